"""Keeps a node's private directory, where only this user may write.

A swarm's folder is open to every user who can write there. So a node keeps its logs, checkpoints and settings here and
copies them to the folder for readers. From the folder it takes back only what its own key has signed: it copies a file
here first, verifies the copy, and loads that.
"""

import os
import re
import stat
from pathlib import Path

from rl_swarm.errors import UserError
from rl_swarm.protocol.wire import canonical, digest
from rl_swarm.storage.files import SWARMS
from rl_swarm.storage.settings import StorageSettings

KEY, NAME = 16, 40  # characters of a digest that tells directories apart, and of the name before it


def private_root(settings: StorageSettings) -> Path:
    """Return the directory of all private files, `PRIVATE_PATH`; by default in the user's home."""
    if settings.private_path:
        return Path(settings.private_path).expanduser().absolute()
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state).absolute() / "rl-swarm"


def check(settings: StorageSettings, root: Path) -> None:
    """Raise `UserError` if the private directory cannot be used for a swarm in this folder."""
    named = root.parent.parent if root.parent.name == SWARMS else root
    private, shared = os.path.realpath(private_root(settings)), os.path.realpath(named)
    if Path(private).is_relative_to(shared):
        raise UserError(
            f"PRIVATE_PATH={private} lies in the swarm's folder {shared}, where others can write. Set it to a "
            "directory outside of that folder."
        )
    _made(settings, "logs")


def swarm_folder(settings: StorageSettings, where: Path | str, swarm: str) -> Path:
    """Returns, and makes, the private directory for a swarm in a directory or at a URL."""
    if isinstance(where, Path):
        check(settings, where)
    shared = where if isinstance(where, str) else os.path.realpath(where)
    return _made(settings, f"{_short(shared)}-{digest(canonical([shared, swarm]))[:KEY]}")


def remember_swarm(settings: StorageSettings, root: Path, swarm: str) -> None:
    """Keep which swarm this user has started in a directory."""
    _remembered(settings, root).write_text(swarm)


def started_swarm(settings: StorageSettings, root: Path) -> str:
    """Tell which swarm this user has started in a directory; empty where none was."""
    try:
        return _remembered(settings, root).read_text()
    except OSError:
        return ""


def _remembered(settings: StorageSettings, root: Path) -> Path:
    shared = os.path.realpath(root)
    return _made(settings, "runs") / f"{_short(shared)}-{digest(shared.encode())[:KEY]}"


def _short(shared: str) -> str:
    """Make a short name of harmless letters from that of a directory or a URL."""
    return re.sub("[^A-Za-z0-9.-]+", "-", os.path.basename(shared))[-NAME:].strip("-.") or "swarm"


def log_file(settings: StorageSettings, root: Path) -> Path:
    """Return the private file behind the `swarm.log` of a folder, which is begun before its swarm is known."""
    shared = os.path.realpath(root)
    return _made(settings, "logs") / f"{_short(shared)}-{digest(shared.encode())[:KEY]}.log"


def _made(settings: StorageSettings, name: str) -> Path:
    """Make a private directory; a clear error where others could write to it."""
    root = private_root(settings)
    folder = root / name
    try:
        for each in (root, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = each.stat()
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UserError(
                    f"{each} belongs to another user, or others can write to it. A node's private files need a "
                    f"directory of their own: `chmod 700 {each}`, or set PRIVATE_PATH to another one."
                )
    except OSError as error:
        raise UserError(
            f"The private directory {folder} cannot be made ({error.strerror}). Set PRIVATE_PATH to a directory that "
            "this user can write to."
        ) from error
    return folder
