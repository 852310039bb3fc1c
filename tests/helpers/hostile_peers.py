"""Attacks a swarm over real daemons on loopback."""

import asyncio
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from swarms import LOOPBACK, AmongPeers, engine_of, introduction, report

from rl_swarm.network.p2p.engine import STREAM, PeerEngine
from rl_swarm.network.p2p.records import DhtRecord, dht_key
from rl_swarm.network.p2p.storage import NoStorage
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import seal

FILLING = "x" * 3072  # makes a notice as large as one may be


@contextmanager
def attacker() -> Iterator[PeerEngine]:
    """Start a peer that keeps nothing for other peers and breaks every rule."""
    known = engine_of("coordinator").addresses
    engine = PeerEngine(Identity.generate(), known, LOOPBACK, relay=False, map_ports=False).start()
    engine.node.protocol.storage = NoStorage()
    try:
        assert engine.meet(60)
        yield engine
    finally:
        engine.close()


def fill(engine: PeerEngine, swarm: str, folder: str, count: int, seconds: float = 600.0) -> int:
    """Leave many notices of one author under one key, large ones and then small ones; return how many a peer took."""
    who = engine.identity

    async def leave() -> int:
        taken, names = 0, [f"n{number}" for number in range(count)]
        for start in range(0, count, 25):
            stores = []
            for name in names[start : start + 25]:
                made = DhtRecord(
                    swarm=swarm,
                    path=f"{folder}/{name}.json",
                    sha256="0" * 64,
                    size=1,
                    timestamp=time.time(),
                    content=FILLING if len(stores) + start < count - 50 else "",
                    addresses=[],
                )
                data, expires = seal(made, who), time.time() + seconds
                key, subkey = dht_key(swarm, folder), f"{who.peer_id}/{name}.json"
                stores.append(engine.table.store(key, subkey, data, expires))
            taken += sum(await asyncio.gather(*stores))
        return taken

    return engine._call(leave(), 300.0)


class IdleStreams:
    """Opens streams that send the length of a request and nothing more, again whenever they are closed."""

    def __init__(self, engine: PeerEngine, victims: Sequence[PeerEngine], count: int) -> None:
        self.engine, self.open, self.closed = engine, 0, 0
        self.tasks = [
            asyncio.run_coroutine_threadsafe(self._hold(victim), engine.loop)
            for victim in victims
            for _ in range(count)
        ]

    async def _hold(self, victim: PeerEngine) -> None:
        from hivemind.p2p import PeerID

        peer = PeerID.from_base58(victim.identity.peer_id)
        while True:
            writer = None
            try:
                _, reader, writer = await self.engine.p2p.call_binary_stream_handler(peer, STREAM)
                writer.write(struct.pack(">I", 100))
                self.open += 1
                await reader.read(1)
                self.open, self.closed = self.open - 1, self.closed + 1
            except Exception:
                pass
            finally:
                if writer is not None:
                    writer.close()
            await asyncio.sleep(0.2)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for task in self.tasks:
            with suppress(BaseException):
                task.result(10)


class Swarm(AmongPeers):
    """Runs a swarm with a coordinator, whose two nodes report round by round."""

    nodes = ("ann", "bob")

    def __init__(self, folder: Path, **changes: object) -> None:
        super().__init__(folder, min_peers=2, **{"rounds": 100, "peer_timeout": 600.0, **changes})
        self.coordinators = {node: self.coordinator(node) for node in self.nodes}
        for node, coordinator in self.coordinators.items():
            coordinator.register(introduction(self.manifest, node))

    def report(self, round: int) -> None:
        for node, coordinator in self.coordinators.items():
            coordinator.submit(report(self.manifest, node, round))

    def round(self) -> int:
        state = self.conductor.state
        return state.round if state.phase == "running" else -1
