"""Keeps documents as files, in any shared folder: a mounted Google Drive, NFS, a local disk, or a bucket.

No server and no open port is needed. A synced folder is unreliable: listings lag, files appear late, twice or
truncated, and reads fail for a moment. So the exchange asks for rollouts by name and depends on no listing. Every
document carries its digest, and what cannot be read yet is read again with growing pauses.
"""

from collections.abc import Mapping
from pathlib import Path

from rl_swarm.network.documents import DocumentKey, Kind
from rl_swarm.network.layout import FOLDERS, folder_of, node_of, path_of, round_folder
from rl_swarm.storage.files import ROUND_FOLDER, Files, LocalFiles


class FolderStore:
    def __init__(self, files: Files) -> None:
        self.files = files

    @classmethod
    def at(cls, root: Path) -> "FolderStore":
        return cls(LocalFiles(root))

    def make(self) -> None:
        """Make the directory, where there is none."""
        if isinstance(self.files, LocalFiles):
            self.files.make()

    @property
    def root(self) -> Path | str:
        return self.files.root

    def name(self, key: DocumentKey) -> str:
        return path_of(key)

    def read(self, key: DocumentKey, limit: int) -> bytes:
        return self.files.read(path_of(key), limit)

    def write(self, key: DocumentKey, data: bytes) -> None:
        self.files.write(path_of(key), data)

    def append(self, key: DocumentKey, data: bytes, at: int | None = None) -> None:
        self.files.append(path_of(key), data, at)

    def nodes(self, group: DocumentKey) -> list[str]:
        return [node for node in map(node_of, self.files.names(folder_of(group))) if node is not None]

    def rounds(self, kind: Kind) -> list[int]:
        found = map(ROUND_FOLDER.fullmatch, self.files.names(FOLDERS[kind]))
        return sorted(int(match[1]) for match in found if match)

    def remove_rollouts(self, round: int, archive: bool) -> None:
        folder = round_folder(Kind.ROLLOUTS, round)
        if archive:
            self.files.move(folder, round_folder(Kind.ARCHIVE, round))
        else:
            self.files.remove(folder)

    def stamp(self, key: DocumentKey) -> tuple[int, ...] | None:
        """Return time, size and inode of a file: clocks of file systems are coarse."""
        if not isinstance(self.files, LocalFiles):
            return None
        try:
            found = self.files.stat(path_of(key))
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def subnets(self) -> Mapping[str, str]:
        return {}
