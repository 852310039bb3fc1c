"""A node's model, optimiser and place in the swarm, written whole or not at all.

Random numbers are drawn from seeds made of the swarm's seed, the peer and the round, so the round
number is the random state. No pickle: weights and optimiser are safetensors, the rest is JSON. Checkpoints lie
in the swarm's folder, where others may write: `place.json` is signed and has the digest of every other file.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rl_swarm.errors import UserError
from rl_swarm.identity import Identity
from rl_swarm.network.files import open_plain
from rl_swarm.trust import Kept
from rl_swarm.wire import Rejected, seal, unseal

if TYPE_CHECKING:
    from rl_swarm.learning.policy import Policy

log = logging.getLogger(__name__)

PLACE = "place.json"
PLACE_BYTES = 1 << 16
MKDIR_TRIES = 10
MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # what Adam keeps of a parameter
OS_ERROR = re.compile(r"\(os error (\d{1,4})\)")


class CheckpointError(UserError):
    """A checkpoint that cannot be used."""


class Place(msgspec.Struct, frozen=True):
    """Where a checkpoint stands: the stage it had finished."""

    swarm: str
    peer_id: str
    model: str
    round: int
    stage: int
    policy_version: int
    files: dict[str, str] = {}  # the SHA-256 of each
    standing: Kept = {}  # of peers
    role: dict[str, object] | msgspec.UnsetType = msgspec.UNSET  # what its role remembers


def save(policy: "Policy | None", place: Place, root: Path, node: str, keep: int, identity: Identity) -> Path:
    """Writes checkpoints/round_<r>/<node>/ and removes this node's older ones but `keep`. A model that does not learn is
    not written."""
    target = root / f"round_{place.round}" / node
    if not root.parent.is_dir():  # a drive that was unmounted is not made anew
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root.parent))
    aside = target.with_name(f".{node}.{os.getpid()}.tmp")
    for left in root.glob(f"round_*/.{node}.*.tmp"):  # by a process that was killed while it saved
        if left.name[len(node) + 2 : -4].isdigit():
            shutil.rmtree(left, ignore_errors=True)
    _make(aside)
    try:
        if policy is not None:
            policy.save(aside)
            save_file(_flat(policy.trainer.optimizer), aside / "optimizer.safetensors")
        place = msgspec.structs.replace(place, files=_digests(aside))
        (aside / PLACE).write_bytes(seal(place, identity, limit=PLACE_BYTES))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if told := OS_ERROR.search(str(error)):  # safetensors tells a full disk in its own way
            raise OSError(int(told[1]), os.strerror(int(told[1])), str(target)) from error
        raise
    for number, folder in sorted(_existing(root, node), reverse=True)[keep:]:
        if number != place.round:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_if_empty(folder.parent)
    return target


def _make(folder: Path) -> None:
    """Makes a folder, although other nodes remove its parent whenever they find it empty."""
    for _ in range(MKDIR_TRIES):
        with suppress(FileNotFoundError):
            folder.mkdir(parents=True)
            return
    folder.mkdir(parents=True)


def written(root: Path, node: str, swarm: str, peer_id: str) -> Iterator[tuple[Path, Place]]:
    """The checkpoints of this node in this swarm, newest first."""
    for _, folder in sorted(_existing(root, node), reverse=True):
        try:
            with open_plain(folder / PLACE, "rb") as file:
                place = unseal(file.read(PLACE_BYTES + 1), Place, PLACE_BYTES)
        except (OSError, Rejected) as error:
            log.warning("the checkpoint %s is passed over: %s", folder, error)
            continue
        if place.swarm == swarm and place.peer_id == peer_id:
            yield folder, place


def verify(folder: Path, place: Place) -> None:
    """Raises unless the files are those that the node wrote."""
    try:
        found = _digests(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be used: {error}") from error
    changed = sorted({name for name, _ in found.items() ^ place.files.items()})
    if changed:
        raise CheckpointError(
            f"{folder} cannot be used: {', '.join(changed[:3])} is not as this node wrote it"
        )


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name != PLACE and (path.is_symlink() or not path.is_dir()):
            with open_plain(path, "rb") as file:
                sha = hashlib.sha256()
                while chunk := file.read(1 << 20):
                    sha.update(chunk)
                found[name] = sha.hexdigest()
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
        elif values:  # memory ran out while they were made, so no step was taken with them
            log.warning("the moments of parameter %d in %s are incomplete: they begin anew", number, folder)


def _flat(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{number}/{name}": value.detach().to("cpu", copy=True).contiguous()
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def _existing(root: Path, node: str) -> list[tuple[int, Path]]:
    return [
        (int(folder.name[6:]), folder / node)
        for folder in root.glob("round_*")
        if folder.name.isascii() and folder.name[6:].isdigit() and (folder / node).is_dir()
    ]


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
