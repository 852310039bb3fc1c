"""Counts the rounds until a swarm solves what its models rarely solve: until the median node has a quarter, and
half, right.

    python benchmarks/takeoff.py docs/results/discovery.jsonl.xz [--window 20]

Reads one JSON line per run: experiment, arm, seed, learning rate, and for each node its rows of round, mean reward of
fresh
local rollouts, generated tokens, trained tokens and groups of others. A node has taken off at the end of the first
window
of rounds whose mean reward reaches the level; a run's time is that of its median node.
"""

import argparse
import json
import lzma
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LEVELS = (0.25, 0.5)
ROUND, REWARD = 0, 1


def takeoff(rows: Sequence[Sequence[float]], level: float, window: int) -> int | None:
    """Return the rounds played when the mean reward of a window first reaches the level; None if it never does."""
    rewards = [row[REWARD] for row in rows]
    for end in range(window, len(rewards) + 1):
        if sum(rewards[end - window : end]) >= level * window:
            return end
    return None


def median_node(run: dict[str, Any], level: float, window: int) -> float:
    """Return when the median node of a run takes off; infinity if it does not."""
    times = (takeoff(rows, level, window) for rows in run["nodes"].values())
    return statistics.median_low(float("inf") if one is None else one for one in times)


def shown(times: Sequence[float], rounds: int) -> str:
    return ", ".join(f"over {rounds}" if time == float("inf") else f"{time:.0f}" for time in sorted(times))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("file", type=Path)
    options.add_argument("--window", type=int, default=20, help="rounds")
    given = options.parse_args()
    groups = defaultdict(list)
    with lzma.open(given.file, "rt") as lines:
        for run in map(json.loads, lines):
            groups[run["experiment"], len(run["nodes"]), run["arm"], run["rate"]].append(run)
    print("| experiment | nodes | arm | rate | runs | rounds | fresh local, mean | a quarter solved | half solved |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | --- | --- |")
    for (experiment, nodes, arm, rate), runs in sorted(groups.items()):
        rounds = min(len(rows) for run in runs for rows in run["nodes"].values())
        fresh = statistics.fmean(row[REWARD] for run in runs for rows in run["nodes"].values() for row in rows[:rounds])
        times = (shown([median_node(run, level, given.window) for run in runs], rounds) for level in LEVELS)
        print(
            f"| {experiment} | {nodes} | {arm} | {rate:g} | {len(runs)} | {rounds} | {fresh:.3f} | {' | '.join(times)} "
            "|"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
