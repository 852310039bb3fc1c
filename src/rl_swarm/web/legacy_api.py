"""Serves the endpoints of the original RL Swarm dashboard by their names, for programs that use them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Query

from rl_swarm.monitor import snapshot
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.records import RolloutRow
from rl_swarm.monitor.rollouts import RolloutFilter, RolloutReader
from rl_swarm.protocol.identity import animal_name

LEADERS = 100  # of the leaderboards
CHARTED = 10  # of the history of rewards
LONGEST = 300  # characters of a message
PeerId = Annotated[str, Query(max_length=100)]


@dataclass(frozen=True)
class HealthMessage:
    message: str
    lastPolled: float | None  # seconds


@dataclass(frozen=True)
class RoundAndStage:
    round: int
    stage: int


@dataclass(frozen=True)
class LeaderboardRow:
    id: str
    nickname: str
    participation: int
    score: float  # mean of the last rounds, or the sum of all
    wins: int


@dataclass(frozen=True)
class Leaderboard:
    leaders: list[LeaderboardRow]
    total: int


@dataclass(frozen=True)
class Point:
    x: int  # round
    y: float


@dataclass(frozen=True)
class History:
    id: str
    nickname: str
    values: list[Point]


@dataclass(frozen=True)
class Histories:
    leaders: list[History]


@dataclass(frozen=True)
class PeerIdOf:
    id: str | None


@dataclass(frozen=True)
class Message:
    id: str
    message: str
    node: str
    nodeId: str
    timestamp: float
    question: str
    answer: str  # the best of them
    reward: float


@dataclass(frozen=True)
class Gossip:
    messages: list[Message]


def router(current: Callable[[], Follower], reader: RolloutReader) -> APIRouter:
    routes = APIRouter(prefix="/api", tags=["legacy"])
    Swarm = Annotated[Follower, Depends(current)]

    @routes.get("/healthz")
    def healthz(swarm: Swarm) -> HealthMessage:
        found = snapshot.health(swarm)
        return HealthMessage("stale" if found.status == "stale" else "OK", found.seconds_since_heartbeat)

    @routes.get("/round_and_stage")
    def round_and_stage(swarm: Swarm) -> RoundAndStage:
        overview = snapshot.overview(swarm)
        return RoundAndStage(overview.round, overview.stage)

    @routes.get("/leaderboard")
    def leaderboard(swarm: Swarm) -> Leaderboard:
        """Return the nodes by the reward of the last rounds."""
        return leaders(swarm, total=False)

    @routes.get("/leaderboard-cumulative")
    def leaderboard_cumulative(swarm: Swarm) -> Leaderboard:
        """Return the nodes by the sum of all rewards."""
        return leaders(swarm, total=True)

    @routes.get("/rewards-history")
    def rewards_history(swarm: Swarm) -> Histories:
        lines = snapshot.lines(swarm, "reward_local", points=200, most=CHARTED)
        peers = {row.node: row.peer_id for row in snapshot.nodes(swarm, limit=CHARTED).nodes}
        return Histories(
            [
                History(
                    peers.get(line.node, line.node),
                    line.name,
                    [Point(x, y) for x, y in zip(lines.rounds, line.values, strict=True) if y is not None],
                )
                for line in lines.lines
            ]
        )

    @routes.get("/name-to-id")
    def name_to_id(swarm: Swarm, name: Annotated[str, Query(max_length=100)] = "") -> PeerIdOf:
        found = snapshot.find(swarm, " ".join(name.lower().split()))
        return PeerIdOf(found.peer.peer_id if found and found.peer else None)

    @routes.post("/id-to-name", responses={400: {"description": "No text."}, 413: {"description": "More than 100 KB."}})
    def id_to_name(ids: Annotated[list[PeerId], Body(max_length=1000)]) -> dict[str, str]:
        return {peer_id: animal_name(peer_id) for peer_id in ids}

    @routes.get("/gossip")
    def gossip(swarm: Swarm, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> Gossip:
        """Return the latest completions."""
        return Gossip([message(row) for row in reader.page(RolloutFilter(), None, limit, keys=False).rollouts])

    return routes


def leaders(swarm: Follower, total: bool) -> Leaderboard:
    page = snapshot.nodes(swarm, limit=100_000)
    found = [
        LeaderboardRow(n.peer_id, n.name, n.participation, n.total_reward if total else n.reward or 0.0, n.wins)
        for n in page.nodes
    ]
    found.sort(key=lambda leader: (-leader.score, leader.id))
    return Leaderboard(found[:LEADERS], page.total)


def message(row: RolloutRow) -> Message:
    """Format a rollout as one line: the question, and the best of the answers."""
    best = max(row.completions, key=lambda text: text.reward)
    question, answer = (" ".join(text.split())[:LONGEST] for text in (row.question, best.text))
    text = f"{question} → {answer}"[:LONGEST]
    return Message(row.id, text, row.name, row.node, row.timestamp, question, answer, best.reward)
