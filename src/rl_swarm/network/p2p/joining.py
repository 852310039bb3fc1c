"""Joins a swarm among peers and leaves it again: the engine, the manifest, and the work in between."""

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
from rl_swarm.network.folder import MANIFEST, pauses
from rl_swarm.network.p2p import time_offset as clocks
from rl_swarm.network.p2p.documents import PeerFiles
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.p2p.records import DhtRecord, acceptable, key_of
from rl_swarm.network.presence import only_one_here
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, convert, decode, unseal
from rl_swarm.storage.files import LocalFiles

log = logging.getLogger(__name__)

ADDRESSES = "addresses.json"  # of peers that were there last time
BOOT = "bootnodes.json"  # addresses of the coordinator of a swarm on this machine
MAX_ADDRESSES = 64
LAST_WORDS = 5.0  # seconds for which a coordinator still tells that the swarm has finished
MAX_SHOWN = 4  # addresses in a message
MEET_SECONDS = 10.0
SETTLE_SECONDS = 10.0  # until a newcomer hands the manifest on: by then it knows how many others do
MAX_TRIES = 8  # peers that are asked in one look for manifests that are too large for a notice
GIVEN_LOOKS = 3  # for which only the peers whose addresses were given are asked, if they do not answer
RENEW_SECONDS = 30.0  # between looks at which notices are due
REMEMBER_SECONDS = 5.0  # between looks at who is there


@contextmanager
def engine_of(identity: Identity, known: Sequence[str], settings: NetworkSettings, here: Path) -> Iterator[PeerEngine]:
    """A running engine that knows these addresses, and those that worked last time."""
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
                "nobody can be reached at %s; this node goes on alone and looks for the others again and again",
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
) -> Iterator[PeerFiles]:
    """The swarm's documents; this peer's own are renewed until the end, and the manifest is handed on."""
    local = LocalFiles(here)
    files = PeerFiles(engine, manifest.swarm(), manifest.peer_id, identity, local)
    files.serve()
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
                due = time.monotonic() + RENEW_SECONDS
                clocks.warn(engine)
                files.renew()
            done.wait(REMEMBER_SECONDS)

    threading.Thread(target=renew, name=threading.current_thread().name, daemon=True).start()
    try:
        yield files
    finally:
        done.set()


def tell(engine: PeerEngine, here: Path) -> None:
    """Leaves this engine's addresses for other processes of this machine."""
    LocalFiles(here).write(BOOT, msgspec.json.encode({"addresses": list(engine.addresses)}))


def told(here: Path, stop: threading.Event) -> list[str]:
    """The addresses of the process on this machine where others begin, once it has told them."""
    while not stop.is_set():
        if found := _addresses(LocalFiles(here), BOOT):
            return found
        stop.wait(0.1)
    return []


@dataclass(frozen=True)
class Candidate:
    """Holds a manifest of which there are notices in the DHT."""

    manifest: Manifest
    signed: bytes
    authors: set[str]  # of the notices


def await_manifest(
    engine: PeerEngine, settings: NetworkSettings, stop: threading.Event
) -> tuple[Manifest, bytes] | None:
    """The manifest of the swarm that the peers there are in, signed as it is; None when told to stop.

    That of a peer whose address was given counts. Where those have none (a bootnode), the one that most peers tell of.
    """
    pause = pauses(settings.poll_interval)
    looks = 0
    while not stop.is_set():
        clocks.warn(engine)
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
                chosen = _most_told_of(list(candidates.values()))
                return chosen.manifest, chosen.signed
        if looks == GIVEN_LOOKS:
            log.info("waiting for somebody who knows the swarm's manifest")
        stop.wait(next(pause))
    return None


def _of_given_peers(engine: PeerEngine, owner: str | None) -> tuple[tuple[Manifest, bytes] | None, bool]:
    """Asks the peers whose addresses were given for the manifest; also tells whether all of them answered."""
    all_answered = True
    for peer_id in dict.fromkeys(address.rpartition("/")[2] for address in engine.given):
        try:
            data = engine.ask(peer_id, MANIFEST.encode(), MAX_BYTES)
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


def _most_told_of(candidates: list[Candidate]) -> Candidate:
    """Chooses the manifest that at least twice as many peers tell of as of any other; an error where there is none."""
    first, *others = sorted(candidates, key=lambda one: (-len(one.authors), one.manifest.swarm()))
    if not others:
        return first
    if len(first.authors) >= 2 * len(others[0].authors):
        log.warning(
            "%d peers tell of %s of %s; %d other manifests are ignored",
            len(first.authors),
            first.manifest.name,
            first.manifest.peer_id,
            len(others),
        )
        return first
    told_of = (first, *others)[:MAX_SHOWN]
    listed = ", ".join(f"{one.manifest.name} of {one.manifest.peer_id}" for one in told_of)
    raise NetworkError(
        f"There are several swarms among these peers: {listed}. Say whose is meant: SWARM_OWNER=…, or join at the "
        "address "
        "of one of its nodes."
    )


def manifests(engine: PeerEngine) -> dict[str, Candidate]:
    """The manifests that peers have left notices of, by swarm."""
    found = dict[str, Candidate]()
    try:
        records = engine.find(key_of("", ""))
    except OSError:
        return found
    tries = 0
    noticed = [acceptable(key_of("", ""), *record, engine.clock()) for record in records.items()]
    notices = [notice for notice in noticed if notice is not None and notice.path == MANIFEST]
    # Those with a manifest inside first: nobody has to be waited for.
    for notice in sorted(random.sample(notices, len(notices)), key=lambda one: not one.inside):
        if notice.swarm in found:
            found[notice.swarm].authors.add(notice.peer_id)
            continue
        tries += not notice.inside
        if tries > MAX_TRIES:
            continue
        engine.introduce(notice.peer_id, notice.addresses)
        with suppress(OSError, Rejected):
            data = _body(engine, notice)
            manifest = unseal(data, Manifest)
            if manifest.swarm() == notice.swarm:  # whoever hands it on, its owner signed it
                found[notice.swarm] = Candidate(manifest, data, {notice.peer_id})
    return found


def _body(engine: PeerEngine, notice: DhtRecord) -> bytes:
    if notice.inside:
        return notice.inside.encode()
    data = engine.ask(notice.peer_id, notice.path.encode(), MAX_BYTES)
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
