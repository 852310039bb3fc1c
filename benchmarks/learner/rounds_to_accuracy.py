"""Counts the rounds until a swarm solves a quarter, and half, of what its model rarely solves.

    python -m benchmarks.learner.rounds_to_accuracy docs/results/discovery/*.xz [--window 20] [--figure FILE]

The files are packed experiments. A node has solved a share of the questions at the end of the first window of rounds
in which that share of its new answers was right; a swarm has when its median node has. Nodes that share nothing are
swarms of one. A swarm that does not get there is censored at its last round. The interval of a median is that of its
order statistics, which assumes no distribution: 95 %, or the whole range of five swarms and fewer.
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lib.command import print_table
from rl_swarm.experiment import packed
from rl_swarm.experiment.measures import NodeLog, Run

LEVELS = {"a quarter solved": 0.25, "half solved": 0.5}
Key = tuple[int, str, str]  # nodes that share, arm, learning rate


def rounds_until(rewards: Sequence[float], level: float, window: int) -> float:
    """Return the rounds played when the mean reward of a window first reaches the level; infinity if it never does."""
    for end in range(window, len(rewards) + 1):
        if sum(rewards[end - window : end]) >= level * window:
            return end
    return math.inf


def swarms(run: Run) -> list[list[NodeLog]]:
    """Divide a run into groups of nodes that share."""
    return [run.nodes] if run.job.arm.external_groups else [[node] for node in run.nodes]


def median_node(swarm: Sequence[NodeLog], level: float, window: int) -> float:
    return statistics.median_low(rounds_until([r.reward_local for r in node.rounds], level, window) for node in swarm)


def interval(times: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with 95 % probability, or the range of too few."""
    ordered, n = sorted(times), len(times)
    below = [sum(math.comb(n, k) for k in range(rank + 1)) / 2**n for rank in range(n // 2)]
    rank = max((rank for rank, tail in enumerate(below) if tail <= 0.025), default=0)
    return ordered[rank], ordered[n - 1 - rank]


def shown(value: float, rounds: int) -> str:
    return f"over {rounds}" if value == math.inf else f"{value:.0f}"


def draw(found: dict[Key, list[list[NodeLog]]], window: int, file: Path) -> None:
    """Draw the rounds to a quarter solved against the number of nodes that share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot(xlabel="nodes that share", ylabel="rounds until a quarter is solved")
    plain = {nodes: group for (nodes, arm, _), group in sorted(found.items()) if arm in ("4/0", f"4/{4 * (nodes - 1)}")}
    for nodes, group in plain.items():
        times = [median_node(swarm, 0.25, window) for swarm in group]
        rounds = min(len(node.rounds) for swarm in group for node in swarm)
        low, high = (min(end, rounds) for end in interval(times))
        axes.plot([nodes] * len(times), [min(time, rounds) for time in times], ".", color="#9ca3af", ms=4)
        axes.plot([nodes, nodes], [low, high], color="#0f766e", lw=4, alpha=0.35)
        axes.plot([nodes], [statistics.median(times)], "o", color="#0f766e")
    axes.plot([*plain], [statistics.median(median_node(s, 0.25, window) for s in g) for g in plain.values()], "#0f766e")
    axes.set_xscale("log", base=2)
    axes.set_xticks([*plain], [str(nodes) for nodes in plain])
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", type=Path, nargs="+", metavar="file")
    options.add_argument("--window", type=int, default=20, help="rounds")
    options.add_argument("--figure", type=Path, help="where to draw rounds against the number of nodes")
    given = options.parse_args()
    found: dict[Key, list[list[NodeLog]]] = defaultdict(list)
    for file in given.files:
        for run in packed.read(file)[1]:
            shares = run.job.arm.external_groups > 0
            key = (
                len(run.nodes) if shares else 1,
                run.job.arm.configuration,
                f"{run.job.rate or run.job.settings['learning_rate']:g}",
            )
            found[key] += swarms(run)
    table = []
    for (nodes, arm, rate), group in sorted(found.items()):
        rounds = min(len(node.rounds) for swarm in group for node in swarm)
        row = [str(nodes), arm, rate, str(len(group)), str(rounds)]
        for level in LEVELS.values():
            times = [median_node(swarm, level, given.window) for swarm in group]
            low, high = interval(times)
            reached = sum(time < math.inf for time in times)
            row += [f"{shown(statistics.median(times), rounds)} ({shown(low, rounds)} to {shown(high, rounds)})"]
            row += [f"{reached} of {len(times)}"]
        table.append(row)
    print_table(
        ["nodes that share", "arm", "rate", "swarms", "rounds", *(h for level in LEVELS for h in (level, "reached"))],
        table,
    )
    if given.figure:
        draw(found, given.window, given.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
