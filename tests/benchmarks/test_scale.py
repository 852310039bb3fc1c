"""Swarms in virtual time, and a few real peers: what the benchmark of large swarms measures."""

import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from processes import run_benchmark

pytest.importorskip("hivemind")

from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer

from benchmarks.network import simulated_network, simulated_swarm, virtual_time
from rl_swarm.network.p2p.table import REMEMBERED_SECONDS


def simulate(*arguments: Any, **options: Any) -> dict[str, Any]:
    scenario = simulated_swarm.Scenario(*arguments, settle=4, **options)
    result: dict[str, Any] = simulated_swarm.simulate(scenario)
    return result


@pytest.fixture(scope="module")
def simulated() -> list[dict[str, Any]]:
    return [simulate(peers, 4) for peers in (12, 48)]


@pytest.mark.slow
def test_everybody_in_a_simulated_swarm_plays_every_round_and_collects(simulated: list[dict[str, Any]]) -> None:
    for swarm in simulated:
        assert swarm["played"] == 1
        assert swarm["groups_taken"] > 7.5 and swarm["rejected"] == {}


@pytest.mark.slow
def test_what_is_sent_is_received_and_every_kind_is_counted_once(simulated: list[dict[str, Any]]) -> None:
    for swarm in simulated:
        assert swarm["bytes"] == swarm["received"] == pytest.approx(sum(swarm["bytes_by_kind"].values()))
        assert swarm["bytes_by_kind"]["bodies"] > swarm["asked"]["ask"][1] > 20_000
        assert swarm["messages"] == pytest.approx(sum(swarm["messages_by_kind"].values()))


def test_a_rollout_is_read_by_few_and_what_was_learned_from_it_reaches_half_of_the_swarm(
    simulated: list[dict[str, Any]],
) -> None:
    for swarm in simulated:
        reach = swarm["reach"]
        assert 0 < reach["read_by"] < 0.5 < reach["half_reached"]
        assert 0 < reach["half_s"]["median"] <= 4 * swarm["interval_s"]
    small, large = simulated
    assert large["reach"]["read_by"] < small["reach"]["read_by"]


def test_what_a_node_reads_does_not_grow_with_the_swarm(simulated: list[dict[str, Any]]) -> None:
    small, large = simulated
    assert large["bytes_by_kind"]["bodies"] < 1.2 * small["bytes_by_kind"]["bodies"]
    assert large["bytes_by_kind"]["find"] < 1.2 * small["bytes_by_kind"]["find"]


def test_the_same_seed_gives_the_same_swarm_and_another_one_another() -> None:
    once, again, other = (simulate(8, 2, churn=True, seed=seed) for seed in (1, 1, 2))
    assert once == again != other


def test_a_swarm_goes_on_while_a_third_leaves_and_others_come() -> None:
    swarm = simulate(12, 6, churn=True)
    assert swarm["played"] > 0.8
    assert swarm["groups_taken"] > 6
    assert swarm["bytes_by_kind"]["connect"] > 0


@pytest.mark.slow
def test_a_missed_bar_is_the_exit_status() -> None:
    done = run_benchmark("network.scale", "simulate", "--rounds", "1", "--check", "--peers", "2,12")
    assert done.returncode == 1, done.stderr
    assert "12 peers send" in done.stderr and done.stdout.startswith("| peers |")


@pytest.mark.slow
def test_three_real_peers_publish_and_collect() -> None:
    size = ["--peers", "3", "--rounds", "1", "--interval", "3", "--processes", "1"]
    done = run_benchmark("network.scale", "real", *size, "--json", "-")
    assert done.returncode == 0, done.stderr
    (swarm,) = json.loads(done.stdout)["results"]
    assert swarm["played"] == 1 and swarm["members_known"] == 3
    assert swarm["publications_read"] > 0 and swarm["groups_taken"] > 0
    if os.geteuid() == 0 and swarm["bytes"] is not None:
        asked = sum(size for _, size in swarm["asked"].values())
        assert swarm["bytes"] > asked > 0 and swarm["packets"] > swarm["messages"] > 0


def in_a_network(live: Callable[[list[Any], Callable[[], Any]], None]) -> None:
    """Forty peers that know each other, and a way to make another one; `live` is done in their time."""
    world = virtual_time.World(1000.0)
    network = simulated_network.Network(world, 1, simulated_network.COSTS, (0.01, 0.1), 1e6)
    numbers = itertools.count()

    def another() -> Any:
        number = next(numbers)
        rng = random.Random(number)
        return simulated_network.SimulatedEngine(network, simulated_swarm.identity(1, number), None, rng)

    def all_of_it() -> None:
        engines = [another() for _ in range(40)]
        for one in engines:
            one.start(engines[0] if one is not engines[0] else None)
        live(engines, another)

    with simulated_swarm.one_world(world, 1):
        world.spawn(all_of_it)
        world.run(1e9)


def sent_by(one: Any, work: Callable[[], object]) -> Counter[str]:
    before = one.line.messages.copy()
    work()
    return one.line.messages - before


def test_who_keeps_a_record_is_remembered_until_one_of_them_has_gone() -> None:
    def live(engines: list[Any], another: Callable[[], Any]) -> None:
        writer, reader = engines[20], engines[30]

        def cost(value: bytes, seconds: float) -> int:
            return sent_by(writer, lambda: writer.store("key", "sub", value, seconds))["place"]

        assert cost(b"old", 500.0) > 0 == cost(b"value", 600.0)
        assert reader.find("key") == {"sub": b"value"}
        keepers = [one for one in engines if one.node.storage and one not in (writer, reader)]
        assert 4 <= len(keepers) <= 5
        for one in keepers[:2]:
            one.leave()
        assert reader.find("key") == {"sub": b"value"}
        writer.store("key", "sub", b"newer", 700.0)
        assert cost(b"newest", 800.0) > 0
        assert reader.find("key") == {"sub": b"newest"}

    in_a_network(live)


def test_one_of_those_who_keep_a_record_tells_who_has_come_near() -> None:
    def live(engines: list[Any], another: Callable[[], Any]) -> None:
        writer = engines[20]
        assert writer.store("key", "sub", b"value", 600.0)
        place = DHTID(int(DHTID.generate(source="key")) ^ 1)
        nearest = min(engines, key=lambda one: place ^ one.node.node_id)
        while place ^ (newcomer := another()).node.node_id > place ^ nearest.node.node_id:
            newcomer.leave()
        newcomer.start(nearest)
        assert newcomer not in writer.node.routing.uid_to_peer_id.values()
        writer.world.sleep(REMEMBERED_SECONDS)
        sent = sent_by(writer, lambda: writer.store("key", "sub", b"newer", 900.0, 3))
        assert sent["find"] == 1 and sent["store"] <= 3 and not sent["place"]
        (held, _) = newcomer.node.storage.get(DHTID.generate(source="key"))
        assert MSGPackSerializer.loads(held.get("sub").value) == b"newer"

    in_a_network(live)
