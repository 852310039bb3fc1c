"""Plays a swarm of real nodes through crashes, hangs, bad lines, wrong clocks, full disks and old states.

    python -m benchmarks.robustness.faults --network folder
    python -m benchmarks.robustness.faults --network p2p --nodes 16 --rounds 75 [--seed 1] [--json FILE]
    python -m benchmarks.robustness.faults --network p2p --show > plan.json    # --plan plan.json plays it

Faults are data, drawn from a seed. Nodes are `rl-swarm join` with the bundled model (fault_node.py). In every ten
rounds a third of them leave, orderly or not, and come back. In a folder the drive misbehaves; among peers the network
does (fault_network.py), and bootnodes and founder are killed halfway. Everything runs in namespaces of its own. Where
the kernel gives users none, the faults that need them are left out.

After the run no node may be stuck, no work lost beyond the round in flight, and all must agree on who is who
(fault_verdict.py). The exit code is 1, with a sentence for every violation.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benchmarks.lib.command import parser_of, print_table, progress, write_json
from benchmarks.robustness.fault_plan import WORDS, Kind, Network, draw, left_out, names_of, plan_of
from benchmarks.robustness.fault_runner import KILLED, FaultRunner
from benchmarks.robustness.fault_verdict import History, violations

INSIDE = "FAULTS_INSIDE"  # set in the namespaces
UNSHARE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
]


def outcome(runner: FaultRunner) -> list[dict[str, Any]]:
    """Tell by kind of fault how often it came, and how long its nodes took to finish a round again."""
    rows = []
    for kind in get_args(Kind):
        found = [entry for entry in runner.happened if entry[1].kind == kind]
        waits = []
        for ends, fault in found:
            for name in fault.nodes:
                if name in runner.nodes and ends < math.inf:
                    waits += waits_after(runner.nodes[name].history, ends)
        if found:
            rows.append(
                {
                    "kind": kind,
                    "times": len(found),
                    "nodes": sum(len(fault.nodes) for _, fault in found),
                    "median_seconds": round(statistics.median(waits), 1) if waits else None,
                    "worst_seconds": round(max(waits), 1) if waits else None,
                }
            )
    return rows


def waits_after(history: History, ends: float) -> list[float]:
    """Return the seconds from the end of a fault, or the start after it, to the next finished round."""
    after = min((time for time, _ in history.finished if time > ends), default=math.inf)
    begun = max([ends, *(start.time for start in history.starts if start.time < after)])
    return [after - begun] if after < math.inf else []


def figures_of(runner: FaultRunner, broken: list[str], seconds: float) -> dict[str, Any]:
    run = runner.run
    starts = [s for node in run.nodes.values() for s in node.starts[1:] if s.resumed is not None]
    lost = [len(start.lost) for start in starts if not start.put_back]
    return {
        "network": runner.network,
        "round_end": runner.round_end,
        "interval": runner.interval,
        "nodes": len(run.nodes),
        "rounds": run.rounds,
        "node_rounds": run.node_rounds(),
        "restarts": len(starts),
        "rounds_lost": sum(lost),
        "most_lost_by_one": max(lost, default=0),
        "ended_and_started_again": sum(end.excuse != KILLED for node in run.nodes.values() for end in node.ends),
        "killed_from_outside": sum(end.excuse == KILLED for node in run.nodes.values() for end in node.ends),
        "faults": outcome(runner),
        "violations": broken,
        "seconds": round(seconds),
        "cores": os.cpu_count(),
    }


def print_figures(figures: dict[str, Any]) -> None:
    rows = [
        [
            WORDS[row["kind"]],
            str(row["times"]),
            str(row["nodes"]),
            *("-" if row["median_seconds"] is None else f"{row[f'{q}_seconds']} s" for q in ("median", "worst")),
        ]
        for row in figures["faults"]
    ]
    print_table(["fault", "times", "nodes", "until the next finished round: median", "worst"], rows)
    print(
        f"\n{figures['network']}: {figures['nodes']} nodes, {figures['rounds']} rounds, "
        f"{figures['node_rounds']} node-rounds in {figures['seconds']} s; "
        f"{figures['restarts']} restarts lost {figures['rounds_lost']} rounds together, "
        f"and one at most {figures['most_lost_by_one']}; "
        f"{figures['ended_and_started_again']} ended because of a fault and were started again, "
        f"{figures['killed_from_outside']} were killed from outside of this runner (memory?)."
    )


def can_unshare() -> bool:
    with suppress(OSError):
        return subprocess.run([*UNSHARE, "ip", "tuntap", "add", "mode", "tap"], capture_output=True).returncode == 0
    return False


def parser() -> argparse.ArgumentParser:
    options = parser_of(__doc__)
    options.add_argument("--network", choices=get_args(Network), default="folder")
    options.add_argument("--nodes", type=int, default=16)
    options.add_argument("--rounds", type=int, default=75)
    options.add_argument("--interval", type=float, default=8.0, help="seconds per round")
    options.add_argument("--round-end", help="default: deadline in a folder, interval (the clock) among peers")
    options.add_argument("--seed", type=int, default=0, help="decides the plan")
    options.add_argument("--plan", metavar="FILE", help="the faults, instead of those drawn from the seed")
    options.add_argument("--show", action="store_true", help="print the plan and do nothing")
    options.add_argument("--folder", help="keep everything there (default: a temporary folder)")
    options.add_argument("--no-namespaces", action="store_true", help="only what needs none")
    return options


def main() -> None:
    options = parser().parse_args()
    if options.plan:
        plan = plan_of(Path(options.plan).read_text())
        unknown = {name for fault in plan for name in fault.nodes} - names_of(options.network, options.nodes)
        if unknown:
            raise SystemExit(f"--plan: there is no {', '.join(sorted(unknown))} in this swarm")
    else:
        plan = draw(options.network, options.nodes, options.rounds, options.interval, options.seed)
    if options.show:
        print("[\n" + ",\n".join("  " + json.dumps(asdict(fault)) for fault in plan) + "\n]")
        return
    if INSIDE not in os.environ and not options.no_namespaces:
        if can_unshare():
            os.execvpe(UNSHARE[0], [*UNSHARE, sys.executable, *sys.orig_argv[1:]], {**os.environ, INSIDE: "1"})
        progress("this user may not have namespaces (unshare): what needs them is left out")
    namespaces = INSIDE in os.environ
    plan, out = left_out(plan, options.network, namespaces)
    if out:
        progress(f"left out without namespaces: {', '.join(f'{kind} ({count})' for kind, count in out.items())}")
    round_end = options.round_end or ("interval" if options.network == "p2p" else "deadline")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        folder = Path(options.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        runner = FaultRunner(
            options.network, plan, options.nodes, options.rounds, options.interval, round_end, folder, options.seed,
            namespaces,
        )  # fmt: skip
        try:
            runner.play()
        except KeyboardInterrupt:
            sys.exit(130)
        broken = violations(runner.run)
        figures = figures_of(runner, broken, time.monotonic() - started)
    if options.json != "-":
        print_figures(figures)
    write_json(options.json, figures)
    for sentence in broken:
        print(sentence)
    print(f"{len(broken)} violations" if broken else "nothing stuck, nothing lost, all agree on who is who")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
