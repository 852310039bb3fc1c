"""Defines the settings of folders: the shared one of a swarm, and the node's private one."""

from pathlib import Path
from typing import Annotated, ClassVar

from rl_swarm.errors import ConfigError
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

    def experiment_dir(self) -> Path | str | None:
        """Return the address of the folder swarm that the settings name, if they name one."""
        if self.gdrive_path is None:
            return None
        if self.experiment_name is None:
            raise ConfigError(
                f"GDRIVE_PATH={self.gdrive_path} names the root of a folder swarm, but EXPERIMENT_NAME is not set. "
                "Set it to the swarm's name, for example EXPERIMENT_NAME=my-swarm."
            )
        if "://" in self.gdrive_path:
            return f"{self.gdrive_path.rstrip('/')}/experiments/{self.experiment_name}"
        return Path(self.gdrive_path).expanduser() / "experiments" / self.experiment_name
