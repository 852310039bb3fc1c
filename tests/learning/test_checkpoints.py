"""A checkpoint is complete or absent, and resuming from one equals never having stopped."""

import copy
import errno
import os
import resource
import threading

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from small_models import save_small

from rl_swarm.config.settings import Settings
from rl_swarm.learning import checkpoints
from rl_swarm.learning.checkpoints import CheckpointError, Checkpoints, Place, restore_optimizer
from rl_swarm.learning.policy import ModelError, Policy
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Group, Publication, Sampling
from rl_swarm.protocol.rounds import State
from rl_swarm.protocol.wire import Rejected, seal, unseal
from rl_swarm.storage.files import LocalFiles

ME = Identity.generate()


def of(root, node="node", identity=ME, keep=5):
    """A node's checkpoints: private ones below `private`, copies in a folder to which peers write, too."""
    files = LocalFiles(root / "shared")
    return Checkpoints(root / "private" / node, identity, node, files, keep, keep_private=keep)


def elsewhere(root, node="node", identity=ME, keep=5):
    """The same on a machine that has nothing but the folder."""
    files = LocalFiles(root / "shared")
    return Checkpoints(root / "another" / node, identity, node, files, keep)


def save(policy, place, root, node, keep, identity=ME):
    return of(root, node, identity, keep).save(policy, place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_small(tmp_path_factory.mktemp("model"))


@pytest.fixture
def settings(folder):
    return Settings.of(model=str(folder), max_new_tokens=16, learning_rate=1e-2, cpu_only=True)


def place(number, **changes):
    values = {
        "swarm": "swarm",
        "peer_id": ME.peer_id,
        "model": "m",
        "round": number,
        "stage": 0,
        "policy_version": number,
    }
    return Place(**{**values, **changes})


def teach(policy, *words):
    question = Question("chain_sum", 0, 1, "What is 2 plus 2?", "4")
    completions = tuple(Completion(word, True) for word in words)
    policy.learn([Group("peer", question, completions, (1.0,) + (0.0,) * (len(words) - 1), True)])


def resumed(settings, folder):
    policy = Policy.load(settings, "", folder)
    restore_optimizer(policy, folder)
    return policy


def newest(root, node="node", swarm="swarm", identity=ME):
    kept = of(root, node, identity)
    found = next(kept.written(swarm), None)
    return found and (kept.fetch(found), replace(found.place, files={}, node="", kind=""))


def rounds(kept, swarm="swarm"):
    return [(saved.place.round, saved.private is not None) for saved in kept.written(swarm)]


@pytest.mark.parametrize("kl_weight", [0.0, 0.5])
def test_going_on_from_a_checkpoint_is_going_on(settings, tmp_path, kl_weight):
    """To the last bit: weights, both moments of Adam and its step; and the reference is still the first model."""
    settings = settings.changed(kl_weight=kl_weight)
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    teach(policy, "four", "nine")
    save(policy, place(1), tmp_path, "node", keep=2)
    other = resumed(settings, newest(tmp_path)[0])
    for one in (policy, other):
        teach(one, "5", "six", "x")
    for a, b in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [one.trainer.optimizer.state_dict()["state"] for one in (policy, other)]
    assert states[0].keys() == states[1].keys() and len(states[0]) > 5
    for number, values in states[0].items():
        assert values.keys() == states[1][number].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(value, states[1][number][name]) for name, value in values.items())
    assert float(states[1][0]["step"]) == 3


def test_a_checkpoint_is_a_model_that_anybody_can_load(settings, tmp_path):
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    where = save(policy, place(0), tmp_path, "node", keep=2)
    loaded = Policy.load(settings.changed(model=str(where)), "")
    assert loaded.sample(["Hi"], 1, 0, greedy=True) == policy.sample(["Hi"], 1, 0, greedy=True)[:1]
    assert not list(where.glob("*.bin")) and not list(where.glob("*.pt"))  # no pickle


def test_the_newest_checkpoint_of_this_node_in_this_swarm_is_found(settings, tmp_path):
    policy = Policy.load(settings, "")
    assert newest(tmp_path) is None
    for number in (2, 10, 9):
        save(policy, place(number), tmp_path, "node", keep=5)
    save(policy, place(11), tmp_path, "other-node", keep=5)
    save(policy, place(12, swarm="another"), tmp_path, "node", keep=5)
    assert newest(tmp_path) == (tmp_path / "private" / "node" / "round_10", place(10))
    assert rounds(of(tmp_path)) == [(n, private) for n in (10, 9, 2) for private in (True, False)]
    assert rounds(elsewhere(tmp_path)) == [(10, False), (9, False), (2, False)]
    assert rounds(of(tmp_path, identity=Identity.generate())) == []


def test_old_checkpoints_are_removed_and_other_nodes_keep_theirs(settings, tmp_path):
    policy = Policy.load(settings, "")
    save(policy, place(0), tmp_path, "neighbour", keep=1)
    kept = Checkpoints(tmp_path / "private" / "node", ME, "node", LocalFiles(tmp_path / "shared"), keep=2)
    for number in range(4):
        kept.save(policy, place(number))
    assert rounds(kept) == [(3, True), (3, False), (2, False)]
    shared = tmp_path / "shared" / "checkpoints"
    assert sorted(f.name for f in shared.iterdir()) == ["round_0", "round_2", "round_3"]
    assert (shared / "round_0" / "neighbour").is_dir()


def test_a_round_saved_again_is_the_later_one(settings, tmp_path):
    policy = Policy.load(settings, "")
    save(policy, place(3), tmp_path, "node", keep=1)
    teach(policy, "4", "7")
    save(policy, place(3, policy_version=9), tmp_path, "node", keep=1)
    folder, found = newest(tmp_path)
    assert found.policy_version == 9
    again = resumed(settings, folder)
    for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("moment", ["model", "optimizer", "place", "rename"])
def test_a_save_that_fails_leaves_the_previous_checkpoint_and_nothing_else(settings, tmp_path, monkeypatch, moment):
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    save(policy, place(0), tmp_path, "node", keep=1)
    weights = copy.deepcopy(policy.model.state_dict())
    teach(policy, "5", "8")

    def fail(*args, **kwargs):
        raise OSError("the disk is gone")

    if moment == "model":
        monkeypatch.setattr(policy.tokenizer, "save_pretrained", fail)
    elif moment == "optimizer":
        monkeypatch.setattr(checkpoints, "save_file", fail)
    elif moment == "place":
        monkeypatch.setattr(checkpoints, "seal", fail)
    else:
        monkeypatch.setattr(checkpoints.os, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        save(policy, place(1), tmp_path, "node", keep=1)
    monkeypatch.undo()

    folder, found = newest(tmp_path)
    assert found == place(0)
    restored = resumed(settings, folder).model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in restored.items())
    left = [p.name for p in tmp_path.rglob("*") if p.name.endswith(".tmp") or p.name.startswith(".new-")]
    assert left == []
    assert len(restored) > 5


def test_leftovers_of_a_killed_process_are_removed(settings, tmp_path):
    policy = Policy.load(settings, "")
    left = tmp_path / "private" / "node" / ".new-12345678"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half a model")
    assert newest(tmp_path) is None
    save(policy, place(1), tmp_path, "node", keep=2)
    assert not left.exists()


def test_a_checkpoint_that_was_damaged_is_passed_over_or_refused(settings, tmp_path):
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    for number in range(3):
        save(policy, place(number), tmp_path, "node", keep=5)
    shared = tmp_path / "shared" / "checkpoints"
    for junk in (b'{"swarm":', b'{"swarm":"\xff"}', b'{"a":' + b"[" * 100_000, b"[]"):
        (shared / "round_2" / "node" / "place.json").write_bytes(junk)
        assert rounds(elsewhere(tmp_path)) == [(1, False), (0, False)]
    (shared / "round_²" / "node").mkdir(parents=True)
    assert rounds(elsewhere(tmp_path)) == [(1, False), (0, False)]
    for name, error in (("model.safetensors", ModelError), ("optimizer.safetensors", CheckpointError)):
        path = tmp_path / "private" / "node" / "round_1" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(error):
            resumed(settings, path.parent)
        with pytest.raises(CheckpointError, match=name):
            kept = of(tmp_path)
            kept.fetch(next(saved for saved in kept.written("swarm") if saved.place.round == 1))
        path.write_bytes(whole)


def test_a_copy_that_a_peer_changed_or_wrote_is_not_used(settings, tmp_path):
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    save(policy, place(0), tmp_path, "node", keep=5)
    shared = tmp_path / "shared" / "checkpoints" / "round_0" / "node"
    kept = elsewhere(tmp_path)
    (found,) = kept.written("swarm")
    assert {"model.safetensors", "optimizer.safetensors", "tokenizer.json"} <= found.place.files.keys()

    teach(policy, "poison", "4")
    real = (shared / "model.safetensors").read_bytes()
    policy.save(shared)  # over the weights of the node
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not as this node wrote it"):
        kept.fetch(found)
    for other in (real + b"more", real[:-1]):
        (shared / "model.safetensors").write_bytes(other)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            kept.fetch(found)
    (shared / "model.safetensors").unlink()
    (shared / "model.safetensors").symlink_to(tmp_path / "private" / "node" / "round_0" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a regular file"):
        kept.fetch(found)
    (shared / "model.safetensors").unlink()
    os.mkfifo(shared / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a regular file"):
        kept.fetch(found)
    (shared / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        kept.fetch(found)
    assert not list((tmp_path / "another").rglob("*.safetensors"))

    (shared / "model.safetensors").write_bytes(real)
    (shared / "adapters.safetensors").write_bytes(b"more")  # nobody signed it, so nobody reads it
    assert not (kept.fetch(found) / "adapters.safetensors").exists()
    save(policy, place(1), tmp_path, "node", keep=5, identity=Identity.generate())
    save(policy, place(2), tmp_path, "node-2", keep=5)
    os.rename(shared.parent.parent / "round_2" / "node-2", shared.parent.parent / "round_2" / "node")
    assert rounds(elsewhere(tmp_path)) == [(0, True), (0, False)], "neither a stranger's nor another node's"


def test_only_verified_files_are_loaded_however_fast_the_folder_changes(settings, tmp_path):
    """A program exchanges the weights again and again while they are copied and verified."""
    policy = Policy.load(settings, "")
    teach(policy, "4", "7")
    save(policy, place(0), tmp_path, "node", keep=5)
    shared = tmp_path / "shared" / "checkpoints" / "round_0" / "node"
    real = (shared / "model.safetensors").read_bytes()
    (tmp_path / "real").write_bytes(real)
    done = threading.Event()

    def swap():
        while not done.is_set():
            for data in (bytes(len(real)), real):
                (tmp_path / "other").write_bytes(data)
                os.replace(tmp_path / "other", shared / "model.safetensors")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(60):
            kept = elsewhere(tmp_path)
            found = next(saved for saved in kept.written("swarm") if saved.private is None)
            try:
                folder = kept.fetch(found)
            except CheckpointError:
                continue
            assert (folder / "model.safetensors").read_bytes() == real
    finally:
        done.set()
        thread.join()
    (shared / "model.safetensors").write_bytes(real)
    assert (kept.fetch(found) / "model.safetensors").read_bytes() == real


@pytest.mark.parametrize("where", ["checkpoints", "checkpoints/round_0", "checkpoints/round_0/node"])
def test_a_link_in_place_of_a_folder_leads_nowhere(settings, tmp_path, where):
    policy = Policy.load(settings, "")
    outside = tmp_path / "outside"
    (outside / "round_0" / "node").mkdir(parents=True)
    (outside / "node").mkdir()
    (outside / "precious").write_bytes(b"mine")
    before = sorted(path for path in outside.rglob("*"))
    link = tmp_path / "shared" / where
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    for number in (0, 1, 2):
        save(policy, place(number), tmp_path, "node", keep=1)
    assert sorted(path for path in outside.rglob("*")) == before
    assert rounds(elsewhere(tmp_path)) == [(2, False)]


def test_a_disk_error_is_reported_as_one(settings, tmp_path):
    """safetensors has errors of its own; here the kernel refuses files of more than a few bytes."""
    policy = Policy.load(settings, "")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            save(policy, place(0), tmp_path, "node", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    assert error.value.filename == str(tmp_path / "private" / "node" / "round_0")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_folder_that_another_node_tidies_away_meanwhile_is_made_again(settings, tmp_path, monkeypatch):
    """Another node finds the folder of a round empty and removes it before the copy is in it."""
    opening, tidied = os.open, []

    def open_late(path, flags, *mode, dir_fd=None):
        if path == "round_0" and dir_fd is not None and not tidied:
            tidied.append(path)
            os.rmdir(path, dir_fd=dir_fd)
        return opening(path, flags, *mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_late)
    save(Policy.load(settings, ""), place(0), tmp_path, "node", 1)
    assert tidied and (tmp_path / "shared/checkpoints/round_0/node/place.json").exists()


def test_moments_that_are_incomplete_in_a_checkpoint_begin_anew(settings, tmp_path, caplog):
    """Moments that are incomplete because memory ran out while they were allocated."""
    policy = Policy.load(settings, "")
    folder = save(policy, place(0), tmp_path, "node", keep=5)
    first, second = policy.trainer.parameters()[:2]
    whole = {name: torch.zeros_like(first) for name in ("exp_avg", "exp_avg_sq")}
    state = {"0/step": torch.zeros(()), "1/step": torch.zeros(())}
    state |= {f"0/{name}": values for name, values in whole.items()} | {"1/exp_avg": torch.zeros_like(second)}
    save_file(state, folder / "optimizer.safetensors")
    other = resumed(settings, folder)
    assert "the moments of parameter 1 in" in caplog.text and "parameter 0" not in caplog.text
    for one in (policy, other):
        teach(one, "4", "7")
    for a, b in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_nothing_else_that_a_node_has_signed_is_a_checkpoint(settings, tmp_path):
    """A publication has all the fields of a place, and no files: it would be a model that never learned."""
    policy = Policy.load(settings, "")
    save(policy, place(4), tmp_path, "node", keep=5)
    said = Publication(
        peer_id="", kind="rollouts", swarm="swarm", node="node", round=5, stage=0, timestamp=1.0, model="m",
        policy_version=9, sampling=Sampling(1.0, 1.0, 0, 8), rollouts={},
    )  # fmt: skip
    forged = tmp_path / "shared" / "checkpoints" / "round_5" / "node"
    forged.mkdir(parents=True)
    (forged / "place.json").write_bytes(seal(said, ME, compress=True))
    assert rounds(of(tmp_path)) == [(4, True), (4, False)]
    (forged / "place.json").write_bytes(seal(place(5), ME))  # signed before it was a checkpoint
    assert rounds(of(tmp_path)) == [(4, True), (4, False)]
    with pytest.raises(Rejected):
        unseal((tmp_path / "shared/checkpoints/round_4/node/place.json").read_bytes(), State)


def test_many_invented_folders_of_rounds_cost_little(settings, tmp_path, caplog):
    mine = of(tmp_path, keep=2)
    for number in (1, 2, 3):
        mine.save(None, place(number))
    for number in range(500):
        (tmp_path / "shared" / "checkpoints" / f"round_{1000 + number}" / "node").mkdir(parents=True)
    mine.save(None, place(4))
    kept = [path.parents[1].name for path in (tmp_path / "shared" / "checkpoints").glob("*/node/place.json")]
    assert sorted(kept) == ["round_3", "round_4"], "the own ones are kept and removed as ever"
    (found, *_) = elsewhere(tmp_path).written("swarm")
    assert found.place.round == 4
    assert sum("is skipped" in record.message for record in caplog.records) <= checkpoints.MAX_LOGGED
