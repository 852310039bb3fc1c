"""Puts what happens in a swarm into sentences: "sly teal crow" and "saved a checkpoint in round 20"."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_swarm.monitor.records import Event
from rl_swarm.protocol.reject_reason import RejectReason

LONGEST = 200  # characters of a part of a sentence
REASONS = {
    RejectReason.SIGNATURE: "it is not signed by that node",
    RejectReason.DIGEST: "it was altered on its way",
    RejectReason.PLACE: "it was written for another round or node",
    RejectReason.SWARM: "it was written for another swarm",
    RejectReason.SIZE: "it is too large",
    RejectReason.LIMITS: "it is longer than this swarm allows",
    RejectReason.QUESTION: "it does not answer the question that was asked",
    RejectReason.COPY: "it repeats what another node wrote",
    RejectReason.UNLIKELY: "a model would hardly write it",
    RejectReason.SLOW: "checking it took too long",
    RejectReason.UNREADABLE: "it could not be fetched",
    RejectReason.PEER: "its author is no member",
    RejectReason.ADMISSION: "its author is not admitted",
}


def told(event: Event, line: Mapping[str, Any]) -> Event:
    """Add the sentence to an event of a node's log. A peer may have written the line, so its parts are cut."""
    played = None if event.round is None else event.round + 1  # people count from 1
    of_round = "" if played is None else f" in round {played}"
    said, about, rest = {
        "joined": (f"joined with {_cut(line.get('model'))}", "", ""),
        "restarted": ("was started again" + ("" if played is None else f" after round {played}"), "", ""),
        "joined_late": (f"joined late{of_round}", "", ""),
        "left": ("left" + ("" if played is None else f" after round {played}"), "", ""),
        "finished": (f"finished{of_round}", "", ""),
        "offline": (f"went offline{of_round}", "", ""),
        "online": (f"came online{of_round}", "", ""),
        "checkpoint": (f"saved a checkpoint{of_round}", "", ""),
        "skipped": (f"skipped {_rounds(line.get('first'), line.get('last'))}", "", ""),
        "rejected": ("refused a rollout of", _cut(line.get("node")), f": {reason_of(line.get('reason'))}"),
        "not_asked": ("takes nothing from", _cut(line.get("peer")), f" for {_cut(line.get('rounds'))} rounds"),
        "failed": (f"failed: {_cut(line.get('error'))}", "", ""),
        "pushed": (f"uploaded its model to {_cut(line.get('repo'))}", "", ""),
        "push_failed": (f"could not upload its model: {_cut(line.get('reason'))}", "", ""),
    }.get(event.event, (event.event.replace("_", " ") + of_round, "", ""))
    return replace(event, said=said, about=about, rest=rest)


def _rounds(first: object, last: object) -> str:
    """Name the rounds from one to another, as people count them."""
    begin, end = (number + 1 if isinstance(number, int) else _cut(number) for number in (first, last))
    return f"round {begin}" if begin == end else f"rounds {begin} to {end}"


def reason_of(reason: object) -> str:
    """Put a reason to refuse a rollout into plain words."""
    known = next((words for one, words in REASONS.items() if one.value == reason), None)
    return known or _cut(reason)


def best_score(event: Event, score: float, before: float) -> Event:
    """Tell of a node's best held-out score so far."""
    said = f"reached its best test score so far, {score:.0%} (before: {before:.0%})"
    return replace(event, event="best_score", said=said, detail=f"{before:.3f} to {score:.3f}")


def first_solved(event: Event, task: str) -> Event:
    """Tell of a task of which a node has answered a test question for the first time."""
    return replace(event, event="first_solved", said=f"solved its first test question of {_cut(task)}", detail=task)


def _cut(value: object) -> str:
    return str(value)[:LONGEST]
