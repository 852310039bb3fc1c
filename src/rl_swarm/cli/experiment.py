"""Runs, reports and packs experiments: `experiment sapo`, `report`, `pack`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_swarm.cli import catch_signals, parse_assignments, preflight, program, quoted, resolve_settings
from rl_swarm.cli.arguments import ConfigFile, Json, Sets
from rl_swarm.cli.flags import setting_flags
from rl_swarm.config.resolve import layered
from rl_swarm.errors import UsageError, UserError
from rl_swarm.experiment.arms import ELSEWHERE, GIVEN_BY_ARM, PACKED, PRESET, arms, is_packed, name_of, nodes_given
from rl_swarm.plural import counted
from rl_swarm.protocol.untrusted import printable
from rl_swarm.protocol.wire import MAX_BYTES
from rl_swarm.storage.files import LocalFiles

app = typer.Typer(
    help="Measure what sharing rollouts is worth: the SAPO experiment, and strategies of your own.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@setting_flags("nodes", "rounds", "model", "tasks", "device")
def sapo(
    out: Annotated[Path, typer.Option("--out", help="Directory of the experiment; an existing experiment is resumed.")],
    configs: Annotated[
        str,
        typer.Option(
            "--configs",
            help="Own/external groups a round, comma-separated: 8/0, 4/4, 4/4x2 (two updates on the same groups), "
            "4/4@1 (an update on every group), 4/0-pooled (one learner with all questions); or presets: paper (8/0, "
            "6/2, 4/4, 2/6), gpt2 (4/0, 3/1, 2/2, 1/3), budget (4/0, 4/4, 4/12, 8/0, 8/8), controls (4/0x2, "
            "4/0-pooled).",
        ),
    ] = "paper",
    strategies: Annotated[
        str,
        typer.Option(
            "--strategies",
            help="How external groups are chosen and weighted, comma-separated: sapo, uniform, top, top-signal, "
            "capped, gated, adaptive, frugal, or your own classes as module:Class. Every configuration with external "
            "groups runs with each.",
        ),
    ] = "sapo",
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds that are reported, such as 1,2,3 or 1-3.")] = "1",
    rates: Annotated[
        str,
        typer.Option(
            "--rates", help="Learning-rate grid for every arm, such as 3e-5,1e-4,3e-4; by default the model's own rate."
        ),
    ] = "",
    tune_seeds: Annotated[
        int,
        typer.Option(
            "--tune-seeds", min=1, max=100, help="Number of seeds to choose the rate on; none of them is reported."
        ),
    ] = 2,
    tune_rounds: Annotated[
        int | None, typer.Option("--tune-rounds", min=1, help="Rounds of those runs; a fifth of --rounds by default.")
    ] = None,
    each: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="K:NAME=VALUE",
            help="A setting of one node, such as 1:learning_rate=3e-4, 2:model=DIR or 3:tasks=gcd,chain_sum (a "
            "specialist).",
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option("--at-once", min=0, max=64, help="Runs at the same time; 0: as many as fit.")
    ] = 0,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only estimate the time; the rounds timed for it are kept.")
    ] = False,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Keep the trained models of finished runs.")
    ] = False,
    config_file: ConfigFile = None,
    sets: Sets = None,
    **flags: Any,
) -> None:
    """Run the SAPO experiment and write report.md, report.json and figures into --out. The same command resumes it."""
    from rich.console import Console

    from rl_swarm.experiment.drawing import arms_table
    from rl_swarm.experiment.progress import followed
    from rl_swarm.experiment.run import Experiment, Runner

    for name in parse_assignments(sets):
        if name in GIVEN_BY_ARM:
            raise UsageError(f"--set {name}: use --configs, --strategies, --seeds, --nodes or --rounds.")
        if name in ELSEWHERE:
            raise UsageError(f"--set {name}: not a setting of an experiment. A token of the hub comes from HF_TOKEN.")
    resolved = resolve_settings("experiment sapo", PRESET, config_file, sets, **flags)
    settings = resolved.settings
    if settings.model.hf_token:  # the hub's library reads it there, in the runs' processes too
        os.environ.setdefault("HF_TOKEN", settings.model.hf_token)
    preflight.check(settings)
    grid = _rates(rates)
    values = settings.flat()
    explicit = {
        name: values[name]
        for name, source in resolved.sources.items()
        if source != "default" and not source.startswith("preset") and name not in (*GIVEN_BY_ARM, *ELSEWHERE)
    }
    if grid and "learning_rate" in explicit:
        raise UsageError(f"--rates {rates} and a learning_rate contradict each other. Drop one of them.")
    experiment = Experiment(
        out=out,
        arms=arms(configs, strategies),
        seeds=_seeds(seeds),
        nodes=settings.swarm.nodes,
        rounds=settings.swarm.rounds,
        resolve=layered,
        settings=explicit,
        each=nodes_given(each or [], settings.swarm.nodes),
        rates=grid,
        tune_seeds=tune_seeds,
        tune_rounds=tune_rounds or max(1, settings.swarm.rounds // 5),
        at_once=at_once,
        keep_models=keep_models,
        user=settings,
    )
    kinds = {
        (node.model.model, node.model.device): node for run in experiment.runs({}) for node in run.members(layered)
    }
    for node in kinds.values():
        preflight.check(node)
    console = Console(highlight=False, markup=False)
    stop = catch_signals()
    try:
        path = Runner(experiment, console, stop).run(plan)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}.") from error
    if path is not None:
        console.print(arms_table(followed(out).state(), console.width))
        console.print(f"Written: {path}, {path.with_suffix('.json').name} and figures. In a browser:", soft_wrap=True)
        console.print(f"  {program()} watch {quoted(out)}", soft_wrap=True)
    elif stop.is_set():
        console.print(f"Stopped. The same command resumes it: {out}", soft_wrap=True)
        sys.exit(stop.exit_code)


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Directories that --out named, single runs, or packed experiments."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where to write; the first PATH by default, unless packed.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the report of one or several experiments again, all arms beside each other."""
    from rl_swarm.experiment.report import write

    for path in paths:
        if not is_packed(path):
            _check_folder(path)
    if out is None and is_packed(paths[0]):
        raise UsageError(f"{paths[0]} is a packed experiment. Give the directory to write to with --out.")
    written = write(paths, out or paths[0])
    shown = written.with_suffix(".json") if as_json else written
    text = LocalFiles(shown.parent).read(shown.name, MAX_BYTES).decode(errors="replace")
    print(printable(text), end="")


@app.command()
def pack(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories that --out named.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file (NAME.jsonl.xz), or a directory for one per DIR.")],
) -> None:
    """Pack what a report needs of an experiment's finished runs into one file, small enough to store or to send."""
    from rl_swarm.experiment.report import pack

    paths = [out if is_packed(out) else out / f"{name_of(folder)}{PACKED}" for folder in folders]
    if len(set(paths)) < len(paths):
        raise UsageError(f"{out}: two of these experiments would become one file. Pack them one by one.")
    for folder, path in zip(folders, paths, strict=True):
        _check_folder(folder)
        print(f"{counted(pack(folder, path), 'run')} in {path}")
    print(f"Read with: {program()} experiment report {' '.join(map(quoted, paths))} --out DIR")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such directory. Give the directory that `experiment sapo --out` named.")


def _rates(text: str) -> list[float]:
    try:
        found = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        found = [0.0]
    if any(not 0 < rate <= 1 for rate in found):
        raise UsageError(f"--rates {text}: write numbers above 0, at most 1, comma-separated, such as 3e-5,1e-4,3e-4.")
    return found


def _seeds(text: str) -> list[int]:
    from rl_swarm.experiment.run import TUNING_SEEDS

    found: dict[int, None] = {}
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            numbers = range(int(first), int(last if dash else first) + 1)
            if not numbers or len(numbers) > TUNING_SEEDS:
                raise ValueError
            found |= dict.fromkeys(numbers)
    except ValueError:
        found = {}
    if not found or min(found) < 0 or max(found) >= TUNING_SEEDS:
        raise UsageError(f"--seeds {text}: write whole numbers from 0 to {TUNING_SEEDS - 1}, such as 1,2,3 or 1-3.")
    return list(found)
