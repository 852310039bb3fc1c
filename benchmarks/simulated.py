"""A network that is not there: `Engine` for peers of a simulation, over a Kademlia table that sends every message.

What hivemind's `DHTNode` does is done here in virtual time: its own routing tables, its beam search with four calls at
a time, five replicas, pings of full buckets, records that newcomers are given. Messages have the sizes that protobuf gives them, and the overhead that was measured on real ones.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.utils import MSGPackSerializer
from players import Asked
from virtual import World

from rl_swarm.identity import Identity
from rl_swarm.network.p2p.engine import CALL_SECONDS, CANDIDATES, MOST_MET, REPLICAS, Answer

BUCKET, MODULO, WORKERS = 20, 5, 4  # the defaults of DHTNode
LOST_SECONDS = 3.0  # until a call to somebody who has gone is given up: DHTNode's `wait_timeout`
BAN_SECONDS = 5.0  # for which it is then not called, twice as long every time
NEIGHBOUR = 62  # bytes of a node's id and its peer's, in an answer
FIND, ANSWER, STORE, STORED, PING = 46, 26, 64, 27, 57  # bytes of calls and answers without what they carry
RECORD = 19  # bytes around a record in a table's answer


@dataclass(frozen=True)
class Costs:
    """Bytes on the wire beside what is said, both ways together: `scale.py messages` measures them."""

    call: float = 986.0  # a call of the DHT with its answer
    ask: float = 940.0  # a stream with request and answer
    connect: float = 4300.0  # two peers who were not connected
    per_byte: float = 1.003  # of what is said
    idle: float = 19.7  # a connection, per second
    connections: tuple[int, int] = (256, 512)  # to so many they are cut when there are more than that


COSTS = Costs()
Records = dict[str, tuple[bytes, float]]  # by subkey: value and expiry


@dataclass
class Line:
    """What a peer has sent and received."""

    sent: Counter[str] = field(default_factory=Counter)  # bytes by kind
    received: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)  # sent


class Network:
    """Everybody who is here, and what it takes to reach them."""

    def __init__(
        self, world: World, seed: int, costs: Costs, delays: tuple[float, float], rate: float
    ) -> None:
        self.world, self.costs, self.delays, self.rate = world, costs, delays, rate
        self.rng = random.Random(f"network {seed}")
        self.peers = dict[str, SimulatedEngine]()
        self.nodes = dict[DHTID, SimulatedEngine]()

    def add(self, engine: "SimulatedEngine") -> None:
        self.peers[engine.identity.peer_id] = self.nodes[engine.node_id] = engine

    def carry(
        self,
        kind: str,
        one: "SimulatedEngine",
        other: "SimulatedEngine",
        there: int,
        back: int,
        around: float,
    ) -> float:
        """A question and its answer; the seconds that they take."""
        seconds = 0.0
        if other not in one.connected:
            one.connect(other)
            other.connect(one)
            self._count("connect", one, other, self.costs.connect / 2, self.costs.connect / 2, 2)
            seconds += 3 * self._delay(one, other)  # TCP, encryption, multiplexing
        there_bytes = there * self.costs.per_byte + around / 2
        back_bytes = back * self.costs.per_byte + around / 2
        self._count(kind, one, other, there_bytes, back_bytes, 1)
        return seconds + 2 * self._delay(one, other) + (there_bytes + back_bytes) / self.rate

    def _delay(self, one: "SimulatedEngine", other: "SimulatedEngine") -> float:
        return one.delay + other.delay

    def _count(
        self,
        kind: str,
        one: "SimulatedEngine",
        other: "SimulatedEngine",
        there: float,
        back: float,
        messages: int,
    ) -> None:
        there, back = round(there), round(back)
        one.line.sent[kind] += there
        other.line.received[kind] += there
        other.line.sent[kind] += back
        one.line.received[kind] += back
        one.line.messages[kind] += messages
        other.line.messages[kind] += messages


class SimulatedEngine:
    """One peer's engine: the calls of `rl_swarm.network.p2p.engine.Engine`, in virtual time."""

    def __init__(
        self,
        network: Network,
        identity: Identity,
        accept: Callable[[bytes, bytes, bytes, float], bool],
    ) -> None:
        self.network, self.world, self.identity, self.accept = network, network.world, identity, accept
        self.answer: Answer = lambda request, peer: None
        self.clock = self.world.clock
        self.node_id = DHTID.generate(source=identity.peer_id)
        self.addresses = [f"/ip4/127.0.0.1/tcp/31000/p2p/{identity.peer_id}"]
        self.known = list[str]()
        self.online = True
        self.delay = network.rng.uniform(*network.delays) / 2
        self.table = RoutingTable(self.node_id, BUCKET, MODULO)
        self.storage = dict[DHTID, Records]()
        self.banned = dict[DHTID, tuple[float, int]]()  # until when, and how often so far
        self.connected = dict[SimulatedEngine, float]()  # since when
        self.met_before = set[str]()
        self.line, self.asked = Line(), Asked()
        self._nearest = dict[DHTID, list[DHTID]]()  # of keys that were asked for since the table has changed
        network.add(self)

    # What the rest of the program calls.

    def start(self, known: "SimulatedEngine | None") -> None:
        if known is not None:
            self.known = list(known.addresses)
            self._ping(known)
            _, seconds = self._search(self.node_id)
            self.world.sleep(seconds)

    def leave(self) -> None:
        self.online = False
        for other in list(self.connected):
            self.disconnect(other)

    def connect(self, other: "SimulatedEngine") -> None:
        self.connected[other] = self.clock()
        fewest, most = self.network.costs.connections
        if len(self.connected) > most:
            for old in list(self.connected)[: len(self.connected) - fewest]:
                self.disconnect(old)

    def disconnect(self, other: "SimulatedEngine") -> None:
        """Signs that both are still there were sent as long as they were connected, by each of them."""
        for one, there in ((self, other), (other, self)):
            one.settle(there)
            one.connected.pop(there, None)

    def settle(self, other: "SimulatedEngine") -> None:
        """Counts what an idle connection has cost until now."""
        now = self.clock()
        size = round((now - self.connected[other]) * self.network.costs.idle / 2)
        self.connected[other] = now
        self.line.sent["idle"] += size
        other.line.received["idle"] += size

    def store(self, key: str, subkey: str, value: bytes, seconds: float) -> bool:
        self.asked.note("store", len(value))
        key_id, expires = DHTID.generate(source=key), self.clock() + seconds
        beside = DHTID(key_id ^ 1)  # under which nothing lies, so that nothing is sent along
        nearest, took = self._search(beside)
        candidates = sorted([*nearest, self.node_id], key=beside.__xor__)[:CANDIDATES]
        stored, slowest = 0, 0.0
        for node in candidates:
            there = self.network.nodes[node]
            if there is self:
                stored += self._keep(key_id, subkey, value, expires)
            else:
                answered = self._call("store", there, STORE + len(subkey) + len(value), STORED)
                if answered is not None:
                    stored += there._keep(key_id, subkey, value, expires)
                    slowest = max(slowest, answered)
            if stored == REPLICAS:
                break
        self.world.sleep(took + slowest)
        return stored > 0

    def find(self, key: str) -> dict[str, bytes]:
        key_id = DHTID.generate(source=key)
        found = dict(self._held(key_id))

        def look(records: Records) -> None:
            for subkey, (value, expires) in records.items():
                if subkey not in found or expires > found[subkey][1]:
                    found[subkey] = (value, expires)

        _, took = self._search(key_id, look)
        self.asked.note("find", sum(len(value) for value, _ in found.values()))
        self.world.sleep(took)
        return {subkey: value for subkey, (value, _) in found.items()}

    def ask(self, peer_id: str, request: bytes, limit: int, seconds: float = CALL_SECONDS) -> bytes | None:
        other = self.network.peers.get(peer_id)
        if other is None or not other.online:
            self.world.sleep(LOST_SECONDS)
            raise OSError(f"{peer_id} cannot be reached")
        answer = other.answer(request, self.identity.peer_id)
        self.asked.note("ask" if answer else "ask in vain", len(request) + len(answer or b""))
        kind = "bodies" if request.startswith(b"rollouts/") else "asks"
        self.world.sleep(
            self.network.carry(
                kind, self, other, 4 + len(request), 5 + len(answer or b""), self.network.costs.ask
            )
        )
        return answer[: limit + 1] if answer is not None else None

    def introduce(self, peer_id: str, addresses: Sequence[str]) -> None:
        if peer_id in self.met_before or peer_id == self.identity.peer_id or not addresses:
            return
        if len(self.met_before) < MOST_MET:
            self.met_before.add(peer_id)
            self._ping(self.network.peers[peer_id])

    def peers(self) -> list[str]:
        return []  # all in one private network, of which nothing follows

    # What the table does for that.

    def _search(self, key: DHTID, look: Callable[[Records], None] | None = None) -> tuple[list[DHTID], float]:
        """The nodes nearest to a key, nearest first, and the seconds it took: a beam search, four calls at a time. Those
        that hold records of the key send them along, whether they are wanted or not."""
        initial = self._neighbours(key, self.node_id)
        known = {*initial, self.node_id}
        candidates = [(key ^ node, node) for node in initial]
        heapq.heapify(candidates)
        beam = [(-distance, node) for distance, node in candidates]
        heapq.heapify(beam)
        under_way: list[tuple[float, int, DHTID]] = []
        answers = dict[DHTID, tuple[Records, list[DHTID]]]()
        now, calls = 0.0, 0
        kind = "find" if look else "place"
        while True:
            while (
                candidates
                and len(under_way) < WORKERS
                and (len(beam) < BUCKET or candidates[0][0] <= -beam[0][0])
            ):
                _, node = heapq.heappop(candidates)
                there = self.network.nodes[node]
                if self._is_banned(node):
                    continue
                records, neighbours = there._held(key), there._neighbours(key, self.node_id)
                size = ANSWER + NEIGHBOUR * len(neighbours) + size_of(records)
                took = self._call(kind, there, FIND, size)
                calls += 1
                if took is None:
                    heapq.heappush(under_way, (now + LOST_SECONDS, calls, node))
                else:
                    answers[node] = (records, neighbours)
                    heapq.heappush(under_way, (now + took, calls, node))
            if not under_way:
                break
            now, _, node = heapq.heappop(under_way)
            if node not in answers:
                continue
            records, neighbours = answers[node]
            if look:
                look(records)
            for other in neighbours:
                if other not in known:
                    known.add(other)
                    distance = key ^ other
                    if len(beam) < BUCKET:
                        heapq.heappush(beam, (-distance, other))
                        heapq.heappush(candidates, (distance, other))
                    elif distance <= -beam[0][0]:
                        heapq.heappushpop(beam, (-distance, other))
                        heapq.heappush(candidates, (distance, other))
        return [node for _, node in heapq.nlargest(BUCKET, beam)], now

    def _call(self, kind: str, other: "SimulatedEngine", there: int, back: int) -> float | None:
        """A call of the table; None where nobody answers. Both get to know each other."""
        if not other.online:
            self._lost(other.node_id)
            return None
        seconds = self.network.carry(kind, self, other, there, back, self.network.costs.call)
        self.banned.pop(other.node_id, None)
        other._meet(self)
        self._meet(other)
        return seconds

    def _ping(self, other: "SimulatedEngine") -> None:
        self._call("ping", other, PING // 2, PING // 2)

    def _meet(self, other: "SimulatedEngine") -> None:
        table, node = self.table, other.node_id
        is_new = node not in table.uid_to_peer_id
        if is_new:
            self._pass_on(other)
        to_ping = table.add_or_update_node(node, other)
        if is_new:
            self._nearest.clear()
        if to_ping is not None:  # its bucket is full: is the one that was silent for longest still there?
            silent: SimulatedEngine = to_ping[1]
            if silent.online:
                self.network.carry("ping", self, silent, PING // 2, PING // 2, self.network.costs.call)
                table.add_or_update_node(silent.node_id, silent)
            else:
                self._lost(silent.node_id)

    def _pass_on(self, newcomer: "SimulatedEngine") -> None:
        """Records that a newcomer is now nearer to."""
        for key in list(self.storage):
            records = self._held(key)
            if not records:
                del self.storage[key]
                continue
            near = self._neighbours(key, self.node_id)[:REPLICAS]
            if not near or (newcomer.node_id ^ key < near[-1] ^ key and self.node_id ^ key < near[0] ^ key):
                self.network.carry(
                    "store", self, newcomer, STORE + size_of(records), STORED, self.network.costs.call
                )
                newcomer.storage[key] = {**newcomer.storage.get(key, {}), **records}

    def _lost(self, node: DHTID) -> None:
        if node in self.table.uid_to_peer_id:
            del self.table[node]
            self._nearest.clear()
        count = self.banned.get(node, (0.0, 0))[1]
        self.banned[node] = (self.clock() + BAN_SECONDS * 2.0**count, count + 1)

    def _is_banned(self, node: DHTID) -> bool:
        return node in self.banned and self.banned[node][0] > self.clock()

    def _neighbours(self, key: DHTID, asking: DHTID) -> list[DHTID]:
        near = self._nearest.get(key)
        if near is None:
            everybody = (node for bucket in self.table.buckets for node in bucket.nodes_to_peer_id)
            near = self._nearest[key] = heapq.nsmallest(BUCKET + 1, everybody, key=key.__xor__)
        return [node for node in near if node != asking][:BUCKET]

    def _held(self, key: DHTID) -> Records:
        now = self.clock()
        return {s: entry for s, entry in self.storage.get(key, {}).items() if entry[1] > now}

    def _keep(self, key: DHTID, subkey: str, value: bytes, expires: float) -> bool:
        if not self.accept(key.to_bytes(), packed(subkey), packed(value), expires):
            return False
        records = self.storage.setdefault(key, {})
        if subkey not in records or expires > records[subkey][1]:
            records[subkey] = (value, expires)
        return True


packed = MSGPackSerializer.dumps


def size_of(records: Records) -> int:
    """As a table's answer carries them."""
    return sum(RECORD + len(subkey) + len(value) for subkey, (value, _) in records.items())
