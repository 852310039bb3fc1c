"""Judges a run of `faults.py`: stuck nodes, lost work, and disagreement about who is who.

The functions are pure: they take what happened, by the runner's clock, and return a sentence for every violation.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

LATE_ROUNDS = 4  # rounds that a node without a fault may miss
PATIENCE = 30.0  # seconds always allowed, on a busy machine
START_SECONDS = 150.0  # until a node that was started takes part

Moment = tuple[float, int]  # a time, and the round that began or was finished then


@dataclass(frozen=True)
class Start:
    time: float
    resumed: int | None  # round it resumed from; -1: from nothing, None: it did not resume
    in_place: float  # when it took part again
    lost: tuple[int, ...] = ()  # finished rounds that it has lost
    put_back: bool = False  # it was given an old state


@dataclass(frozen=True)
class End:
    """Describes the end of a process that was not told to end."""

    time: float
    code: int
    excuse: str  # the fault that caused it, if any
    words: str = ""


@dataclass
class History:
    peer_id: str = ""
    well: list[tuple[float, float]] = field(default_factory=list)  # times when it ran without a fault
    finished: list[Moment] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    members: list[tuple[float, dict[str, str]]] = field(default_factory=list)  # the peers it knew, by name
    accepted: list[tuple[str, int, str]] = field(default_factory=list)  # author, round, content
    left_well: bool | None = None  # whether it ended with the swarm; None: it had left before


@dataclass
class Run:
    rounds: int
    clock: list[Moment] = field(default_factory=list)  # when the swarm's rounds began
    nodes: dict[str, History] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)  # processes that outlived it

    def node_rounds(self) -> int:
        return sum(len({number for _, number in node.finished}) for node in self.nodes.values())


def violations(run: Run) -> list[str]:
    return [
        *swarm_stopped(run),
        *stuck(run),
        *work_lost(run),
        *ended_without_reason(run),
        *disagreements(run),
        *two_contents(run),
        *(f"a process outlived the run: {process}" for process in run.left_behind),
    ]


def swarm_stopped(run: Run) -> Iterator[str]:
    """Check that the swarm's rounds rise one by one to the last."""
    numbers = [number for _, number in run.clock]
    for before, after in pairwise(numbers):
        if after < before:
            yield f"the swarm went back from round {before} to round {after}"
    if not numbers or numbers[-1] < run.rounds - 1:
        yield f"the swarm ended at round {numbers[-1] if numbers else -1} of {run.rounds}"
    done = {number for node in run.nodes.values() for _, number in node.finished}
    if run.rounds - 1 not in done:
        yield "no node finished the last round"


def stuck(run: Run) -> Iterator[str]:
    """Check that an undisturbed node finishes a round before the swarm is a few further, and a started one joins."""
    for name, node in run.nodes.items():
        for start, end in node.well:
            times = [start, *(time for time, _ in node.finished if start < time < end), end]
            for before, after in pairwise(times):
                missed = sum(before < time <= after for time, _ in run.clock)
                if missed > LATE_ROUNDS and after - before > PATIENCE:
                    yield f"{name} was stuck: nothing finished for {after - before:.0f} s and {missed} rounds"
        for begun in node.starts:
            if begun.resumed is None or begun.in_place - begun.time > START_SECONDS:
                yield f"{name} was stuck: started, and not there after {begun.in_place - begun.time:.0f} s"
        if node.left_well is False:
            yield f"{name} was stuck: it did not end with the swarm"
        if not node.finished:
            yield f"{name} was stuck: it never finished a round"


def work_lost(run: Run) -> Iterator[str]:
    """Check that a returning node has lost no more than the round in flight."""
    for name, node in run.nodes.items():
        for start in node.starts:
            if len(start.lost) > 1 and not start.put_back:
                lost = ", ".join(map(str, start.lost))
                yield f"{name} lost work: it came back with round {start.resumed}, and had finished {lost}"


def ended_without_reason(run: Run) -> Iterator[str]:
    """Check that a node ends by itself only where a fault forces it to, with a message to its user."""
    for name, node in run.nodes.items():
        for end in node.ends:
            if not end.excuse or (end.code > 0 and not end.words.startswith("rl-swarm: ")):
                yield f"{name} ended by itself with exit code {end.code}: {end.words}"


def disagreements(run: Run) -> Iterator[str]:
    """Check that a name means the same peer to every node, and that present nodes know each other at the end.

    Without a coordinator, peers are named by their ids.
    """
    by_id = {node.peer_id: name for name, node in run.nodes.items()}

    def named(members: Mapping[str, str]) -> dict[str, str]:
        return {by_id.get(other, other): peer for other, peer in members.items()}

    for name, node in run.nodes.items():
        meant: dict[str, str] = {}
        for _, members in node.members:
            for other, peer in named(members).items():
                if not is_right(run.nodes, other, peer):
                    meant[other] = peer
        for other, peer in meant.items():
            known = run.nodes[other].peer_id if other in run.nodes else "unknown"
            yield f"{name} took {peer} for {other}, which is {known}"
    last = run.clock[-1 - LATE_ROUNDS][0] if len(run.clock) > LATE_ROUNDS else float("inf")
    there = {n for n, node in run.nodes.items() if node.left_well and node.well and node.well[-1][0] < last}
    for name in sorted(there):
        history = run.nodes[name].members
        unknown = sorted(there - set(named(history[-1][1]) if history else ()) - {name})
        if unknown:
            yield f"{name} did not know at the end that {', '.join(unknown)} took part"


def is_right(nodes: Mapping[str, History], name: str, peer_id: str) -> bool:
    return name in nodes and nodes[name].peer_id == peer_id


def two_contents(run: Run) -> Iterator[str]:
    """Check that all nodes which accepted a peer's round accepted the same content."""
    contents: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for node in run.nodes.values():
        for author, number, content in node.accepted:
            contents[author, number].add(content)
    for (author, number), found in contents.items():
        if len(found) > 1:
            yield f"{author} published {len(found)} different contents for round {number}, and others accepted them"
