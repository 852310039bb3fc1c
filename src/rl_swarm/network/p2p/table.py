"""Records in hivemind's table, written and read with few bytes.

Left to itself, hivemind asks twenty peers for whatever is stored or found, and every one of them sends all that it has
under the key. Here the peers that keep a key's records are looked for under the key beside it, where nothing lies; who
they are is remembered for a while, and then one of them is asked who has come near since; and a few of them are asked for the
records.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Any

REPLICAS = 5  # peers that keep a record
CANDIDATES = 6  # from which they are taken: one may not answer
READERS = 3  # of the keepers that are asked for records, drawn at random: one that hides some does not matter
REMEMBERED_SECONDS = 180.0  # for which it is known who keeps a key's records
MOST_KEYS = 64  # of which that is known


class Table:
    def __init__(
        self,
        node: Any,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        timestamp: Callable[[str, str, bytes], float | None] = lambda key, subkey, value: 0.0,
    ) -> None:
        self.node, self.clock, self.rng = node, clock, rng or random.Random()
        self.timestamp = timestamp  # which its author signed; None: of no use
        self._keepers = dict[
            str, tuple[float, dict[Any, Any]]
        ]()  # by key: since when, and peers by their place

    async def store(
        self, key: str, subkey: str, value: bytes, expires: float, copies: int = REPLICAS
    ) -> bool:
        """Whether anybody took the record."""
        from hivemind.dht.routing import DHTID

        protocol, key_id = self.node.protocol, DHTID.generate(source=key)
        packed = protocol.serializer.dumps(value)

        async def keep(peer: Any) -> bool | None:
            if peer != self.node.peer_id:
                answer = await protocol.call_store(peer, [key_id], [packed], expires, subkeys=[subkey])
                return None if not answer else bool(answer[0])
            return bool(protocol.storage.store(key_id, packed, expires, subkey=subkey))

        answers = await self._answers(key, keep, await self.keepers(key), copies)
        return any(answers)

    async def find(self, key: str) -> dict[str, bytes]:
        """The records under a key, the newest of each."""
        from hivemind.dht.routing import DHTID
        from hivemind.dht.storage import DictionaryDHTValue

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
        answers = await self._answers(key, read, keepers, READERS)
        if not any(answers):  # perhaps some that were not asked know better
            answers += await self._answers(key, read, keepers[READERS:], REPLICAS)
        newest = dict[str, tuple[tuple[float, float], bytes]]()
        for records in answers:
            for subkey, entry in records.items():
                value = self._unpacked(entry.value)
                if not isinstance(subkey, str) or value is None:
                    continue
                if subkey in newest and newest[subkey][1] == value:
                    continue
                # One that is shown again with a later expiry is not newer than what its author signed later.
                signed = self.timestamp(key, subkey, value)
                if signed is not None and isinstance(entry.expiration_time, float):
                    found = (signed, entry.expiration_time), value
                    newest[subkey] = max(found, newest.get(subkey, found))
        return {subkey: value for subkey, (_, value) in newest.items()}

    def _unpacked(self, packed: Any) -> bytes | None:
        try:
            value = self.node.protocol.serializer.loads(packed)
        except Exception:  # noqa: BLE001 whatever a stranger's bytes do to it
            return None
        return value if isinstance(value, bytes) else None

    async def keepers(self, key: str) -> list[Any]:
        """The peers nearest to a key, this one among them if it is; they keep the records."""
        from hivemind.dht.routing import DHTID

        since, known = self._keepers.get(key, (-math.inf, {}))
        if self.clock() - since < REMEMBERED_SECONDS:
            return list(known.values())
        beside = DHTID(int(DHTID.generate(source=key)) ^ 1)
        nearest = await self._come_near(beside, known) if known else None
        if nearest is None:
            found = await self.node.find_nearest_nodes([beside], k_nearest=CANDIDATES, beam_size=CANDIDATES)
            nearest = found[beside]
        self._keepers.pop(key, None)
        if len(nearest) == CANDIDATES:  # a small swarm may be one that is just beginning
            self._keepers[key] = (self.clock(), nearest)
            while len(self._keepers) > MOST_KEYS:
                del self._keepers[next(iter(self._keepers))]
        return list(nearest.values())

    async def _come_near(self, place: Any, known: dict[Any, Any]) -> dict[Any, Any] | None:
        """Who is nearest to a place now, as far as one of those knows who were; None if it has gone."""
        others = [peer for peer in list(known.values())[:READERS] if peer != self.node.peer_id]
        answer = await self.node.protocol.call_find(self.rng.choice(others), [place])
        if answer is None:
            return None
        near = {**known, self.node.node_id: self.node.peer_id, **answer[place][1]}
        return {node: near[node] for node in sorted(near, key=place.__xor__)[:CANDIDATES]}

    async def _answers(self, key: str, ask: Callable[[Any], Any], peers: list[Any], wanted: int) -> list[Any]:
        """What so many of the peers answer, the first ones first; others are asked for those that do not."""
        left, answers = list(peers), list[Any]()
        while left and len(answers) < wanted:
            asked = left[: wanted - len(answers)]
            del left[: len(asked)]
            found = await asyncio.gather(*map(ask, asked))
            if None in found:  # somebody has gone
                self._keepers.pop(key, None)
            answers += [answer for answer in found if answer is not None]
        return answers
