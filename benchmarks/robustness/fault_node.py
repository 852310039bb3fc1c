"""Starts a node as `rl-swarm` does, with a clock and a drive that can fail.

    python -m benchmarks.robustness.fault_node FOLDER join ADDRESS …

`FOLDER/control.json` says, at any moment, by how much this process's clock is wrong and how badly its drive behaves.
The node records what it believes in `FOLDER/seen.jsonl`: the members, what it published, and what it accepted.
"""

import errno
import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTROL, SEEN = "control.json", "seen.jsonl"
LOOK_SECONDS = 0.1
AGAIN_SECONDS = 1.5  # until a duplicated write is repeated
OVERTAKEN = 1.0  # largest delay in seconds of a write that others overtake
here = Path()
real_time = time.time


class Control:
    """Reads which faults the runner wants in this process."""

    def __init__(self, path: Path) -> None:
        self.path, self.values, self.next_look = path, dict[str, Any](), 0.0

    def __call__(self, name: str) -> float:
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_SECONDS
            try:
                self.values = json.loads(self.path.read_text())
            except FileNotFoundError:
                self.values = {}
        return float(self.values.get(name, 0.0))


def note(what: str, **values: object) -> None:
    line = json.dumps({"what": what, "time": real_time(), **values})
    with (here / SEEN).open("a") as file:
        file.write(line + "\n")


def make_drive(control: Control) -> type:
    """Make a directory that syncs badly for as long as the control file says so."""
    from rl_swarm.storage.files import LocalFiles

    class Drive(LocalFiles):
        def __init__(self, root: Path) -> None:
            super().__init__(root)
            self.pending: dict[str, bytes] = {}  # written, and not visible to others yet

        def read(self, path: str, limit: int) -> bytes:
            self._meet(path)
            ours = self.pending.get(path)
            return ours[: limit + 1] if ours is not None else super().read(path, limit)

        def write(self, path: str, data: bytes) -> None:
            self._meet(path)
            late = control("delay")
            if random.random() < control("reorder"):
                late += random.random() * OVERTAKEN
            if late:
                self.pending[path] = data
                self._later(late, path, data)
            else:
                self.pending.pop(path, None)
                super().write(path, data)
            if random.random() < control("duplicate"):
                stem, _, ending = path.rpartition(".")
                super().write(f"{stem} (1).{ending}", data)
                self._later(late + AGAIN_SECONDS, path, data)  # over what was written meanwhile

        def append(self, path: str, data: bytes, at: int | None = None) -> None:
            self._meet(path)
            super().append(path, data, at)

        def names(self, folder: str) -> list[str]:
            self._meet(folder)
            return super().names(folder)

        def _later(self, seconds: float, path: str, data: bytes) -> None:
            def arrive() -> None:
                if self.pending.get(path) == data:
                    del self.pending[path]
                LocalFiles.write(self, path, data)

            timer = threading.Timer(seconds, arrive)
            timer.daemon = True
            timer.start()

        def _meet(self, path: str) -> None:
            if control("partition") or random.random() < control("loss"):
                raise OSError(errno.EIO, "the drive does not answer", path)

    return Drive


def watch_what_it_believes() -> None:
    from rl_swarm.network.coordinator import DocumentCoordinator
    from rl_swarm.network.exchange import DocumentExchange
    from rl_swarm.protocol.rollouts import Publication
    from rl_swarm.protocol.rounds import State
    from rl_swarm.protocol.wire import canonical

    def content(publication: Publication) -> str:
        import msgspec

        return hashlib.sha256(canonical(msgspec.to_builtins(publication.rollouts))).hexdigest()[:16]

    known: dict[str, str] = {}

    def viewed(current: Callable[[Any], State]) -> Callable[[Any], State]:
        def look(self: Any) -> State:
            state = current(self)
            members = {member.node: peer_id for peer_id, member in state.members.items()}
            if members != known:
                known.clear()
                known.update(members)
                note("members", members=members)
            return state

        return look

    publish, checked = DocumentExchange.publish, DocumentExchange._checked

    def published(self: Any, publication: Publication) -> None:
        note("published", round=publication.round, content=content(publication))
        publish(self, publication)

    def accepted(self: Any, data: bytes, key: tuple[int, int, str]) -> Publication:
        publication = checked(self, data, key)
        note("accepted", round=publication.round, author=publication.node, content=content(publication))
        return publication

    DocumentExchange.publish = published  # type: ignore[method-assign]
    DocumentExchange._checked = accepted  # type: ignore[method-assign]
    DocumentCoordinator.current = viewed(DocumentCoordinator.current)  # type: ignore[method-assign]
    try:
        from rl_swarm.network.p2p.clock_rounds import ClockCoordinator
    except ImportError:
        return
    ClockCoordinator.current = viewed(ClockCoordinator.current)  # type: ignore[method-assign]


def main() -> None:
    global here
    here = Path(sys.argv[1]).absolute()
    control = Control(here / CONTROL)
    time.time = lambda: real_time() + control("clock")  # before anything is imported that keeps it
    sys.argv = ["rl-swarm", *sys.argv[2:]]

    from rl_swarm.cli import main as rl_swarm
    from rl_swarm.network import address

    drive = make_drive(control)

    class FaultyStore(address.FolderStore):
        @classmethod
        def at(cls, root: Path) -> "FaultyStore":
            return cls(drive(root))

    address.FolderStore = FaultyStore  # type: ignore[misc]
    watch_what_it_believes()
    rl_swarm()


if __name__ == "__main__":
    main()
