"""Drives the hostile processes of `siege.py`: what they know, how fast they go, and the members among them.

A hostile process attacks one swarm in one way until it is told to stop. It uses a bounded share of a core, so that the
attack is measured and not the processor time that it takes.
"""

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec

from benchmarks.lib.paths import STATE
from rl_swarm.network.coordinator import DocumentCoordinator
from rl_swarm.network.documents import DocumentStore, report_key, rollouts_key
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import PeerInfo, Report, State
from rl_swarm.protocol.wire import seal, sign, unseal

COMMAND = "$(touch ran)"  # leaves a file where a shell runs it
HEARTBEAT_SECONDS = 10.0  # between heartbeats of a hostile member
TICKS = os.sysconf("SC_CLK_TCK")
LONGEST_REST = 5.0
LOOK_SECONDS = 5.0  # between readings of the children's processor time
JUNK = (b"", b"{}", b"\x00\xff" * 500, b'{"a":' * 5_000, b"[" * 60_000, b'{"round": ' + b"9" * 9_000 + b"}")


@dataclass(frozen=True)
class Target:
    """Holds what a hostile process knows of the swarm that it attacks."""

    folder: Path  # of the swarm; among peers only this machine's processes use it
    private: Path  # the coordinator's, where the round is readable even if the folder is damaged
    manifest: bytes
    addresses: Sequence[str]  # of its coordinator, among peers
    port: int  # of its dashboard
    outside: Path  # nothing may change there
    scratch: Path
    seed: int
    share: float  # of a core

    def made(self) -> Manifest:
        return unseal(self.manifest, Manifest)

    def state(self) -> State:
        """Read the state of the swarm."""
        while True:
            with suppress(OSError):
                return unseal((self.private / STATE).read_bytes(), State)
            time.sleep(0.1)

    def nodes(self) -> dict[str, str]:
        """Return the honest nodes by their peer ids: those of the beginning."""
        members = self.state().members
        return {peer_id: m.node for peer_id, m in members.items() if m.joined_round == 0}


@dataclass(frozen=True)
class Processes:
    """Lists all processes of this machine at one moment: their parents and processor times."""

    parents: dict[int, int]
    seconds: dict[int, float]  # of children that have ended, too

    @classmethod
    def now(cls) -> "Processes":
        parents, seconds = dict[int, int](), dict[int, float]()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError, ValueError, IndexError):
                    fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                    parents[int(name)] = int(fields[1])
                    seconds[int(name)] = sum(map(int, fields[11:15])) / TICKS
        return cls(parents, seconds)

    def family(self, pid: int) -> list[int]:
        """Return a process and all its descendants."""
        below = dict[int, list[int]]()
        for child, parent in self.parents.items():
            below.setdefault(parent, []).append(child)
        found = [pid] if pid in self.parents else []
        for one in found:
            found += below.get(one, [])
        return found

    def used(self, pid: int) -> float:
        return sum(self.seconds[one] for one in self.family(pid))


class Pace:
    """Keeps a hostile process to its share of a core."""

    def __init__(self, share: float, ready: Event, stop: Event, seed: int) -> None:
        self.share, self.ready, self.stop = share, ready, stop
        self.rng = random.Random(seed)
        self.done = 0  # attacks so far
        self.children, self.look_at = 0.0, -LOOK_SECONDS
        self.began = 0.0  # when it was ready

    def go(self, pause: float = 0.1) -> bool:
        """Rest for as long as the share demands; return False when the siege is over.

        The first call says that the attack is ready.
        """
        self.done += 1
        if not self.began:
            self.began, self.used = time.monotonic(), self._used()
            self.ready.set()
        ahead = (self._used() - self.used) / self.share - (time.monotonic() - self.began)
        return not self.stop.wait(max(pause, min(ahead, LONGEST_REST)))

    def _used(self) -> float:
        if time.monotonic() >= self.look_at + LOOK_SECONDS:  # finding children is not cheap
            self.look_at = time.monotonic()
            self.children = max(0.0, Processes.now().used(os.getpid()) - time.process_time())
        return time.process_time() + self.children


class HostileMember:
    """Joins as a peer, sends heartbeats, and obeys no other rule."""

    def __init__(self, store: DocumentStore, target: Target, name: str, identity: Identity | None = None) -> None:
        self.store, self.target, self.name = store, target, name
        self.identity = identity or Identity.generate()
        self.manifest = target.made()
        self.coordinator = DocumentCoordinator(store, self.manifest, self.identity, name, threading.Event(), 0.5)
        self.next_sign, self.joined = 0.0, time.time()

    def sign_of_life(self) -> None:
        if time.monotonic() >= self.next_sign:
            self.next_sign = time.monotonic() + HEARTBEAT_SECONDS
            with suppress(OSError):
                self.coordinator.register(self.introduction())

    def introduction(self) -> PeerInfo:
        return PeerInfo(
            peer_id=self.identity.peer_id,
            swarm=self.manifest.swarm(),
            node=self.name,
            model=COMMAND,
            device="`touch ran`",
            host="\x1b[2J$(touch ran)",
            joined=self.joined,
            timestamp=time.time(),
        )

    def report(self, state: State) -> None:
        votes = sorted(state.members)
        report = Report(
            peer_id=self.identity.peer_id,
            swarm=state.swarm,
            node=self.name,
            round=state.round,
            stage=state.stage,
            timestamp=time.time(),
            reward=1e6,
            training_reward=-1e6,
            rollouts=8,
            vote=votes[state.round % len(votes)] if votes else "",
        )
        with suppress(OSError):
            self.store.write(report_key(state.round, state.stage, self.name), seal(report, self.identity))

    def rounds(self, pace: Pace) -> Iterator[State]:
        """Yield each round as it begins, and send heartbeats meanwhile."""
        last = -1
        while pace.go(0.2):
            self.sign_of_life()
            state = self.target.state()
            if state.phase == "running" and state.round != last:
                last = state.round
                yield state


def mute(member: HostileMember, pace: Pace) -> None:
    """Join and keep the others waiting; report just often enough to be waited for again."""
    for state in member.rounds(pace):
        me = state.members.get(member.identity.peer_id)
        if me is None or not me.is_awaited(time.time(), member.manifest.peer_timeout):
            member.report(state)


def liar(member: HostileMember, pace: Pace) -> None:
    """Publish junk, foreign text and answer keys, each round in another way, and report in time."""
    from benchmarks.robustness import attack_types as types
    from rl_swarm import environments
    from rl_swarm.config.settings import Settings
    from rl_swarm.learning.policy import other_models

    settings = Settings.of(model="tiny", generations=8)
    environment = environments.made(member.manifest)
    environment.configure(settings.task, None, other_models(settings))
    ways = [
        kind()
        for kind in (
            types.Before, types.Wrong, types.Garbage, types.Invented, types.Long, types.Copying,
            types.RoundLie, types.Forged, types.Replay, types.Negatives,
        )
    ]  # fmt: skip
    honest = sorted(member.target.nodes().values())
    for state in member.rounds(pace):
        member.report(state)
        known = types.Known(
            manifest=member.manifest,
            settings=settings,
            environment=environment,  # type: ignore[arg-type]
            store=member.store,
            policy=None,  # type: ignore[arg-type]
            honest=honest,
            state=state,
            defended=True,
            rng=pace.rng,
            canary=member.target.outside / "canary",
        )
        with suppress(Exception):  # the file to copy does not exist yet
            made = ways[state.round % len(ways)].publish(member.identity, known)
            for key, data in made.items():
                member.store.write(key, data)


def garbage(member: HostileMember, pace: Pace) -> None:
    """Publish what is no document, or under a command as name, and report in time."""
    from rl_swarm.protocol.wire import canonical, digest

    for state in member.rounds(pace):
        member.report(state)
        place = {"node": member.name, "round": state.round, "stage": state.stage}
        fields = {"peer_id": COMMAND, "kind": "rollouts", **place}
        junk = msgspec.json.encode({**fields, "digest": digest(canonical(fields)), "signature": "AAAA"})
        whole = sign(member.introduction(), member.identity)
        ways = [junk, *JUNK, whole, whole[:-9], b"x" * (5 << 20)]
        with suppress(OSError):
            key = rollouts_key(state.round, state.stage, member.name)
            member.store.write(key, ways[state.round % len(ways)])


def unfinished_requests(target: Target, pace: Pace) -> None:
    """Open connections to the dashboard and never finish a request."""
    import socket

    held: list[socket.socket] = []
    while pace.go(0.05):
        try:
            one = socket.create_connection(("127.0.0.1", target.port), timeout=2)
            one.sendall(b"GET /api/overview HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * (pace.done % 50))
            held.append(one)
        except OSError:
            pass
        for old in held[:-1500]:
            old.close()
        del held[:-1500]
        if held:
            with suppress(OSError):
                held[pace.done % len(held)].send(b"b")
