"""Sends the same payload through GenRL 0.3.0: every peer puts a value under one key of the DHT and fetches all.

GenRL imports `get_dht_time` from a module where newer versions of hivemind lack it. That name is supplied, and nothing
else is changed. All peers begin a round at the same moment, which suits GenRL: an early peer fetches everything again
and again until the last value is there.
"""

import asyncio
import importlib
import logging
import os
import random
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.network.real_peers import INSIDE, Traffic, hosts
from benchmarks.network.stub_nodes import quantiles
from benchmarks.network.synthetic_rollouts import QUESTIONS, Arithmetic

END_SECONDS = 70.0  # after the last round has begun
START_SECONDS = 120.0  # for a daemon, on a busy machine
TIMEOUT = 60  # seconds after which it gives up; its default is 600


def backend() -> Any:
    """Return GenRL's module, with the name that hivemind has moved."""
    import hivemind
    from hivemind.utils.timed_storage import get_dht_time

    hivemind.get_dht_time = get_dht_time
    return importlib.import_module("genrl.communication.hivemind.hivemind_backend")


class InThread:
    """Stands in for `hivemind.DHT` as far as the backend uses it, in an event loop of this process.

    The original runs in a process of its own, whose pipe breaks with larger values.
    """

    def __init__(self, start: bool, **options: Any) -> None:
        from hivemind.dht.node import DHTNode

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.node = self._wait(DHTNode.create(**options))
        self.peer_id = self.node.peer_id

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def get_visible_maddrs(self, latest: bool = False) -> Any:
        return self._wait(self.node.get_visible_maddrs(latest))

    def store(self, key: Any, value: Any, expiration_time: float, **options: Any) -> Any:
        return self._wait(self.node.store(key, value, expiration_time, **options))

    def get(self, key: Any, **options: Any) -> Any:
        return self._wait(self.node.get(key, **options))


def payload(environment: Arithmetic, rng: random.Random) -> list[Any]:
    """Make the publication of a node of ours in GenRL's classes, with the prompt once per question."""
    from genrl.communication import Payload
    from genrl.state.game_tree import WorldState

    questions = environment.questions([rng.getrandbits(31) for _ in range(QUESTIONS)])
    return [
        Payload(WorldState(question.prompt, None, None), [c.text for c in completions], None)
        for question, completions in zip(questions, environment.generate(QUESTIONS, rng), strict=True)
    ]


@dataclass
class Member:
    """Plays one peer."""

    backend: Any
    world: int
    whole_s: list[float] = field(default_factory=list)  # rounds in which it got everything
    failures: list[str] = field(default_factory=list)

    def play(self, begins: list[float], environment: Arithmetic, seed: int) -> None:
        for number, begin in enumerate(begins):
            shared = payload(environment, random.Random(f"{seed} {number}"))
            time.sleep(max(0.0, begin - time.time()))
            started = time.monotonic()
            try:
                found = self.backend.all_gather_object(shared)
            except Exception as error:  # noqa: BLE001 any error is the result
                self.failures.append(f"{type(error).__name__}: {error}"[:200])
                continue
            if len(found) >= self.world:
                self.whole_s.append(time.monotonic() - started)
            else:
                self.failures.append(f"it got {len(found)} of {self.world}, after an error that it keeps to itself")


def host(link: Connection, count: int, known: list[str], world: int, in_thread: bool) -> None:
    """Run a process with some of its peers."""
    os.setpgrp()  # so that its children end with it
    os.environ["HIVEMIND_WORLD_SIZE"] = str(world)
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    module, environment = backend(), Arithmetic()
    if in_thread:
        module.DHT = InThread
    members = []
    for _ in range(count):
        module.HivemindRendezvouz.init(is_master=not known)
        made = module.HivemindBackend(initial_peers=known or None, timeout=TIMEOUT, startup_timeout=START_SECONDS)
        members.append(Member(made, world))
        if not known:
            known = [str(address) for address in made.dht.get_visible_maddrs()]
            link.send(known)
    link.send("ready")
    begins, ends = link.recv()
    threads = [
        threading.Thread(target=member.play, args=(begins, environment, id(member)), daemon=True) for member in members
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.time()))
    link.send(
        [(member.whole_s, member.failures, thread.is_alive()) for member, thread in zip(members, threads, strict=True)]
    )
    link.recv()
    os._exit(0)  # some of its threads never end


def measure(count: int, processes: int, rounds: int, interval: float, in_thread: bool) -> dict[str, Any]:
    with hosts(host, count, processes, count, in_thread) as links:
        first = time.time() + 2
        begins = [first + k * interval for k in range(rounds + 1)]  # the first is not counted
        for link in links:
            link.send((begins, begins[-1] + END_SECONDS))
        time.sleep(max(0.0, begins[1] - time.time()))
        before = Traffic.now()
        results = [result for link in links for result in link.recv()]
        sent = Traffic.now().since(before)
    each = count * rounds
    return {
        "peers": count,
        "rounds": rounds,
        "interval_s": interval,
        "in_thread": in_thread,
        "complete": sum(len(seconds) for seconds, *_ in results) / (count * (rounds + 1)),
        "gather_s": quantiles([s for seconds, *_ in results for s in seconds[1:]]),
        "bytes": sent.bytes / each if os.environ.get(INSIDE) else None,
        "packets": sent.packets / each if os.environ.get(INSIDE) else None,
        "hung": sum(hung for *_, hung in results),
        "failures": sorted({failure for _, failures, _ in results for failure in failures})[:5],
    }
