"""Defines every command of `rl-swarm`, thin: read the settings, call the package, print."""

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_swarm import __version__, environments
from rl_swarm.cli import experiment as experiments
from rl_swarm.cli import identity as identities
from rl_swarm.cli import parse_assignments, resolve_settings
from rl_swarm.cli.arguments import (
    ADMIT,
    HELP,
    LOOK,
    MODELS,
    RESEARCH,
    RUN,
    Address,
    ConfigFile,
    DryRun,
    GroupedCommands,
    Json,
    KeyFile,
    NewestAddress,
    OptionalAddress,
    Sets,
    complete_model,
)
from rl_swarm.cli.flags import setting_flags
from rl_swarm.config import resolve as config
from rl_swarm.config.resolve import Resolved
from rl_swarm.config.settings import UP_PRESET, all_settings
from rl_swarm.errors import UsageError, UserError
from rl_swarm.experiment.arms import is_experiment
from rl_swarm.protocol.untrusted import printable
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, decode
from rl_swarm.storage.files import LocalFiles

app = typer.Typer(
    cls=GroupedCommands,
    help="Train language models together: every node learns by reinforcement and shares its rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CATCH_SIGNALS = ("up", "join", "coordinate", "bootnode", "experiment", "watch")  # of their own once they have begun


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rl-swarm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version and stop.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    if context.invoked_subcommand not in CATCH_SIGNALS:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_settings(resolved: Resolved) -> None:
    width = max(len(name) for name in resolved.sources)
    values, secrets = resolved.settings.flat(), {known.name for known in all_settings() if known.secret}
    for name, source in resolved.sources.items():
        shown = "(set)" if name in secrets and values[name] else json.dumps(values[name])
        print(f"{name:<{width}}  {shown:<24}  {source}")


@app.command(rich_help_panel=RUN)
@setting_flags(
    "nodes", "rounds", "seed", "local_groups", "external_groups", "generations", "model", "learning_rate",
    "environment", "tasks", "device", "admission", "network", "identity_path", "web", "web_port",
)  # fmt: skip
def up(
    run: Annotated[Path | None, typer.Option("--run", help="Run directory; a new one in runs/ by default.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Resume this run.")] = None,
    from_base: Annotated[
        bool, typer.Option("--from-base", help="With --resume: nodes without a checkpoint begin again with the model.")
    ] = False,
    config_file: ConfigFile = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    **flags: Any,
) -> None:
    """Start a swarm on this machine and watch it learn. With GDRIVE_PATH set, join that swarm in the role NODE_ROLE."""
    from rl_swarm.cli import running
    from rl_swarm.network.address import configured_address
    from rl_swarm.node import run_settings

    if run is not None and resume is not None:
        raise UsageError(
            f"--run {run} and --resume {resume} contradict each other: a run resumes in its own folder. Drop --run."
        )
    for flag, folder in (("--run", run), ("--resume", resume)):
        if folder is not None and folder.resolve() == Path.cwd():
            raise UsageError(f"{flag} names this folder itself. Give a folder of its own, such as runs/mine.")
    if from_base and resume is None:
        raise UsageError("--from-base goes with --resume: a new run always begins with the model.")
    named = parse_assignments(sets) | ({"environment": flags["environment"]} if flags["environment"] else {})
    preset = dict(UP_PRESET)
    with suppress(environments.NoEnvironment):  # reported with the other settings
        preset |= environments.named(str(config.peek("environment", config_file, named))).defaults
    if resume is not None:
        key = flags["identity_path"]
        user = config.load({}, config_file, {"identity_path": key} if key else {}, command="up")
        preset |= run_settings.resumed(resume, user.settings)
    if run is None and resume is None and config.peek("gdrive_path", config_file, {}):
        resolved = resolve_settings("up", {}, config_file, sets, **flags)
        address = configured_address(resolved.settings.storage)
        if dry_run:
            return _print_settings(resolved)
        assert address is not None
        return running.run_process(resolved.settings.task.role, address, resolved.settings)
    resolved = resolve_settings("up", preset, config_file, sets, **flags)
    if dry_run:
        return _print_settings(resolved)
    return running.up(resolved.settings, run, resume, from_base)


@app.command(rich_help_panel=RUN)
@setting_flags(
    "role", "local_groups", "external_groups", "generations", "model", "learning_rate", "device", "invitation",
    "identity_path",
)  # fmt: skip
def join(
    address: OptionalAddress = None,
    config_file: ConfigFile = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    **flags: Any,
) -> None:
    """Join a swarm as a worker and train."""
    _alone("worker", address, config_file, sets, dry_run, flags)


@app.command(rich_help_panel=RUN)
@setting_flags(
    "rounds", "seed", "environment", "tasks", "model", "round_end", "round_interval", "min_peers", "admission",
    "identity_path",
)  # fmt: skip
def coordinate(
    address: OptionalAddress = None,
    config_file: ConfigFile = None,
    sets: Sets = None,
    dry_run: DryRun = False,
    **flags: Any,
) -> None:
    """Coordinate a swarm: advance its rounds. Founds the swarm if there is none at the address."""
    _alone("coordinator", address, config_file, sets, dry_run, flags)


@app.command(rich_help_panel=RUN)
@setting_flags("p2p_initial_peers", "identity_path")
def bootnode(config_file: ConfigFile = None, sets: Sets = None, **flags: Any) -> None:
    """Run a peer that is always online, so that peers on the internet find each other."""
    from rl_swarm.cli import peers

    peers.bootnode(resolve_settings("bootnode", {"identity_path": "bootnode.pem"}, config_file, sets, **flags).settings)


def _alone(
    role: str,
    address: str | None,
    config_file: Path | None,
    sets: list[str] | None,
    dry_run: bool,
    flags: dict[str, Any],
) -> None:
    from rl_swarm.cli import running
    from rl_swarm.network.address import configured_address

    resolved = resolve_settings("join" if role == "worker" else "coordinate", {}, config_file, sets, **flags)
    if dry_run:
        return _print_settings(resolved)
    where = address or configured_address(resolved.settings.storage)
    if where is None:
        raise UsageError("Which swarm? Give its address, or set GDRIVE_PATH and EXPERIMENT_NAME.")
    return running.run_process(role, where, resolved.settings)


@app.command(rich_help_panel=ADMIT)
def invite(
    address: Address,
    uses: Annotated[int, typer.Option("--uses", min=1, max=100_000, help="Peers that it admits.")] = 1,
    days: Annotated[float, typer.Option("--days", min=0, max=36_500, help="How long it can be used.")] = 7.0,
    identity_path: KeyFile = None,
) -> None:
    """Print an invitation to a swarm that you own."""
    from rl_swarm.cli import admission

    admission.invite(address, identities.load(identity_path), uses, days)


Listed = Annotated[str, typer.Argument(metavar="PEER_ID", help="A peer id, or an invitation's name.")]


@app.command(rich_help_panel=ADMIT)
def allow(address: Address, peer_id: Listed, identity_path: KeyFile = None) -> None:
    """Let a peer take part in a swarm that you own. This also revokes a denial."""
    from rl_swarm.cli import admission

    admission.change(address, identities.load(identity_path), peer_id, allow=True)


@app.command(rich_help_panel=ADMIT)
def deny(address: Address, peer_id: Listed, identity_path: KeyFile = None) -> None:
    """Keep a peer, or all peers of an invitation, out of a swarm that you own."""
    from rl_swarm.cli import admission

    admission.change(address, identities.load(identity_path), peer_id, allow=False)


@app.command(rich_help_panel=ADMIT)
def members(address: Address, as_json: Json = False) -> None:
    """List who takes part in a swarm, how each was admitted, and who is kept out."""
    from rl_swarm.cli import admission

    admission.members(address, as_json)


@app.command(rich_help_panel=LOOK)
def status(
    address: NewestAddress = None,
    every: Annotated[bool, typer.Option("--all", help="List every node, however many there are.")] = False,
    as_json: Json = False,
) -> None:
    """Show the progress of a swarm or an experiment, or what it achieved."""
    from rl_swarm.cli import status as command
    from rl_swarm.cli.choice import address_of

    where = address_of(address)
    if is_experiment(where):
        from rl_swarm.experiment.drawing import print_once as print_experiment

        return print_experiment(Path(where), as_json)
    return command.status(where, every, as_json)


@app.command(rich_help_panel=LOOK)
@setting_flags("web_port", "web_host")
def watch(
    address: NewestAddress = None,
    tui: Annotated[bool, typer.Option("--tui", help="In this terminal; without one, show it once and stop.")] = False,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Watch a swarm or an experiment in a browser (a page, an API, metrics) or in this terminal. Ctrl-C stops it."""
    from rl_swarm.cli import dashboard
    from rl_swarm.cli.choice import address_of

    if tui and any(value is not None for value in flags.values()):
        raise UsageError("--tui shows the swarm in this terminal, which has no --port and no --host.")
    settings = resolve_settings("watch", {}, None, sets, **flags).settings
    where = address_of(address)
    dashboard.watch_here(where) if tui else dashboard.watch(where, settings)


@app.command(rich_help_panel=LOOK)
def runs(
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Delete this run (its name or path).")] = None,
    root: Annotated[Path, typer.Option("--root", help="Where runs are kept.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs on this machine, or remove some."""
    from rl_swarm.cli import runs as command

    command.remove_runs(root, remove, config.load().settings) if remove else command.list_runs(root, as_json)


@app.command(rich_help_panel=LOOK)
def validate(
    address: NewestAddress = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Expected number of rounds.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Expected number of nodes.")] = None,
    as_json: Json = False,
) -> None:
    """Check that a finished run, or a swarm among peers, is sound: signatures, rewards, logs, and a sample scored
    again."""
    from rl_swarm.cli import validate as command
    from rl_swarm.cli.choice import address_of

    raise typer.Exit(command.validate(address_of(address), rounds, nodes, as_json))


@app.command(rich_help_panel=MODELS)
@setting_flags("environment", "tasks", "device")
def evaluate(
    model: Annotated[str, typer.Argument(help="tiny, coder, a directory (a checkpoint), or a hub name.")],
    questions: Annotated[
        int | None, typer.Option("--questions", min=1, help="Held-out questions; held_out_questions by default.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Sampled answers per question; held_out_samples by default.")
    ] = None,
    as_json: Json = False,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Score a model or checkpoint on the held-out questions."""
    from rl_swarm.cli import models

    settings = resolve_settings("evaluate", {}, None, sets, **flags).settings
    models.evaluate(model, settings, questions, samples, as_json)


@app.command(rich_help_panel=MODELS)
@setting_flags("tasks", "learning_rate", "seed", "device")
def warmup(
    model: Annotated[str, typer.Argument(help="smollm2-135m, a directory, or a hub name.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="New model directory; models/<name>-warm by default.")
    ] = None,
    examples: Annotated[int, typer.Option("--examples", min=1, help="Right answers to learn from.")] = 320,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="How often each of them is used.")] = 1,
    questions: Annotated[int, typer.Option("--questions", min=1, help="Held-out questions.")] = 60,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Sampled answers per question.")] = 1,
    as_json: Json = False,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Train a model that scores nothing on right answers for a short while, and score it before and after."""
    from rl_swarm.cli import warmup as command

    settings = resolve_settings("warmup", {}, None, sets, **flags).settings
    command.warmup(model, settings, out, examples, epochs, questions, samples, as_json)


@app.command(rich_help_panel=MODELS)
@setting_flags("device")
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A run, whose best checkpoint answers; tiny, coder, a directory (a checkpoint), or a hub name. By "
            "default the newest run of this folder.",
            autocompletion=complete_model,
        ),
    ] = None,
    node: Annotated[str | None, typer.Option("--node", help="The checkpoint of this node of the run.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Ask once and stop.")] = None,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Talk to a model."""
    from rl_swarm.cli.choice import checkpoint_of
    from rl_swarm.learning import lookup

    settings = resolve_settings("chat", {}, None, sets, **flags).settings
    named = checkpoint_of(model, node)
    lookup.check(named, settings.model.hf_token)  # before anything heavy is imported
    from rl_swarm.cli import models

    models.chat(named, settings, prompt)


@app.command(name="models", rich_help_panel=MODELS)
@setting_flags("device")
def models_(as_json: Json = False, sets: Sets = None, **flags: Any) -> None:
    """List the models that nodes use: which fit this machine, and how long a round takes, roughly."""
    from rl_swarm.cli import models

    models.list_models(resolve_settings("models", {}, None, sets, **flags).settings, as_json)


@app.command(rich_help_panel=MODELS)
def doctor(as_json: Json = False) -> None:
    """Check this machine: what it has, what is missing, what to do."""
    from rl_swarm.cli.doctor import examine

    raise typer.Exit(examine(as_json))


@app.command(rich_help_panel=LOOK)
def show(file: Annotated[Path, typer.Argument(help="Any JSON file of a swarm, compressed or not.")]) -> None:
    """Print a file of a swarm as JSON."""
    try:
        found = decode(LocalFiles(file.parent).read(file.name, MAX_BYTES))
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror}. Give a file of a swarm, such as runs/<name>/manifest.json."
        ) from error
    except Rejected as error:
        raise UserError(f"{file} is no document of a swarm ({error}).") from error
    print(printable(json.dumps(found, indent=2, ensure_ascii=False)))


app.add_typer(identities.app, name="identity", rich_help_panel=ADMIT)
app.add_typer(experiments.app, name="experiment", rich_help_panel=RESEARCH)


@app.command(name="help", rich_help_panel=HELP)
def help_(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Such as: up, or identity new.")
    ] = None,
) -> None:
    """Explain a command; without one, list all."""
    app([*(command or []), "--help"], prog_name=context.find_root().info_name, standalone_mode=False)
