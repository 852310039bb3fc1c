"""Remembers whose swarm lies at an address, so that no other owner's manifest takes its place.

A node is told the owner (`owner`), or has an invitation, which the owner signed for this manifest. Otherwise the owner
that a node finds at an address first is remembered beside its key, and anybody else there is refused from then on.
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

MAX_REMEMBERED = 1000  # addresses; the oldest go


class OwnerError(UserError):
    """A manifest of somebody else than it should be; the message says who, and what to do."""


def check(manifest: Manifest, address: Path | str, settings: NetworkSettings) -> None:
    """Raises unless the manifest is by whom this node was told, or by whom it was the first time."""
    owner = manifest.peer_id
    if settings.owner is not None:
        if settings.owner != owner:
            raise OwnerError(
                f"The manifest.json in {address} is signed by {owner}, and SWARM_OWNER={settings.owner} says whose it "
                "should be. Somebody may have put another one there: ask the owner for the address, or correct "
                "SWARM_OWNER."
            )
    elif not settings.invitation:  # a node that has one checks it when it asks for admission
        first = _remembered(_file(settings)).get(_place(address), owner)
        if first != owner:
            raise OwnerError(
                f"The manifest.json in {address} is signed by {owner}, and when this node first came here it was by "
                f"{first}. Somebody may have exchanged it: ask the owner. If the swarm is {owner}'s now, join with "
                f"SWARM_OWNER={owner}; this node remembers it."
            )


def remember(manifest: Manifest, address: Path | str, settings: NetworkSettings) -> None:
    """Keeps who the owner is, once this node was let in. Who was told needs no memory, but an old one is put right."""
    file, here = _file(settings), _place(address)
    known = _remembered(file)
    if known.get(here) == manifest.peer_id or (settings.owner and here not in known):
        return
    known.pop(here, None)
    latest = [*known.items(), (here, manifest.peer_id)][-MAX_REMEMBERED:]
    try:
        LocalFiles(file.parent).write(file.name, msgspec.json.format(msgspec.json.encode(dict(latest))))
    except OSError as error:  # a node that does not remember is better than none
        log.warning("%s cannot be written, so the owner of %s is not remembered: %s", file, here, error)


def _place(address: Path | str) -> str:
    """An address as it is remembered, from wherever it is looked at."""
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
            f"{file}, where this node remembers who owns which swarm, cannot be read ({error}). Move it away, and "
            "whoever owns the swarm then is remembered; set SWARM_OWNER if you know who that should be."
        ) from error
