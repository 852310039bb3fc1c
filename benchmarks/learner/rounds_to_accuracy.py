"""Counts the rounds until the median node of a swarm solves a quarter, and half, of what its model rarely solves.

    python -m benchmarks.learner.rounds_to_accuracy docs/results/discovery.jsonl.xz [--window 20]

The file has one JSON line per run: experiment, arm, seed, learning rate, and the rows of each node. A row holds the
round, the mean reward of fresh local rollouts, generated and trained tokens, and external groups. A node reaches a
level at the end of the first window of rounds whose mean reward reaches it.
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

from benchmarks.lib.command import print_table

LEVELS = (0.25, 0.5)
REWARD = 1  # column of a row


def rounds_until(rows: Sequence[Sequence[float]], level: float, window: int) -> int | None:
    """Return the rounds played when the mean reward of a window first reaches the level; None if it never does."""
    rewards = [row[REWARD] for row in rows]
    for end in range(window, len(rewards) + 1):
        if sum(rewards[end - window : end]) >= level * window:
            return end
    return None


def median_node(run: dict[str, Any], level: float, window: int) -> float:
    """Return after how many rounds the median node of a run reaches the level; infinity if it does not."""
    times = (rounds_until(rows, level, window) for rows in run["nodes"].values())
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
    rows = []
    for (experiment, nodes, arm, rate), runs in sorted(groups.items()):
        rounds = min(len(rows) for run in runs for rows in run["nodes"].values())
        fresh = statistics.fmean(row[REWARD] for run in runs for rows in run["nodes"].values() for row in rows[:rounds])
        times = (shown([median_node(run, level, given.window) for run in runs], rounds) for level in LEVELS)
        rows.append([experiment, str(nodes), arm, f"{rate:g}", str(len(runs)), str(rounds), f"{fresh:.3f}", *times])
    header = ["experiment", "nodes", "arm", "rate", "runs", "rounds", "fresh local, mean"]
    print_table([*header, "a quarter solved", "half solved"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
