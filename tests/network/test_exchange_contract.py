"""What every exchange promises, whatever network it sits on."""

import threading
import time
from itertools import islice

import pytest
from msgspec.structs import replace
from swarms import FOR_EVER, Background, InMemory, eventually, publication

from rl_swarm.network.local import KEPT_ROUNDS
from rl_swarm.protocol.rollouts import Answer

PATIENCE = 120.0  # far more than any network here needs, on however busy a machine


@pytest.fixture
def swarm(network):
    return network()


def publish(swarm, node, round=0, stage=0, text="", exchange=None):
    sent = publication(swarm.manifest, node, round, stage, text)
    (exchange or swarm.exchange(node)).publish(sent)
    return sent


def collect(swarm, nodes, round=0, stage=0, patience=PATIENCE, **options):
    return list(swarm.exchange("reader").collect(round, stage, nodes, patience, **options))


def test_what_was_published_arrives_identical(swarm):
    answers = [
        Answer("¿2 + 2? 二 \u0000\n", '  \\" 4 ', -0.25, ended=False, tokens=[1, 2], logprobs=[-0.5, -1e-4]),
        Answer("¿2 + 2? 二 \u0000\n", "", 1.0),
    ]
    sent = replace(
        publication(swarm.manifest, "ann"), rollouts={"3": answers}, parents={"3": ["ab", "cd"]}, tokenizer="abc"
    )
    swarm.exchange("ann").publish(sent)

    assert collect(swarm, ["ann"]) == [sent]


def test_only_the_nodes_that_were_asked_for_are_returned(swarm):
    ann, bob, cleo = (publish(swarm, node) for node in ("ann", "bob", "cleo"))

    assert collect(swarm, ["cleo", "ann"], in_order=True) == [cleo, ann]
    assert bob not in collect(swarm, ["ann", "cleo"])


def test_a_node_that_is_named_twice_is_returned_once(swarm):
    ann = publish(swarm, "ann")

    assert collect(swarm, ["ann", "ann"]) == [ann]


def test_at_most_max_peers_nodes_are_asked(swarm):
    nodes = ["ann", "bob", "cleo", "dan", "eve"]
    for node in nodes:
        publish(swarm, node)
    found = swarm.exchange("reader", max_peers=3).collect(0, 0, nodes, PATIENCE)

    assert sorted(p.node for p in found) == ["ann", "bob", "cleo"]


def test_in_order_keeps_to_the_order_of_the_nodes(swarm):
    bob = publish(swarm, "bob")
    waiting = Background(lambda: collect(swarm, ["ann", "bob"], in_order=True))
    time.sleep(0.15)
    ann = publish(swarm, "ann")

    assert waiting.result() == [ann, bob]


def test_without_order_whoever_is_there_comes_first(swarm):
    bob = publish(swarm, "bob")
    found = swarm.exchange("reader").collect(0, 0, ["ann", "bob"], PATIENCE)

    assert next(found) == bob
    ann = publish(swarm, "ann")
    assert list(found) == [ann]


def test_who_publishes_late_is_waited_for(swarm):
    waiting = Background(lambda: collect(swarm, ["ann"]))
    time.sleep(0.15)
    assert waiting.is_alive()
    ann = publish(swarm, "ann")

    assert waiting.result() == [ann]


@pytest.mark.parametrize("poll", [0.02, FOR_EVER])
def test_waiting_ends_when_patience_is_over(swarm, poll):
    assert list(swarm.exchange("reader", poll=poll).collect(0, 0, ["nobody"], patience=0.3)) == []


def test_without_patience_nobody_is_waited_for(swarm):
    assert list(swarm.exchange("reader", poll=FOR_EVER).collect(0, 0, ["nobody", "no-one"])) == []


def test_one_who_never_publishes_does_not_hide_the_others(swarm):
    bob = publish(swarm, "bob")
    collect(swarm, ["bob"])  # it has arrived

    assert collect(swarm, ["nobody", "bob"], patience=1.0, in_order=True) == [bob]


def test_nothing_comes_from_another_round_or_stage(swarm):
    publish(swarm, "ann", round=4, stage=0)
    publish(swarm, "ann", round=5, stage=1)
    ann = publish(swarm, "ann", round=4, stage=1)

    assert collect(swarm, ["ann"], round=4, stage=1) == [ann]
    assert collect(swarm, ["ann"], round=5, stage=0, patience=0.3) == []


def test_an_earlier_round_can_be_asked_for_later(swarm):
    sent = [publish(swarm, "ann", round=number) for number in range(5)]
    exchange = swarm.exchange("reader")
    for number in (4, 3, 2, 4):
        assert list(exchange.collect(number, 0, ["ann"], PATIENCE)) == [sent[number]]


def test_who_publishes_again_is_read_in_one_of_the_versions_and_at_last_in_the_newest(swarm):
    ann = swarm.exchange("ann")
    first = publish(swarm, "ann", text="one", exchange=ann)
    assert collect(swarm, ["ann"]) == [first]
    second = publish(swarm, "ann", text="one and two", exchange=ann)

    assert collect(swarm, ["ann"]) in ([first], [second])
    assert eventually(lambda: collect(swarm, ["ann"]) == [second])


def test_a_reader_never_sees_half_of_what_is_published_again_and_again(swarm):
    ann = swarm.exchange("ann")
    versions = [publish(swarm, "ann", text="x" * 50 * k, exchange=ann) for k in range(3)]
    more = (publish(swarm, "ann", text="y" * 50 * k, exchange=ann) for k in range(40))
    writing = Background(lambda: versions.extend(more))
    read = [collect(swarm, ["ann"]) for _ in range(10)]
    writing.result()

    assert all(found[0] in versions and len(found) == 1 for found in read)


def test_being_told_to_stop_ends_the_waiting_at_once(swarm):
    stop = threading.Event()
    exchange = swarm.exchange("reader", stop, poll=FOR_EVER)
    waiting = Background(lambda: list(exchange.collect(0, 0, ["nobody"], patience=FOR_EVER)))
    time.sleep(0.2)
    assert waiting.is_alive()
    stop.set()

    assert waiting.result() == []


def test_nodes_are_asked_as_the_caller_consumes(swarm):
    """A caller that has enough after the first does not wait for the second, and can go on later."""
    ann = publish(swarm, "ann")
    found = swarm.exchange("reader").collect(0, 0, ["ann", "bob"], FOR_EVER, in_order=True)

    assert list(islice(found, 1)) == [ann]
    bob = publish(swarm, "bob")
    assert list(found) == [bob]


def test_in_memory_rounds_that_nobody_asks_for_are_forgotten(tmp_path):
    swarm = InMemory(tmp_path)
    for number in range(KEPT_ROUNDS + 50):
        publish(swarm, "ann", number)

    assert len(swarm.swarm.published) == KEPT_ROUNDS + 1


def test_many_nodes_exchange_everything_at_the_same_time(swarm):
    nodes = [f"node-{k}" for k in range(6)]

    def play(node):
        exchange, received = swarm.exchange(node), []
        for number in range(3):
            exchange.publish(publication(swarm.manifest, node, number))
            others = [other for other in nodes if other != node]
            received += exchange.collect(number, 0, others, PATIENCE, in_order=True)
        return received

    for node, thread in [(node, Background(lambda node=node: play(node))) for node in nodes]:
        expected = [
            publication(swarm.manifest, other, number) for number in range(3) for other in nodes if other != node
        ]
        assert thread.result() == expected
    assert swarm.rejected == []
