"""Joins a swarm among peers: starts the engine, finds the manifest, serves documents and renews their notices."""

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rl_swarm.network.address import is_peer_address, known_addresses
from rl_swarm.network.base import NetworkError
from rl_swarm.network.documents import MANIFEST
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.p2p import time_offset
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import MANIFESTS, DhtRecord, acceptable, request_for
from rl_swarm.network.presence import only_one_here
from rl_swarm.network.retries import poll_pauses
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, convert, decode, unseal
from rl_swarm.storage.files import LocalFiles

log = logging.getLogger(__name__)

ADDRESSES = "addresses.json"  # of peers that were there last time
BOOT = "bootnodes.json"  # addresses of the coordinator of a swarm on this machine
MAX_ADDRESSES = 64
LINGER_SECONDS = 5.0  # for which a coordinator still tells that the swarm has finished
MAX_SHOWN = 4  # addresses in a message
MEET_SECONDS = 10.0
SETTLE_SECONDS = 10.0  # until a newcomer announces the manifest: by then it knows the size of the swarm
MAX_TRIES = 8  # peers that are asked in one look for manifests that are too large for a notice
GIVEN_LOOKS = 3  # for which only the peers whose addresses were given are asked, if they do not answer
RENEW_SECONDS = 30.0  # between looks at which notices are due
REMEMBER_SECONDS = 5.0  # between looks at who is connected


@contextmanager
def engine_of(identity: Identity, known: Sequence[str], settings: NetworkSettings, here: Path) -> Iterator[PeerEngine]:
    """Run an engine that knows these addresses, and those that worked last time."""
    local = LocalFiles(here)
    with only_one_here(identity, "p2p"):  # two daemons of one identity would take each other's messages
        yield from _engine(identity, known, settings, local)


def _engine(
    identity: Identity, known: Sequence[str], settings: NetworkSettings, local: LocalFiles
) -> Iterator[PeerEngine]:
    first = [*known, *(known_addresses(settings.p2p_initial_peers) if settings.p2p_initial_peers else [])]
    engine = PeerEngine(
        identity,
        list(dict.fromkeys([*first, *_addresses(local, ADDRESSES)])),
        listen=tuple(settings.p2p_listen.split(",")),
        announce=tuple(filter(None, (settings.p2p_announce or "").split(","))),
        quota=DhtQuota(),
        relay=settings.p2p_relay,
        map_ports=settings.p2p_relay,
    ).start()
    engine.given = first
    try:
        if engine.known and not engine.meet(MEET_SECONDS):
            log.warning(
                "no peer can be reached at %s; this node goes on alone and tries again",
                ", ".join(engine.known[:MAX_SHOWN]) + (" and others" if len(engine.known) > MAX_SHOWN else ""),
            )
        yield engine
    finally:
        with suppress(OSError):
            _remember(local, engine)
        engine.close()


@contextmanager
def among_peers(
    engine: PeerEngine, identity: Identity, manifest: Manifest, signed: bytes, here: Path
) -> Iterator[PeerStore]:
    """Serve this peer's documents and the manifest, and renew their notices until the end."""
    local = LocalFiles(here)
    store = PeerStore(engine, manifest.swarm(), manifest.peer_id, identity, FolderStore(local))
    store.serve()
    if manifest.peer_id == identity.peer_id:
        store.write(MANIFEST, signed)
    else:
        store.serve_copy(MANIFEST, signed)
    done = threading.Event()

    def renew() -> None:
        due = time.monotonic() + SETTLE_SECONDS
        while not done.is_set():
            with suppress(OSError):  # a node that is killed must find its peers again
                _remember(local, engine)
            if time.monotonic() >= due:
                due = time.monotonic() + RENEW_SECONDS
                time_offset.warn(engine)
                store.renew()
            done.wait(REMEMBER_SECONDS)

    threading.Thread(target=renew, name=threading.current_thread().name, daemon=True).start()
    try:
        yield store
    finally:
        done.set()


def write_bootnodes(engine: PeerEngine, here: Path) -> None:
    """Write this engine's addresses for other processes of this machine."""
    LocalFiles(here).write(BOOT, msgspec.json.encode({"addresses": list(engine.addresses)}))


def await_bootnodes(here: Path, stop: threading.Event) -> list[str]:
    """Wait for the addresses that another process of this machine writes."""
    while not stop.is_set():
        if found := _addresses(LocalFiles(here), BOOT):
            return found
        stop.wait(0.1)
    return []


@dataclass(frozen=True)
class Candidate:
    """Holds a manifest that peers announce in the DHT."""

    manifest: Manifest
    signed: bytes
    authors: set[str]  # of the notices


def await_manifest(
    engine: PeerEngine, settings: NetworkSettings, stop: threading.Event
) -> tuple[Manifest, bytes] | None:
    """Wait for the manifest of the swarm that the peers are in, and its signed form; None when told to stop.

    The manifest of a peer whose address was given is taken. If those have none (a bootnode), the one that most peers
    announce is.
    """
    pauses = poll_pauses(settings.poll_interval)
    looks = 0
    while not stop.is_set():
        time_offset.warn(engine)
        found, all_answered = _of_given_peers(engine, settings.owner)
        if found is not None:
            return found
        looks += 1
        if all_answered or looks >= GIVEN_LOOKS:
            candidates = manifests(engine)
            if settings.owner is not None:
                candidates = {
                    swarm: candidate
                    for swarm, candidate in candidates.items()
                    if candidate.manifest.peer_id == settings.owner
                }
            if candidates:
                chosen = _most_announced(list(candidates.values()))
                return chosen.manifest, chosen.signed
        if looks == GIVEN_LOOKS:
            log.info("waiting for a peer that knows the swarm's manifest")
        stop.wait(next(pauses))
    return None


def _of_given_peers(engine: PeerEngine, owner: str | None) -> tuple[tuple[Manifest, bytes] | None, bool]:
    """Ask the peers whose addresses were given for the manifest. Return it, and whether all of them answered."""
    all_answered = True
    for peer_id in dict.fromkeys(address.rpartition("/")[2] for address in engine.given):
        try:
            data = engine.ask(peer_id, request_for(MANIFEST), MAX_BYTES)
            manifest = unseal(data, Manifest) if data is not None else None
        except OSError:
            all_answered = False
            continue
        except Rejected as error:
            log.warning("the manifest of %s is not used: %s", peer_id, error)
            continue
        if manifest is not None and data is not None and owner in (None, manifest.peer_id):
            return (manifest, data), True
    return None, all_answered


def _most_announced(candidates: list[Candidate]) -> Candidate:
    """Choose the manifest that at least twice as many peers announce as any other; raise an error if none is."""
    first, *others = sorted(candidates, key=lambda one: (-len(one.authors), one.manifest.swarm()))
    if not others:
        return first
    if len(first.authors) >= 2 * len(others[0].authors):
        log.warning(
            "%d peers announce %s of %s; %d other manifests are ignored",
            len(first.authors),
            first.manifest.name,
            first.manifest.peer_id,
            len(others),
        )
        return first
    shown = (first, *others)[:MAX_SHOWN]
    listed = ", ".join(f"{one.manifest.name} of {one.manifest.peer_id}" for one in shown)
    raise NetworkError(
        f"There are several swarms among these peers: {listed}. Say whose is meant: SWARM_OWNER=…, or join at the "
        "address of one of its nodes."
    )


def manifests(engine: PeerEngine) -> dict[str, Candidate]:
    """Return the manifests that peers have left notices of, by swarm."""
    found = dict[str, Candidate]()
    try:
        records = engine.find(MANIFESTS)
    except OSError:
        return found
    tries = 0
    noticed = [acceptable(MANIFESTS, *record, engine.clock()) for record in records.items()]
    notices = [notice for notice in noticed if notice is not None and notice.key == MANIFEST]
    # Those with a manifest inside first: they take no request.
    for notice in sorted(random.sample(notices, len(notices)), key=lambda one: not one.content):
        if notice.swarm in found:
            found[notice.swarm].authors.add(notice.peer_id)
            continue
        tries += not notice.content
        if tries > MAX_TRIES:
            continue
        engine.introduce(notice.peer_id, notice.addresses)
        with suppress(OSError, Rejected):
            data = _body(engine, notice)
            manifest = unseal(data, Manifest)
            if manifest.swarm() == notice.swarm:  # the owner signed it, whatever peer announces it
                found[notice.swarm] = Candidate(manifest, data, {notice.peer_id})
    return found


def _body(engine: PeerEngine, notice: DhtRecord) -> bytes:
    if notice.content:
        return notice.content.encode()
    data = engine.ask(notice.peer_id, request_for(MANIFEST), MAX_BYTES)
    if data is None:
        raise FileNotFoundError(notice.path)
    return data


def _addresses(local: LocalFiles, name: str) -> list[str]:
    try:
        found = convert(decode(local.read(name, MAX_BYTES)), dict[str, list[str]])
        return [text for text in found.get("addresses", []) if is_peer_address(text)][:MAX_ADDRESSES]
    except (OSError, Rejected):
        return []


def _remember(local: LocalFiles, engine: PeerEngine) -> None:
    addresses = list(dict.fromkeys([*engine.peers(), *engine.known]))[:MAX_ADDRESSES]
    if addresses and set(addresses) != set(_addresses(local, ADDRESSES)):
        local.write(ADDRESSES, msgspec.json.encode({"addresses": addresses}))
