"""Describes the arguments that commands share, completes them in a shell, and groups the commands in the help."""

from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

RUN, LOOK, MODELS = "Run a swarm", "Look at it", "Models and this machine"
ADMIT, RESEARCH, HELP = "Identity and admission", "Research", "Help"
PANELS = (RUN, LOOK, MODELS, ADMIT, RESEARCH, HELP)
RUNS = Path("runs")  # where `up` keeps runs
MAX_COMPLETED = 100
BUNDLED_MODELS = ("tiny", "coder", "smollm2-135m")


class GroupedCommands(TyperGroup):
    """Lists the commands under the headings that they were given."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = [(name, command) for name in self.list_commands(ctx) if (command := self.get_command(ctx, name))]
        shown = [(name, command) for name, command in shown if not command.hidden]
        wide = max(len(name) for name, _ in shown)
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        for name, command in shown:
            panel = getattr(command, "rich_help_panel", None)
            text = command.get_short_help_str(formatter.width - 6 - wide)
            rows = panels.setdefault(panel if isinstance(panel, str) else "Commands", [])
            rows.append((name.ljust(wide), text))
        for panel, rows in filter(itemgetter(1), panels.items()):
            with formatter.section(panel):
                formatter.write_dl(rows)


def runs_here(root: Path = RUNS) -> list[Path]:
    """List the runs and experiments in a folder, the one that was active last first."""
    found = []
    with suppress(OSError):
        for folder in root.iterdir():
            marks = ("state/current_state.json", "manifest.json", "runs")  # of a run, a run, an experiment
            if not folder.name.startswith(".") and (when := max(map(_changed, (folder / mark for mark in marks)))):
                found.append((when, str(folder), folder))
    return [folder for *_, folder in sorted(found, reverse=True)]


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def complete_run(incomplete: str) -> list[str]:
    """Complete the address of a run: those of this folder first, then any folder."""
    runs = runs_here()
    found = [str(run) for run in runs if str(run).startswith(incomplete)]
    found = found or [run.name for run in runs if run.name.startswith(incomplete)]
    if incomplete and not found:
        with suppress(OSError, ValueError):
            above = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
            found = [f"{path}/" for path in sorted(above.iterdir()) if path.is_dir()]
            found = [path for path in found if path.startswith(incomplete)]
    return found[:MAX_COMPLETED]


def complete_model(incomplete: str) -> list[str]:
    """Complete what can be talked to: a run, or a bundled model."""
    return [*complete_run(incomplete), *(name for name in BUNDLED_MODELS if name.startswith(incomplete))]


ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any setting (docs/settings.md).")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print every setting and where it came from, then stop.")]
KeyFile = Annotated[str | None, typer.Option("--identity-path", help="The node's private key.")]
Json = Annotated[bool, typer.Option("--json", help="For programs: one JSON document and nothing else.")]
Address = Annotated[
    str,
    typer.Argument(
        help="Directory or URL of a swarm: runs/<name>, <root>/experiments/<name>, s3://<bucket>/<name>, "
        "p2p://<address>.",
        autocompletion=complete_run,
    ),
]
NewestAddress = Annotated[
    str | None,
    typer.Argument(
        metavar="[ADDRESS]",
        help="Directory or URL of a swarm: runs/<name> or only its <name>, <root>/experiments/<name>, "
        "s3://<bucket>/<name>, p2p://<address>. By default the newest run of this folder.",
        autocompletion=complete_run,
    ),
]
OptionalAddress = Annotated[
    str | None,
    typer.Argument(
        help="Directory or URL of a swarm; by default GDRIVE_PATH/experiments/EXPERIMENT_NAME.",
        autocompletion=complete_run,
    ),
]
