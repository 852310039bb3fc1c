"""Fuzzes streams and records among peers: the protocol as a state machine, over real daemons on loopback.

In a case a stranger and a member open many streams at once to a peer. Each stream takes random steps: parts of a
length or of a request, garbage, whole requests, waiting past deadlines, reading little, closing, breaking off. Both
also leave records in the table, changed and signed again. Meanwhile an honest peer asks. A case fails when

- the honest peer gets no answer, or a wrong one;
- streams, tasks or records exceed their bounds or stay behind;
- the parts under test log anything.
"""

import asyncio
import contextlib
import logging
import random
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.lib.paths import MANIFEST, STATE, report_folder
from benchmarks.robustness.fuzz_messages import change_bytes, change_fields, signed
from benchmarks.robustness.fuzz_records import AUTHORS, OWNER, SWARM, identity_of, seeded
from benchmarks.robustness.fuzz_target import Case, Harm, Target
from rl_swarm.network.documents import report_key
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.layout import key_at, path_of
from rl_swarm.network.p2p import engine as engines
from rl_swarm.network.p2p import quota, streams
from rl_swarm.network.p2p import records as notices
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.engine import MAX_REQUEST, STREAM, WHAT_TIME, PeerEngine
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import MAX_NOTICE, DhtRecord, acceptable, dht_key
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.rounds import Member, State
from rl_swarm.protocol.wire import Rejected, seal, unseal

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
REQUEST_SECONDS, TAKE_SECONDS = 1.0, 3.0  # deadlines, shorter than they are, so that more cases are played
PATIENCE = 60.0
DOCUMENT, LARGE = path_of(report_key(0, 0, "owner")), path_of(report_key(1, 0, "owner"))
FOLDERS = ("peers", "state", "", "rollouts/round_0/stage_0", "rewards/round_x/stage_0", *(report_folder(n,
0) for n in range(5)))  # fmt: skip
STEPS = (
    "a length",
    "part of a length",
    "part of a request",
    "garbage",
    "a request",
    "too much",
    "read",
    "read all",
    "wait",
)
DIRECT = 60  # records of a case that are offered to a storage without a network


class Listener(logging.Handler):
    """Keeps the log lines of the parts under test."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(self.format(record))


class HostileStream:
    """Plays one stream of a peer that breaks every rule, and keeps what it received."""

    def __init__(self, engine: PeerEngine, victim: str, rng: random.Random) -> None:
        self.engine, self.victim, self.rng = engine, victim, rng
        self.done: list[str] = []
        self.stays, self.is_stuck = rng.random() < 0.3, False
        self.reader: Any = None
        self.writer: Any = None

    async def play(self) -> None:
        from hivemind.p2p import PeerID

        try:
            opening = self.engine.p2p.call_binary_stream_handler(PeerID.from_base58(self.victim), STREAM)
            _, self.reader, self.writer = await asyncio.wait_for(opening, 20.0)
            for _ in range(self.rng.choice((0, 1, 1, 2, 4))):
                self.done.append(self.rng.choice(STEPS))
                await asyncio.wait_for(self._step(self.done[-1]), 20.0)
            if self.stays:
                self.done.append("stays")
                self.is_stuck = True
                await asyncio.wait_for(self.reader.read(-1), PATIENCE)
                self.is_stuck = False
        except (ConnectionError, EOFError) as error:
            self.is_stuck = False
            self.done.append(f"ended with {type(error).__name__}")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 the attacker's own failures do not matter
            self.done.append(f"ended with {type(error).__name__}")
        finally:
            if self.writer is not None:
                if self.rng.random() < 0.3:
                    self.writer.transport.abort()
                self.writer.close()

    async def _step(self, step: str) -> None:
        rng = self.rng
        request = rng.choice((WHAT_TIME, DOCUMENT.encode(), LARGE.encode(), b"../../etc/passwd", b"", b"\xff\0"))
        whole = struct.pack(">I", len(request)) + request
        if step == "a length":
            self.writer.write(
                struct.pack(">I", rng.choice((0, 1, 100, MAX_REQUEST, MAX_REQUEST + 1, 2**31, 2**32 - 1)))
            )
        elif step == "part of a length":
            self.writer.write(whole[: rng.randrange(1, 4)])
        elif step == "part of a request":
            self.writer.write(whole[: rng.randrange(4, len(whole) + 1)])
        elif step == "garbage":
            self.writer.write(rng.randbytes(rng.choice((1, 5, 5000))))
        elif step == "a request":
            self.writer.write(whole * rng.choice((1, 1, 1, 3)))
        elif step == "too much":
            self.writer.write(whole + b"x" * 200_000)
        elif step == "read":
            await asyncio.wait_for(self.reader.read(rng.choice((1, 5, 1000))), 0.5)
        elif step == "read all":
            await asyncio.wait_for(self.reader.read(-1), 2.0)
        else:
            await asyncio.sleep(rng.choice((0.0, 0.1, REQUEST_SECONDS * 1.3)))
        await self.writer.drain()


def record(rng: random.Random, author: Identity, now: float) -> tuple[str, Any, Any, float]:
    """Make a record for the table, most of the time a slightly wrong one: key, subkey, value, expiry."""
    from hivemind.utils import MSGPackSerializer

    folder, name = rng.choice(FOLDERS), rng.choice(("a", "b", "c", "owner", "n" * 60))
    how = rng.choice((*[""] * 9, "bytes", "fields", "subkey", "packed", "type", "garbage", "time", "expiry", "place"))
    notice = DhtRecord(
        peer_id=author.peer_id, swarm=SWARM.swarm(), path=f"{folder}/{name}.json".lstrip("/"), sha256="0" * 64, size=1,
        timestamp=now + rng.choice((-700, 50, 90, 1e18) if how == "time" else (0, 0, -5)),
        content="x" * rng.choice((0, 0, 100, 3000, 3072)), depth=rng.choice((0, 12)),
        addresses=rng.choice(([], ["/ip4/127.0.0.1/tcp/1/p2p/x"] * 8)),
    )  # fmt: skip
    subkey: Any = notice.subkey()
    try:
        data: Any = seal(notice, author, limit=MAX_NOTICE)
    except Exception:  # noqa: BLE001 too large for an honest author
        data = b"{}"
    if how == "bytes":
        data = change_bytes(data, [data], rng)
    elif how == "fields":
        fields = change_fields(msgspec.to_builtins(notice), rng)
        data = signed(fields if isinstance(fields, dict) else {}, author, rng)
    elif how == "subkey":
        subkey = rng.choice((None, 5, b"x", "", subkey + "x", {"a": 1}, [subkey]))
    packed = MSGPackSerializer.dumps(data)
    if how == "packed":
        packed = change_bytes(packed, [packed], rng)
    elif how == "type":
        data = rng.choice((None, 5, "x", [data], {"a": data}))
        packed = MSGPackSerializer.dumps(data)
    elif how == "garbage":
        packed = rng.randbytes(rng.choice((0, 1, 7000)))
    place = rng.choice(notice.dht_keys()[:3] or ["elsewhere"])
    if how == "place":
        place = rng.choice((dht_key(SWARM.swarm(), rng.choice(FOLDERS)), "elsewhere"))
    expires = now + (
        rng.choice((0, -1, 1e9, float("nan"), float("inf"))) if how == "expiry" else rng.choice((60, 100, 1))
    )
    return place, subkey, packed, expires


def check_table(storage: Any, room: DhtQuota) -> None:
    """Raise unless the table's contents agree with its account, and are within its bounds."""
    from hivemind.utils import MSGPackSerializer

    claims = [claim for under in room.by_key.values() for claim in under.values()]
    shares = Counter[str]()
    for claim in claims:
        shares[claim.author] += claim.size
    if shares != Counter(room.shares) or sum(room.sizes.values()) != sum(shares.values()):
        raise Harm("the account of the table does not add up")
    if len(claims) != sum(map(len, room.by_author.values())):
        raise Harm("the account by key and the one by author differ")
    for author, theirs in room.by_author.items():
        in_key = Counter(key for key, _ in theirs)
        reports = sum(claim.is_report for claim in theirs.values())
        if len(theirs) > quota.MAX_OF_AUTHOR or reports > quota.MAX_REPORTS_OF_AUTHOR:
            raise Harm(f"{author} has {len(theirs)} notices, {reports} of them reports")
        if max(in_key.values()) > notices.MAX_OF_AUTHOR_IN_KEY:
            raise Harm("an author has too many notices under one key")
    for under in room.by_key.values():
        strangers = sum(claim.size for claim in under.values() if not claim.is_member)
        if sum(claim.size for claim in under.values()) > quota.MAX_KEY_BYTES or strangers > quota.MAX_KEY_BYTES / 2:
            raise Harm("a key has more than its room")
    for key, held in storage.data.items():
        for subkey, entry in held.value.data.items():
            value = MSGPackSerializer.loads(entry.value)
            try:
                notice = unseal(value, DhtRecord, MAX_NOTICE)
            except Rejected as error:
                raise Harm(f"a record lies in the table that is none: {error}") from error
            claim = room.by_key.get(key.to_bytes(), {}).get(subkey)
            if acceptable(None, subkey, value, notice.timestamp) is None:
                raise Harm("a record lies where it does not belong")
            if claim is None and entry.expiration_time > room.clock():
                raise Harm("a record lies in the table without being counted")


class Direct:
    """Stores records without a network, with a clock set by hand."""

    def __init__(self) -> None:
        from rl_swarm.network.p2p.storage import FairStorage

        self.now = time.time()
        self.quota = DhtQuota(lambda: self.now)
        self.storage = FairStorage(self.quota)
        self.members = {OWNER.peer_id}
        self.quota.swarms[SWARM.swarm()] = self
        self.authors = [*AUTHORS.values(), *(identity_of(seeded(f"author {n}")) for n in range(40))]

    def is_member(self, peer_id: str) -> bool:
        return peer_id in self.members

    def report_rounds(self) -> range | None:
        return range(3)

    def offer(self, rng: random.Random) -> str:
        from hivemind.dht.routing import DHTID

        self.now += rng.choice((0, 0, 0.1, 1, 30))
        author = rng.choice(self.authors[:3] if rng.random() < 0.5 else self.authors)
        place, subkey, packed, expires = record(rng, author, self.now)
        taken = self.storage.store(DHTID.generate(source=place), packed, expires, subkey=subkey)
        return "record: taken" if taken else "record: refused"


class Streams(Target):
    name = "streams"
    longest = 240.0

    def open(self) -> None:
        engines.REQUEST_SECONDS, engines.CALL_SECONDS = REQUEST_SECONDS, TAKE_SECONDS
        self.place = Path(tempfile.mkdtemp(prefix="rl-swarm-fuzz-"))
        self.members: set[str] = set()
        self.engines: list[PeerEngine] = []
        self.victim = self._engine("owner", DhtQuota())
        self.honest, self.member, self.stranger = (
            self._engine(name, None) for name in ("honest", "member", "stranger")
        )
        store = PeerStore(self.victim, SWARM.swarm(), OWNER.peer_id, OWNER, FolderStore.at(self.place))
        store.serve()
        self.victim.is_member = lambda peer_id: peer_id in self.members
        self.documents = {DOCUMENT: b"a report", LARGE: random.Random(0).randbytes(2 << 20)}
        now = time.time()
        state = State(
            peer_id=OWNER.peer_id, swarm=SWARM.swarm(), phase="running", round=1, started=now, timestamp=now,
            members={self.member.identity.peer_id: Member("member", 0, now)},
        )  # fmt: skip
        for path, data in {MANIFEST: seal(SWARM, OWNER), STATE: seal(state, OWNER), **self.documents}.items():
            key = key_at(path)
            assert key is not None
            store.write(key, data)
        self.store, self.direct = store, Direct()
        for each in self.engines[1:]:
            if not each.meet(PATIENCE):
                raise OSError("the peers do not find each other")

    def _engine(self, name: str, room: DhtQuota | None) -> PeerEngine:
        who = OWNER if name == "owner" else identity_of(seeded(name))
        known = self.engines[0].addresses if self.engines else ()
        made = PeerEngine(who, known, LOOPBACK, quota=room, relay=False, map_ports=False).start()
        self.engines.append(made)
        return made

    def close(self) -> None:
        for each in self.engines:
            each.close()
        shutil.rmtree(self.place, ignore_errors=True)

    def forget(self) -> None:
        """Empty the slots and the table, whatever a case has left there."""
        self.victim.streams.waiting.clear()
        self.victim.streams.answered.clear()
        self.direct = Direct()

    def next(self) -> Case:
        rng = self.rng
        return {
            "seed": rng.getrandbits(48),
            "streams": rng.choice((1, 5, 20, 80)),
            "records": rng.choice((0, 5, 20)),
            "honest": rng.choice(("member", "stranger")),
        }

    def play(self, case: Case) -> set[str]:
        rng = random.Random(case["seed"])
        self.members = {OWNER.peer_id, self.member.identity.peer_id}
        if case["honest"] == "member":
            self.members.add(self.honest.identity.peer_id)
        reached = {self.direct.offer(rng) for _ in range(DIRECT)}
        check_table(self.direct.storage, self.direct.quota)
        with listening() as heard:
            reached |= self._attacked(case, rng)
        if heard:
            raise Harm(f"it says {heard[0][:2000]}")
        return reached

    def _attacked(self, case: Case, rng: random.Random) -> set[str]:
        victim, room = self.victim, self.victim.quota
        assert room is not None
        wild = [
            HostileStream(rng.choice((self.member, self.stranger)), OWNER.peer_id, random.Random(rng.getrandbits(48)))
            for _ in range(case["streams"])
        ]
        playing = [asyncio.run_coroutine_threadsafe(each.play(), each.engine.loop) for each in wild]
        try:
            reached = {self._leave(rng) for _ in range(case["records"])}
            reached |= {self._ask(rng)}
            while not all(each.done() for each in playing):
                reached |= {self._ask(rng)}
                self._check_slots()
                time.sleep(0.05)
        finally:
            for each in playing:
                each.cancel()
        if any(each.is_stuck for each in wild):
            raise Harm("a stream that does not go on is not closed")
        self._until(lambda: not victim.streams.waiting and not victim.streams.answered, "slots are not freed")
        self._until(lambda: self._answering() == 0, "tasks stay behind")
        victim._call(self._checked(room), PATIENCE)
        reached |= {f"stream: {step}" for each in wild for step in each.done}
        return {step for step in reached if step}

    async def _checked(self, room: DhtQuota) -> None:
        check_table(self.victim.node.protocol.storage, room)

    def _leave(self, rng: random.Random) -> str:
        """Leave a record with the victim, in the form that the attacker chooses."""
        from hivemind.dht.routing import DHTID

        engine = rng.choice((self.member, self.stranger))
        place, subkey, packed, expires = record(
            rng, rng.choice((engine.identity, rng.choice(self.direct.authors))), time.time()
        )
        key = rng.choice((DHTID.generate(source=place), DHTID(rng.getrandbits(160))))
        calling = engine.node.protocol.call_store(
            self.victim.p2p.peer_id, [key], [packed], expires, subkeys=[subkey], in_cache=rng.random() < 0.2
        )
        try:
            answer = engine._call(calling, 20.0)
        except OSError:  # not even its own side takes it
            return "sent: failed"
        return f"sent: {'no answer' if not answer else 'taken' if answer[0] else 'refused'}"

    def _ask(self, rng: random.Random) -> str:
        """Ask as an honest peer does; raise unless the answer is right."""
        path = rng.choice((DOCUMENT, DOCUMENT, LARGE, WHAT_TIME.decode(), "rewards/round_9/stage_0/nobody.json"))
        tries, deadline = 0, time.monotonic() + PATIENCE
        while True:
            self.honest.silent.clear()
            tries += 1
            try:
                answer = self.honest.ask(OWNER.peer_id, path.encode(), 4 << 20, 10.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Harm(f"an honest peer is not answered: {error}") from error
        if path == WHAT_TIME.decode():
            right = abs(float(answer or b"0") - time.time()) < PATIENCE
        else:
            right = answer == self.documents.get(path)
        if not right:
            raise Harm(f"an honest peer gets {(answer or b'nothing')[:50]!r} for {path}")
        return "honest: answered" if tries == 1 else "honest: answered, asked again"

    def _check_slots(self) -> None:
        slots = self.victim.streams
        counts = Counter(each.peer_id for each in [*list(slots.waiting), *list(slots.answered)])
        if len(slots.waiting) > streams.MAX_WAITING or len(slots.answered) > streams.MAX_ANSWERS:
            raise Harm("too many streams have a slot")
        if counts and max(counts.values()) > streams.MAX_OF_PEER:
            raise Harm("a peer has too many slots")

    def _answering(self) -> int:
        async def count() -> int:
            return sum("PeerEngine._answer" in repr(task) for task in asyncio.all_tasks())

        return self.victim._call(count(), PATIENCE)

    def _until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            if time.monotonic() > deadline:
                raise Harm(what)
            time.sleep(0.05)


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    listener = Listener()
    loggers = [logging.getLogger(name) for name in ("rl_swarm", "asyncio")]
    for each in loggers:
        each.addHandler(listener)
    try:
        yield listener.heard
    finally:
        for each in loggers:
            each.removeHandler(listener)
