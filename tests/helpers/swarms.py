"""Makes small signed records, and swarms to exchange them in."""

import atexit
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from flaky import FAULTS, Drive
from processes import HAS_HIVEMIND
from stores import BUCKET

from rl_swarm.network.address import open_address
from rl_swarm.network.base import Coordinator, Exchange
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.documents import PEERS, DocumentStore
from rl_swarm.network.exchange import DocumentExchange
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.local import LocalCoordinator, LocalExchange, LocalSwarm
from rl_swarm.network.p2p.documents import PeerStore
from rl_swarm.network.p2p.engine import PeerEngine
from rl_swarm.network.p2p.quota import DhtQuota
from rl_swarm.network.round_server import RoundServer
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rollouts import Answer, Publication, Sampling
from rl_swarm.protocol.rounds import PeerInfo, Report
from rl_swarm.protocol.tasks import Task
from rl_swarm.storage.files import LocalFiles
from rl_swarm.storage.settings import StorageSettings

POLL = 0.02
FOR_EVER = 3600.0  # longer than a test may take
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
OWNER = Identity.generate()
_identities: dict[str, Identity] = {}


def identity_of(node: str) -> Identity:
    return _identities.setdefault(node, Identity.generate())


def peer_id(node: str) -> str:
    return identity_of(node).peer_id


def make_manifest(**changes) -> Manifest:
    values = {
        "peer_id": OWNER.peer_id,
        "name": "test",
        "created": 1.0,
        "seed": 1,
        "environment": "reasoning",
        "tasks": [Task("chain_sum")],
        "partial_rewards": False,
        "versions": {},
        "rounds": 3,
        "stages": 1,
        "round_end": "everyone",
        "round_interval": 0.3,
        "peer_timeout": 20.0,
    }
    return Manifest(**{**values, **changes})


def publication(manifest: Manifest, node: str, round: int = 0, stage: int = 0, text: str = "") -> Publication:
    answers = [
        Answer(prompt=f"What is 2 + {k}?", response=f'{text} <answer>{k}</answer> – ¿sí? \n"\\', reward=float(k))
        for k in range(2)
    ]
    return Publication(
        peer_id=peer_id(node),
        kind="rollouts",
        swarm=manifest.swarm(),
        node=node,
        round=round,
        stage=stage,
        timestamp=1.5,
        model="tiny",
        policy_version=3,
        sampling=Sampling(1.0, 1.0, 0, 24),
        rollouts={"0": answers, "7": answers[::-1]},
    )


def introduction(manifest: Manifest, node: str, timestamp: float | None = None) -> PeerInfo:
    now = time.time() if timestamp is None else timestamp
    return PeerInfo(peer_id=peer_id(node), swarm=manifest.swarm(), node=node, model="tiny", joined=now, timestamp=now)


def report(
    manifest: Manifest, node: str, round: int = 0, stage: int = 0, reward: float = 0.5, vote: str = ""
) -> Report:
    return Report(
        peer_id=peer_id(node),
        swarm=manifest.swarm(),
        node=node,
        round=round,
        stage=stage,
        timestamp=time.time(),
        reward=reward,
        training_reward=reward,
        rollouts=8,
        vote=peer_id(vote) if vote else "",
    )


def eventually(condition: Callable[[], bool], seconds: float = 240.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


class Background(threading.Thread):
    """Runs a function in a thread; `result` waits, and returns its value or raises its error."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self.function()
        except BaseException as error:
            self.error = error

    def result(self, seconds: float = 240.0):
        self.join(seconds)
        assert not self.is_alive(), "still busy"
        if self.error is not None:
            raise self.error
        return self.value


class InMemory:
    """Runs the local network."""

    def __init__(self, folder: Path, min_peers: int = 1, **changes) -> None:
        self.manifest = make_manifest(**changes)
        self.swarm = LocalSwarm(self.manifest, min_peers)
        self.rejected: list[tuple[str, str, str]] = []

    def exchange(
        self, node: str, stop: threading.Event | None = None, poll: float = POLL, max_peers: int = 10
    ) -> Exchange:
        return LocalExchange(self.swarm, stop or threading.Event(), max_peers)

    def coordinator(self, node: str, stop: threading.Event | None = None, poll: float = POLL) -> Coordinator:
        return LocalCoordinator(self.swarm, stop or threading.Event())

    def close(self) -> None:
        pass


class InFolder:
    """Runs the folder network, with a real coordinator in a thread."""

    def __init__(self, folder: Path, min_peers: int = 1, **changes) -> None:
        self.manifest = make_manifest(**changes)
        self.folder = folder
        self.rejected: list[tuple[str, str, str]] = []
        self.stop = threading.Event()
        self.conductor = RoundServer(
            self.store("coordinator"),
            self.manifest,
            OWNER,
            NetworkSettings(min_peers=min_peers, poll_interval=POLL),
            StorageSettings(),
            self.stop,
        )
        self.thread = Background(self.conductor.run)

    def store(self, node: str) -> DocumentStore:
        return FolderStore.at(self.folder)

    def exchange(
        self, node: str, stop: threading.Event | None = None, poll: float = POLL, max_peers: int = 10
    ) -> Exchange:
        return DocumentExchange(
            self.store(node),
            self.manifest,
            identity_of(node),
            node,
            stop or threading.Event(),
            lambda *why: self.rejected.append(why),
            poll,
            max_peers,
        )

    def coordinator(self, node: str, stop: threading.Event | None = None, poll: float = POLL) -> Coordinator:
        return DocumentCoordinator(
            self.store(node), self.manifest, identity_of(node), node, stop or threading.Event(), poll
        )

    def close(self) -> None:
        self.stop.set()
        self.thread.result()


class InSyncedFolder(InFolder):
    """Runs the folder network on a drive that is synced as badly as it gets."""

    def __init__(self, folder: Path, min_peers: int = 1, **changes) -> None:
        self.drive = Drive(LocalFiles(folder), FAULTS["everything at once"], seed=7)
        super().__init__(folder, min_peers, **changes)

    def store(self, node: str) -> DocumentStore:
        return FolderStore(self.drive.view(node))


_engines: dict[str, PeerEngine] = {}


def engine_of(node: str) -> PeerEngine:
    """Return a real daemon on loopback, kept for all tests of a file. The first one is the others' bootnode."""
    if not HAS_HIVEMIND:
        pytest.skip("hivemind is not installed")
    if node not in _engines:
        known = next(iter(_engines.values())).addresses if _engines else ()
        who = OWNER if node == "coordinator" else identity_of(node)
        engine = PeerEngine(who, known, LOOPBACK, quota=DhtQuota(), relay=False, map_ports=False)
        _engines[node] = engine.start()
        atexit.register(engine.close)
    return _engines[node]


def close_engines() -> None:
    """End all daemons, so that the next tests meet none of these peers."""
    while _engines:
        _engines.popitem()[1].close()


class AmongPeers(InFolder):
    """Runs the peer-to-peer network."""

    number = itertools.count(2)

    def __init__(self, folder: Path, min_peers: int = 1, **changes) -> None:
        self.views: dict[str, PeerStore] = {}
        super().__init__(folder, min_peers, **{"created": float(next(self.number)), **changes})

    def store(self, node: str) -> DocumentStore:
        if node not in self.views:
            engine = engine_of(node)
            who = OWNER if node == "coordinator" else identity_of(node)
            local = FolderStore.at(self.folder / node)
            self.views[node] = PeerStore(engine, self.manifest.swarm(), OWNER.peer_id, who, local)
            self.views[node].serve()
        return self.views[node]

    def exchange(
        self, node: str, stop: threading.Event | None = None, poll: float = POLL, max_peers: int = 10
    ) -> Exchange:
        store = self.store(node)
        if PEERS.of(node) not in store.own:  # a node introduces itself before it publishes
            self.coordinator(node).register(introduction(self.manifest, node))
        return super().exchange(node, stop, poll, max_peers)


class InStore(InFolder):
    """Runs the folder network at a URL, through one connection for all nodes."""

    def __init__(self, url: str, min_peers: int = 1, **changes) -> None:
        self.opened = open_address(url).store
        super().__init__(Path("nowhere"), min_peers, **changes)

    def store(self, node: str) -> DocumentStore:
        return self.opened


class InBucket(InStore):
    """Runs the folder network in a bucket of a real S3 server."""

    def __init__(self, folder: Path, min_peers: int = 1, **changes) -> None:
        super().__init__(f"s3://{BUCKET}/{folder.parent.name}/{folder.name}", min_peers, **changes)


NETWORKS = {
    "local": InMemory,
    "folder": InFolder,
    "synced folder": InSyncedFolder,
    "bucket": InBucket,
    "peer-to-peer": AmongPeers,
}
