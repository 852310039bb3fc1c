"""Into a swarm among peers and out of it again: the engine, the manifest, and what has to be done meanwhile."""

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from rl_swarm.config import Settings
from rl_swarm.identity import Identity
from rl_swarm.manifest import Manifest
from rl_swarm.network.address import known_addresses
from rl_swarm.network.base import NetworkError
from rl_swarm.network.files import LocalFiles
from rl_swarm.network.folder import MANIFEST, pauses
from rl_swarm.network.p2p import clocks
from rl_swarm.network.p2p.documents import KEPT_SECONDS, Notice, PeerFiles, Shelf, acceptable, key_of
from rl_swarm.network.p2p.engine import Engine
from rl_swarm.presence import only_one_here
from rl_swarm.wire import MAX_BYTES, Rejected, decode, typed, unseal

log = logging.getLogger(__name__)

ADDRESSES = "addresses.json"  # of peers that were there last time
BOOT = "bootnodes.json"  # addresses of the coordinator of a swarm on this machine
MOST_ADDRESSES = 64
LAST_WORDS = 5.0  # seconds for which a coordinator still tells that the swarm has finished
MEET_SECONDS = 10.0
SETTLE_SECONDS = 10.0  # until a newcomer hands the manifest on: by then it knows how many others do
MOST_TRIES = 32  # peers that are asked for manifests in one look
REMEMBER_SECONDS = 5.0  # between looks at who is there


@contextmanager
def engine_of(identity: Identity, known: Sequence[str], settings: Settings, here: Path) -> Iterator[Engine]:
    """A running engine that knows these addresses, and those that worked last time."""
    local = LocalFiles(here)
    with only_one_here(identity, "p2p"):  # two daemons of one identity would take each other's messages
        yield from _engine(identity, known, settings, local)


def _engine(
    identity: Identity, known: Sequence[str], settings: Settings, local: LocalFiles
) -> Iterator[Engine]:
    first = [*known, *known_addresses(settings.p2p_known or "")]
    engine = Engine(
        identity,
        list(dict.fromkeys([*first, *_addresses(local, ADDRESSES)])),
        listen=tuple(settings.p2p_listen.split(",")),
        announce=tuple(filter(None, (settings.p2p_announce or "").split(","))),
        accept=Shelf().accepts,
        relay=settings.p2p_relay,
        map_ports=settings.p2p_relay,
    ).start()
    try:
        if engine.known and not engine.meet(MEET_SECONDS):
            log.warning(
                "nobody can be reached at %s; this node goes on alone and looks for the others again and again",
                ", ".join(engine.known),
            )
        yield engine
    finally:
        with suppress(OSError):
            _remember(local, engine)
        engine.close()


@contextmanager
def among_peers(
    engine: Engine, identity: Identity, manifest: Manifest, signed: bytes, here: Path
) -> Iterator[PeerFiles]:
    """The swarm's documents; this peer's own are renewed until the end, and the manifest is handed on."""
    local = LocalFiles(here)
    files = PeerFiles(engine, manifest.swarm(), manifest.peer_id, identity, local)
    engine.answer = files.answer
    if manifest.peer_id == identity.peer_id:
        files.write(MANIFEST, signed)
    else:
        files.hand_on(MANIFEST, signed)
    done = threading.Event()

    def renew() -> None:
        due = time.monotonic() + SETTLE_SECONDS
        while not done.is_set():
            with suppress(OSError):  # a node that is killed must find the others again
                _remember(local, engine)
            if time.monotonic() >= due:
                due = time.monotonic() + KEPT_SECONDS / 6
                clocks.warn(engine)
                files.renew()
            done.wait(REMEMBER_SECONDS)

    threading.Thread(target=renew, name=threading.current_thread().name, daemon=True).start()
    try:
        yield files
    finally:
        done.set()


def tell(engine: Engine, here: Path) -> None:
    """Leaves this engine's addresses for other processes of this machine."""
    LocalFiles(here).write(BOOT, msgspec.json.encode({"addresses": list(engine.addresses)}))


def told(here: Path, stop: threading.Event) -> list[str]:
    """The addresses of the process on this machine where others begin, once it has told them."""
    while not stop.is_set():
        if found := _addresses(LocalFiles(here), BOOT):
            return found
        stop.wait(0.1)
    return []


def await_manifest(
    engine: Engine, settings: Settings, stop: threading.Event
) -> tuple[Manifest, bytes] | None:
    """The manifest of the swarm that the peers there are in, signed as it is; None when told to stop."""
    pause = pauses(settings.poll_interval)
    told = False
    while not stop.is_set():
        clocks.warn(engine)
        found = manifests(engine)
        if settings.owner is not None:
            found = {
                swarm: (manifest, data)
                for swarm, (manifest, data) in found.items()
                if manifest.peer_id == settings.owner
            }
        if len(found) > 1:
            listed = ", ".join(f"{manifest.name} of {manifest.peer_id}" for manifest, _ in found.values())
            raise NetworkError(
                f"There are several swarms among these peers: {listed}. Say whose is meant: SWARM_OWNER=…."
            )
        if found:
            return next(iter(found.values()))
        if not told:
            told = True
            log.info("waiting for somebody who knows the swarm's manifest")
        stop.wait(next(pause))
    return None


def manifests(engine: Engine) -> dict[str, tuple[Manifest, bytes]]:
    """The manifests that peers have left notices of, by swarm."""
    found: dict[str, tuple[Manifest, bytes]] = {}
    try:
        records = engine.find(key_of("", ""))
    except OSError:
        return found
    tries = 0
    for subkey, value in random.sample(list(records.items()), len(records)):
        notice = acceptable(key_of("", ""), subkey, value, engine.clock())
        if notice is None or notice.path != MANIFEST or notice.swarm in found or tries >= MOST_TRIES:
            continue
        tries += 1
        engine.introduce(notice.peer_id, notice.addresses)
        with suppress(OSError, Rejected):
            data = _body(engine, notice)
            manifest = unseal(data, Manifest)
            if manifest.swarm() == notice.swarm:  # whoever hands it on, its owner signed it
                found[notice.swarm] = (manifest, data)
    return found


def _body(engine: Engine, notice: Notice) -> bytes:
    if notice.inside:
        return notice.inside.encode()
    data = engine.ask(notice.peer_id, notice.path.encode(), MAX_BYTES)
    if data is None:
        raise FileNotFoundError(notice.path)
    return data


def _addresses(local: LocalFiles, name: str) -> list[str]:
    try:
        found = typed(decode(local.read(name, MAX_BYTES)), dict[str, list[str]])
        return found.get("addresses", [])[:MOST_ADDRESSES]
    except (OSError, Rejected):
        return []


def _remember(local: LocalFiles, engine: Engine) -> None:
    addresses = list(dict.fromkeys([*engine.peers(), *engine.known]))[:MOST_ADDRESSES]
    if addresses and set(addresses) != set(_addresses(local, ADDRESSES)):
        local.write(ADDRESSES, msgspec.json.encode({"addresses": addresses}))
