"""Describes faults as data: what happens to which nodes, from which round, for how long.

They are drawn from a seed or read from a file.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "join", "leave", "crash", "hang", "partition", "loss", "delay", "reorder", "duplicate", "clock", "disk", "old"
]
Network = Literal["folder", "p2p"]
WORDS: dict[Kind, str] = {
    "join": "a new node joins",
    "leave": "told to stop, comes back",
    "crash": "crash (SIGKILL), comes back",
    "hang": "hang (SIGSTOP)",
    "partition": "partition",
    "loss": "loss",
    "delay": "delay",
    "reorder": "reordering",
    "duplicate": "duplicates",
    "clock": "wrong clock",
    "disk": "disk full",
    "old": "restart with an old state",
}
ON_THE_LINE = ("partition", "loss", "delay", "reorder", "duplicate")


@dataclass(frozen=True)
class Fault:
    kind: Kind
    round: int  # of the swarm, in which it begins
    nodes: tuple[str, ...]
    seconds: float | None = 0.0  # that it lasts, or until the node comes back; None: for good
    amount: float = 0.0  # a share, seconds, or rounds back, by its kind


def draw(network: Network, count: int, rounds: int, interval: float, seed: int) -> list[Fault]:
    """Draw the faults of a run: every ten rounds a third of the nodes leave and return, and one of every other kind."""
    rng = random.Random(f"{network} {count} {rounds} {seed}")
    names = node_names(count)
    busy = dict.fromkeys(names, 0.0)  # rounds
    plan: list[Fault] = []

    def happen(kind: Kind, at: int, how_many: int, seconds: float, amount: float = 0.0) -> None:
        begins = at - amount if kind == "old" else at
        free = [name for name in names if busy[name] <= begins]
        chosen = tuple(sorted(rng.sample(free, min(how_many, len(free)))))
        if not chosen:
            return
        plan.append(Fault(kind, at, chosen, round(seconds, 1), amount))
        for name in chosen:
            busy[name] = at + seconds / interval + 3

    late = names[-(count // 8) :] if count >= 8 else []
    for name in late:
        at = rng.randrange(rounds // 5, max(rounds // 2, rounds // 5 + 1))
        plan.append(Fault("join", at, (name,)))
        busy[name] = at + 4
    for first in range(min(4, rounds // 4), rounds - 6, 10):
        length = min(10, rounds - 6 - first)
        gone = math.ceil(count / 3 * length / 10)
        wanted: list[tuple[Kind, float]] = [(rng.choice(("leave", "crash")), 0.0) for _ in range(gone)]
        wanted += [
            ("hang", 0.0),
            ("partition", 0.0),
            ("loss", rng.choice((0.05, 0.15, 0.3))),
            ("delay", rng.choice((0.1, 0.3, 1.0))),
            ("reorder", 0.3),
            ("duplicate", 0.3),
            ("clock", rng.choice((-2.5, -0.4, 0.4, 2.5)) * interval),
            ("old", 3.0),
        ]
        if network == "p2p" or first <= rounds / 2 < first + 10:  # all nodes of a folder share one disk
            wanted.append(("disk", 0.0))
        rng.shuffle(wanted)
        for place, (kind, amount) in enumerate(wanted):
            group = max(1, count // 4) if kind == "partition" else 1
            happen(kind, first + place * length // len(wanted), group, rng.uniform(0.5, 2.5) * interval, amount)
    if network == "p2p":
        plan.append(Fault("crash", rounds // 2, ("boot-1", "boot-2", "lead"), None))
    else:
        plan += [Fault("crash", rounds * part // 3, ("lead",), interval) for part in (1, 2)]
    return sorted(plan, key=lambda fault: fault.round)


def node_names(count: int) -> list[str]:
    return [f"node-{number:02}" for number in range(1, count + 1)]


def names_of(network: Network, count: int) -> set[str]:
    """Return the names of all processes of a swarm that can have faults."""
    return {*node_names(count), "lead", *(("boot-1", "boot-2") if network == "p2p" else ())}


def left_out(plan: Iterable[Fault], network: Network, namespaces: bool) -> tuple[list[Fault], Counter[str]]:
    """Return the faults that are possible here, and how many of each kind are not."""
    kept, out = [], Counter[str]()
    for fault in plan:
        if not namespaces and (fault.kind == "disk" or (network == "p2p" and fault.kind in ON_THE_LINE)):
            out[fault.kind] += 1
        else:
            kept.append(fault)
    return kept, out


def plan_of(text: str) -> list[Fault]:
    """Read a plan as `--show` prints it; raise a clear error where it is none."""
    try:
        faults = [Fault(**{**entry, "nodes": tuple(entry["nodes"])}) for entry in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"--plan is no list of faults as --show prints them: {error!r}") from error
    for fault in faults:
        if fault.kind not in get_args(Kind):
            raise SystemExit(f"--plan: {fault.kind!r} is no kind of fault; these are: {', '.join(WORDS)}")
    return sorted(faults, key=lambda fault: fault.round)
