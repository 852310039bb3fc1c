"""Describes a swarm as a map: its nodes with score and phase, and who learned from whom, now and round by round."""

import math
import threading
from collections.abc import Mapping, Sequence
from heapq import nlargest
from statistics import median_high

import msgspec

from rl_swarm.monitor.edges import MAX_FRAMES, RECENT, Edges
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.node_history import NodeHistory
from rl_swarm.monitor.records import MapFrame, MapNodes, MapRound, Replay, SwarmMap
from rl_swarm.monitor.run_reader import NodeView
from rl_swarm.monitor.series import number, padded
from rl_swarm.telemetry.schema import Seconds

MAX_EDGES = 40_000  # in the answer about the newest rounds; whole rounds, the newest first
MAX_REPLAYED = 64_000  # edges of a replay; of too many those with the most groups stay in every frame
MAX_SCORES = 400_000  # of a replay; of too many neighbouring frames are merged
REPLAY_SECONDS = 3.0
WORDS = ("waiting", "sampling", "scoring", "collecting", "training", "measuring")
Edge = tuple[int, int, int]  # learner, author, groups


class Replays:
    """Keeps a replay for some seconds: for a large swarm it takes half a second, and many viewers may ask for it."""

    def __init__(self, follower: Follower) -> None:
        self.follower, self._lock = follower, threading.Lock()
        self._made, self._until = b"", -math.inf

    def newest(self) -> bytes:
        """Return a replay as JSON, which is at most `REPLAY_SECONDS` old."""
        with self._lock:
            if self.follower.clock() >= self._until:
                self._made = msgspec.json.encode(replay(self.follower))
                self._until = self.follower.clock() + REPLAY_SECONDS
            return self._made


def swarm_map(follower: Follower, since: int = 0) -> SwarmMap:
    """Return the nodes as they are now, and who learned from whom in the newest rounds, from round `since` on."""
    with follower.lock:
        view = follower.view
        nodes = list(view.nodes.values())
        finished = view.phase == "finished"
        newest = view.state.round if view.state else 0
        histories = [(k, follower.histories[n.node]) for k, n in enumerate(nodes) if n.node in follower.histories]
        rounds = {k: history.edges.recent for k, history in histories}
        found = SwarmMap(
            phase=view.phase,
            round=newest,
            nodes=MapNodes(
                node=[node.node for node in nodes],
                name=[node.name for node in nodes],
                joined=[node.peer.joined if node.peer else None for node in nodes],
                score=[_score(node) for node in nodes],
                wins=[node.member.wins if node.member else 0 for node in nodes],
                phase=[_phase(node, finished) for node in nodes],
                has_log=[bool(node.rounds) for node in nodes],
                seconds=[_seconds(node) for node in nodes],
            ),
            recent_rounds=RECENT,
            rounds=[],
        )
        wanted = {played for recent in rounds.values() for played in recent if since <= played <= newest}
        left = MAX_EDGES
        for played in sorted(wanted, reverse=True)[:RECENT]:
            edges = [(k, author, n) for k, recent in rounds.items() for author, n in recent.get(played, {}).items()]
            if found.rounds and len(edges) > left:
                break
            found.rounds.append(MapRound(played, _flat(_heaviest(edges, MAX_EDGES))))
            left -= len(edges)
    found.rounds.reverse()
    return found


def replay(follower: Follower) -> Replay:
    """Return the scores of all nodes, and who learned from whom, in every round; neighbours merged in long runs."""
    with follower.lock:
        nodes, now = list(follower.view.nodes.values()), follower.view.state
        known = {k: follower.histories[n.node] for k, n in enumerate(nodes) if n.node in follower.histories}
        played = max((each.curves.end for each in known.values()), default=0)
        frames, stride = _measured(known, len(nodes), min(played, now.round + 1) if now else played)
        # A log that claims rounds far ahead is merged more than the others, and left out.
        usual = {k: each for k, each in known.items() if _stride(each) <= stride}
        edges = {k: each.edges.copy() for k, each in usual.items()}
        lines = [usual[k].curves.points("reward_local", stride) if k in usual else [] for k in range(len(nodes))]
    most = MAX_REPLAYED // max(1, frames)
    rows = [[_rounded(score) for score in padded(line, frames)[:frames]] for line in lines]
    return Replay(
        stride=stride,
        nodes=[node.node for node in nodes],
        frames=[
            MapFrame(frame * stride, [row[frame] for row in rows], _flat(_strongest(edges, frame, stride, most)))
            for frame in range(frames)
        ],
    )


def _measured(known: Mapping[int, NodeHistory], nodes: int, played: int) -> tuple[int, int]:
    """Return how many frames a replay has, and how many rounds each."""
    stride = median_high([_stride(each) for each in known.values()] or [1])
    most = min(MAX_FRAMES, max(1, MAX_SCORES // max(1, nodes)))
    while played > stride * most:
        stride *= 2
    return -(-played // stride), stride


def _stride(history: NodeHistory) -> int:
    return max(history.curves.stride, history.edges.stride)


def _strongest(edges: dict[int, Edges], frame: int, stride: int, most: int) -> list[Edge]:
    found = [(k, author, n) for k, each in edges.items() for author, n in each.frame(frame, stride).items()]
    return _heaviest(found, most)


def _heaviest(edges: list[Edge], most: int) -> list[Edge]:
    return sorted(nlargest(most, edges, key=_weight)) if len(edges) > most else edges


def _weight(edge: Edge) -> tuple[int, int]:
    """Order edges by their groups; of equal ones some of every node come first."""
    learner, author, groups = edge
    return groups, (learner * 7919 + author * 104729) % 9973


def _flat(edges: Sequence[Edge]) -> list[int]:
    return [value for edge in edges for value in edge]


def _score(node: NodeView) -> float | None:
    return _rounded(number(node.reward())) if node.has_reward else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _phase(node: NodeView, finished: bool) -> str:
    """Return what a node does by its last heartbeat; nothing where it does not say."""
    if not node.alive:
        return "finished" if finished else "offline"
    word = node.peer.phase if node.peer else ""
    return word if word in WORDS else ""


def _seconds(node: NodeView) -> list[float]:
    """Return how long the node sampled, scored, collected and trained in its last round; nothing if unknown."""
    if node.last is None:
        return []
    s: Seconds = node.last.seconds
    parts = ((s.questions, s.generate), (s.score,), (s.publish, s.collect), (s.train, s.report))
    return [round(min(max(sum(value or 0.0 for value in part), 0.0), 1e6), 2) for part in parts]
