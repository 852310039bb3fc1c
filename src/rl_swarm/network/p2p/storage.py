"""Guards hivemind's DHT against misuse by strangers: its storage has fair shares, its cache takes nothing.

hivemind lets any peer fill its cache, from which it answers before it looks at its storage. It lets a peer choose its
place among the others, or several. Here the place follows from the peer's id. hivemind's reader follows values within
values, and a kilobyte of them overflows the stack and ends the process. Here records are read strictly. This module
needs hivemind; the engine imports it when it starts.
"""

import heapq
from typing import Annotated, Any

import msgspec
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from rl_swarm.network.p2p.quota import MAX_KEY_BYTES, DhtQuota
from rl_swarm.network.p2p.records import MAX_NOTICE, DhtRecord, acceptable
from rl_swarm.network.p2p.reliability import Reliability

MAX_RECORDS = 2048  # in one dictionary
MAX_DICTIONARY = MAX_KEY_BYTES + 128 * MAX_RECORDS  # bytes, with subkeys and expiries
DICTIONARY = 0x50  # as hivemind numbers its types
Record = tuple[str, bytes, float]  # a subkey, a value, an expiry
READ_OUTER = msgspec.msgpack.Decoder(str | msgspec.msgpack.Ext)
READ_RECORDS = msgspec.msgpack.Decoder(
    tuple[float | None, float, Annotated[list[Record], msgspec.Meta(max_length=MAX_RECORDS)]]
)
READ_BYTES = msgspec.msgpack.Decoder(bytes)
SPARE = 64  # entries of a heap that are no longer used, beside as many as there are records


class StrictSerializer:
    """Reads subkeys and dictionaries of records, and nothing within them."""

    dumps = staticmethod(MSGPackSerializer.dumps)

    @staticmethod
    def loads(data: bytes) -> Any:
        found = READ_OUTER.decode(data)
        if isinstance(found, str):
            return found
        if found.code != DICTIONARY or len(found.data) > MAX_DICTIONARY:
            raise ValueError("no dictionary")
        records = DictionaryDHTValue()
        # Without its heap, which costs more than all the rest: users of a record check its expiry.
        records.data = {
            subkey: ValueWithExpiration(value, expires) for subkey, value, expires in READ_RECORDS.decode(found.data)[2]
        }
        return records


def unpacked(value: Any) -> bytes | None:
    """Read the value of a record, which may be anything where a stranger wrote it."""
    try:
        return READ_BYTES.decode(value)
    except (msgspec.MsgspecError, TypeError):
        return None


class FairStorage(DHTLocalStorage):  # type: ignore[misc]
    """Stores notices that are signed, in their place, recent, and within their author's share."""

    def __init__(self, quota: DhtQuota) -> None:
        super().__init__()
        self.quota = quota

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: Any, expiration_time: float) -> bool:
        place = key.to_bytes()
        notice = self._read(place, subkey, value)
        if notice is None:
            return False
        before = self.quota.by_key.get(place, {}).get(subkey)
        same = before is not None and before.timestamp == notice.timestamp
        if same and before is not None and before.expires >= expiration_time:  # a copy from another peer
            return True
        displaced = self.quota.admit(place, subkey, notice, len(value), expiration_time)
        if displaced is None:
            return False
        for old_key, old_subkey in [*displaced, (place, subkey)]:
            self._drop(DHTID.from_bytes(old_key), old_subkey)
        return bool(super().store_subkey(key, subkey, value, expiration_time))

    def _read(self, key: bytes, subkey: Any, value: Any) -> DhtRecord | None:
        if not isinstance(subkey, str) or not isinstance(value, bytes) or len(value) > MAX_NOTICE + 8:
            return None
        data = unpacked(value)
        notice = acceptable(None, subkey, data, self.quota.clock()) if data is not None else None
        if notice is None or all(DHTID.generate(source=own).to_bytes() != key for own in notice.dht_keys()):
            return None
        return notice

    def _drop(self, key: DHTID, subkey: str) -> None:
        held = self.data.get(key)
        if held is not None and subkey in held.value.data:
            del held.value[subkey]
            _compact(held.value)
        _compact(self)


class NoStorage(DHTLocalStorage):  # type: ignore[misc]
    """Takes nothing."""

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        return False

    def store_subkey(self, key: DHTID, subkey: Any, value: Any, expiration_time: float) -> bool:
        return False


def _compact(storage: TimedStorage[Any, Any]) -> None:
    """Drop heap entries of records that were replaced, which hivemind keeps until they would have expired."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + SPARE:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


def place_of(peer_id: str) -> DHTID:
    """Return the place of a peer among the others. Another place takes another key."""
    return DHTID.generate(source=peer_id)


def guard(protocol: Any, quota: DhtQuota, reliability: Reliability) -> None:
    """Guard a running protocol against strangers."""
    protocol.serializer = StrictSerializer
    protocol.storage, protocol.cache = FairStorage(quota), NoStorage()
    update, find = protocol.update_routing_table, protocol.call_find

    async def update_routing_table(node_id: DHTID | None, peer_id: Any, responded: bool = True) -> None:
        if not responded or node_id is None or node_id == place_of(str(peer_id)):
            await update(node_id, peer_id, responded)

    async def call_find(peer: Any, keys: Any) -> Any:
        if reliability.is_left_out(peer):
            return None
        answer = await reliability.ask(peer, find(peer, keys))
        if answer is None:
            return None
        checked = {
            key: (held, {node: other for node, other in near.items() if node == place_of(str(other))})
            for key, (held, near) in answer.items()
        }
        reliability.record_named(peer, [other for _, near in checked.values() for other in near.values()])
        return checked

    protocol.update_routing_table, protocol.call_find = update_routing_table, call_find
