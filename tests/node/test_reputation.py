"""A peer that keeps failing is asked less, then not at all, and can earn its way back."""

import random
from collections import Counter

import pytest

from rl_swarm.learning.checkpoints import MAX_KEPT
from rl_swarm.learning.likelihood import max_span_nll
from rl_swarm.node.reputation import PeerReputation, max_groups_per_source, source_by_source


def share_asked(reputation, peer_id, round, tries=2000):
    rng = random.Random(0)
    return sum(reputation.should_ask(peer_id, round, rng) for _ in range(tries)) / tries


def test_every_failure_halves_how_often_a_peer_is_asked_and_success_takes_it_back():
    reputation = PeerReputation(patience=4, ban_rounds=10)
    assert share_asked(reputation, "mallory", 0) == 1
    for failures in (1, 2, 3):
        assert not reputation.record("mallory", failed=True, round=failures)
        assert share_asked(reputation, "mallory", failures) == pytest.approx(0.5**failures, abs=0.05)
    reputation.record("mallory", failed=False, round=4)
    assert share_asked(reputation, "mallory", 4) == pytest.approx(0.25, abs=0.05)
    for _ in range(3):
        reputation.record("mallory", failed=False, round=5)
    assert share_asked(reputation, "mallory", 5) == 1
    assert share_asked(reputation, "alice", 5) == 1, "others are not touched"


def test_who_keeps_failing_is_not_asked_for_some_rounds_and_then_on_probation():
    reputation = PeerReputation(patience=3, ban_rounds=10)
    assert [reputation.record("mallory", True, round) for round in (5, 6, 7)] == [False, False, True]
    assert [share_asked(reputation, "mallory", round) for round in (8, 17)] == [0, 0]
    assert share_asked(reputation, "mallory", 18) == pytest.approx(0.25, abs=0.05)
    assert reputation.record("mallory", True, 18), "one more failure is enough"
    assert share_asked(reputation, "mallory", 19) == share_asked(reputation, "mallory", 28) == 0
    for round in (29, 30):
        reputation.record("mallory", False, round)
    assert share_asked(reputation, "mallory", 31) == 1


def test_an_honest_swarm_draws_no_random_numbers_for_whom_to_ask():
    reputation, rng = PeerReputation(4, 10), random.Random(1)
    assert reputation.should_ask("alice", 0, rng)
    assert rng.random() == random.Random(1).random()


def test_what_is_kept_is_what_counts_and_no_more_than_fits():
    reputation = PeerReputation(patience=2, ban_rounds=10)
    for peer in ("banned", "banned", "failed", "honest", "forgiven"):
        reputation.record(peer, failed=peer != "honest", round=3)
    reputation.record("forgiven", failed=False, round=4)
    assert reputation.snapshot(4) == {"banned": (1, 14), "failed": (1, 0)}

    for number in range(2 * MAX_KEPT):
        reputation.record(f"peer-{number}", failed=True, round=5)
    kept = reputation.snapshot(5)
    assert len(kept) == MAX_KEPT and "banned" in kept
    again = PeerReputation(patience=2, ban_rounds=10)
    again.restore(kept)
    assert again.snapshot(5) == kept
    assert share_asked(again, "banned", 13) == 0 and share_asked(again, "honest", 5) == 1
    assert again.record("failed", failed=True, round=6), "one more failure is enough"


@pytest.mark.parametrize(
    ("wanted", "share", "sources", "expected"),
    [(4, 0.5, 3, 2), (4, 0.5, 1, 4), (4, 0.5, 0, 4), (4, 0.25, 3, 2), (5, 0.5, 9, 3), (1, 0.1, 9, 1), (4, 1.0, 9, 4)],
)
def test_what_one_source_may_contribute(wanted, share, sources, expected):
    assert max_groups_per_source(wanted, share, sources) == expected


def test_a_foreign_stretch_stands_out_however_long_the_rest_is():
    usual = [-0.5, 0.3, -0.7, 0.4] * 50
    assert max_span_nll(usual) < 1
    assert max_span_nll([*usual, 6.0, 7.0, 5.0, *usual]) == pytest.approx(18, abs=1)
    assert max_span_nll([]) == 0


def test_a_source_with_many_names_is_not_asked_more_often_than_one_with_few():
    peers = [*(f"crowd {k}" for k in range(20)), "ann", "bob", "cleo"]
    sources = {peer: "crowd" for peer in peers if peer.startswith("crowd")}
    first = Counter()
    for seed in range(400):
        order = source_by_source(peers, sources, random.Random(seed))
        assert sorted(order) == sorted(peers)
        assert len({sources.get(peer, peer) for peer in order[:4]}) == 4, "one of every source first"
        first[sources.get(order[0], order[0])] += 1
    assert all(60 < first[source] < 140 for source in ("crowd", "ann", "bob", "cleo"))
    assert first.total() == 400
    assert len({source_by_source(peers, sources, random.Random(seed))[-1] for seed in range(20)}) > 5
