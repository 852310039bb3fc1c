"""What every coordinator promises, whatever network it sits on."""

import threading
import time

import pytest
from swarms import FOR_EVER, Background, eventually, introduction, peer_id, report

BEFORE_THE_FIRST = (-1, -1)


@pytest.fixture
def join(network):
    """Starts a swarm whose members are these nodes and returns their coordinators."""

    def start(*nodes, min_peers=None, **changes):
        swarm = network(min_peers=min_peers or len(nodes), **changes)
        members = {node: Member(swarm, node) for node in nodes}
        for member in members.values():
            member.register()
        return swarm, *members.values()

    return start


class Member:
    """One node's side of the coordinator."""

    def __init__(self, swarm, node):
        self.swarm, self.node = swarm, node
        self.stop = threading.Event()
        self.coordinator = swarm.coordinator(node, self.stop)
        self.current, self.wait_for = self.coordinator.current, self.coordinator.wait_for

    def register(self):
        self.coordinator.register(introduction(self.swarm.manifest, self.node))

    def submit(self, round=0, stage=0, **said):
        self.coordinator.submit(report(self.swarm.manifest, self.node, round, stage, **said))


def names(state):
    return sorted(member.node for member in state.members.values())


def test_before_anybody_joins_the_swarm_waits(network):
    swarm = network()
    state = Member(swarm, "ann").current()

    assert (state.phase, state.round, state.members) == ("waiting", 0, {})
    assert state.swarm == swarm.manifest.swarm()


def test_the_first_round_begins_when_enough_have_joined(join):
    swarm, ann = join("ann", min_peers=2)
    waiting = Background(lambda: ann.wait_for(BEFORE_THE_FIRST))
    time.sleep(0.15)
    assert waiting.is_alive()
    bob = Member(swarm, "bob")
    bob.register()

    for state in (waiting.result(), bob.wait_for(BEFORE_THE_FIRST)):
        assert (state.phase, state.round, state.stage) == ("running", 0, 0)
        assert names(state) == ["ann", "bob"]
        assert state.members[peer_id("ann")].node == "ann"


def test_a_round_ends_when_everyone_has_submitted(join):
    _, ann, bob = join("ann", "bob")
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit()
    waiting = Background(lambda: ann.wait_for((0, 0)))
    time.sleep(0.15)
    assert waiting.is_alive()
    assert ann.current().round == 0
    bob.submit()

    assert (waiting.result().round, waiting.value.stage) == (1, 0)
    assert bob.wait_for((0, 0)).round == 1


def test_stages_come_before_the_next_round(join):
    _, ann = join("ann", rounds=2, stages=2)
    places, state = [], ann.wait_for(BEFORE_THE_FIRST)
    while state.phase == "running":
        places.append((state.round, state.stage))
        ann.submit(*places[-1])
        state = ann.wait_for(places[-1])

    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_after_the_last_round_everyone_gets_the_final_state(join):
    _, ann, bob = join("ann", "bob", rounds=1)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit()
    bob.submit()

    for member in (ann, bob, ann):
        state = member.wait_for((0, 0))
        assert state.phase == "finished"
        assert member.wait_for((99, 99)) == state == member.current()


def test_being_told_to_stop_ends_the_waiting_at_once(network):
    stop = threading.Event()
    coordinator = network().coordinator("ann", stop, poll=FOR_EVER)
    waiting = Background(lambda: coordinator.wait_for(BEFORE_THE_FIRST))
    time.sleep(0.2)
    assert waiting.is_alive()
    stop.set()

    assert waiting.result() is None


def test_a_late_joiner_starts_with_the_present_round(join):
    swarm, ann = join("ann", rounds=4)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit(0)
    ann.wait_for((0, 0))
    bob = Member(swarm, "bob")
    bob.register()

    assert eventually(lambda: bob.current().round == 1)
    assert bob.wait_for(BEFORE_THE_FIRST).round == 1
    bob.submit(1)
    ann.submit(1)
    state = ann.wait_for((1, 0))
    assert names(state) == ["ann", "bob"]
    assert state.members[peer_id("bob")].joined_round == 1
    assert state.members[peer_id("bob")].participation == 1
    assert state.members[peer_id("ann")].participation == 2


def test_a_slow_node_skips_to_the_present_round(join):
    _, ann, bob = join("ann", "bob", round_end="interval", round_interval=0.2, rounds=100)
    assert ann.wait_for(BEFORE_THE_FIRST).round == 0
    assert eventually(lambda: bob.current().round >= 3)

    assert ann.wait_for((0, 0)).round >= 3


def test_rounds_on_an_interval_need_no_reports(join):
    _, ann = join("ann", round_end="interval", round_interval=0.2)
    seen = [ann.wait_for(BEFORE_THE_FIRST)]
    while seen[-1].phase == "running":
        seen.append(ann.wait_for((seen[-1].round, seen[-1].stage)))

    assert seen[-1].phase == "finished"
    assert seen[-1].members[peer_id("ann")].participation == 0


def test_a_deadline_ends_a_round_that_somebody_does_not_report(join):
    _, ann, _ = join("ann", "bob", round_end="deadline", round_interval=0.3)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit()

    assert ann.wait_for((0, 0)).round == 1


def test_a_silent_member_is_not_waited_for_and_counts_again_when_it_speaks(join):
    _, ann, bob = join("ann", "bob", peer_timeout=0.5, rounds=100_000)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit(0)
    assert ann.wait_for((0, 0)).members[peer_id("bob")].participation == 0  # bob said nothing

    def counts_again():  # a round may end without him, where his report is seen late
        number = ann.current().round
        for member in (bob, ann):
            member.register()
            member.submit(number)
        return ann.current().members[peer_id("bob")].participation > 0

    assert eventually(counts_again)


def test_a_sign_of_life_keeps_a_slow_member_awaited(join):
    _, ann, bob = join("ann", "bob", peer_timeout=3.0)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit(0)
    for _ in range(16):
        time.sleep(0.2)
        bob.register()
        ann.register()
        assert ann.current().round == 0
    bob.submit(0)

    assert ann.wait_for((0, 0)).members[peer_id("bob")].participation == 1


def test_votes_and_rewards_make_the_leaderboard(join):
    _, ann, bob, cleo = join("ann", "bob", "cleo", rounds=2)
    ann.wait_for(BEFORE_THE_FIRST)
    for number in range(2):
        ann.submit(number, reward=0.25, vote="ann")  # a vote for oneself does not count
        bob.submit(number, reward=0.5, vote="cleo")
        cleo.submit(number, reward=0.75, vote="bob" if number else "")
        state = ann.wait_for((number, 0))

    assert state.phase == "finished"
    board = [(m.node, m.wins, m.reward, m.participation) for _, m in state.leaderboard()]
    assert board == [("cleo", 2, 1.5, 2), ("bob", 1, 1.0, 2), ("ann", 0, 0.5, 2)]


def test_a_vote_for_somebody_who_is_no_member_does_not_count(join):
    _, ann = join("ann", rounds=1)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit(vote="stranger")

    assert [m.wins for m in ann.wait_for((0, 0)).members.values()] == [0]


def test_only_the_first_report_of_a_member_counts(join):
    _, ann, bob = join("ann", "bob", rounds=1)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit(reward=0.25)
    ann.submit(reward=100.0)
    ann.submit(round=7, reward=100.0)
    bob.submit()

    assert ann.wait_for((0, 0)).members[peer_id("ann")].reward == 0.25


def test_a_node_that_was_restarted_and_reports_again_counts_once(join):
    swarm, ann, bob = join("ann", "bob", rounds=1)
    ann.wait_for(BEFORE_THE_FIRST)
    ann.submit(reward=0.25)
    restarted = Member(swarm, "ann")
    restarted.register()
    assert restarted.wait_for(BEFORE_THE_FIRST).round == 0
    restarted.submit(reward=100.0)
    bob.submit()

    assert ann.wait_for((0, 0)).members[peer_id("ann")].reward == 0.25


def test_what_a_node_sees_never_goes_back(join):
    _, ann, bob = join("ann", "bob", round_end="interval", round_interval=0.12, rounds=6)
    seen = []
    while not seen or seen[-1][0] != "finished":
        state = bob.current()
        seen.append((state.phase, state.round, state.stage))
        time.sleep(0.005)

    order = {"waiting": 0, "running": 1, "finished": 2}
    assert [(order[phase], *rest) for phase, *rest in seen] == sorted((order[phase], *rest) for phase, *rest in seen)
    assert ann.wait_for((5, 0)).phase == "finished"
