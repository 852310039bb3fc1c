"""Remembers the owner of the swarm at an address, so that no manifest of another owner takes its place.

The user names the owner (`owner`), or gives an invitation, which the owner signed for this manifest. Otherwise the node
remembers the first owner that it finds at an address, in a file beside its key, and refuses any other one from then on.
"""

import logging
from pathlib import Path

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.network.address import is_url
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, convert, decode
from rl_swarm.storage.files import LocalFiles

log = logging.getLogger(__name__)

MAX_ADDRESSES = 1000  # that are remembered; the oldest go


class OwnerError(UserError):
    """Reports a manifest of an unexpected owner; the message names both, and what to do."""


def check(manifest: Manifest, address: Path | str, settings: NetworkSettings) -> None:
    """Raise `OwnerError` unless the manifest is signed by the named owner, or by the remembered one."""
    owner = manifest.peer_id
    if settings.owner is not None:
        if settings.owner != owner:
            raise OwnerError(
                f"The manifest.json in {address} is signed by {owner}, and SWARM_OWNER={settings.owner} says whose it "
                "should be. It may have been exchanged: ask the owner for the address, or correct "
                "SWARM_OWNER."
            )
    elif not settings.invitation:  # a node that has one checks it when it asks for admission
        first = _remembered(_file(settings)).get(_place(address), owner)
        if first != owner:
            raise OwnerError(
                f"The manifest.json in {address} is signed by {owner}, and when this node first came here it was by "
                f"{first}. It may have been exchanged: ask the owner. If the swarm is {owner}'s now, join with "
                f"SWARM_OWNER={owner}; this node remembers it."
            )


def remember(manifest: Manifest, address: Path | str, settings: NetworkSettings) -> None:
    """Remember the owner, once this node was admitted. A named owner only corrects an entry that is there."""
    file, here = _file(settings), _place(address)
    known = _remembered(file)
    if known.get(here) == manifest.peer_id or (settings.owner and here not in known):
        return
    known.pop(here, None)
    latest = [*known.items(), (here, manifest.peer_id)][-MAX_ADDRESSES:]
    try:
        LocalFiles(file.parent).write(file.name, msgspec.json.format(msgspec.json.encode(dict(latest))))
    except OSError as error:  # a node that does not remember is better than none
        log.warning("%s cannot be written, so the owner of %s is not remembered: %s", file, here, error)


def _place(address: Path | str) -> str:
    """Return the same text for an address, whatever the working directory."""
    return str(address) if is_url(address) else str(Path(address).resolve())


def _file(settings: NetworkSettings) -> Path:
    return Path(settings.identity_path).with_suffix(".owners.json")


def _remembered(file: Path) -> dict[str, str]:
    try:
        return convert(decode(LocalFiles(file.parent).read(file.name, MAX_BYTES)), dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, Rejected) as error:
        raise OwnerError(
            f"{file}, where this node remembers the owners of swarms, cannot be read ({error}). Move it away, and the "
            "present owner will be remembered; set SWARM_OWNER if you know who that should be."
        ) from error
