"""The life of a swarm as a pure state machine: nobody waits for who is gone, nothing counts twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_swarm.config.settings import Settings
from rl_swarm.node.founding import new_manifest
from rl_swarm.protocol.rounds import (
    MAX_MISSED,
    MAX_WAIT,
    REPORTS_PER_PARDON,
    Member,
    Report,
    Rules,
    State,
    advance,
    record_presence,
    record_report,
)

TIMEOUT = 10.0
INTERVAL = 60.0


def rules(end="everyone", rounds=5, stages=1, min_peers=1):
    return Rules(rounds, stages, end, INTERVAL, TIMEOUT, min_peers)


def report(peer_id, round=0, stage=0, reward=0.5, vote=""):
    return Report(
        peer_id=peer_id,
        swarm="swarm",
        node=f"node-{peer_id}",
        round=round,
        stage=stage,
        timestamp=0.0,
        reward=reward,
        training_reward=reward,
        rollouts=4,
        vote=vote,
    )


def running(*peers, now=0.0, rules=rules()):
    """A swarm whose first round has just begun with these peers."""
    state = State(swarm="swarm")
    for peer in peers:
        state = record_presence(state, peer, f"node-{peer}", now)
    state, why = advance(state, rules, now)
    assert (state.phase, why) == ("running", None)
    return state


def reported(state, *reports, now=1.0):
    for one in reports:
        state = record_report(state, one, now)
    return state


def test_nothing_begins_before_enough_peers_have_joined():
    state = record_presence(State(swarm="swarm"), "a", "node-a", 1.0)
    assert advance(state, rules(min_peers=2), 100.0) == (state, None)
    state = record_presence(state, "a", "node-a", 2.0)  # the same one again
    assert advance(state, rules(min_peers=2), 100.0)[0].phase == "waiting"
    state, why = advance(record_presence(state, "b", "node-b", 3.0), rules(min_peers=2), 100.0)
    assert (state.phase, state.round, state.stage, state.started, why) == ("running", 0, 0, 100.0, None)


def test_a_round_on_an_interval_ends_with_it_and_not_before_whoever_reported():
    on_interval = rules("interval")
    state = reported(running("a", "b"), report("a"), report("b"))
    assert advance(state, on_interval, INTERVAL - 0.1) == (state, None)
    after, why = advance(state, on_interval, INTERVAL)
    assert (after.round, after.started, after.reports, why) == (1, INTERVAL, {}, "interval")
    assert advance(running("a", "b"), on_interval, INTERVAL)[1] == "interval"  # nobody reported


def test_a_round_ends_when_everyone_has_reported():
    state = reported(running("a", "b"), report("a"))
    assert advance(state, rules(), 2.0) == (state, None)
    after, why = advance(reported(state, report("b"), now=3.0), rules(), 3.0)
    assert (after.round, after.started, after.reports, why) == (1, 3.0, {}, "everyone")


def test_lockstep_ends_like_everyone():
    state = reported(running("a", "b"), report("a"))
    assert advance(state, rules("lockstep"), 2.0)[1] is None
    assert advance(reported(state, report("b")), rules("lockstep"), 2.0)[1] == "everyone"


def test_a_round_with_a_deadline_ends_with_the_last_report_or_the_deadline():
    with_deadline = rules("deadline")
    assert advance(reported(running("a"), report("a")), with_deadline, 2.0)[1] == "everyone"
    state = running("a", "b")
    for now in range(0, 60, 5):  # both are there, and slow
        state = record_presence(record_presence(state, "a", "node-a", now), "b", "node-b", now)
    assert advance(state, with_deadline, INTERVAL - 0.1) == (state, None)
    assert advance(state, with_deadline, INTERVAL)[1] == "deadline"


def test_a_round_without_any_report_waits():
    state = running("a", "b")
    for end in ("everyone", "lockstep"):
        assert advance(state, rules(end), 1e6) == (state, None)


def test_a_member_that_vanishes_is_waited_for_once_and_then_holds_nobody_up():
    state = reported(running("a", "b"), report("a"), now=1.0)
    assert advance(state, rules(), TIMEOUT)[1] is None
    state, why = advance(state, rules(), TIMEOUT + 0.1)
    assert why == "everyone"
    for number in (1, 2):
        now = TIMEOUT + number
        state, why = advance(reported(state, report("a", round=number), now=now), rules(), now)
        assert (state.round, why) == (number + 1, "everyone")
    assert "b" in state.members


def test_a_member_that_vanished_counts_again_when_it_speaks():
    state, _ = advance(reported(running("a", "b"), report("a")), rules(), TIMEOUT + 1)
    now = TIMEOUT + 2
    state = reported(record_presence(state, "b", "node-b", now), report("a", round=1), now=now)
    assert advance(state, rules(), now)[1] is None
    state = reported(state, report("b", round=1, vote="a"), now=now + 1)
    state, why = advance(state, rules(), now + 1)
    assert why == "everyone"
    assert (state.members["b"].participation, state.members["a"].wins) == (1, 1)


def test_a_report_is_a_sign_of_life():
    """Both reported; whoever did so long before the round ended has as much time for the next as the other."""
    state = reported(running("a", "b"), report("a"), now=1.0)
    state = record_presence(state, "b", "node-b", 9.0)
    state, _ = advance(reported(state, report("b"), now=18.0), rules(), 18.0)
    state = reported(state, report("b", round=1), now=19.0)
    assert advance(state, rules(), 18.0 + TIMEOUT)[1] is None
    assert advance(state, rules(), 18.1 + TIMEOUT)[1] == "everyone"


def test_heartbeats_keep_a_slow_member_awaited():
    state = reported(running("a", "b"), report("a"), now=1.0)
    for now in (9.0, 18.0, 27.0):
        state = record_presence(state, "b", "node-b", now)
        assert advance(state, rules(), now)[1] is None


def test_a_late_joiner_is_part_of_the_round_it_finds():
    state, _ = advance(reported(running("a"), report("a")), rules(), 2.0)
    state = reported(record_presence(state, "c", "node-c", 3.0), report("a", round=1), now=3.0)
    assert state.members["c"] == Member("node-c", joined_round=1, last_seen=3.0, missed=MAX_MISSED - 1)
    assert advance(state, rules(), 3.0)[1] is None
    state, why = advance(reported(state, report("c", round=1), now=4.0), rules(), 4.0)
    assert (state.round, why) == (2, "everyone")
    assert state.members["c"].participation == 1
    assert state.members["a"].participation == 2


def stage_with_a_silent_sloth(state, life, began, in_time=False):
    """The state after a stage in which b gives signs of life, and how long that took: a reports after a second."""
    now = began + 1.0
    state = reported(state, report("a", round=state.round), now=now)
    if in_time:
        state = reported(state, report("b", round=state.round), now=now)
    while (found := advance(state, life, now))[1] is None:
        assert now < began + 1000
        now += 1.0
        state = record_presence(state, "b", "node-b", now)
    return found[0], now - began, found[1]


@pytest.mark.parametrize(
    ("end", "first", "why"),
    [
        ("everyone", 1 + MAX_WAIT * TIMEOUT, "patience"),
        ("lockstep", 1 + MAX_WAIT * TIMEOUT, "patience"),
        ("deadline", INTERVAL, "deadline"),
    ],
)
def test_who_gives_heartbeats_and_never_reports_holds_up_a_few_stages_and_then_none(end, first, why):
    life, now = rules(end, rounds=500), 0.0
    state = running("a", "b", rules=life)
    for number in range(MAX_MISSED):
        state, took, ended = stage_with_a_silent_sloth(state, life, now)
        now += took
        last = number == MAX_MISSED - 1  # no longer than the others took
        assert (state.round, ended) == (number + 1, "patience" if last else why)
        assert took == pytest.approx(3 if last else first, abs=2)
    for _ in range(5):
        state, took, ended = stage_with_a_silent_sloth(state, life, now)
        now += took
        assert (took, ended) == (1.0, "everyone")
    assert state.members["b"].last_seen < now, "signs of life do not help"

    # Many reports in time make up for one wait in vain, and no more than one.
    for in_time, waited in [(True, False)] * REPORTS_PER_PARDON + [
        (False, True),
        (False, False),
        (True, False),
        (False, False),
    ]:
        state, took, _ = stage_with_a_silent_sloth(state, life, now, in_time)
        now += took
        assert (took > 1) == waited
    # Who has earned it is given as many failures as anybody.
    for in_time in [True] * MAX_MISSED * REPORTS_PER_PARDON + [False] * MAX_MISSED:
        state, took, _ = stage_with_a_silent_sloth(state, life, now, in_time)
        now += took
        assert (took > 1) == (not in_time)


def test_a_newcomer_that_never_reports_is_waited_for_once():
    life = rules("deadline", rounds=50)
    state, now = running("a", rules=life), 1.0
    state, _ = advance(reported(state, report("a"), now=now), life, now)
    state = record_presence(state, "b", "node-b", now)
    waited = []
    for _ in range(5):
        state, took, _ = stage_with_a_silent_sloth(state, life, now)
        now += took
        waited.append(took > 1)
    assert waited == [True, False, False, False, False]


def test_where_rounds_take_long_the_others_may_take_as_long_again_as_the_first():
    life, long = rules("lockstep"), 3 * MAX_WAIT * TIMEOUT
    state = record_presence(running("a", "b"), "b", "node-b", long)
    state = reported(state, report("a"), now=long)
    state = record_presence(state, "b", "node-b", 2 * long)
    assert advance(state, life, 2 * long)[1] is None
    assert advance(state, life, 2 * long + 1)[1] == "patience"


def test_who_was_silent_has_missed_nothing_and_is_waited_for_when_it_comes_back():
    state, now = running("a", "b"), TIMEOUT + 1
    for number in range(2 * MAX_MISSED):
        state = reported(state, report("a", round=number), now=now)
        state, why = advance(state, rules(rounds=50), now)
        assert why == "everyone"
    state = reported(record_presence(state, "b", "node-b", now), report("a", round=state.round), now=now)
    assert advance(state, rules(rounds=50), now)[1] is None


def test_on_an_interval_nobody_is_waited_for_and_nothing_is_missed():
    state, now = running("a", "b", rules=rules("interval")), 0.0
    for _ in range(MAX_MISSED):
        now += INTERVAL
        state, _ = advance(record_presence(state, "b", "node-b", now), rules("interval"), now)
    assert state.members["b"].missed == 0


def test_a_report_from_somebody_new_makes_it_a_member():
    state = reported(running("a"), report("z"), now=2.0)
    assert state.members["z"] == Member("node-z", joined_round=0, last_seen=2.0)


def test_a_member_keeps_its_node_name_and_the_round_it_joined():
    state, _ = advance(reported(running("a"), report("a")), rules(), 2.0)
    state = record_presence(state, "a", "another-name", 3.0)
    assert state.members["a"].node == "node-a"
    assert state.members["a"].joined_round == 0
    assert state.members["a"].last_seen == 3.0


def test_only_the_first_report_of_a_member_counts():
    state = reported(running("a", "b"), report("a", reward=0.25, vote="b"), report("a", reward=99.0, vote="c"))
    state, _ = advance(reported(state, report("b", reward=0.5)), rules(), 2.0)
    assert state.members["a"].reward == 0.25
    assert state.members["a"].participation == 1
    assert state.members["b"].wins == 1


def test_reports_for_another_round_or_stage_are_ignored():
    state, _ = advance(reported(running("a", "b"), report("a"), report("b")), rules(), 2.0)
    assert state.round == 1
    for wrong in (report("a", round=0), report("a", round=2), report("a", round=1, stage=1)):
        assert record_report(state, wrong, 3.0) == state


def test_reports_before_the_first_round_and_after_the_last_are_ignored():
    waiting = record_presence(State(swarm="swarm"), "a", "node-a", 0.0)
    assert record_report(waiting, report("a"), 1.0) == waiting
    finished, _ = advance(reported(running("a"), report("a")), rules(rounds=1), 2.0)
    assert finished.phase == "finished"
    assert record_report(finished, report("a"), 3.0) == finished


def test_votes_are_wins_but_not_for_oneself_nor_for_strangers():
    votes = [report("a", vote="b"), report("b", vote="b"), report("c", vote="b"), report("d", vote="stranger")]
    state, _ = advance(reported(running("a", "b", "c", "d"), *votes), rules(), 2.0)
    assert {peer: member.wins for peer, member in state.members.items()} == {"a": 0, "b": 2, "c": 0, "d": 0}
    assert "stranger" not in state.members


def test_a_vote_for_a_member_that_has_vanished_counts():
    state = reported(running("a", "b"), report("a", vote="b"))
    state, _ = advance(state, rules(), TIMEOUT + 1)
    assert state.members["b"].wins == 1
    assert state.members["b"].participation == 0


def test_rewards_add_up_over_rounds():
    state = running("a")
    for number, reward in enumerate((0.25, 0.5)):
        state, _ = advance(reported(state, report("a", round=number, reward=reward)), rules(), 2.0 + number)
    assert (state.members["a"].reward, state.members["a"].participation) == (0.75, 2)


def test_a_round_has_all_its_stages_and_is_counted_once():
    two_stages = rules(stages=2, rounds=2)
    state = running("a", "b", rules=two_stages)
    state, why = advance(reported(state, report("a", vote="b"), report("b")), two_stages, 2.0)
    assert (state.round, state.stage, why, state.started) == (0, 1, "everyone", 2.0)
    assert (state.members["a"].participation, state.members["b"].wins) == (0, 0)
    state, _ = advance(reported(state, report("a", stage=1, vote="b"), report("b", stage=1)), two_stages, 3.0)
    assert (state.round, state.stage) == (1, 0)
    assert (state.members["a"].participation, state.members["b"].wins) == (1, 1)


def test_the_last_round_finishes_the_swarm_for_good():
    state, why = advance(reported(running("a"), report("a", reward=1.0)), rules(rounds=1), 2.0)
    assert (state.phase, state.round, why) == ("finished", 0, "everyone")
    assert state.members["a"].reward == 1.0
    assert advance(state, rules("interval", rounds=1), 1e9) == (state, None)


def test_the_leaderboard_is_by_votes_then_by_reward():
    members = {
        "a": Member("a", 0, 0.0, reward=9.0, wins=1),
        "b": Member("b", 0, 0.0, reward=1.0, wins=2),
        "d": Member("d", 0, 0.0, reward=1.0, wins=1),
        "c": Member("c", 0, 0.0, reward=1.0, wins=1),
    }
    assert [peer for peer, _ in State(swarm="s", members=members).leaderboard()] == ["b", "a", "c", "d"]


def test_the_rules_of_a_swarm_are_those_of_its_manifest():
    settings = Settings.of(rounds=7, round_end="deadline", round_interval=3.0, peer_timeout=4.0)
    manifest = new_manifest(settings, "test", "owner", 0.0, stages=2)
    assert Rules.of(manifest, 3) == Rules(7, 2, "deadline", 3.0, 4.0, 3)


PEERS = st.sampled_from("abcd")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("seen"), PEERS),
        st.tuples(st.just("report"), PEERS, st.integers(0, 3), st.integers(0, 1), PEERS),
        st.tuples(st.just("report now"), PEERS, PEERS),
        st.tuples(st.just("time"), st.floats(0, 80)),
    ),
    max_size=60,
)


@given(
    EVENTS,
    st.sampled_from(["interval", "everyone", "deadline", "lockstep"]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 3),
)
def test_whatever_happens_rounds_go_forward_and_nothing_counts_twice(events, end, rounds, stages, min_peers):
    life = rules(end, rounds, stages, min_peers)
    state, now, ended = State(swarm="swarm"), 0.0, 0
    phases = ("waiting", "running", "finished")
    for event, *about in events:
        before = state
        if event == "seen":
            state = record_presence(state, about[0], about[0], now)
        elif event == "report":
            state = record_report(state, report(*about[:3], vote=about[3]), now)
        elif event == "report now":
            state = record_report(state, report(about[0], state.round, state.stage, vote=about[1]), now)
        else:
            now += about[0]
        state, why = advance(state, life, now)
        place = lambda s: (phases.index(s.phase), s.round, s.stage)  # noqa: E731
        assert place(state) >= place(before)
        assert (why is not None) == (before.phase == "running" and place(state) > place(before))
        ended += why is not None and (state.phase == "finished" or state.stage == 0)
        assert before.members.keys() <= state.members.keys()
        if before.phase == "finished":
            assert (state.phase, state.round, state.stage, state.reports) == (
                "finished",
                before.round,
                before.stage,
                {},
            )
        for peer, member in state.members.items():
            earlier = before.members.get(peer)
            assert member.participation <= ended <= rounds
            assert earlier is None or 0 <= member.participation - earlier.participation <= 1
            assert earlier is None or member.wins >= earlier.wins
        assert sum(m.wins for m in state.members.values()) <= sum(m.participation for m in state.members.values())
        assert state.reports.keys() <= state.members.keys()
        assert 0 <= state.round < rounds and 0 <= state.stage < stages
