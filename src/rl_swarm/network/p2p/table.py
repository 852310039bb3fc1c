"""Writes and reads records in hivemind's DHT with few bytes.

hivemind's own `store` and `get` ask twenty peers, and each of them sends all that it has under the key. Here the
keepers of a key, the peers nearest to it, are searched under the key beside it, where nothing lies. They are remembered
for a while; then one of them is asked which peers are nearest now. A few keepers are asked for the records. A late
keeper is replaced by another, and answers in the background.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

from rl_swarm.network.p2p.reliability import Reliability

REPLICAS = 5  # peers that keep a record
CANDIDATES = 6  # from which they are taken: one may not answer
READERS = 3  # of the keepers that are asked for records, drawn at random: one that hides some does not matter
QUICK_READERS = 2  # of whom the answers are waited for, where the same is read again soon
REMEMBERED_SECONDS = 180.0  # for which the keepers of a key are remembered
MAX_KEYS = 64  # whose keepers are remembered
# After which all peers of a small swarm are searched again in the background; and before anything else.
SMALL_SECONDS = (1.0, 10.0)
MAX_SEARCHED = 40  # peers that are asked in one search
PATIENCE_SECONDS, PATIENCE_TIMES = 0.25, 4.0  # until a peer is late: at least, and times the quickest third
MAX_UNFIT = 32  # records of an answer that are of no use, until the rest is left
UNFIT_DEBT = 3.0  # seconds that it costs a peer to send more of them


class Table:
    def __init__(
        self,
        node: Any,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        timestamp: Callable[[str, str, bytes], float | None] = lambda key, subkey, value: 0.0,
        reliability: Reliability | None = None,
    ) -> None:
        self.node, self.clock, self.rng = node, clock, rng or random.Random()
        self.timestamp = timestamp  # of a record, as its author signed it; None: not valid
        self.reliability = reliability  # None: all peers are taken for present
        # By key: since when, and peers by their place.
        self._keepers = dict[str, tuple[float, dict[Any, Any]]]()
        # The same of all peers of a small swarm.
        self._all_peers = -math.inf, dict[Any, Any]()
        self.background = set[asyncio.Task[Any]]()

    async def store(self, key: str, subkey: str, value: bytes, expires: float, copies: int = REPLICAS) -> bool:
        """Store a record with its keepers; return whether any took it."""
        from hivemind.dht.routing import DHTID

        protocol, key_id = self.node.protocol, DHTID.generate(source=key)
        packed = protocol.serializer.dumps(value)

        async def keep(peer: Any) -> bool | None:
            if peer != self.node.peer_id:
                if self.reliability is not None and self.reliability.is_left_out(peer):
                    return None
                storing = protocol.call_store(peer, [key_id], [packed], expires, subkeys=[subkey])
                answer = await (storing if self.reliability is None else self.reliability.ask(peer, storing))
                return None if not answer else bool(answer[0])
            return bool(protocol.storage.store(key_id, packed, expires, subkey=subkey))

        keepers = await self.keepers(key)
        most = min(copies, len(keepers)) // 2 + 1
        answers = await self._answers(key, keep, keepers, copies, most)
        return any(stored for _, stored in answers)

    async def find(self, key: str, quick: bool = False) -> dict[str, bytes]:
        """Return the records under a key, the newest of each author; `quick` takes the first keepers' answers."""
        from hivemind.dht.routing import DHTID
        from hivemind.dht.storage import DictionaryDHTValue

        from rl_swarm.network.p2p.storage import unpacked

        protocol, key_id = self.node.protocol, DHTID.generate(source=key)

        async def read(peer: Any) -> Any:
            if peer == self.node.peer_id:
                held = protocol.storage.get(key_id)
            else:
                answer = await protocol.call_find(peer, [key_id])
                if answer is None:
                    return None
                held, _ = answer[key_id]
            return held.value if held and isinstance(held.value, DictionaryDHTValue) else {}

        candidates = await self.keepers(key)
        keepers = self.rng.sample(candidates[:REPLICAS], len(candidates[:REPLICAS]))
        answers = await self._answers(key, read, keepers, READERS, QUICK_READERS if quick else READERS)
        if not any(records for _, records in answers):  # perhaps other keepers have some
            answered = {peer for peer, _ in answers}
            rest = [peer for peer in keepers if peer not in answered]
            answers += await self._answers(key, read, rest, REPLICAS, len(rest))
        newest = dict[str, tuple[tuple[float, float], bytes]]()
        for peer, records in answers:
            unfit = 0
            for subkey, entry in records.items():
                value = unpacked(entry.value)
                if value is not None and subkey in newest and newest[subkey][1] == value:
                    continue
                # An old record with a later expiry is not newer than one that its author signed later.
                signed = self.timestamp(key, subkey, value) if value is not None else None
                if signed is not None:
                    found = (signed, entry.expiration_time), value or b""
                    newest[subkey] = max(found, newest.get(subkey, found))
                    continue
                unfit += 1
                if unfit > MAX_UNFIT:  # an honest keeper checks records, and this one does not
                    self._blame(peer)
                    break
        return {subkey: value for subkey, (_, value) in newest.items()}

    async def keepers(self, key: str) -> list[Any]:
        """Return the keepers of a key, the peers nearest to it, which may include this one."""
        from hivemind.dht.routing import DHTID

        since, known = self._keepers.get(key, (-math.inf, {}))
        if self.clock() - since < REMEMBERED_SECONDS:
            return list(known.values())
        beside = DHTID(int(DHTID.generate(source=key)) ^ 1)
        if not known and (few := self._few(beside)):
            return few
        nearest = await self._come_near(beside, known) if known else None
        if nearest is None:
            nearest = await self._search(beside)
        self._keepers.pop(key, None)
        if len(nearest) == CANDIDATES:
            self._keepers[key] = (self.clock(), nearest)
            while len(self._keepers) > MAX_KEYS:
                del self._keepers[next(iter(self._keepers))]
        return list(nearest.values())

    def _few(self, place: Any) -> list[Any]:
        """List all peers of a small swarm, which keep everything.

        The swarm may be growing, so they are searched again and again in the background.
        """
        since, peers = self._all_peers
        age = self.clock() - since
        if age > SMALL_SECONDS[1]:
            return []
        if age > SMALL_SECONDS[0]:
            self._all_peers = self.clock() - SMALL_SECONDS[0] / 2, peers
            self._begin(self._search(place))
        return [peers[node] for node in sorted(peers, key=place.__xor__)]

    async def _search(self, place: Any) -> dict[Any, Any]:
        """Search the peers nearest to a place, by asking known peers and those that they name.

        A peer may name peers that do not exist: only those count that answer, now or the last time.
        """
        if self.reliability is None:
            found = await self.node.find_nearest_nodes([place], k_nearest=CANDIDATES, beam_size=CANDIDATES)
            return dict(found[place])
        table, me = self.node.protocol.routing_table, self.node.node_id
        near = dict(table.get_nearest_neighbors(place, k=CANDIDATES, exclude=me))
        asked, running = set[Any](), dict[asyncio.Task[Any], Any]()
        there, gone = {me: self.node.peer_id}, set[Any]()
        while True:
            nearest = sorted({*near, *there} - gone, key=place.__xor__)[:CANDIDATES]
            for node in nearest:
                if node not in asked and node != me and len(asked) < MAX_SEARCHED:
                    asked.add(node)
                    running[self._begin(self.node.protocol.call_find(near[node], [place]))] = node
            waited_for = [task for task, node in running.items() if node in nearest and node not in there]
            if not waited_for:
                break
            done, _ = await asyncio.wait(waited_for, timeout=self._patience(), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                node = running.pop(task)
                if task.result() is None:
                    gone.add(node)
                else:
                    there[node] = near[node]
                    held, named = task.result()[place]
                    if held:  # nothing lies there
                        self._blame(near[node])
                    near = {**named, **near}
            for late in [] if done else [running[task] for task in waited_for]:
                if self.reliability.answers(near[late]):
                    there[late] = near[late]
                else:
                    gone.add(late)
        nearest = sorted(there, key=place.__xor__)[:CANDIDATES]
        keepers = {node: there[node] for node in nearest}
        is_small = 1 < len(keepers) < CANDIDATES
        self._all_peers = (self.clock(), keepers) if is_small else (-math.inf, {})
        return keepers

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task that goes on in the background when its caller gives up. Nothing else would reference it."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    def _patience(self) -> float:
        usual = self.reliability.usual() if self.reliability is not None else 0.0
        return max(PATIENCE_SECONDS, PATIENCE_TIMES * usual)

    def _blame(self, peer: Any) -> None:
        if self.reliability is not None:
            self.reliability.blame(peer, UNFIT_DEBT)

    def _is_there(self, peer: Any) -> bool:
        return self.reliability is None or peer == self.node.peer_id or self.reliability.answers(peer)

    async def _come_near(self, place: Any, known: dict[Any, Any]) -> dict[Any, Any] | None:
        """Ask one of the peers that were nearest to a place which are nearest now; None if it has gone."""
        others = [peer for peer in list(known.values())[:READERS] if peer != self.node.peer_id]
        answer = await self.node.protocol.call_find(self.rng.choice(others), [place])
        if answer is None:
            return None
        near = {**known, self.node.node_id: self.node.peer_id, **answer[place][1]}
        nearest = {node: near[node] for node in sorted(near, key=place.__xor__)[:CANDIDATES]}
        new = [peer for peer in nearest.values() if not self._is_there(peer)]
        await asyncio.gather(*(self.node.protocol.call_find(peer, [place]) for peer in new))
        return nearest if all(map(self._is_there, nearest.values())) else None

    async def _answers(
        self, key: str, ask: Callable[[Any], Any], peers: list[Any], wanted: int, enough: int
    ) -> list[tuple[Any, Any]]:
        """Ask so many of the peers, and replace those that do not answer or are late.

        Return as soon as enough have answered, or all that are not late.
        """

        async def answer_of(peer: Any) -> Any:
            answer = await ask(peer)
            if answer is None:  # it has gone
                self._keepers.pop(key, None)
            return answer

        left, answers, late = list(peers), list[tuple[Any, Any]](), 0
        running = dict[asyncio.Task[Any], Any]()
        while len(answers) < enough and (left or running):
            while left and len(answers) + len(running) - late < wanted:
                peer = left.pop(0)
                running[self._begin(answer_of(peer))] = peer
            # Where no peer is left to ask, wait for one that was asked.
            patience = self._patience() if left or answers else None
            done, _ = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done and not left:
                break
            for task in done:
                peer, answer = running.pop(task), task.result()
                if answer is not None:
                    answers.append((peer, answer))
            late = min(late, len(running)) if done else len(running)
        return answers
