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
from rl_swarm.cli.flags import setting_flags
from rl_swarm.config import resolve as config
from rl_swarm.config.resolve import Resolved
from rl_swarm.config.settings import UP_PRESET, all_settings
from rl_swarm.errors import UserError
from rl_swarm.experiment.arms import FILE as ARM
from rl_swarm.experiment.arms import is_experiment
from rl_swarm.plural import counted
from rl_swarm.protocol.untrusted import printable
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, decode
from rl_swarm.storage.files import LocalFiles

app = typer.Typer(
    help="Train language models together: every node learns by reinforcement and shares its rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MAX_PRINTED = 50  # notes and errors of `validate` that are printed
CATCH_SIGNALS = ("up", "join", "coordinate", "bootnode", "experiment", "watch")  # of their own once they have begun

ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any setting (docs/settings.md).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every setting and where it came from, then stop.")]
Identity_ = Annotated[str | None, typer.Option("--identity-path", help="The node's private key.")]
Address = Annotated[
    str,
    typer.Argument(
        help="Directory or URL of a swarm: runs/<name>, <root>/experiments/<name>, s3://<bucket>/<name>, p2p://<address>."
    ),
]
OptionalAddress = Annotated[
    str | None, typer.Argument(help="Directory or URL of a swarm; by default GDRIVE_PATH/experiments/EXPERIMENT_NAME.")
]


app.add_typer(identities.app, name="identity")
app.add_typer(experiments.app, name="experiment")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rl-swarm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
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


@app.command()
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
        raise UserError(
            f"--run {run} and --resume {resume} contradict each other: a run resumes in its own folder. Drop --run."
        )
    if from_base and resume is None:
        raise UserError("--from-base goes with --resume: a new run always begins with the model.")
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


@app.command()
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


@app.command()
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


@app.command()
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
        raise UserError("Which swarm? Give its address, or set GDRIVE_PATH and EXPERIMENT_NAME.")
    return running.run_process(role, where, resolved.settings)


@app.command()
def invite(
    address: Address,
    uses: Annotated[int, typer.Option("--uses", min=1, max=100_000, help="Peers that it admits.")] = 1,
    days: Annotated[float, typer.Option("--days", min=0, max=36_500, help="How long it can be used.")] = 7.0,
    identity_path: Identity_ = None,
) -> None:
    """Print an invitation to a swarm that you own."""
    from rl_swarm.cli import admission

    admission.invite(address, identities.load(identity_path), uses, days)


Listed = Annotated[str, typer.Argument(metavar="PEER_ID", help="A peer id, or an invitation's name.")]


@app.command()
def allow(address: Address, peer_id: Listed, identity_path: Identity_ = None) -> None:
    """Let a peer take part in a swarm that you own. This also revokes a denial."""
    from rl_swarm.cli import admission

    admission.change(address, identities.load(identity_path), peer_id, allow=True)


@app.command()
def deny(address: Address, peer_id: Listed, identity_path: Identity_ = None) -> None:
    """Keep a peer, or all peers of an invitation, out of a swarm that you own."""
    from rl_swarm.cli import admission

    admission.change(address, identities.load(identity_path), peer_id, allow=False)


@app.command()
def members(address: Address, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List who takes part in a swarm, how each was admitted, and who is kept out."""
    from rl_swarm.cli import admission

    admission.members(address, as_json)


@app.command()
def status(address: Address, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show the progress of a swarm or an experiment."""
    from rich.console import Console

    from rl_swarm.cli.live import print_once
    from rl_swarm.monitor.run_reader import open_view

    if is_experiment(address):
        from rl_swarm.experiment.drawing import print_once as print_experiment

        return print_experiment(Path(address), as_json)
    with open_view(address, config.user_network) as view:
        if as_json:
            view.refresh()
            print(json.dumps(view.as_dict(), indent=2))
        else:
            print_once(view, Console(highlight=False))
    return None


@app.command()
@setting_flags("web_port", "web_host")
def watch(
    address: Address,
    tui: Annotated[bool, typer.Option("--tui", help="In this terminal; without one, show it once and stop.")] = False,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Watch a swarm or an experiment in a browser (a page, an API, metrics) or in this terminal. Ctrl-C stops it."""
    from rl_swarm.cli import dashboard

    if tui and any(value is not None for value in flags.values()):
        raise UserError("--tui shows the swarm in this terminal, which has no --port and no --host.")
    settings = resolve_settings("watch", {}, None, sets, **flags).settings
    dashboard.watch_here(address) if tui else dashboard.watch(address, settings)


@app.command()
def runs(
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Delete this run (its name or path).")] = None,
    root: Annotated[Path, typer.Option("--root", help="Where runs are kept.")] = Path("runs"),
) -> None:
    """List the runs on this machine, or remove some."""
    from rl_swarm.cli import running

    running.remove_runs(root, remove, config.load().settings) if remove else running.list_runs(root)


@app.command()
def validate(
    address: Address,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Expected number of rounds.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Expected number of nodes.")] = None,
) -> None:
    """Check that a finished run, or a swarm among peers, is sound: signatures, rewards, logs, and a sample scored
    again."""
    from rl_swarm.monitor.run_reader import RunView
    from rl_swarm.monitor.validate import rescore
    from rl_swarm.monitor.validate import validate as validate_run
    from rl_swarm.monitor.validate_peers import validate as validate_peers
    from rl_swarm.network.address import open_address

    among_peers = bool(open_address(address).peers)
    if not among_peers:
        if is_experiment(address) or (Path(address) / ARM).is_file():
            raise UserError(
                f"{address} belongs to an experiment, whose nodes keep their logs but not their rollouts: nothing can "
                "be checked again. `rl-swarm validate` is for runs of `rl-swarm up` and for swarms of several machines."
            )
        RunView.open(address)
    verdict, opened = (
        validate_peers(address, rounds, nodes, config.user_network())
        if among_peers
        else validate_run(address, rounds, nodes)
    )
    if opened is not None:
        environment = environments.made(opened.manifest)
        try:
            rescore(opened, environment, verdict)
        finally:
            environment.close()
    for kind, lines in (("note", verdict.notes), ("error", verdict.errors)):
        for line in lines[:MAX_PRINTED]:
            print(f"{kind}: {printable(line)}")
        if len(lines) > MAX_PRINTED:
            print(f"{kind}: and {len(lines) - MAX_PRINTED} more")
    print("checked: " + ", ".join(counted(number, what) for what, number in verdict.checked.items()))
    wrong = counted(len(verdict.errors), "error")
    print("The run is sound." if verdict.sound else f"The run is NOT sound: {wrong}.")
    raise typer.Exit(0 if verdict.sound else 1)


@app.command()
@setting_flags("environment", "tasks", "device")
def evaluate(
    model: Annotated[str, typer.Argument(help="tiny, coder, a directory (a checkpoint), or a hub name.")],
    questions: Annotated[
        int | None, typer.Option("--questions", min=1, help="Held-out questions; held_out_questions by default.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Sampled answers per question; held_out_samples by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Score a model or checkpoint on the held-out questions."""
    from rl_swarm.cli import models

    settings = resolve_settings("evaluate", {}, None, sets, **flags).settings
    models.evaluate(model, settings, questions, samples, as_json)


@app.command()
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
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Train a model that scores nothing on right answers for a short while, and score it before and after."""
    from rl_swarm.cli import warmup as command

    settings = resolve_settings("warmup", {}, None, sets, **flags).settings
    command.warmup(model, settings, out, examples, epochs, questions, samples, as_json)


@app.command()
@setting_flags("device")
def chat(
    model: Annotated[str, typer.Argument(help="tiny, coder, a directory (a checkpoint), or a hub name.")] = "tiny",
    prompt: Annotated[str | None, typer.Option("--prompt", help="Ask once and stop.")] = None,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Talk to a model."""
    from rl_swarm.cli import models

    models.chat(model, resolve_settings("chat", {}, None, sets, **flags).settings, prompt)


@app.command(name="models")
@setting_flags("device")
def models_(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False, sets: Sets = None, **flags: Any
) -> None:
    """List the models that nodes use: which fit this machine, and how long a round takes, roughly."""
    from rl_swarm.cli import models

    models.list_models(resolve_settings("models", {}, None, sets, **flags).settings, as_json)


@app.command()
def doctor() -> None:
    """Check this machine: what it has, what is missing, what to do."""
    from rl_swarm.cli.doctor import examine

    raise typer.Exit(examine())


@app.command()
def show(file: Annotated[Path, typer.Argument(help="Any JSON file of a swarm, compressed or not.")]) -> None:
    """Print a file of a swarm as JSON."""
    try:
        found = decode(LocalFiles(file.parent).read(file.name, MAX_BYTES))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except Rejected as error:
        raise UserError(f"{file} is no document of a swarm ({error}).") from error
    print(printable(json.dumps(found, indent=2, ensure_ascii=False)))
