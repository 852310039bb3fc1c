"""Keeps the settings of a run of `up`, so that it can be resumed: private, and signed in its folder.

Other users may be able to write to the folder. So a run is resumed with the private copy. On another machine it is
resumed with the copy in the folder, if this user's key has signed that for this swarm.
"""

import logging
from pathlib import Path
from typing import Literal

import msgspec

from rl_swarm.errors import UserError
from rl_swarm.network.documents import MANIFEST, DocumentStore
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.owner_documents import read_manifest
from rl_swarm.node.settings import NodeSettings
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.wire import Id, Rejected, convert, decode, seal, unseal
from rl_swarm.sections import settings_of
from rl_swarm.storage.files import Files, LocalFiles, Refused
from rl_swarm.storage.private import remember_swarm, started_swarm, swarm_folder

log = logging.getLogger(__name__)

SETTINGS_FILE = "settings.json"
SETTINGS_BYTES = 1 << 18


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the settings that a run was started with, without secrets."""

    peer_id: Id = ""
    kind: Literal["settings"] = "settings"
    swarm: Id
    settings: dict[str, object]


def keep(settings: NodeSettings, root: Path, manifest: Manifest, owner: Identity) -> None:
    """Write the settings of a run, privately and into its folder."""
    secrets = {known.name for known in settings_of(type(settings)) if known.secret}
    values = {name: value for name, value in settings.flat().items() if name not in secrets}
    values["identity_path"] = str(Path(settings.network.identity_path).absolute())
    data = seal(RunSettings(swarm=manifest.swarm(), settings=values), owner, limit=SETTINGS_BYTES)
    own = LocalFiles(swarm_folder(settings.storage, root, manifest.swarm()))
    own.write(SETTINGS_FILE, data)
    FolderStore(own).write(MANIFEST, seal(manifest, owner))
    remember_swarm(settings.storage, root, manifest.swarm())
    LocalFiles(root).write(SETTINGS_FILE, data)


def manifest_of(store: DocumentStore, root: Path, settings: NodeSettings) -> Manifest | None:
    """Return the manifest of a run that this user started, also if its file was exchanged; None for other swarms."""
    swarm = started_swarm(settings.storage, root)
    if not swarm:
        return None
    try:
        kept = read_manifest(FolderStore.at(swarm_folder(settings.storage, root, swarm)))
        if read_manifest(store).peer_id == kept.peer_id:  # the same, or a later run of the same user
            return None
    except (FileNotFoundError, Refused):
        return None
    except (OSError, Rejected) as error:
        log.debug("the manifest cannot be read: %s", error)
    log.warning("the manifest in %s is not the one of this run, whose private copy is used", root)
    return kept


def resumed(run: Path, user: NodeSettings) -> dict[str, object]:
    """Return the settings that a run was started with; raise `UserError` where none are this user's own."""
    files = LocalFiles(run)
    try:
        manifest = read_manifest(FolderStore(files))
    except (OSError, Rejected) as error:
        raise UserError(f"--resume {run}: that is no run of `rl-swarm up`. `rl-swarm runs` lists yours.") from error
    if started_swarm(user.storage, run) not in ("", manifest.swarm()):
        raise UserError(
            f"--resume {run}: its manifest.json is not the one of the run that you started there. It was "
            "exchanged, or another run was copied over it."
        )
    private = LocalFiles(swarm_folder(user.storage, run, manifest.swarm()))
    try:
        return convert(decode(private.read(SETTINGS_FILE, SETTINGS_BYTES)), RunSettings).settings
    except (OSError, Rejected):  # another machine, or a directory that was moved
        pass
    key = Path(user.network.identity_path)
    try:
        found = read(files, manifest)
    except (OSError, Rejected) as error:
        raise UserError(
            f"--resume {run}: its {SETTINGS_FILE} cannot be used ({error}). It was changed, or it is missing. "
            "Join the swarm by itself instead, with settings that you give: `rl-swarm coordinate` and `rl-swarm join`."
        ) from error
    if not key.is_file() or Identity.load(key).peer_id != manifest.peer_id:
        raise UserError(
            f"--resume {run}: its settings are signed by {manifest.peer_id}, and IDENTITY_PATH={key} is not that key. "
            "Give the key that the run was started with: --identity-path."
        )
    return found.settings


def read(files: Files, manifest: Manifest) -> RunSettings:
    """Read the settings in a run's folder, if its owner has signed them; raise `OSError` or `Rejected` if not."""
    found = unseal(files.read(SETTINGS_FILE, SETTINGS_BYTES), RunSettings, SETTINGS_BYTES)
    if (found.peer_id, found.swarm) != (manifest.peer_id, manifest.swarm()):
        raise Rejected(RejectReason.OWNER, "not signed by the swarm's owner")
    return found
