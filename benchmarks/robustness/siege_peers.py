"""Attacks a swarm as hostile peers: each a libp2p daemon of its own with another way to stop or to fool it.

They flood the table, hold streams, found second swarms, falsify records, forge and replay notices, take many names,
and ask for junk. As members they lie, answer slowly or say nothing.
"""

import asyncio
import hashlib
import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec.structs import replace

from benchmarks.lib.paths import report_folder
from benchmarks.robustness.siege_hostile import HostileMember, Pace, Target, garbage, liar, mute, unfinished_requests
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.engine import STREAM, WHAT_TIME, EngineError, PeerEngine
from rl_swarm.network.p2p.records import DhtRecord, dht_key
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import seal

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
MEET_SECONDS = 120.0
FILLING = "x" * 3072  # makes a notice as large as one may be
TRIES = 2  # to start a daemon, and one more
STREAMS = 70  # that are held open, per honest peer


def started(target: Target) -> PeerEngine:
    """Start a daemon, and again where the machine is too busy."""
    for _ in range(TRIES):
        with suppress(EngineError):
            return PeerEngine(Identity.generate(), target.addresses, LISTEN, relay=False, map_ports=False).start()
    return PeerEngine(Identity.generate(), target.addresses, LISTEN, relay=False, map_ports=False).start()


@contextmanager
def peer(target: Target, keeps: bool = False) -> Iterator[PeerEngine]:
    """Start a peer that breaks every rule; unless told to, it keeps no records either."""
    engine = started(target)
    if not keeps:
        from rl_swarm.network.p2p.storage import NoStorage

        engine.node.protocol.storage = NoStorage()
    try:
        engine.meet(MEET_SECONDS)
        yield engine
    finally:
        engine.close()


def victims(target: Target) -> list[str]:
    return sorted({target.made().peer_id, *target.nodes()})


def notice(engine: PeerEngine, swarm: str, path: str, content: str = "") -> bytes:
    made = DhtRecord(
        swarm=swarm,
        path=path,
        sha256=hashlib.sha256(content.encode()).hexdigest(),
        size=len(content),
        timestamp=time.time(),
        content=content,
        addresses=list(engine.addresses)[:8],
    )
    return seal(made, engine.identity)


def leave(engine: PeerEngine, key: str, subkey: str, data: bytes, seconds: float = 600.0) -> None:
    with suppress(OSError):
        engine.store(key, subkey, data, seconds)


def flood(target: Target, pace: Pace) -> None:
    """Fill the keys of this round, of coming ones and of the introductions with own notices."""
    swarm, names = target.made().swarm(), itertools.count()
    with peer(target) as engine:
        while pace.go(0.02):
            now, name = target.state().round, f"n{next(names) % 400}"
            ahead = pace.rng.choice([0, 0, 1, 1, 2, 3, 10, 100])
            folder = pace.rng.choice([report_folder(now + ahead, 0)] * 4 + ["peers", "state"])
            content = FILLING if pace.rng.random() < 0.8 else ""
            sealed = notice(engine, swarm, f"{folder}/{name}.json", content)
            leave(engine, dht_key(swarm, folder), f"{engine.identity.peer_id}/{name}.json", sealed)


async def _open(engine: PeerEngine, victim: str) -> tuple[Any, Any]:
    from hivemind.p2p import PeerID

    opening = engine.p2p.call_binary_stream_handler(PeerID.from_base58(victim), STREAM)
    _, reader, writer = await asyncio.wait_for(opening, 10)
    return reader, writer


def _streams(target: Target, pace: Pace, drip: bool) -> None:
    """Hold streams that announce the length of a request, and then send nothing, or a byte at long intervals."""
    others = victims(target)
    with peer(target) as engine:
        held: list[tuple[Any, Any]] = []

        async def add(victim: str) -> None:
            reader, writer = await _open(engine, victim)
            writer.write(struct.pack(">I", 100 if not drip else 4000))
            held.append((reader, writer))

        async def tend() -> None:
            for reader, writer in list(held):
                if reader.at_eof():
                    held.remove((reader, writer))
                    writer.close()
                elif drip:
                    writer.write(b"r")

        while pace.go(0.02):
            with suppress(Exception):  # refused
                if len(held) < STREAMS * len(others):
                    engine._call(add(others[pace.done % len(others)]), 12)
            if pace.done % 50 == 0:
                with suppress(Exception):
                    engine._call(tend(), 12)


def idle_streams(target: Target, pace: Pace) -> None:
    _streams(target, pace, drip=False)


def dripping_streams(target: Target, pace: Pace) -> None:
    _streams(target, pace, drip=True)


def second_manifests(target: Target, pace: Pace) -> None:
    """Found own swarms among these peers, again and again."""
    with peer(target) as engine:
        who = engine.identity
        while pace.go(0.5):
            other = replace(target.made(), peer_id=who.peer_id, name=f"other-{pace.done}", seed=pace.done)
            sealed = seal(other, who).decode("ascii", "replace")
            made = notice(engine, other.swarm(), "manifest.json", sealed if len(sealed) <= 3072 else "")
            leave(engine, dht_key(other.swarm(), ""), f"{who.peer_id}/manifest.json", made)
            state = seal(replace(target.state(), peer_id=who.peer_id, round=10_000), who).decode()
            made = notice(engine, target.made().swarm(), "state/current_state.json", state[:3072])
            key = dht_key(target.made().swarm(), "state")
            leave(engine, key, f"{who.peer_id}/current_state.json", made)


def false_keeper(target: Target, pace: Pace) -> None:
    """Keep other peers' records and answer with garbage, forgeries and expired ones."""
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.utils.timed_storage import ValueWithExpiration

    class Liar(DHTLocalStorage):  # type: ignore[misc]
        def get(self, key: Any) -> Any:
            held = super().get(key)
            told = DictionaryDHTValue()
            later = time.time() + 1e6
            for number in range(20):
                told.store(f"junk-{number}", pace.rng.randbytes(2000), later)
            if held is not None and isinstance(held.value, DictionaryDHTValue):
                for subkey, entry in list(held.value.items())[:20]:
                    if isinstance(entry.value, bytes):
                        told.store(subkey, entry.value[:-8] + bytes(8), later)
            return ValueWithExpiration(told, later)

    with peer(target, keeps=True) as engine:
        engine.node.protocol.storage = Liar()
        swarm = target.made().swarm()
        while pace.go(1.0):
            with suppress(OSError):  # so that others know it
                engine.find(
                    dht_key(swarm, pace.rng.choice(["peers", "state", "", report_folder(target.state().round, 0)]))
                )


def forgeries(target: Target, pace: Pace) -> None:
    """Leave notices in other peers' names: altered, of old rounds, in other places, with a later expiry."""
    swarm = target.made().swarm()
    with peer(target) as engine:
        kept: dict[str, bytes] = {}
        while pace.go(0.1):
            now = target.state().round
            folder = pace.rng.choice(["peers", report_folder(now, 0), report_folder(max(0, now - 1), 0)])
            key = dht_key(swarm, folder)
            if pace.done % 10 == 1:
                with suppress(OSError):
                    kept |= engine.find(key)
                kept = dict(list(kept.items())[-200:])
            if not kept:
                continue
            subkey, data = pace.rng.choice(list(kept.items()))
            place = dht_key(swarm, pace.rng.choice([folder, "peers", report_folder(now + 1, 0)]))
            spoiled = data.replace(b'"round', b'"rount') if pace.done % 3 else data[:-3] + b'x"}'
            leave(engine, place, subkey, pace.rng.choice([data, spoiled, pace.rng.randbytes(500), b""]), 6000.0)


def many_names(target: Target, pace: Pace) -> None:
    """Introduce itself under name after name, honest nodes' names among them."""
    swarm, honest = target.made().swarm(), sorted(target.nodes().values())
    with peer(target) as engine:
        while pace.go(0.05):
            name = pace.rng.choice([*honest, f"name-{pace.done % 5000}"])
            member = HostileMember(FolderStore.at(target.scratch), target, name, engine.identity)
            content = seal(member.introduction(), engine.identity).decode()
            sealed = notice(engine, swarm, f"peers/{name}.json", content)
            leave(engine, dht_key(swarm, "peers"), f"{engine.identity.peer_id}/{name}.json", sealed)


def junk_requests(target: Target, pace: Pace) -> None:
    """Ask for missing things in every wrong way: too long, cut off, with paths that lead elsewhere."""
    others = victims(target)
    asks: Sequence[bytes] = [
        b"../../etc/passwd", b"\xff\xfe", b"x" * 4096, b"state/history.jsonl", b"logs/swarm.log",
        b"peers/" + b"a" * 3000,
        b"", b"?time", b"checkpoints/round_0", b"settings.json", b"manifest.json", b"rollouts/round_0/stage_0/x.json",
    ]  # fmt: skip

    async def send(victim: str, data: bytes) -> None:
        reader, writer = await _open(engine, victim)
        try:
            writer.write(data)
            await asyncio.wait_for(reader.read(64 << 10), 1)
        finally:
            writer.close()

    with peer(target) as engine:
        while pace.go(0.02):
            ask = pace.rng.choice(asks)
            length = pace.rng.choice([len(ask), len(ask), 1 << 31, len(ask) // 2, 0])
            with suppress(Exception):  # refused
                engine._call(send(pace.rng.choice(others), struct.pack(">I", length) + ask), 5)


@contextmanager
def _member(target: Target, name: str) -> Iterator[HostileMember]:
    manifest = target.made()
    with peer(target, keeps=True) as engine:
        local = FolderStore.at(target.scratch / name)
        store = PeerStore(engine, manifest.swarm(), manifest.peer_id, engine.identity, local)
        store.serve()
        yield HostileMember(store, target, name, engine.identity)


def _of(play: Callable[[HostileMember, Pace], None], name: str) -> Callable[[Target, Pace], None]:
    def run(target: Target, pace: Pace) -> None:
        with _member(target, name) as member:
            play(member, pace)

    return run


def slow_answers(target: Target, pace: Pace) -> None:
    """Join, report, and answer requests for its rollouts byte by byte.

    It asks other peers meanwhile, so that they take it for present.
    """
    others = victims(target)
    with _member(target, "slow") as member:
        engine: PeerEngine = member.store.engine  # type: ignore[attr-defined]

        async def answer(info: Any, reader: Any, writer: Any) -> None:
            try:
                (size,) = struct.unpack(">I", await reader.readexactly(4))
                path = await reader.readexactly(min(size, 4096))
                if path.startswith(b"rewards"):
                    found = member.store.answer(path, str(info.peer_id)) or b""  # type: ignore[attr-defined]
                    writer.write(struct.pack(">?I", True, len(found)) + found)
                    await writer.drain()
                    return
                writer.write(struct.pack(">?I", True, 100_000))
                for _ in range(60):
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.5)
            except Exception:  # noqa: BLE001 they have gone
                pass
            finally:
                writer.close()

        async def replace_answers() -> None:
            await engine.p2p.remove_binary_stream_handler(STREAM)
            await engine.p2p.add_binary_stream_handler(STREAM, answer)

        engine._call(replace_answers(), 20)
        last = -1
        while pace.go(0.2):
            member.sign_of_life()
            state = target.state()
            if state.round != last:
                last = state.round
                member.report(state)
            with suppress(OSError):
                engine.ask(others[pace.done % len(others)], WHAT_TIME, 100, 3.0)


KINDS: dict[str, Callable[[Target, Pace], None]] = {
    "notices for coming rounds in the table": flood,
    "idle streams": idle_streams,
    "dripping streams": dripping_streams,
    "second manifests": second_manifests,
    "a keeper of records that lies": false_keeper,
    "forged and replayed notices": forgeries,
    "many names of one key": many_names,
    "junk requests": junk_requests,
    "a member that lies": _of(liar, "liar"),
    "a member that publishes garbage": _of(garbage, "garbage"),
    "a member that keeps others waiting": _of(mute, "mute"),
    "a member that answers slowly": slow_answers,
    "unfinished requests to the dashboard": unfinished_requests,
}
