"""Measures what sharing is worth: the default swarm with and without it, with the same seed, rounds and answers.

    python -m benchmarks.learner.sharing [--seeds 42 43 44] [--rounds 120] [--out DIR] [--json FILE]

Every run is the real `rl-swarm up`, four processes on this machine. With sharing a node trains on 4 own
and 4 external groups a round, without on its 4 own, in one update; both generate 4 x 8 answers. The held-out score is
sampled at temperature 1 on questions that training never sees.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.command import parser_of, print_table, write_json
from rl_swarm.monitor.run_reader import RunView

ARMS = {"4/4 sharing": 4, "4/0 alone": 0}


def measure(out: Path, external: int, seed: int, rounds: int) -> dict[str, Any]:
    run = out / f"seed-{seed}-external-{external}"
    started = time.monotonic()
    if not run.exists():
        command = [sys.executable, "-m", "rl_swarm", "up", "--run", str(run), "--seed", str(seed)]
        command += ["--rounds", str(rounds), "--external-groups", str(external), "--set", "groups_per_update=0"]
        subprocess.run(command, cwd=out, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - started
    nodes = list(RunView.open(run).nodes.values())
    starts, ends = [node.start for node in nodes], [node.now for node in nodes]
    tasks = starts[0]["by_task"]
    by_task = {t: (mean(s["by_task"][t] for s in starts), mean(e["by_task"][t] for e in ends)) for t in tasks}
    return {
        "seed": seed,
        "external": external,
        "start": mean(s["sampled"] for s in starts),
        "end": mean(e["sampled"] for e in ends),
        "greedy_start": mean(s["greedy"] for s in starts),
        "greedy_end": mean(e["greedy"] for e in ends),
        "well_formed": [mean(s["well_formed"] for s in starts), mean(e["well_formed"] for e in ends)],
        "right_of_those": [
            mean(s["accuracy_well_formed"] for s in starts),
            mean(e["accuracy_well_formed"] for e in ends),
        ],
        "fresh_local": mean(line.reward_local for node in nodes for line in node.rounds),
        "training_set": mean(line.reward_training for node in nodes for line in node.rounds),
        "tasks_improved": sum(after > before for before, after in by_task.values()),
        "by_task": by_task,
        "seconds": seconds,
    }


def mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--out", type=Path, default=None, help="keep the runs here; those that exist are not run again")
    args = parser.parse_args()
    out = (args.out or Path(tempfile.mkdtemp(prefix="sharing-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)

    results = [
        {"arm": arm, **measure(out, external, seed, args.rounds)}
        for seed in args.seeds
        for arm, external in ARMS.items()
    ]
    if args.json != "-":
        show(results)
    write_json(args.json, results)


def show(results: list[dict[str, Any]]) -> None:
    header = ["seed", "arm", "held-out before", "after", "times", "greedy", "fresh local", "training set"]
    rows = [
        [
            str(r["seed"]),
            r["arm"],
            f"{r['start']:.3f}",
            f"{r['end']:.3f}",
            f"{r['end'] / r['start']:.1f}",
            f"{r['greedy_start']:.2f} → {r['greedy_end']:.2f}",
            f"{r['fresh_local']:.3f}",
            f"{r['training_set']:.3f}",
            f"{r['tasks_improved']} of {len(r['by_task'])}",
            f"{r['seconds']:.0f} s",
        ]
        for r in results
    ]
    print_table([*header, "tasks improved", "time"], rows)


if __name__ == "__main__":
    main()
