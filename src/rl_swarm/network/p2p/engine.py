"""Runs hivemind's DHT and libp2p's streams, in a thread with an event loop of its own.

Small signed records go into the DHT; larger documents are asked for, peer by peer, over streams. hivemind's daemon
is a child of this process and ends with it. Every call has a time limit, and a network that is down is an `OSError`,
never the end of the node.
"""

import asyncio
import logging
import math
import multiprocessing
import os
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from rl_swarm.network.address import is_peer_address
from rl_swarm.network.base import NetworkError
from rl_swarm.network.p2p import die_with_parent
from rl_swarm.network.p2p.late_answers import LateAnswers
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import acceptable
from rl_swarm.network.p2p.reliability import Reliability
from rl_swarm.network.p2p.requests import BoundedHandlers, PendingCalls, Requests, write_message
from rl_swarm.network.p2p.streams import PeerStream, StreamSlots
from rl_swarm.network.p2p.table import REPLICAS, Table
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.untrusted import plain
from rl_swarm.protocol.wire import MAX_DETAIL

log = logging.getLogger(__name__)
T = TypeVar("T")
_importing = threading.Lock()
_starting = threading.Lock()  # of a daemon: uvloop refuses to, while another loop of this process starts one

STREAM = "/rl-swarm/documents/1"
WHAT_TIME = b"?time"  # a request that every peer answers, with the seconds since 1970
ANYWHERE = ("/ip4/0.0.0.0/tcp/0",)
START_SECONDS = 90.0  # on a machine that is busy
CALL_SECONDS = 10.0  # for the answer of the DHT or a peer
FIRST_SECONDS = 4.0  # for a peer to begin to answer
SILENT_SECONDS = (15.0, 240.0)  # in which a peer that did not is not asked again; it grows
EARLY_SECONDS = 60.0  # a pause that is not longer ends when that peer sends a request
LEAST_PATIENCE = 2.0  # seconds for the answer of a peer that was too late before
REGAINED_SECONDS = 0.5  # of patience, with every answer that comes in time
REGAINED_IN_PAUSE = 1 / 120  # of a pause, so that a peer on a slow line is not excluded for ever
MAX_REQUEST = 4 << 10  # bytes of what a peer asks for
REQUEST_SECONDS = 4.0  # for all bytes of a request to come
MAX_ASKS_OF_PEER = 4  # requests to one peer at a time: half of the streams that it allows
MAX_LINES = 100  # of the daemon that are kept, to explain why it did not start
LONGEST_FOLDER = 40  # characters, for temporary files
MAX_INTRODUCED = 24  # peers that are connected to as soon as they are known
CONNECTIONS = (24, 40)  # to so many they are cut when there are more: an idle one takes 10 bytes a second
MAX_PEERS = 1024  # whose addresses are kept, and which are known not to answer
RECONNECT_SECONDS = (2.0, 60.0)  # between searches for peers, when there are none; the pause grows
MISSING = (
    "The peer-to-peer network needs hivemind, which is not installed. Install it: pip install 'rl-swarm[p2p]'; in a "
    "clone, .venv/bin/pip install -c constraints.txt -e '.[p2p]'."
)
Answer = Callable[[bytes, str], bytes | None]  # to a request of a peer; None: there is nothing


class EngineError(NetworkError):
    """Reports that the engine cannot start; the message says what would help."""


class PeerEngine:
    addresses: Sequence[str] = ()  # of this peer
    clock = staticmethod(time.time)
    clock_compared = False  # with those of other peers

    def __init__(
        self,
        identity: Identity,
        known: Sequence[str] = (),
        listen: Sequence[str] = ANYWHERE,
        announce: Sequence[str] = (),
        quota: DhtQuota | None = None,  # of notices of other peers; None: no bounds
        answer: Answer = lambda request, peer: None,
        relay: bool = True,
        map_ports: bool = True,
        reachability: Literal["public", "private"] | None = None,  # None: it finds out
    ) -> None:
        self.identity, self.known, self.listen, self.announce = identity, list(known), listen, announce
        self.given = list(known)  # addresses that the user gave
        self.quota, self.answer, self.relay, self.map_ports = quota, answer, relay, map_ports
        self.is_member: Callable[[str], bool] = lambda peer_id: False
        self.reachability = reachability
        self.loop = _new_event_loop()
        self.thread = threading.Thread(target=self._run, name="p2p", daemon=True)
        # Mode 0700. The path of a socket has to be short.
        short = None if len(tempfile.gettempdir()) <= LONGEST_FOLDER else "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="rl-swarm-p2p-", dir=short))
        self.met = asyncio.Event()  # another peer is connected
        # Peers that did not answer: asked again from when, and their next pause.
        self.silent = dict[str, tuple[float, float]]()
        self.patience = dict[str, float]()  # seconds for the answers of peers that were too late before
        # Addresses of peers that this one connects to.
        self.introduced = dict[str, list[str]]()
        self.reaching = set[Future[bool]]()  # which nothing else would reference
        self.claimed = dict[str, list[str]]()  # addresses that peers announce
        self.streams = StreamSlots()
        self.late = LateAnswers(self.ask)
        self.requests = Requests(lambda peer_id: self.is_member(peer_id))
        self.asking = WeakValueDictionary[str, asyncio.Semaphore]()  # turns to ask a peer
        self.p2p: Any = None
        self.node: Any = None
        self.table = Table(None)
        self.reconnecting: asyncio.Task[None] | None = None

    def start(self) -> "PeerEngine":
        """Start the daemon and listen. Peers may be found later."""
        self.thread.start()
        try:
            self._call(self._start(), START_SECONDS)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise EngineError(
                    f"The peer-to-peer daemon did not start in {START_SECONDS:.0f} s. Is this machine very busy? Try "
                    "again."
                ) from error
            raise
        return self

    def close(self) -> None:
        """End the daemon."""
        self.late.close()
        if self.thread.is_alive():
            with suppress(OSError, NetworkError):
                self._call(self._stop(), CALL_SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(CALL_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, key: str, subkey: str, value: bytes, seconds: float, copies: int = REPLICAS) -> bool:
        """Put a record into the DHT, for so long; return False where a newer one is there or no peer took it."""
        return self._call(self.table.store(key, subkey, value, self.clock() + seconds, copies), CALL_SECONDS)

    def find(self, key: str, quick: bool = False) -> dict[str, bytes]:
        """Return the records of all peers under a key, the newest of each; `quick` takes the first keepers' answers."""
        return self._call(self.table.find(key, quick), CALL_SECONDS)

    def ask(self, peer_id: str, request: bytes, limit: int, seconds: float = CALL_SECONDS) -> bytes | None:
        """Return a peer's answer, at most `limit + 1` bytes of it; None if it has nothing.

        A peer that does not answer (a laptop that was closed) is not asked again for a while, at first until it sends a
        request, and then has less time. So a peer that answers slowly on purpose costs little.
        """
        until, pause = self.silent.get(peer_id, (0.0, SILENT_SECONDS[0]))
        if time.monotonic() < until:
            raise TimeoutError(f"{peer_id} did not answer a moment ago")
        # The pause that has passed is half of the next one.
        regained = pause / 2 * REGAINED_IN_PAUSE if peer_id in self.silent else 0.0
        patience = min(CALL_SECONDS, self.patience.get(peer_id, CALL_SECONDS) + regained)
        try:
            answer = self._call(self._ask(peer_id, request, limit), min(seconds, patience))
        except TimeoutError:
            self.silent[peer_id] = (time.monotonic() + pause, min(2 * pause, SILENT_SECONDS[1]))
            self.patience[peer_id] = max(LEAST_PATIENCE, patience / 2)
            for by_peer in (self.silent, self.patience):
                if len(by_peer) > MAX_PEERS:
                    by_peer.pop(next(iter(by_peer)))
            raise
        if peer_id in self.patience:
            self.patience[peer_id] = patience + REGAINED_SECONDS
            if self.patience[peer_id] >= CALL_SECONDS:
                self.patience.pop(peer_id)
                self.silent.pop(peer_id, None)
        return answer

    def ask_soon(self, peer_id: str, request: bytes, limit: int) -> bytes | None:
        """Ask a peer and wait a moment only; a late answer is there when the same is asked again."""
        return self.late.ask(peer_id, request, limit)

    def introduce(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Keep the addresses that a peer announces, and connect to it while there are few connections."""
        own = [text for text in addresses if text.endswith(f"/p2p/{peer_id}") and is_peer_address(text)]
        if peer_id == self.identity.peer_id or not own:
            return
        self.claimed[peer_id] = own
        if len(self.claimed) > MAX_PEERS:
            del self.claimed[next(iter(self.claimed))]
        before = self.introduced.get(peer_id, [])
        if own != before and (before or len(self.introduced) < MAX_INTRODUCED):
            self.introduced[peer_id] = own
            # A peer that was started again has other ports.
            self.known = [text for text in self.known if text not in before] + own
            reaching = asyncio.run_coroutine_threadsafe(self._reach_any(own), self.loop)
            self.reaching.add(reaching)
            reaching.add_done_callback(self.reaching.discard)

    def peers(self) -> list[str]:
        """Return the addresses of the connected peers."""
        return self._call(self._peers(), CALL_SECONDS)

    def meet(self, seconds: float) -> bool:
        """Wait until another peer is connected."""
        with suppress(OSError):
            self._call(asyncio.wait_for(self.met.wait(), seconds), seconds + 1)
        return self.met.is_set()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(_ignore_ended_connections)
        self.loop.run_forever()
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    def _call(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run a coroutine in the engine's thread; any failure of the network is an `OSError`."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:
            work.close()
            raise OSError("the peer-to-peer engine has been closed") from error
        try:
            return future.result(seconds)
        except (TooLate, asyncio.TimeoutError) as error:
            future.cancel()
            raise TimeoutError("the peer-to-peer network did not answer in time") from error
        except (NetworkError, OSError):
            raise
        except Exception as error:  # hivemind and its daemon raise all kinds
            # Their messages may quote a peer.
            raise OSError(f"{type(error).__name__}: {plain(str(error), MAX_DETAIL)}") from error

    async def _start(self) -> None:
        try:
            with _locks_without_names():
                from hivemind.dht.node import DHTNode
            from hivemind.p2p import P2P
            from hivemind.p2p.p2p_daemon_bindings import control as bindings
            from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

            from rl_swarm.network.p2p.storage import guard, place_of
        except ImportError as error:
            raise EngineError(f"{MISSING} ({error})") from error
        # Its daemon's lines quote peers, and name nothing that a user could do.
        logging.getLogger("hivemind").setLevel(logging.CRITICAL + 1)
        bindings.write_pbmsg = write_message

        started, lines = list[Any](), list[str]()  # and the daemon's lines

        class Daemon(P2P):  # type: ignore[misc]
            _UNIX_SOCKET_PREFIX = f"/unix{self.folder}/"  # where no other user can reach it

            def __init__(self) -> None:
                super().__init__()
                started.append(self)

            @staticmethod
            def _log_p2pd_message(line: str) -> None:
                if len(lines) < MAX_LINES and '"logger"' not in line:
                    lines.append(line)

            @staticmethod
            def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
                kwargs |= {"connLo": CONNECTIONS[0], "connHi": CONNECTIONS[1]}
                return [sys.executable, "-S", str(die_with_parent.__file__), *P2P._make_process_args(*args, **kwargs)]

        relays = self.known if self.relay else None  # by which peers reach this one behind a router
        key = self.folder / "key"
        with open(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(self.identity.libp2p())
        try:
            with _starting:
                self.p2p = await Daemon.create(
                    identity_path=str(key),
                    host_maddrs=list(self.listen),
                    announce_maddrs=list(self.announce) or None,
                    nat_port_map=self.map_ports,
                    auto_nat=self.relay,
                    use_relay=self.relay,
                    use_auto_relay=self.relay,
                    trusted_relays=relays,
                    force_reachability=self.reachability,
                    check_if_identity_free=False,
                    startup_timeout=START_SECONDS - 5,
                )
        except (P2PDaemonError, OSError, ValueError) as error:
            for daemon in started:  # so that nothing of it is left when the loop is closed
                await daemon.shutdown()
            raise EngineError(explained("\n".join(lines) or str(error), self.listen)) from error
        finally:
            key.unlink(missing_ok=True)
        control = self.p2p._client.control
        control.unary_handlers = BoundedHandlers(self.requests, self.p2p._client.disconnect)
        control._pending_calls = PendingCalls(control._pending_calls)
        self.addresses = [str(address) for address in await self.p2p.get_visible_maddrs()]
        await self.p2p.add_binary_stream_handler(STREAM, self._answer)
        self.node = await DHTNode.create(
            p2p=self.p2p,
            node_id=place_of(self.identity.peer_id),
            num_replicas=REPLICAS,
            cache_locally=False,
            cache_nearest=0,
        )
        if self.quota is None:
            self.table = Table(self.node)
        else:
            reliability = Reliability()
            guard(self.node.protocol, self.quota, reliability)
            self.table = Table(self.node, timestamp=self._timestamp, reliability=reliability)
        self.requests.open = True
        await self._connect()
        self.reconnecting = asyncio.create_task(self._keep_connected())

    def _timestamp(self, key: str, subkey: str, value: bytes) -> float | None:
        notice = acceptable(key, subkey, value, self.clock())
        return notice.timestamp if notice is not None else None

    async def _stop(self) -> None:
        if self.reconnecting is not None:
            self.reconnecting.cancel()
        if self.node is not None:
            await self.node.shutdown()
        if self.p2p is not None:
            await self.p2p.shutdown()

    async def _keep_connected(self) -> None:
        """Search for peers as long as there are none: at the start, and when all have gone."""
        pause = RECONNECT_SECONDS[0]
        while True:
            await asyncio.sleep(pause)
            with suppress(Exception):  # the next look is soon
                if await self._peers():
                    self.met.set()
                    pause = RECONNECT_SECONDS[0]
                else:
                    self.met.clear()
                    await self._connect()
                    pause = min(2 * pause, RECONNECT_SECONDS[1])

    async def _connect(self) -> None:
        """Try all known addresses at once, and learn of the peers near this one."""
        if await self._reach_any(self.known):
            await self.node.find_nearest_nodes([self.node.node_id])
            self.met.set()

    async def _reach_any(self, addresses: Sequence[str]) -> bool:
        return any(await asyncio.gather(*(self._reach(text) for text in addresses)))

    async def _reach(self, text: str) -> bool:
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        try:
            address = Multiaddr(text)
            peer = PeerID.from_base58(address["p2p"])
            if peer == self.p2p.peer_id:
                return False
            await self.p2p._client.connect(peer, [address.decapsulate(f"/p2p/{peer}")])
            return await self.node.protocol.call_ping(peer) is not None
        except Exception as error:  # noqa: BLE001 an address that does not work, for one of many reasons
            log.debug("%s cannot be reached: %s", text, error)
            return False

    async def _peers(self) -> list[str]:
        return [f"{address}/p2p/{peer.peer_id}" for peer in await self.p2p.list_peers() for address in peer.addrs]

    async def _ask(self, peer_id: str, request: bytes, limit: int) -> bytes | None:
        turn = self.asking.setdefault(peer_id, asyncio.Semaphore(MAX_ASKS_OF_PEER))
        async with turn:
            return await self._ask_now(peer_id, request, limit)

    async def _ask_now(self, peer_id: str, request: bytes, limit: int) -> bytes | None:
        from hivemind.p2p import PeerID
        from hivemind.utils.multiaddr import Multiaddr

        if peer_id in self.claimed and peer_id not in self.introduced:
            with suppress(Exception):  # perhaps there is another way to it
                where = [Multiaddr(text).decapsulate(f"/p2p/{peer_id}") for text in self.claimed[peer_id]]
                connecting = self.p2p._client.connect(PeerID.from_base58(peer_id), where)
                await asyncio.wait_for(connecting, FIRST_SECONDS)
        opening = self.p2p.call_binary_stream_handler(PeerID.from_base58(peer_id), STREAM)
        _, reader, writer = await asyncio.wait_for(opening, FIRST_SECONDS)
        try:
            writer.write(struct.pack(">I", len(request)) + request)
            await writer.drain()
            there, size = struct.unpack(">?I", await asyncio.wait_for(reader.readexactly(5), FIRST_SECONDS))
            if not there:
                return None
            return bytes(await reader.readexactly(min(size, limit + 1)))
        except asyncio.IncompleteReadError as error:
            raise OSError("the stream ended early") from error
        finally:
            writer.close()

    def _end_pause(self, peer_id: str) -> None:
        """End the pause of a peer that is there again, unless it was too late too often."""
        pause = self.silent.get(peer_id, (0.0, math.inf))[1]
        if pause <= EARLY_SECONDS:
            self.silent[peer_id] = (0.0, pause)

    async def _answer(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a request of any peer, within bounds of time and memory."""
        peer_id = str(info.peer_id)
        stream = PeerStream(peer_id, self.is_member(peer_id), writer.close)
        try:
            if not self.streams.open(stream):
                return
            request = await asyncio.wait_for(_request(reader), REQUEST_SECONDS)
            if request is None:
                return
            self._end_pause(peer_id)
            if request == WHAT_TIME:
                found: bytes | None = f"{self.clock():.3f}".encode()
            elif self.streams.answer(stream):
                found = self.answer(request, peer_id)
            else:
                return
            writer.write(struct.pack(">?I", found is not None, len(found or b"")) + (found or b""))
            await asyncio.wait_for(writer.drain(), CALL_SECONDS)
        except (asyncio.TimeoutError, OSError, EOFError) as error:
            log.debug("a request of %s came to nothing: %s", peer_id, error)
        finally:
            self.streams.leave(stream)
            writer.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop of uvloop, which takes half the processor time, where it is installed with hivemind."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@contextmanager
def _locks_without_names() -> Iterator[None]:
    """Let hivemind make its locks between processes as for forks: other locks have names in the system, which stay
    behind when this process is killed. They are not used here."""
    with _importing:
        before = multiprocessing.get_start_method(allow_none=True)
        multiprocessing.set_start_method("fork", force=True)
        try:
            yield
        finally:
            multiprocessing.set_start_method(before, force=True)


def _ignore_ended_connections(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore connections of hivemind that ended while no task waited for them."""
    if isinstance(context.get("exception"), (OSError, EOFError)):
        log.debug("%s: %r", context.get("message"), context["exception"])
    else:
        loop.default_exception_handler(context)


async def _request(reader: asyncio.StreamReader) -> bytes | None:
    """Read a peer's request; None if it is too long."""
    (size,) = struct.unpack(">I", await reader.readexactly(4))
    return bytes(await reader.readexactly(size)) if size <= MAX_REQUEST else None


def explained(error: str, listen: Sequence[str]) -> str:
    """Explain what to do about a daemon that does not start."""
    where = ", ".join(listen)
    if "address already in use" in error:
        return f"P2P_LISTEN={where}: the port is taken. Give another one, or 0 for any that is free."
    if "cannot assign requested address" in error:
        return f"P2P_LISTEN={where}: this machine has no such address. /ip4/0.0.0.0/tcp/0 listens on all it has."
    # The first line is what happened; the rest is a trace with paths of the machine where the daemon was built.
    first = next((line.strip() for line in error.splitlines() if line.strip()), "without a message")
    shown = ascii(first)[1:-1][:300]
    if "multiaddr" in first and any(address in first for address in listen):
        return f"P2P_LISTEN={where} is no multiaddress; one looks like /ip4/0.0.0.0/tcp/31000. ({shown})"
    return f"The peer-to-peer daemon does not start: {shown}"
