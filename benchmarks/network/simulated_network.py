"""Simulates the network: an `Engine` for every peer, over a Kademlia table that sends each message.

`Table` and hivemind's routing tables and storage are the real ones. What lies between them, hivemind's `DHTNode`, is
done here in virtual time: its beam search with four calls at a time, pings of full buckets, and the records that
newcomers receive. Messages have the sizes that protobuf gives them, and the overhead that was measured on real ones.
"""

import asyncio
import heapq
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import MSGPackSerializer

from benchmarks.network.stub_nodes import RequestCounts
from benchmarks.network.virtual_time import World
from rl_swarm.network.p2p.engine import CALL_SECONDS, CONNECTIONS, MAX_INTRODUCED, Answer
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import acceptable
from rl_swarm.network.p2p.storage import FairStorage, place_of
from rl_swarm.network.p2p.table import REPLICAS, Table
from rl_swarm.protocol.identity import Identity

T = TypeVar("T")
BUCKET, MODULO, WORKERS = 20, 5, 4  # the defaults of DHTNode
LOST_SECONDS = 3.0  # until a call to an absent peer fails: DHTNode's `wait_timeout`
BAN_SECONDS = 5.0  # then it is not called for this long, doubled every time
# Bytes of calls and answers without what they carry, of a node in an answer, and of records beside key and value.
FIND, ANSWER, STORE, STORED, PING = 46, 26, 64, 27, 57
NEIGHBOUR, RECORDS, RECORD = 62, 38, 16


@dataclass(frozen=True)
class Costs:
    """Holds the bytes on the wire beside the payload, both ways together, as `scale messages` measures them."""

    call: float = 986.0  # a call of the table with its answer
    ask: float = 940.0  # a stream with request and answer
    connect: float = 4300.0  # two peers who were not connected
    per_byte: float = 1.003  # of payload
    idle: float = 19.7  # a connection, per second


COSTS = Costs()


@dataclass
class Line:
    """Counts what a peer has sent and received, by kind."""

    sent: Counter[str] = field(default_factory=Counter)  # bytes
    received: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)  # that it sent

    def copy(self) -> "Line":
        return Line(self.sent.copy(), self.received.copy(), self.messages.copy())


class Network:
    """Holds all present peers, and the time it takes to reach them."""

    def __init__(self, world: World, seed: int, costs: Costs, delays: tuple[float, float], rate: float) -> None:
        self.world, self.costs, self.delays, self.rate = world, costs, delays, rate
        self.rng = random.Random(f"network {seed}")
        self.peers = dict[str, SimulatedEngine]()
        self.nodes = dict[DHTID, SimulatedEngine]()
        self.loop = LeapingLoop()

    def carry(
        self, kind: str, one: "SimulatedEngine", other: "SimulatedEngine", there: int, back: int, around: float
    ) -> float:
        """Send a request and its answer; return the seconds that they take."""
        seconds, delay = 0.0, one.delay + other.delay
        if other not in one.connected:
            self.count("connect", one, other, self.costs.connect / 2, self.costs.connect / 2, 2)
            one.connect(other)
            other.connect(one)
            seconds += 3 * delay  # TCP, encryption, multiplexing
        sent = there * self.costs.per_byte + around / 2
        answered = back * self.costs.per_byte + around / 2
        self.count(kind, one, other, sent, answered, 1)
        return seconds + 2 * delay + (sent + answered) / self.rate

    def count(
        self, kind: str, one: "SimulatedEngine", other: "SimulatedEngine", there: float, back: float, messages: int
    ) -> None:
        for sender, receiver, size in ((one, other, round(there)), (other, one, round(back))):
            sender.line.sent[kind] += size
            receiver.line.received[kind] += size
            sender.line.messages[kind] += messages


class SimulatedEngine:
    """Simulates one peer's engine: the calls of `rl_swarm.network.p2p.engine.PeerEngine`, in virtual time."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        quota: DhtQuota | None,  # None: everything is kept
        rng: random.Random,
    ) -> None:
        self.network, self.world, self.identity = network, network.world, identity
        self.answer: Answer = lambda request, peer: None
        self.quota = quota
        self.is_member: Callable[[str], bool] = lambda peer_id: False
        self.clock = self.world.clock
        self.addresses = [f"/ip4/127.0.0.1/tcp/31000/p2p/{identity.peer_id}"]
        self.online = True
        self.delay = network.rng.uniform(*network.delays) / 2
        self.connected = dict[SimulatedEngine, float]()  # until when idle time is accounted for
        self.met_before = set[str]()
        self.line, self.asked = Line(), RequestCounts()
        self.node = SimulatedNode(self, quota)
        self.table = Table(self.node, self.clock, rng, *([self._timestamp] if quota else []))
        network.peers[identity.peer_id] = network.nodes[self.node.node_id] = self

    def _timestamp(self, key: str, subkey: str, value: bytes) -> float | None:
        notice = acceptable(key, subkey, value, self.clock())
        return notice.timestamp if notice is not None else None

    def start(self, known: "SimulatedEngine | None") -> None:
        if known is not None:
            self.node.ping(known)
            self._wait(self.node.find_nearest_nodes([self.node.node_id]))

    def leave(self) -> None:
        self.online = False
        for other in list(self.connected):
            self.disconnect(other)

    def store(self, key: str, subkey: str, value: bytes, seconds: float, copies: int = REPLICAS) -> bool:
        self.asked.note("store", len(value))
        return self._wait(self.table.store(key, subkey, value, self.clock() + seconds, copies))

    def find(self, key: str, quick: bool = False) -> dict[str, bytes]:
        found = self._wait(self.table.find(key, quick))
        self.asked.note("find", sum(map(len, found.values())))
        return found

    def ask(self, peer_id: str, request: bytes, limit: int, seconds: float = CALL_SECONDS) -> bytes | None:
        other = self.network.peers.get(peer_id)
        if other is None or not other.online:
            self.world.sleep(LOST_SECONDS)
            raise OSError(f"{peer_id} cannot be reached")
        answer = other.answer(request, self.identity.peer_id)
        self.asked.note("ask" if answer else "ask in vain", len(request) + len(answer or b""))
        kind = "bodies" if request.startswith(b"rollouts/") else "asks"
        there, back = 4 + len(request), 5 + len(answer or b"")
        self.world.sleep(self.network.carry(kind, self, other, there, back, self.network.costs.ask))
        return answer[: limit + 1] if answer is not None else None

    def ask_soon(self, peer_id: str, request: bytes, limit: int) -> bytes | None:
        return self.ask(peer_id, request, limit)

    def introduce(self, peer_id: str, addresses: Sequence[str]) -> None:
        if peer_id == self.identity.peer_id or peer_id in self.met_before or not addresses:
            return
        if len(self.met_before) < MAX_INTRODUCED:
            self.met_before.add(peer_id)
            self.node.ping(self.network.peers[peer_id])

    def peers(self) -> list[str]:
        return []  # all peers are in one private network, so addresses mean nothing

    def connect(self, other: "SimulatedEngine") -> None:
        """Connect to a peer, and end the oldest of too many connections as libp2p's manager does."""
        self.connected[other] = self.clock()
        fewest, most = CONNECTIONS
        if len(self.connected) > most:
            for old in list(self.connected)[: len(self.connected) - fewest]:
                self.disconnect(old)

    def disconnect(self, other: "SimulatedEngine") -> None:
        for one, there in ((self, other), (other, self)):
            if there in one.connected:
                one.settle(there)
                del one.connected[there]

    def settle(self, other: "SimulatedEngine") -> None:
        """Count what an idle connection has cost until now."""
        now = self.clock()
        size = round((now - self.connected[other]) * self.network.costs.idle / 2)
        self.connected[other] = now
        self.line.sent["idle"] += size
        other.line.received["idle"] += size

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine for as long as it takes in virtual time."""
        loop = self.network.loop
        before = loop.time()
        result = loop.run_until_complete(work)
        self.world.sleep(loop.time() - before)
        while left := self.table.background:  # no caller waits for it
            loop.run_until_complete(asyncio.wait(left))
        return result


class SimulatedNode:
    """Simulates hivemind's `DHTNode` and its protocol as far as `Table` uses them."""

    serializer = MSGPackSerializer

    def __init__(self, engine: SimulatedEngine, quota: DhtQuota | None) -> None:
        self.engine, self.network = engine, engine.network
        self.peer_id, self.protocol = engine, self
        self.node_id = place_of(engine.identity.peer_id)
        self.routing = RoutingTable(self.node_id, BUCKET, MODULO)
        self.storage = DHTLocalStorage() if quota is None else FairStorage(quota)
        self.banned = dict[DHTID, tuple[float, int]]()  # until when, and how often so far
        self._nearest = dict[DHTID, list[DHTID]]()  # of keys that were asked for since the table has changed

    async def find_nearest_nodes(
        self, queries: Sequence[DHTID], k_nearest: int = BUCKET, beam_size: int = BUCKET
    ) -> dict[DHTID, dict[DHTID, SimulatedEngine]]:
        found = {}
        for key in queries:
            nearest, seconds = self._search(key, beam_size)
            await asyncio.sleep(seconds)
            ordered = sorted([*nearest, self.node_id], key=key.__xor__)[:k_nearest]
            found[key] = {node: self.network.nodes[node] for node in ordered}
        return found

    async def call_store(
        self,
        peer: SimulatedEngine,
        keys: Sequence[DHTID],
        values: Sequence[bytes],
        expires: float,
        subkeys: Sequence[str],
    ) -> list[bool] | None:
        (key,), (value,), (subkey,) = keys, values, subkeys
        packed = self.serializer.dumps(subkey)
        seconds = self._call("store", peer, STORE + len(packed) + len(value), STORED)
        await asyncio.sleep(LOST_SECONDS if seconds is None else seconds)
        if seconds is None:
            return None
        return [peer.node.storage.store(key, value, expires, subkey=subkey)]

    async def call_find(self, peer: SimulatedEngine, keys: Sequence[DHTID]) -> dict[DHTID, Any] | None:
        (key,) = keys
        held, near = peer.node.storage.get(key), peer.node.neighbours(key, self.node_id)
        seconds = self._call("find", peer, FIND, ANSWER + NEIGHBOUR * len(near) + size_of(held))
        await asyncio.sleep(LOST_SECONDS if seconds is None else seconds)
        return None if seconds is None else {key: (held, {node: self.network.nodes[node] for node in near})}

    def ping(self, peer: SimulatedEngine) -> None:
        self._call("ping", peer, PING // 2, PING // 2)

    def neighbours(self, key: DHTID, asking: DHTID) -> list[DHTID]:
        near = self._nearest.get(key)
        if near is None:
            known = (node for bucket in self.routing.buckets for node in bucket.nodes_to_peer_id)
            near = self._nearest[key] = heapq.nsmallest(BUCKET + 1, known, key=key.__xor__)
        return [node for node in near if node != asking][:BUCKET]

    def _search(self, key: DHTID, width: int) -> tuple[list[DHTID], float]:
        """Return the nodes nearest to a key, and the seconds of the search.

        Four calls at a time go to the nearest known nodes, until the `width` nearest have all been called.
        """
        initial = self.neighbours(key, self.node_id)
        heard_of = {*initial, self.node_id}
        candidates = [(key ^ node, node) for node in initial]
        heapq.heapify(candidates)
        beam = [(-distance, node) for distance, node in heapq.nsmallest(width, candidates)]
        heapq.heapify(beam)
        under_way = list[tuple[float, int, list[DHTID]]]()
        now, calls = 0.0, 0
        while True:
            while candidates and len(under_way) < WORKERS and (len(beam) < width or candidates[0][0] <= -beam[0][0]):
                _, node = heapq.heappop(candidates)
                if self.banned.get(node, (0.0, 0))[0] > self.engine.clock():
                    continue
                there = self.network.nodes[node]
                near = there.node.neighbours(key, self.node_id)
                answer = ANSWER + NEIGHBOUR * len(near) + size_of(there.node.storage.get(key))
                seconds = self._call("place", there, FIND, answer)
                calls += 1
                ends = now + (LOST_SECONDS if seconds is None else seconds)
                heapq.heappush(under_way, (ends, calls, [] if seconds is None else near))
            if not under_way:
                break
            now, _, near = heapq.heappop(under_way)
            for node in near:
                if node not in heard_of:
                    heard_of.add(node)
                    distance = key ^ node
                    if len(beam) < width:
                        heapq.heappush(beam, (-distance, node))
                    elif distance <= -beam[0][0]:
                        heapq.heappushpop(beam, (-distance, node))
                    else:
                        continue
                    heapq.heappush(candidates, (distance, node))
        return [node for _, node in beam], now

    def _call(self, kind: str, peer: SimulatedEngine, there: int, back: int) -> float | None:
        """Return the seconds of a call; None where the peer does not answer. Both peers learn of each other."""
        if not peer.online:
            self._lost(peer.node.node_id)
            return None
        seconds = self.network.carry(kind, self.engine, peer, there, back, self.network.costs.call)
        self.banned.pop(peer.node.node_id, None)
        peer.node._meet(self.engine)
        self._meet(peer)
        return seconds

    def _meet(self, peer: SimulatedEngine) -> None:
        node = peer.node.node_id
        is_new = node not in self.routing.uid_to_peer_id
        if is_new:
            self._pass_on(peer)
        silent = self.routing.add_or_update_node(node, peer)
        if is_new:
            self._nearest.clear()
        if silent is not None:  # its bucket is full: is the one that was silent for longest still there?
            if silent[1].online:
                costs = self.network.costs.call
                self.network.carry("ping", self.engine, silent[1], PING // 2, PING // 2, costs)
                self.routing.add_or_update_node(*silent)
            else:
                self._lost(silent[0])

    def _pass_on(self, newcomer: SimulatedEngine) -> None:
        """Pass on the records that a newcomer should keep, if this node is the nearest that keeps them."""
        for key, held in list(self.storage.items()):
            near = self.neighbours(key, self.node_id)[:REPLICAS]
            if not near or (newcomer.node.node_id ^ key < near[-1] ^ key and self.node_id ^ key < near[0] ^ key):
                costs = self.network.costs.call
                self.network.carry("store", self.engine, newcomer, STORE + size_of(held), STORED, costs)
                for subkey, (value, expires) in held.value.items():
                    newcomer.node.storage.store(key, value, expires, subkey=subkey)

    def _lost(self, node: DHTID) -> None:
        if node in self.routing.uid_to_peer_id:
            del self.routing[node]
            self._nearest.clear()
        count = self.banned.get(node, (0.0, 0))[1]
        self.banned[node] = (self.engine.clock() + BAN_SECONDS * 2.0**count, count + 1)


class LeapingLoop(asyncio.SelectorEventLoop):
    """Runs an event loop without waiting: its time leaps to the next event."""

    def __init__(self) -> None:
        self.leapt = 0.0
        super().__init__(Leaper(self))

    def time(self) -> float:
        return self.leapt


class Leaper(selectors.SelectSelector):
    def __init__(self, loop: LeapingLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        self.loop.leapt += timeout or 0.0
        return super().select(0)


def size_of(held: Any) -> int:
    """Return the bytes of a table's records in an answer."""
    if not held or not isinstance(held.value, DictionaryDHTValue):
        return 0
    return RECORDS + sum(RECORD + len(subkey) + len(value) for subkey, (value, _) in held.value.items())
