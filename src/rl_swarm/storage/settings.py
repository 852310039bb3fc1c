"""Defines the settings of folders: the shared one of a swarm, and the node's private one."""

from typing import Annotated, ClassVar

from rl_swarm.protocol.wire import Name
from rl_swarm.sections import Section, setting


class StorageSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "Folders"

    gdrive_path: Annotated[
        str | None, setting("root of the folder swarm: any shared directory, or the URL of a store", "GDRIVE_PATH")
    ] = None
    experiment_name: Annotated[Name | None, setting("the swarm's name below that root", "EXPERIMENT_NAME")] = None
    private_path: Annotated[
        str | None,
        setting(
            "the directory for a node's own logs, checkpoints and settings, where only this user may "
            "write; by default `~/.local/state/rl-swarm`",
            "PRIVATE_PATH",
        ),
    ] = None
