"""Measures what single messages between two real peers cost on the wire: the constants of `simulated_network.Costs`.

It must run in a network namespace of its own.
"""

import os
import time
from collections.abc import Callable

from benchmarks.network.real_peers import CountedEngine, Traffic
from rl_swarm.protocol.identity import Identity

REPEATS = 200
IDLE_SECONDS = 60.0
REQUEST = b"rollouts/round_1/stage_0/" + b"x" * 52 + b".json"


def measure() -> dict[str, float]:
    from hivemind.p2p import PeerID

    one = CountedEngine(Identity.generate(), [])
    one.start()
    other = CountedEngine(Identity.generate(), list(one.addresses))
    other.start()
    try:
        other.meet(10)
        time.sleep(3)
        there = PeerID.from_base58(other.identity.peer_id)
        body = b""
        other.answer = lambda request, peer: body

        def call() -> None:
            one._call(one.node.protocol.call_ping(there), 5)

        def ask() -> None:
            one.ask(other.identity.peer_id, REQUEST, 1 << 20)

        def reconnect() -> None:
            one._call(one.p2p._client.disconnect(there), 5)
            time.sleep(0.05)
            ask()

        call()
        before = one.calls.copy()
        calls = each(call, REPEATS) - (one.calls - before).bytes["ping"] / REPEATS
        empty = each(ask, REPEATS) - 4 - 5 - len(REQUEST)
        body = os.urandom(100_000)
        large = each(ask, 20) - 4 - 5 - len(REQUEST)
        body = b""
        return {
            "call": calls,
            "ask": empty,
            "connect": each(reconnect, 20) - empty - 4 - 5 - len(REQUEST),
            "per_byte": (large - empty) / 100_000,
            "idle": each(lambda: time.sleep(IDLE_SECONDS), 1) / IDLE_SECONDS,
        }
    finally:
        other.close()
        one.close()


def each(work: Callable[[], object], times: int) -> float:
    """Return the bytes of one, on average."""
    before = Traffic.now()
    for _ in range(times):
        work()
    time.sleep(0.3)
    return Traffic.now().since(before).bytes / times
