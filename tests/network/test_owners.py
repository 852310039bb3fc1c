"""A node joins the swarm that it was told of, or the one that it found the first time, and no other at that address."""

import threading
import time

import pytest

from benchmarks.lib.paths import MANIFEST
from rl_swarm.config.settings import Settings
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owners import MAX_ADDRESSES, OwnerError, remember
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.node.swarm import worker_settings
from rl_swarm.node.worker import found, join
from rl_swarm.protocol.admission import AdmissionError, invite
from rl_swarm.protocol.identity import Identity
from rl_swarm.storage.files import LocalFiles

OWNER, MALLORY = Identity.generate(), Identity.generate()


class Folder:
    """A folder where anybody may put a manifest, and a node that joins what lies there."""

    def __init__(self, root):
        self.address, self.memory = root / "swarm", root / "me.owners.json"
        self.settings = Settings.of(
            identity_path=str(root / "me.pem"), device="cpu", held_out_questions=1, held_out_samples=1
        )

    def found(self, owner, **changes):
        LocalFiles(self.address).remove("")
        return found(FolderStore.at(self.address), self.settings.changed(**changes), "swarm", owner)

    def join(self, **changes):
        """Joins for no longer than it takes to get in."""
        stop = threading.Event()
        stop.set()
        join(self.address, self.settings.changed(**changes), stop)

    def came_in(self):
        return bool(LocalFiles(self.address).names("peers"))


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


@pytest.mark.processes
def test_the_owner_that_was_found_first_is_the_only_one_from_then_on(folder):
    folder.found(OWNER)
    folder.join()
    folder.found(OWNER, seed=7)  # who may start again
    folder.join()
    assert folder.came_in()

    folder.found(MALLORY)
    with pytest.raises(OwnerError) as refused:
        folder.join()
    for part in (str(folder.address), OWNER.peer_id, f"SWARM_OWNER={MALLORY.peer_id}"):
        assert part in str(refused.value)
    assert not folder.came_in()

    folder.join(owner=MALLORY.peer_id)  # as the message says
    folder.join()
    assert folder.came_in()
    folder.found(OWNER)
    with pytest.raises(OwnerError):
        folder.join()


@pytest.mark.processes
def test_a_node_that_was_told_the_owner_takes_no_other_and_needs_no_memory(folder):
    folder.found(MALLORY)
    with pytest.raises(OwnerError, match=f"{MALLORY.peer_id}, and SWARM_OWNER={OWNER.peer_id}"):
        folder.join(owner=OWNER.peer_id)
    folder.found(OWNER)
    folder.join(owner=OWNER.peer_id)
    assert folder.came_in() and not folder.memory.exists()


@pytest.mark.processes
def test_an_invitation_names_the_owner_too(folder):
    manifest = folder.found(OWNER, admission="invited")
    token = invite(manifest, OWNER, uses=1, expires=int(time.time()) + 1000)[1]
    theirs = LocalFiles(folder.address).read(MANIFEST, 1 << 20)
    folder.found(MALLORY)
    with pytest.raises(AdmissionError, match="not the manifest of their swarm"):
        folder.join(invitation=token)
    assert not folder.memory.exists()

    folder.join()  # a mistake, remembered
    LocalFiles(folder.address).write(MANIFEST, theirs)
    folder.join(invitation=token)
    assert OWNER.peer_id in folder.memory.read_text() and MALLORY.peer_id not in folder.memory.read_text()


def test_who_was_not_let_in_remembers_nothing(folder):
    folder.found(MALLORY, admission="invited")
    with pytest.raises(AdmissionError):
        folder.join()
    assert not folder.memory.exists()


@pytest.mark.parametrize("damage", [b"", b'{"a":', b"[]", b'{"a": 1}', b"[" * 100_000])
def test_a_memory_that_cannot_be_read_is_not_taken_for_none(damage, folder):
    folder.found(MALLORY)
    folder.memory.write_bytes(damage)
    with pytest.raises(OwnerError, match=r"me\.owners\.json.*Move it away"):
        folder.join()


def test_a_memory_that_cannot_be_written_stops_nobody(folder, tmp_path, caplog):
    name = "m" * 230 + ".pem"  # with no room for the name under which a file is written aside
    remember(folder.found(OWNER), folder.address, NetworkSettings(identity_path=f"{tmp_path}/{name}"))
    assert f"the owner of {folder.address} is not remembered" in caplog.text


def test_the_latest_addresses_are_remembered(folder, tmp_path):
    manifest = folder.found(OWNER)
    for number in range(MAX_ADDRESSES + 2):
        remember(manifest, tmp_path / str(number), folder.settings.network)
    text = folder.memory.read_text()
    assert text.count(OWNER.peer_id) == MAX_ADDRESSES
    assert f'{tmp_path}/1"' not in text and f'{tmp_path}/2"' in text


def test_the_nodes_of_up_know_their_owner(tmp_path):
    workers = worker_settings(Settings.of(identity_path=str(tmp_path / "swarm.pem"), nodes=3))
    assert {worker.network.owner for worker in workers.values()} == {Identity.load(tmp_path / "swarm.pem").peer_id}
