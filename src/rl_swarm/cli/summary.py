"""Prints what a run achieved, for the person who started it."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_swarm import environments
from rl_swarm.cli import program, quoted
from rl_swarm.environments.settings import TaskSettings
from rl_swarm.monitor.drawing import LONGEST_PATH, answer_pair, clock, marked
from rl_swarm.monitor.headline import headline, score_of
from rl_swarm.monitor.run_reader import TREND_ROUNDS, RunView
from rl_swarm.node.evaluation import mean


def print_summary(run: RunView, seconds: float, console: Console) -> None:
    views = [view for view in run.nodes.values() if view.start and view.now]
    if not views:
        _print_rewards(run, seconds, console)
        return
    told = headline(list(run.nodes.values()), finished=True)
    if told.sentence:
        console.print()
        console.print(Text(told.sentence, style="bold"))
    if told.example:
        console.print(answer_pair(told.example))
    table = Table(
        title="Test score: questions that training never saw", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("node", no_wrap=True, vertical="bottom")
    for title in ("before", "after", "ratio", "greedy", "well-formed", "accuracy if\nwell-formed"):
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for view in views:
        start, now = view.start, view.now
        if start and now:
            table.add_row(view.name, *_columns(start, now))
    if len(views) > 1:
        starts = [view.start for view in views if view.start]
        ends = [view.now for view in views if view.now]
        table.add_section()
        keys = ("sampled", "greedy", "well_formed", "accuracy_well_formed")
        average = [{key: mean([line[key] or 0.0 for line in lines]) for key in keys} for lines in (starts, ends)]
        table.add_row("mean", *_columns(*average), style="bold")
    console.print()
    console.print(table)
    console.print(f"[dim]{run.held_out_protocol()}; greedy once[/]")

    best = max(views, key=lambda view: score_of(view.now) or 0.0)
    kinds = environments.of_swarm(run.manifest).roles if run.manifest else {}
    roles = [(view, kinds[view.role]) for view in run.nodes.values() if view.role_metrics and view.role in kinds]
    for view, kind in roles:
        console.print(
            f"\n[bold]{marked(view.role.capitalize())}[/] {view.name}: "
            f"{marked(kind.summary(view.role_metrics), LONGEST_PATH)}."
        )

    taken = sum(view.external_accepted for view in views)
    own = sum(line.local_with_signal for view in views for line in view.rounds)
    if taken:
        console.print(
            f"\n[bold]Sharing[/]: {taken} of the {taken + own} groups with signal "
            f"({taken / max(1, taken + own):.0%}) came from peers."
        )
    if run.manifest and run.manifest.stages > 1:
        rewards = run.rewards(run.manifest.stages)
        console.print(f"[bold]Reward by stage[/]: {', '.join('–' if r is None else f'{r:.2f}' for r in rewards)}")
    console.print(f"[bold]Time[/]: {clock(seconds)}   [bold]Files[/]: {marked(str(run.root), LONGEST_PATH)}")
    _print_next(
        (f"chat {_typed(run)}", f"talk to {best.name}, the best of them"),
        (f"watch {_typed(run)}", "its curves and rollouts in a browser"),
        (f"validate {_typed(run)}", "is this run sound?"),
        (f"up{_environment(run)} --external-groups 0", "the same without sharing"),
        ("models", "larger models that fit this machine"),
        console=console,
    )


def _print_next(*commands: tuple[str, str], console: Console) -> None:
    """Print commands as a person may type them, and what each is for."""
    console.print("\n[bold]Next[/]")
    wide = max(len(command) for command, _ in commands)
    for command, what in commands:
        console.print(f"  {program()} {command:<{wide}}  [dim]{what}[/]", soft_wrap=True)


def _print_rewards(run: RunView, seconds: float, console: Console) -> None:
    """Print the rewards of the rounds, where there are no held-out questions."""
    table = Table(title="Reward: the first and the last rounds", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("node", no_wrap=True)
    for title in ("role", "first", "last", ""):
        table.add_column(title, justify="right" if title in ("first", "last") else "left")
    for view in [view for view in run.nodes.values() if view.rounds]:
        many = max(1, min(TREND_ROUNDS, len(view.rounds) // 2))
        first = mean([line.reward_local for line in view.rounds[:many]])
        told = ", ".join(f"{marked(name)} {value:.4g}" for name, value in view.role_metrics.items())
        table.add_row(view.name, marked(view.role), f"{first:.3f}", f"{view.reward(many):.3f}", told)
    if not table.row_count:  # no log is on this machine
        return
    console.print()
    console.print(table)
    console.print(f"\n[bold]Time[/]: {clock(seconds)}   [bold]Files[/]: {marked(str(run.root), LONGEST_PATH)}")
    _print_next(
        (f"watch {_typed(run)}", "its curves and rollouts in a browser"),
        (f"validate {_typed(run)}", "is this run sound?"),
        console=console,
    )


def _typed(run: RunView) -> str:
    """Quote the run's folder for a shell."""
    return marked(quoted(run.root), LONGEST_PATH)


def _environment(run: RunView) -> str:
    """Return the option that starts another run of this kind."""
    kind = run.manifest.environment if run.manifest else TaskSettings().environment
    return "" if kind == TaskSettings().environment else f" --env {kind}"


def _columns(start: dict[str, Any], now: dict[str, Any]) -> list[str]:
    times = f"{now['sampled'] / start['sampled']:.1f}x" if start["sampled"] else ""
    known = start["greedy"] is not None and now["greedy"] is not None
    greedy = f"{start['greedy']:.2f}→{now['greedy']:.2f}" if known else ""
    return [
        f"{start['sampled']:.3f}",
        f"{now['sampled']:.3f}",
        times,
        greedy,
        f"{start['well_formed']:.2f}→{now['well_formed']:.2f}",
        f"{start['accuracy_well_formed']:.2f}→{now['accuracy_well_formed']:.2f}",
    ]
