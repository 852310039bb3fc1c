"""Writes checkpoints of a node: model, optimiser and place in the swarm, atomically.

Random numbers are drawn from seeds made of the swarm's seed, the peer and the round, so the round
number is the random state. No pickle: weights and optimiser are safetensors, the rest is JSON.

A checkpoint is written to the node's private directory and copied to the swarm's folder. `place.json` is signed and has
size and digest of every other file. A checkpoint that is only in the folder is copied back into the private directory,
verified on the way, and loaded from there: only verified files are loaded.
"""

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_swarm.errors import UserError
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.wire import Count, Id, Rejected, seal, unseal
from rl_swarm.storage.files import LASTING, ROUND_FOLDER, LocalFiles

if TYPE_CHECKING:
    from rl_swarm.learning.policy import Policy

log = logging.getLogger(__name__)

PLACE = "place.json"
PLACE_BYTES = 1 << 16
SHARED = "checkpoints"  # in the swarm's folder
MAX_LISTED = 2000  # folders of rounds that are searched for a checkpoint, the newest first
MAX_PRUNED = 64  # that are searched for an old checkpoint to remove
MAX_LOGGED = 5  # skipped checkpoints that are named in the log
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # what Adam keeps of a parameter
OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")


MAX_KEPT = 256  # peers in a checkpoint: the worst ones
# By peer: its failures, and the round from which it is asked again.
KeptReputation = Annotated[dict[Id, tuple[Count, Count]], Meta(max_length=MAX_KEPT)]


class CheckpointError(UserError):
    """Raised when a checkpoint cannot be used."""


class Place(msgspec.Struct, frozen=True):
    """Tells the place of a checkpoint in the swarm, the last finished stage, and the digests of its files."""

    swarm: str
    peer_id: str  # of the signer
    model: str
    round: int
    stage: int
    policy_version: int
    kind: Literal["", "checkpoint"] = ""  # tells it from other documents that this key signs
    node: str = ""
    files: dict[str, tuple[int, str]] = {}  # size and SHA-256 of each
    logs: dict[str, tuple[int, str]] = {}  # of the node's logs at that time
    standing: KeptReputation = {}  # of peers
    role: dict[str, object] | msgspec.UnsetType = msgspec.UNSET  # the state of its role


@dataclass(frozen=True)
class Saved:
    """Names a checkpoint that was found, in the private directory or else in the swarm's folder."""

    place: Place
    private: Path | None = None


class Checkpoints:
    """Writes and finds the checkpoints of one node."""

    def __init__(
        self,
        private: Path,
        signer: Identity,
        node: str,
        files: LocalFiles | None = None,
        keep: int = 2,
        keep_private: int = 1,
    ) -> None:
        self.private, self.signer, self.node, self.files = private, signer, node, files
        self.keep, self.keep_private = keep, keep_private  # how many of the newest, in the folder and here
        self._is_in_folder = False  # whether the last one is
        self._skipped = 0  # that could not be used

    def save(self, policy: "Policy | None", place: Place) -> Path:
        """Write a checkpoint, copy it to the folder, remove older ones, and return the private directory.

        A model that does not learn (None) is not written.
        """
        target = self.private / f"round_{place.round}"
        aside = self._aside()
        try:
            if policy is not None:
                policy.save(aside)
                save_file(_flat(policy.trainer.optimizer), aside / "optimizer.safetensors")
            place = msgspec.structs.replace(place, kind="checkpoint", node=self.node, files=_digests(aside))
            (aside / PLACE).write_bytes(seal(place, self.signer, limit=PLACE_BYTES))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(aside, target)
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if found := OS_ERROR.search(str(error)):  # safetensors hides the errno in its message
                raise OSError(int(found[1]), os.strerror(int(found[1])), str(target)) from error
            raise
        for number in sorted(self._private_rounds() - {place.round}, reverse=True)[self.keep_private - 1 :]:
            shutil.rmtree(self.private / f"round_{number}", ignore_errors=True)
        self._copy(place.round)
        return target

    def _aside(self) -> Path:
        """Make a directory to write in, and remove those that killed processes left."""
        self.private.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self.private.glob(".new-*"):
            shutil.rmtree(left, ignore_errors=True)
        aside = self.private / f".new-{secrets.token_hex(4)}"
        aside.mkdir()
        return aside

    def _copy(self, number: int) -> None:
        """Copy a checkpoint to the folder. Damage to the folder by peers fails the copy, not the node."""
        if self.files is None:
            return
        self._is_in_folder = False
        try:
            self.files.copy_in(self.private / f"round_{number}", self.shared(number))
            self._is_in_folder = True
            older = [round for round in self._shared_rounds(number)[:MAX_PRUNED] if self._is_copied(round)]
            for round in older[self.keep - 1 :]:
                self.files.remove(self.shared(round))
                self.files.remove_if_empty(f"{SHARED}/round_{round}")
        except OSError as error:
            if error.errno in LASTING and error.errno not in (errno.EACCES, errno.EPERM):
                raise
            if not self.files.has_folder(""):  # a drive that was unmounted
                raise
            log.warning("the checkpoint of round %d is not copied to the folder: %s", number, error)

    def shared(self, number: int) -> str:
        """Return the path of a copy in the swarm's folder."""
        return f"{SHARED}/round_{number}/{self.node}"

    def written(self, swarm: str) -> Iterator[Saved]:
        """Yield this node's checkpoints in this swarm, newest first; private ones before copies of the same round."""
        found = [(number, True) for number in self._private_rounds()]
        copied = [number for number in self._shared_rounds() if self._is_copied(number)]
        for number, private in sorted({*found, *((number, False) for number in copied)}, reverse=True):
            saved = self._read(number, private)
            if saved and (saved.place.swarm, saved.place.round) == (swarm, number):
                yield saved

    def fetch(self, saved: Saved) -> Path:
        """Return a private directory with the verified files of a checkpoint; raise `CheckpointError`."""
        place = saved.place
        if saved.private is not None:
            verify(saved.private, place)
            return saved.private
        assert self.files is not None
        aside, target = self._aside(), self.private / f"round_{place.round}"
        try:
            self.files.copy_out(self.shared(place.round), aside, place.files)
            (aside / PLACE).write_bytes(seal(place, self.signer, limit=PLACE_BYTES))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(aside, target)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"{self.shared(place.round)} cannot be used: {error.filename}: {error.strerror}"
            ) from error
        return target

    def clear(self) -> None:
        """Remove the private checkpoints of a run that has ended, if the last one is in the folder too."""
        if self._is_in_folder:
            shutil.rmtree(self.private, ignore_errors=True)

    def _read(self, number: int, private: bool) -> Saved | None:
        where = f"{self.private}/round_{number}" if private else self.shared(number)
        try:
            if private:
                data = LocalFiles(self.private).read(f"round_{number}/{PLACE}", PLACE_BYTES)
            else:
                assert self.files is not None
                data = self.files.read(f"{where}/{PLACE}", PLACE_BYTES)
            place = unseal(data, Place, PLACE_BYTES)
            if (place.kind, place.peer_id, place.node) != ("checkpoint", self.signer.peer_id, self.node):
                raise Rejected(RejectReason.OWNER, "not signed by this node")
        except (OSError, Rejected) as error:
            self._skipped += 1
            if self._skipped <= MAX_LOGGED:
                log.warning("the checkpoint %s is skipped: %s", where, error)
            return None
        return Saved(place, self.private / f"round_{number}" if private else None)

    def _private_rounds(self) -> set[int]:
        return _rounds(LocalFiles(self.private).names(""))

    def _shared_rounds(self, before: int | None = None) -> list[int]:
        """List the rounds that have a folder, newest first; with `before`, only earlier ones."""
        try:
            names = self.files.names(SHARED) if self.files else []
        except OSError as error:
            log.warning("the checkpoints in the folder cannot be listed: %s", error)
            return []
        found = [number for number in _rounds(names) if before is None or number < before]
        return sorted(found, reverse=True)[:MAX_LISTED]

    def _is_copied(self, number: int) -> bool:
        return self.files is not None and self.files.has_folder(self.shared(number))


def _rounds(names: list[str]) -> set[int]:
    return {int(match[1]) for match in map(ROUND_FOLDER.fullmatch, names) if match}


def verify(folder: Path, place: Place) -> None:
    """Raise unless the files of a private directory are those that the node wrote."""
    try:
        found = _digests(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be used: {error}") from error
    changed = sorted({name for name, _ in found.items() ^ place.files.items()})
    if changed:
        raise CheckpointError(f"{folder} cannot be used: {', '.join(changed[:3])} is not as this node wrote it")


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path != folder / PLACE:
            with path.open("rb") as file:
                sha, size = hashlib.sha256(), 0
                while chunk := file.read(1 << 20):
                    sha.update(chunk)
                    size += len(chunk)
                found[path.relative_to(folder).as_posix()] = (size, sha.hexdigest())
    return found


def restore_optimizer(policy: "Policy", folder: Path) -> None:
    try:
        tensors = load_file(folder / "optimizer.safetensors", device=str(policy.device))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be used: {error}") from error
    optimizer = policy.trainer.optimizer
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        values = {name.split("/")[1]: t for name, t in tensors.items() if name.startswith(f"{number}/")}
        if values.keys() >= MOMENTS:
            optimizer.state[parameter] = values
        elif values:  # memory ran out while they were allocated, so no step has used them
            log.warning("the moments of parameter %d in %s are incomplete: they start from zero", number, folder)


def _flat(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{number}/{name}": value.detach().to("cpu", copy=True).contiguous()
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
    }
