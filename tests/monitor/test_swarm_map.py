"""The history of who learned from whom stays small, whatever logs claim, and the map shows what they say."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from small_runs import SmallRun

from rl_swarm.monitor import swarm_map
from rl_swarm.monitor.edges import MAX_FRAMES, MAX_GROUPS, PER_FRAME, RECENT, Edges
from rl_swarm.monitor.follower import Follower
from rl_swarm.monitor.run_reader import RunView
from rl_swarm.protocol.rounds import PeerInfo
from rl_swarm.protocol.wire import Rejected, seal, sign, unseal
from rl_swarm.telemetry.journal import METRICS


def flat(edges: list[int]) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(edges)] * 3, strict=True)


def test_neighbouring_rounds_are_merged_and_nothing_is_lost_that_was_kept() -> None:
    edges = Edges()
    for played in range(10 * MAX_FRAMES):
        edges.add(played, {played % 3: 2})
    assert edges.stride == 16 and len(edges.recent) == RECENT
    frames = [edges.frame(number) for number in range(10 * MAX_FRAMES // 16)]
    assert sum(sum(frame.values()) for frame in frames) == 2 * 10 * MAX_FRAMES
    assert edges.frame(0, 64) == {0: 44, 1: 42, 2: 42}
    assert edges.recent[10 * MAX_FRAMES - 1] == {(10 * MAX_FRAMES - 1) % 3: 2}


def test_what_strangers_claim_is_bounded() -> None:
    edges = Edges()
    edges.add(0, {peer: peer for peer in range(5000)})
    assert edges.frame(0) == {peer: peer for peer in range(5000 - PER_FRAME, 5000)}, "the largest ones"
    for _ in range(3):
        edges.add(1, {7: 1_000_000})
    assert edges.frame(1) == {7: MAX_GROUPS} and edges.recent[1] == {7: MAX_GROUPS}
    edges.add(2, {7: -5, 8: 0})
    assert edges.frame(2) == {}
    edges.add(1 << 52, {3: 1})
    assert edges.frame((1 << 52) // edges.stride) == {3: 1}
    for played in range(100_000):
        edges.add(played, {peer: 1 for peer in range(20)})
    held = sys.getsizeof(edges._peers) + sys.getsizeof(edges._groups)
    assert held < 8 * MAX_FRAMES * PER_FRAME and len(edges.recent) == RECENT


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    played = SmallRun(tmp_path / "run", nodes=3, total=300)
    for _ in range(4):
        played.play()
    return played


def followed(run: SmallRun) -> Follower:
    follower = Follower(RunView(run.root))
    follower.poll()
    return follower


def test_a_log_that_claims_rounds_far_ahead_changes_nothing_for_others(run: SmallRun) -> None:
    before = swarm_map.replay(followed(run))
    liar, strangers = run.names[0], [identity.peer_id for identity in run.identities]
    for played in range(4, 250):
        run.write_round(liar, played, 1e14, [*strangers, "nobody", "x" * 64])
    follower = followed(run)
    told, replayed = swarm_map.swarm_map(follower), swarm_map.replay(follower)
    assert [each.round for each in told.rounds] == [0, 1, 2, 3]
    assert (replayed.stride, len(replayed.frames)) == (1, 5), "the round that is played now is the last"
    others = [told.nodes.node.index(name) for name in run.names[1:]]
    for old, new in zip(before.frames, replayed.frames, strict=False):
        assert [new.scores[k] for k in others] == [old.scores[k] for k in others]
        assert [e for e in flat(new.edges) if e[0] in others] == [e for e in flat(old.edges) if e[0] in others]


def test_peers_that_nobody_knows_are_not_on_the_map(run: SmallRun) -> None:
    node = run.names[0]
    run.write_round(node, 4, 0.5, [f"12D3KooW{number}" for number in range(500)])
    with (run.root / "logs" / node / METRICS).open("ab") as log:
        log.write(b'{"kind": "round", "round": 4, "external_by_peer": {"a": -1}}\n')
    told = swarm_map.swarm_map(followed(run))
    assert len(told.nodes.node) == 3 and [each.round for each in told.rounds] == [0, 1, 2, 3]


def test_only_new_rounds_are_sent_where_they_are_asked_for(run: SmallRun) -> None:
    follower = followed(run)
    assert [each.round for each in swarm_map.swarm_map(follower, since=2).rounds] == [2, 3]
    assert swarm_map.swarm_map(follower, since=1 << 52).rounds == []


def test_a_swarm_without_rounds_has_a_map(tmp_path: Path) -> None:
    told = followed(SmallRun(tmp_path / "new", nodes=2))
    assert swarm_map.swarm_map(told).rounds == [] and swarm_map.replay(told).frames == []


def test_large_answers_keep_some_edges_of_every_node(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_map, "MAX_EDGES", 4)
    monkeypatch.setattr(swarm_map, "MAX_REPLAYED", 4 * 4)
    monkeypatch.setattr(swarm_map, "MAX_SCORES", 3 * 2)
    follower = followed(run)
    told, replayed = swarm_map.swarm_map(follower), swarm_map.replay(follower)
    assert [len(each.edges) for each in told.rounds] == [3 * 4], "the newest round, and a part of it"
    assert (replayed.stride, len(replayed.frames)) == (2, 2)
    assert {learner for learner, *_ in flat(replayed.frames[0].edges)} == {0, 1, 2}


def test_viewers_share_a_replay_for_some_seconds(run: SmallRun) -> None:
    now = 0.0
    follower = Follower(RunView(run.root), clock=lambda: now)
    follower.poll()
    replays = swarm_map.Replays(follower)
    first = replays.newest()
    run.play()
    follower.poll_now()
    assert replays.newest() is first
    now += swarm_map.REPLAY_SECONDS
    assert len(msgspec.json.decode(replays.newest())["frames"]) == len(msgspec.json.decode(first)["frames"]) + 1


@pytest.mark.parametrize(
    ("phase", "shown"), [("training", "training"), ("waiting", "waiting"), ("juggling", ""), (msgspec.UNSET, "")]
)
def test_a_heartbeat_tells_the_phase(run: SmallRun, phase: str, shown: str) -> None:
    identity = run.identities[1]
    follower = followed(run)
    peer = follower.view.nodes[identity.node].peer
    assert peer is not None and peer.phase is msgspec.UNSET, "older peers do not tell it"
    version = follower.version
    run.files.write(f"peers/{identity.node}.json", seal(replace(peer, phase=phase), identity))
    follower.poll_now()
    told = swarm_map.swarm_map(follower).nodes
    assert told.phase[told.node.index(identity.node)] == shown
    assert (follower.version > version) == (phase is not msgspec.UNSET), "pages hear of it"


@pytest.mark.parametrize("phase", ["", "Training", "x" * 17, "a b", "<b>", "training\n", 7, None, ["training"]])
def test_a_phase_is_a_short_word_or_the_introduction_is_refused(run: SmallRun, phase: object) -> None:
    identity = run.identities[0]
    peer = followed(run).view.nodes[identity.node].peer
    assert peer is not None
    with pytest.raises(Rejected):
        unseal(sign(replace(peer, phase=phase), identity), PeerInfo)


def test_a_node_without_a_log_shows_its_votes(run: SmallRun) -> None:
    from rl_swarm.monitor.node_history import NodeHistory
    from rl_swarm.monitor.reports import add_report
    from rl_swarm.protocol.rounds import Report

    history = NodeHistory()
    for vote in ("ann", "nobody", ""):
        report = Report(
            swarm="s", node="n", round=3, stage=0, timestamp=0.0, reward=0.5, training_reward=0.5, rollouts=1, vote=vote
        )
        add_report(report, history, 1, {"ann": 5})
    assert history.edges.recent == {3: {5: 1}}
