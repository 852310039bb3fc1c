"""Moves a swarm through its rounds, as a pure state machine: `(state, event) -> state`, the clock an argument.

Every coordinator, on every network, feeds joins and reports into this and publishes the new state.

A member without a heartbeat for `peer_timeout` is not waited for; its next heartbeat or report counts again. A member
that sends heartbeats and misses the ends of `MAX_MISSED` stages is not waited for either. Reports in time make up for
misses. For a newcomer, and for a member that may miss one more stage, the others wait no longer than they took
themselves. So no member holds up the swarm again and again.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rl_swarm.protocol.manifest import Manifest, RoundEnd
from rl_swarm.protocol.wire import Count, Id, Name

Round = Count
PhaseWord = Annotated[str, Meta(pattern=r"^[a-z]{1,16}\Z")]
MAX_TICKET = 4096  # characters
MAX_MISSED = 3  # stages that a member may miss until it is not waited for; a newcomer, one
REPORTS_PER_PARDON = 50  # reports in time that make up for a miss
MAX_WAIT = 8  # times `peer_timeout`, after the first report of a stage, for members that send heartbeats
# Why a peer is not admitted.
RefusalReason = Literal["denied", "uninvited", "invalid", "revoked", "expired", "used up", "full"]


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Introduces a peer; writing this again is its heartbeat."""

    peer_id: Id = ""
    kind: Literal["peer"] = "peer"
    swarm: Id
    node: Name
    model: Annotated[str, Meta(max_length=256)]
    tokenizer: Annotated[str, Meta(max_length=64)] = ""
    device: Annotated[str, Meta(max_length=64)] = ""
    host: Annotated[str, Meta(max_length=256)] = ""
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    joined: float
    timestamp: float
    ticket: Annotated[str, Meta(max_length=MAX_TICKET)] = ""  # by which it comes (admission.py)
    role: Name | msgspec.UnsetType = msgspec.UNSET  # where it is not the ordinary one
    phase: PhaseWord | msgspec.UnsetType = msgspec.UNSET  # of its round, when this was written; for people


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Reports a peer's reward in a stage, and its vote for the peer whose rollouts were best."""

    peer_id: Id = ""
    kind: Literal["report"] = "report"
    swarm: Id
    node: Name
    round: Round
    stage: Round
    timestamp: float
    reward: Annotated[float, Meta(ge=-1e6, le=1e6)]
    training_reward: Annotated[float, Meta(ge=-1e6, le=1e6)]
    rollouts: Round
    vote: Annotated[str, Meta(max_length=64)] = ""


class Member(msgspec.Struct, frozen=True):
    node: str
    joined_round: int
    last_seen: float
    participation: int = 0  # rounds reported
    reward: float = 0.0  # sum over rounds
    wins: int = 0  # votes received
    invitation: str = ""  # the name of the one by which it came
    heartbeat: float = 0.0  # when its newest introduction was written, by its own clock
    missed: int = 0  # stages that ended without its report, though the others waited
    on_time: int = 0  # reports in time since then; `REPORTS_PER_PARDON` of them take one back

    @property
    def is_on_probation(self) -> bool:
        """Tell whether one more missed stage is the last."""
        return self.missed >= MAX_MISSED - 1

    def is_awaited(self, now: float, peer_timeout: float) -> bool:
        return self.missed < MAX_MISSED and now - self.last_seen <= peer_timeout


class Refusal(msgspec.Struct, frozen=True):
    """Tells a peer that it is not admitted. `joined` says which introduction this answers."""

    why: RefusalReason
    joined: float


class State(msgspec.Struct, frozen=True, kw_only=True):
    peer_id: Id = ""
    kind: Literal["state"] = "state"
    swarm: Id
    phase: Literal["waiting", "running", "finished"] = "waiting"
    round: Round = 0
    stage: Round = 0
    started: float = 0.0  # when this stage began, by the coordinator's clock
    timestamp: float = 0.0
    members: dict[str, Member] = {}
    reports: dict[str, Report] = {}  # of this stage so far
    first_report_at: float = 0.0
    last_regular_report_at: float = 0.0  # of a member that is not on probation
    access_list_number: Round = 0  # of the access list that this state obeys
    refused: dict[str, Refusal] = {}

    def leaderboard(self) -> list[tuple[str, Member]]:
        """Return the members, best first: by votes received, then by reward."""
        return sorted(self.members.items(), key=lambda item: (-item[1].wins, -item[1].reward, item[0]))

    def sources(self) -> dict[str, str]:
        """Return the source of every member: peers that came by one invitation are one source."""
        return {peer_id: member.invitation or peer_id for peer_id, member in self.members.items()}


class StageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Records the end of a stage in the history."""

    peer_id: Id = ""
    kind: Literal["stage"] = "stage"
    swarm: Id
    round: Round
    stage: Round
    started: float
    ended: float
    why: str
    members: list[str]
    reports: dict[str, str]  # peer id -> digest of its report


@dataclass(frozen=True)
class Rules:
    rounds: int
    stages: int
    end: RoundEnd
    interval: float
    peer_timeout: float
    min_peers: int = 1

    @classmethod
    def of(cls, manifest: Manifest, min_peers: int = 1) -> "Rules":
        return cls(
            manifest.rounds,
            manifest.stages,
            manifest.round_end,
            manifest.round_interval,
            manifest.peer_timeout,
            min_peers,
        )


def record_presence(
    state: State, peer_id: str, node: str, now: float, invitation: str = "", heartbeat: float = 0.0
) -> State:
    """Add a peer that has joined, or record its heartbeat."""
    member = state.members.get(peer_id)
    if member is None:
        joined = state.round if state.phase == "running" else 0
        # A newcomer has to report in time before the others wait for it.
        member = Member(node, joined_round=joined, last_seen=now, missed=MAX_MISSED - 1 if joined else 0)
    heartbeat = max(heartbeat, member.heartbeat)
    member = replace(member, last_seen=now, invitation=invitation or member.invitation, heartbeat=heartbeat)
    return replace(state, members={**state.members, peer_id: member})


def drop_idle(state: State, most: int, now: float, peer_timeout: float) -> State:
    """Return the state with at most so many members: of too many, silent ones that never reported go."""
    idle = (p for p, m in state.members.items() if not m.participation and now - m.last_seen > peer_timeout)
    gone = set(itertools.islice(idle, max(0, len(state.members) - most)))
    return replace(state, members={p: m for p, m in state.members.items() if p not in gone})


def stop_awaiting(state: State, peer_ids: Iterable[str]) -> State:
    """Wait no longer for these members, until their next heartbeat."""
    gone = {peer_id: replace(state.members[peer_id], last_seen=0.0) for peer_id in peer_ids}
    return replace(state, members={**state.members, **gone})


def record_report(state: State, report: Report, now: float) -> State:
    """Count a report. Only the first one of a member for the current stage counts."""
    current = state.phase == "running" and (report.round, report.stage) == (state.round, state.stage)
    if not current or report.peer_id in state.reports:
        return state
    state = record_presence(state, report.peer_id, report.node, now)
    first = state.first_report_at if state.reports else now
    last_regular = state.last_regular_report_at if state.members[report.peer_id].is_on_probation else now
    return replace(
        state,
        reports={**state.reports, report.peer_id: report},
        first_report_at=first,
        last_regular_report_at=last_regular,
    )


def advance(state: State, rules: Rules, now: float) -> tuple[State, str | None]:
    """Return the state at this time, and why the stage ended if it did."""
    if state.phase == "waiting":
        if len(state.members) < rules.min_peers:
            return state, None
        return replace(state, phase="running", started=now, timestamp=now), None
    why = end_reason(state, rules, now) if state.phase == "running" else None
    if why is None:
        return state, None
    counted = replace(
        state,
        members=count_reports(state, rules, now),
        reports={},
        last_regular_report_at=0.0,
        started=now,
        timestamp=now,
    )
    if state.stage + 1 < rules.stages:
        return replace(counted, stage=state.stage + 1), why
    if state.round + 1 < rules.rounds:
        return replace(counted, round=state.round + 1, stage=0), why
    return replace(counted, phase="finished"), why


def end_reason(state: State, rules: Rules, now: float) -> str | None:
    elapsed = now - state.started
    if rules.end == "interval":
        return "interval" if elapsed >= rules.interval else None
    late = late_members(state, rules, now)
    if state.reports and not late:
        return "everyone"
    took = state.last_regular_report_at - state.started
    if took > 0 and elapsed > 2 * took and all(state.members[peer_id].is_on_probation for peer_id in late):
        return "patience"
    if rules.end == "deadline" and elapsed >= rules.interval:
        return "deadline"
    # Where rounds take long, others may take as long again as the first did.
    longest = max(MAX_WAIT * rules.peer_timeout, state.first_report_at - state.started)
    return "patience" if state.reports and now - state.first_report_at > longest else None


def late_members(state: State, rules: Rules, now: float) -> list[str]:
    """Return the members that are waited for and have not reported."""
    return [
        peer_id
        for peer_id, member in state.members.items()
        if peer_id not in state.reports and member.is_awaited(now, rules.peer_timeout)
    ]


def count_reports(state: State, rules: Rules, now: float) -> dict[str, Member]:
    """Return the members with this stage's reports and misses counted; votes count at the end of a round.

    A member that reported has the whole `peer_timeout` for the next stage, however early its report came.
    """
    members = dict(state.members)
    last = state.stage + 1 == rules.stages
    for peer_id in late_members(state, rules, now) if rules.end != "interval" else ():
        members[peer_id] = replace(members[peer_id], missed=members[peer_id].missed + 1, on_time=0)
    for peer_id, report in state.reports.items():
        member = members.get(peer_id)
        if member is None:
            continue
        on_time = member.on_time + 1 if member.missed else 0
        members[peer_id] = replace(
            member,
            last_seen=now,
            participation=member.participation + last,
            reward=member.reward + report.reward,
            missed=member.missed - on_time // REPORTS_PER_PARDON,
            on_time=on_time % REPORTS_PER_PARDON,
        )
    for peer_id, report in state.reports.items() if last else ():
        if report.vote in members and report.vote != peer_id:
            members[report.vote] = replace(members[report.vote], wins=members[report.vote].wins + 1)
    return members
