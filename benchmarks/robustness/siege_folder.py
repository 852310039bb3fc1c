"""Attacks the swarm's folder from processes that may write there: links, pipes, crowds, edits, replays, weights.

They replace copies and put things where honest files will be. They remove no honest document that other nodes still
need: every writer of a folder can stop a swarm that way, and docs/security.md says so.
"""

import itertools
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.lib.paths import HISTORY, MANIFEST, STATE, report_path, rollouts_path
from benchmarks.robustness.siege_hostile import (
    COMMAND,
    JUNK,
    HostileMember,
    Pace,
    Target,
    garbage,
    liar,
    mute,
    unfinished_requests,
)
from rl_swarm.network.folder import FolderStore
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.wire import canonical, digest, seal

CROWD = 30_000  # junk files in one folder
LOGS = ("training_events.jsonl", "metrics.jsonl")
SWARM_LOG = "logs/swarm.log"


class FolderWriter:
    """Changes files in a folder, and never through a link: a change outside is then no work of this class."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def at(self, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """Open the directory of a path, each component without following links."""
        *parents, name = path.split("/")
        here = os.open(self.folder, os.O_DIRECTORY)
        try:
            for parent in parents:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(parent, dir_fd=here)
                inner = os.open(parent, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                os.close(here)
                here = inner
            yield here, name
        finally:
            os.close(here)

    def clear(self, path: str) -> None:
        with suppress(OSError), self.at(path) as (here, name):
            try:
                os.unlink(name, dir_fd=here)
            except IsADirectoryError:
                shutil.rmtree(name, ignore_errors=True, dir_fd=here)

    def symlink(self, to: Path | str, path: str) -> None:
        with suppress(OSError), self.at(path, make=True) as (here, name):
            os.symlink(to, name, dir_fd=here)

    def pipe(self, path: str) -> None:
        with suppress(OSError), self.at(path, make=True) as (here, name):
            os.mkfifo(name, dir_fd=here)

    def directory(self, path: str) -> None:
        with suppress(OSError), self.at(f"{path}/full/of/x", make=True):
            pass

    def put(self, path: str, data: bytes, new: bool = False) -> None:
        """Write a file: over the present one, aside and renamed, or only where there is none."""
        with suppress(OSError), self.at(path, make=True) as (here, name):
            aside = name if new else f".{name}.aside"
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_EXCL if new else os.O_TRUNC)
            with open(os.open(aside, flags, 0o644, dir_fd=here), "wb") as file:
                file.write(data)
            if not new:
                os.rename(aside, name, src_dir_fd=here, dst_dir_fd=here)

    def get(self, path: str) -> bytes:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), self.at(path) as (here, name):
            file = os.open(name, flags, dir_fd=here)
            try:
                return os.read(file, 64 << 20)
            finally:
                os.close(file)
        return b""

    def link(self, old: str, path: str) -> None:
        with suppress(OSError), self.at(old) as (there, source), self.at(path, make=True) as (here, name):
            os.link(source, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)

    def deny(self, path: str) -> None:
        """Take all permissions from a file or a directory."""
        with suppress(OSError), self.at(path) as (here, name):
            found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
            try:
                os.fchmod(found, 0)
            finally:
                os.close(found)

    def names(self, path: str) -> list[str]:
        with suppress(OSError), self.at(f"{path}/x") as (here, _):
            return sorted(os.listdir(here))
        return []


def copies(target: Target) -> list[str]:
    """Return the copies of logs, whose originals their authors keep elsewhere."""
    found = [f"logs/{node}/{name}" for node in target.nodes().values() for name in LOGS]
    return [*found, SWARM_LOG, HISTORY]


def checkpoints(hands: FolderWriter) -> list[str]:
    return [f"checkpoints/{name}" for name in hands.names("checkpoints")]


def links(target: Target, pace: Pace) -> None:
    """Put links to a shell's start file for logs, and links to other directories for directories."""
    profile, precious, hands = target.outside / "profile", target.outside / "precious", FolderWriter(target.folder)
    logs, nodes = itertools.cycle(copies(target)), sorted(target.nodes().values())
    while pace.go(0.2):
        path, ahead = next(logs), target.state().round + 1
        hands.clear(path)
        hands.symlink(profile, path)
        for kind in ("rollouts", "rewards"):  # nothing honest is there yet
            hands.symlink(precious, f"{kind}/round_{ahead}")
        copied = ["archives", "checkpoints", *checkpoints(hands), "logs", f"logs/{pace.rng.choice(nodes)}"]
        folder = pace.rng.choice(copied)
        hands.clear(folder)
        hands.symlink(precious, folder)


def pipes(target: Target, pace: Pace) -> None:
    """Put pipes, full directories and links to devices for logs and for documents of the coming round."""
    hands = FolderWriter(target.folder)
    logs, nodes = itertools.cycle(copies(target)), sorted(target.nodes().values())
    ways: list[Callable[[str], None]] = [
        hands.pipe, hands.directory, lambda path: hands.symlink("/dev/zero", path),
        lambda path: hands.symlink("/dev/stdin", path),
    ]  # fmt: skip
    while pace.go(0.2):
        path, ahead, node = next(logs), target.state().round + 1, pace.rng.choice(nodes)
        hands.clear(path)
        pace.rng.choice(ways)(path)
        for coming in (report_path(ahead, 0, node), rollouts_path(ahead, 0, node), f"peers/x{pace.done % 50}.json"):
            pace.rng.choice(ways)(coming)


def crowd(target: Target, pace: Pace) -> None:
    """Fill the folders of coming rounds with junk, beside `peers`, which was filled before."""
    hands, filled = FolderWriter(target.folder), list[str]()
    while pace.go():
        ahead = target.state().round + 2
        for kind in ("rewards", "rollouts"):
            filled.append(f"{kind}/round_{ahead}/stage_0")
            fill(hands, filled[-1], pace)
            while len(filled) > 12:  # so that the disk does not fill
                with suppress(OSError), hands.at(f"{filled.pop(0)}/x") as (here, _):
                    for name in os.listdir(here):
                        if name.startswith("junk-"):
                            os.unlink(name, dir_fd=here)


def prepare_crowd(target: Target) -> None:
    """Fill `peers` before the siege is measured."""
    for number in range(CROWD):
        (target.folder / "peers" / f"junk-{number}.json").write_bytes(b"{}")


def fill(hands: FolderWriter, folder: str, pace: Pace) -> None:
    """Add junk as the pace allows: names of one file, which take no space."""
    hands.put(f"{folder}/junk-0.json", b"{}", new=True)
    with suppress(OSError), hands.at(f"{folder}/x") as (here, _):
        for number in range(1, CROWD):
            os.link("junk-0.json", f"junk-{number}.json", src_dir_fd=here, dst_dir_fd=here)
            if number % 500 == 0 and not pace.go(0):
                return


def edits(target: Target, pace: Pace) -> None:
    """Edit settings and manifest, and damage the state: cut, replaced, signed by a stranger, an old one."""
    me, manifest, hands = Identity.generate(), target.made(), FolderWriter(target.folder)
    settings = json.loads((target.folder / "settings.json").read_text())
    settings["settings"] |= {"model": "them/evil", "hub_repo": "them/all"}
    old = hands.get(STATE)
    ways: list[Callable[[], None]] = [
        lambda: hands.put("settings.json", json.dumps(settings).encode()),
        lambda: hands.put(MANIFEST, seal(manifest, me)),
        lambda: hands.put(MANIFEST, target.manifest[:-40]),
        lambda: hands.put(STATE, old),
        lambda: hands.put(STATE, seal(target.state(), me)),
        lambda: hands.put(STATE, old[: len(old) // 2]),
        lambda: hands.put("admission.json", pace.rng.choice(JUNK)),
        lambda: hands.put("bootnodes.json", b'{"addresses":["/ip4/127.0.0.1/tcp/9/p2p/$(touch ran)"]}'),
        lambda: hands.clear("settings.json"),
    ]
    for way in itertools.cycle(ways):
        if not pace.go(1.0):
            return
        way()


def replays(target: Target, pace: Pace) -> None:
    """Show old documents in the places of coming ones, link them, and take permissions from copies."""
    nodes, hands = sorted(target.nodes().values()), FolderWriter(target.folder)
    while pace.go(0.2):
        now, node, other = target.state().round, pace.rng.choice(nodes), pace.rng.choice(nodes)
        again = f"again-{pace.done % 20}"
        for path in (rollouts_path, report_path):
            old, coming = path(now - 1, 0, node), path(now + 1, 0, other)
            if pace.done % 2:
                hands.link(old, coming)
            else:
                hands.put(coming, hands.get(old), new=True)
            hands.put(path(now, 0, again), hands.get(old))
        hands.put(f"peers/{again}.json", hands.get(f"peers/{node}.json"))
        hands.deny(pace.rng.choice([*copies(target), "settings.json", *checkpoints(hands)]))
        fields = {"peer_id": COMMAND, "kind": "rollouts", "node": node, "round": now + 1, "stage": 0}
        junk = {**fields, "digest": digest(canonical(fields)), "signature": "AAAA"}
        hands.put(rollouts_path(now + 1, 0, node), json.dumps(junk).encode(), new=True)


def weights(target: Target, pace: Pace) -> None:
    """Rename zeroed weights over those of every checkpoint in the folder."""
    hands = FolderWriter(target.folder)
    while pace.go(0.2):
        found = [f"{one}/{node}/model.safetensors" for one in checkpoints(hands) for node in hands.names(one)]
        for path in pace.rng.sample(found, min(len(found), 2)):
            data = hands.get(path)
            if len(data) > 8:
                hands.put(path, zeroed(data))


def zeroed(data: bytes) -> bytes:
    """Return the same model with all weights zero."""
    (size,) = struct.unpack("<Q", data[:8])
    return data[: 8 + size] + bytes(len(data) - 8 - size)


def _member(target: Target, name: str) -> HostileMember:
    return HostileMember(FolderStore.at(target.folder), target, name)


KINDS: dict[str, Callable[[Target, Pace], None]] = {
    "links for logs and directories": links,
    "pipes, directories and devices for files": pipes,
    "30,000 junk files a folder": crowd,
    "edits of settings, manifest and state": edits,
    "old documents, hard links, permissions": replays,
    "foreign weights": weights,
    "a member that lies": lambda target, pace: liar(_member(target, "liar"), pace),
    "a member that publishes garbage": lambda target, pace: garbage(_member(target, "garbage"), pace),
    "a member that keeps others waiting": lambda target, pace: mute(_member(target, "mute"), pace),
    "unfinished requests to the dashboard": unfinished_requests,
}
