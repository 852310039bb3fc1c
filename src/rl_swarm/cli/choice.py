"""Chooses what a command is about where the user has not said: the newest run, and its best checkpoint."""

import difflib
import sys
from pathlib import Path

from rl_swarm.cli import program, quoted
from rl_swarm.cli.arguments import RUNS, runs_here
from rl_swarm.config import resolve as config
from rl_swarm.errors import UsageError, UserError
from rl_swarm.monitor.headline import score_of
from rl_swarm.monitor.run_reader import NodeView, RunView
from rl_swarm.network.address import configured_address, is_url
from rl_swarm.network.layout import MANIFEST_FILE
from rl_swarm.plural import counted
from rl_swarm.protocol.untrusted import printable


def address_of(given: str | None) -> str:
    """Return the address of a swarm or experiment: the one given, that of the settings, or the newest run here."""
    if given is not None:
        return _located(given)
    configured = configured_address(config.load().settings.storage)
    if configured is not None:
        note(f"{configured} (GDRIVE_PATH and EXPERIMENT_NAME)")
        return str(configured)
    if not (runs := runs_here()):
        raise UserError(
            f"There is no run in {RUNS}/ here. Start one: `{program()} up`; or give the address of a swarm."
        )
    others = f", the newest of {counted(len(runs), 'run')}" if len(runs) > 1 else ", the only run"
    note(f"{runs[0]}{others} here")
    return str(runs[0])


def checkpoint_of(model: str | None, node: str | None) -> str:
    """Return the model that the user means: a model by its name, or the best checkpoint of a run."""
    if model is not None and not _is_run(Path(_located(model, quiet=True))):
        if node is not None:
            raise UsageError(
                f"--node {node} names a node of a run, and {model} is no run. `{program()} runs` lists yours."
            )
        return model
    folders = [Path(_located(model))] if model is not None else [run for run in runs_here() if _is_run(run)]
    if not folders:
        raise UserError(
            f"There is no run in {RUNS}/ here to talk to. Train one: `{program()} up`; or talk to the bundled model: "
            f"`{program()} chat tiny`."
        )
    for folder in folders:
        view = RunView.open(folder)
        saved = {name: rounds[-1] for name in view.nodes if (rounds := view.checkpoints(name))}
        if not saved:
            continue
        nodes = [view.nodes[name] for name in saved]
        found = _named(node, nodes, folder) if node is not None else max(nodes, key=_rank)
        score = score_of(found.now)
        why = f"test score {score:.3f}" if score is not None else "no test score"
        if node is None and len(nodes) > 1 and score is not None:
            why += f", the best of {counted(len(nodes), 'node')}"
        note(f"{found.name} of {folder} after round {saved[found.node] + 1}: {why}")
        return str(folder / "checkpoints" / f"round_{saved[found.node]}" / found.node)
    where = folders[0] if model is not None or len(folders) == 1 else f"{len(folders)} runs in {RUNS}/"
    raise UserError(
        f"{where} has no checkpoint on this machine yet: nodes save every checkpoint_every rounds, and when they stop. "
        f"The bundled model: `{program()} chat tiny`."
    )


def note(text: str) -> None:
    """Say what was chosen, apart from what the command prints."""
    print(printable(text), file=sys.stderr, flush=True)


def _located(given: str, quiet: bool = False) -> str:
    """Return an address as it is, or `runs/<name>` where only the name was given. Suggest a run for a name near it."""
    path = Path(given)
    if is_url(given) or path.exists():
        return given
    if (RUNS / given).is_dir():
        return str(RUNS / given)
    names = {run.name: run for run in runs_here()}
    close = difflib.get_close_matches(path.name, names, n=1)
    if close and not quiet:
        raise UserError(f"{given} is no swarm. Did you mean {quoted(names[close[0]])}?")
    return given


def _is_run(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).is_file()


def _rank(view: NodeView) -> tuple[float, str]:
    score = score_of(view.now)
    return (-1.0 if score is None else score), view.node


def _named(name: str, nodes: list[NodeView], folder: Path) -> NodeView:
    """Find a node with a checkpoint by its animal name, its name in files or its peer id."""
    known = {key.lower(): view for view in nodes for key in (view.node, view.name, view.name.replace(" ", "-"))}
    known |= {view.peer.peer_id.lower(): view for view in nodes if view.peer}
    if name.lower() in known:
        return known[name.lower()]
    begun = {view.node: view for key, view in known.items() if key.startswith(name.lower())}
    if len(begun) == 1:
        return next(iter(begun.values()))
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    mean = f"Did you mean {known[close[0]].name!r}? " if close else ""
    raise UserError(
        f"--node {name}: no node of {folder} with a checkpoint is called that. {mean}There are "
        f"{', '.join(view.name for view in nodes[:8])}{' and others' if len(nodes) > 8 else ''}."
    )
