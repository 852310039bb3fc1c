"""Measures what a peer-to-peer swarm costs by its size: real peers, GenRL's way, and a simulation.

    python -m benchmarks.network.scale real [--peers 4,16,50]          # libp2p daemons on loopback
    python -m benchmarks.network.scale genrl [--peers 4,16,50]         # GenRL 0.3.0, needs the extra `bench`
    python -m benchmarks.network.scale simulate [--peers 10,50,100,300,1000]
    python -m benchmarks.network.scale messages                        # what single messages cost, for the simulation

Every node publishes 8 questions with 8 completions a round, text made from a seed, and wants 8 external groups, as many
as it has itself. Files, coordinator, exchange, selection and the node around them are the real ones in all swarms of
ours. A node "generates" for a quarter to six tenths of a round.

All figures are per node and round, after rounds in which the nodes meet. Bytes are those that a node sends; on average
it receives as many. As root, real swarms run in a network namespace of their own. Bytes are then what its loopback
interface carried: all traffic of libp2p and the DHT, with TCP and IP headers. A message is a request or its answer.

`--check` fails when the largest swarm sends more than 1.2 times the bytes of the smallest. With `real` it fails when
the simulation is off by more than a fifth.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.command import add_json, print_table, progress, write_json

GROWTH, APART = 1.2, 0.2  # growth of bytes per node, and error of the simulation
KINDS = {  # of bytes in the simulation
    "bodies": "rollouts",
    "asks": "other documents",
    "find": "reading the table",
    "place": "finding a place in it",
    "store": "writing to it",
    "ping": "pings",
    "connect": "connecting",
    "idle": "idle connections",
}


def real(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    from benchmarks.network import real_peers

    if not real_peers.in_a_namespace():
        progress("without root and `unshare` there is no namespace to count bytes in")
    results, good = [], True
    for count in args.peers:
        progress(f"{count} real peers")
        result = real_peers.measure(count, args.processes, args.rounds, args.interval)
        results.append(result)
        if args.check and result["bytes"] is not None:
            from benchmarks.network.simulated_swarm import Scenario, simulate

            made = simulate(Scenario(count, args.rounds, args.interval, seed=args.seed))
            result["simulated"] = made["bytes"]
            good &= abs(made["bytes"] / result["bytes"] - 1) <= APART
        progress(json.dumps(result))
    header = ["peers", "publish s", "95 %", "collect s", "95 %", "messages", "packets", "KB", "KB asked for"]
    rows = [
        [
            str(r["peers"]),
            *(f"{r[what][q]:.3f}" for what in ("publish_s", "collect_s") for q in ("median", "p95")),
            f"{r['messages']:.0f}",
            "-" if r["packets"] is None else f"{r['packets']:.0f}",
            kilobytes(r["bytes"]),
            kilobytes(r["asked"].get("ask", (0, 0))[1]),
        ]
        for r in results
    ]
    if args.check:
        header += ["simulated KB", "by real"]
        for row, r in zip(rows, results, strict=True):
            made = r.get("simulated")
            row += [kilobytes(made), "-" if made is None else f"{made / r['bytes']:.2f}"]
    show(args, header, rows)
    return results, good


def genrl(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    from benchmarks.network import genrl_backend, real_peers

    if not real_peers.in_a_namespace():
        progress("without root and `unshare` there is no namespace to count bytes in")
    results = []
    for count in args.peers:
        for in_thread in (True, False):
            progress(f"{count} peers of GenRL's, {'in threads' if in_thread else 'as it is'}")
            results.append(genrl_backend.measure(count, args.processes, args.rounds, args.interval, in_thread))
            progress(json.dumps(results[-1]))
    header = ["peers", "table in", "complete", "gather s", "95 %", "packets", "KB", "hung", "what went wrong"]
    show(
        args,
        header,
        [
            [
                str(r["peers"]),
                "a thread" if r["in_thread"] else "its process",
                f"{100 * r['complete']:.0f} %",
                f"{r['gather_s']['median']:.2f}",
                f"{r['gather_s']['p95']:.2f}",
                "-" if r["packets"] is None else f"{r['packets']:.0f}",
                kilobytes(r["bytes"]),
                str(r["hung"]),
                "; ".join(r["failures"])[:100],
            ]
            for r in results
        ],
    )
    return results, True


def simulate(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    from benchmarks.network.simulated_swarm import Scenario, simulate

    results = []
    for count in args.peers:
        for churn in (False, True) if args.churn else (False,):
            progress(f"{count} simulated peers{' that come and go' if churn else ''}")
            results.append(simulate(Scenario(count, args.rounds, args.interval, churn, args.seed)))
            progress(json.dumps(results[-1]))
    kinds = [kind for kind in KINDS if any(kind in r["bytes_by_kind"] for r in results)]
    header = ["peers", "churn", "messages", "KB", *(KINDS[kind] for kind in kinds), "busiest node KB"]
    header += ["collect s", "read by", "half reached", "after rounds", "95 %"]
    rows = []
    for r in results:
        reach = r["reach"]
        half = reach["half_s"] or {"median": float("nan"), "p95": float("nan")}
        rows.append(
            [
                str(r["peers"]),
                "a third" if r["churn"] else "none",
                f"{r['messages']:.0f}",
                kilobytes(r["bytes"]),
                *(kilobytes(r["bytes_by_kind"].get(kind, 0.0)) for kind in kinds),
                kilobytes(r["busiest"]),
                f"{r['collect_s']['median']:.1f}",
                f"{100 * reach['read_by']:.1f} %",
                f"{100 * reach['half_reached']:.0f} %",
                f"{half['median'] / r['interval_s']:.1f}",
                f"{half['p95'] / r['interval_s']:.1f}",
            ]
        )
    show(args, header, rows)
    still = [r for r in results if not r["churn"]]
    growth = still[-1]["bytes"] / still[0]["bytes"]
    progress(f"{still[-1]['peers']} peers send {growth:.2f} times the bytes of {still[0]['peers']}")
    return results, growth <= GROWTH


def messages(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    from benchmarks.network import message_overhead, real_peers

    if not real_peers.in_a_namespace():
        raise SystemExit("Bytes of single messages can be counted in a network namespace only: run this as root.")
    found = message_overhead.measure()
    show(args, ["message", "bytes beside what is said"], [[what, f"{size:,.4g}"] for what, size in found.items()])
    return [found], True


def kilobytes(size: float | None) -> str:
    return "-" if size is None else f"{size / 1000:.1f}" if size < 1e5 else f"{size / 1000:.0f}"


def show(args: argparse.Namespace, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if args.json != "-":
        print_table(header, rows)


def counts(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    for run, peers, rounds, interval in (
        (real, "4,16,50", 5, 20.0),
        (genrl, "4,16,50", 3, 20.0),
        (simulate, "10,50,100,300,1000", 10, 60.0),
        (messages, "2", 1, 1.0),
    ):
        one = what.add_parser(run.__name__)
        one.set_defaults(run=run)
        one.add_argument("--peers", type=counts, default=counts(peers), help=f"numbers of peers ({peers})")
        one.add_argument("--rounds", type=int, default=rounds, help=f"that are measured ({rounds})")
        one.add_argument("--interval", type=float, default=interval, help=f"seconds per round ({interval:g})")
        one.add_argument("--processes", type=int, default=5, help="that the peers share (5)")
        one.add_argument("--churn", action="store_true", help="also with a third coming and going in ten rounds")
        one.add_argument("--seed", type=int, default=1, help="of the simulation")
        one.add_argument("--check", action="store_true", help="exit status 1 if a bar is missed")
        add_json(one)
    args = parser.parse_args()
    results, good = args.run(args)
    write_json(args.json, {"what": args.what, "cores": os.cpu_count(), "results": results})
    if args.check and not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
