"""The coordinator of a folder swarm: looks at the folder, moves the rounds on, writes the state, tidies up.

All it knows is in the folder, so it can be killed at any moment and started again. The order of writes
matters: first the history line of a stage, then the state that follows it. A crash in between leaves a
history that is one line ahead, which the next start notices.
"""

import logging
import threading
import time
from collections.abc import Iterable
from typing import TypeVar

from msgspec.structs import replace

from rl_swarm import rounds
from rl_swarm.config import Settings
from rl_swarm.identity import Identity
from rl_swarm.manifest import Manifest
from rl_swarm.network.base import NetworkError
from rl_swarm.network.files import Files
from rl_swarm.network.folder import HISTORY, STATE, documents, read_state, report_folder, report_path
from rl_swarm.rounds import Ended, PeerInfo, Report, Rules, State
from rl_swarm.wire import MAX_BYTES, Incomplete, Rejected, seal, unseal, unseal_named

log = logging.getLogger(__name__)
T = TypeVar("T")
HISTORY_BYTES = 256 << 20


class Conductor:
    def __init__(
        self, files: Files, manifest: Manifest, identity: Identity, settings: Settings, stop: threading.Event
    ) -> None:
        if identity.peer_id != manifest.peer_id:
            raise NetworkError(
                f"This swarm belongs to {manifest.peer_id}, and IDENTITY_PATH={settings.identity_path} is "
                f"{identity.peer_id}. Coordinate it with its owner's key, or join it as a worker."
            )
        self.files, self.manifest, self.identity, self.settings, self.stop = (
            files,
            manifest,
            identity,
            settings,
            stop,
        )
        self.rules = Rules.of(manifest, settings.min_peers)
        self.swarm = manifest.swarm()
        self.state = self._restore(time.time())
        self._ended = last_ended(files)
        self._signs: dict[str, float] = {}  # node -> the newest sign of life read
        self._digests: dict[str, str] = {}  # peer id -> digest of its report in this stage
        self._refused: set[str] = set()  # paths whose rejection has been logged
        self._look_again_at = 0.0

    def run(self) -> State:
        """Conducts until the last round has ended or this process is told to stop."""
        while self.state.phase != "finished":
            self.step(time.time())
            if self.stop.wait(self._pause(time.time())):
                break
        return self.state

    def step(self, now: float) -> None:
        """One look at the folder."""
        state = self._members(self.state, now)
        if state.phase == "running":
            state = self._reports(state, now)
        after, why = rounds.advance(state, self.rules, now)
        if why is not None:
            self._write_history(state, why, now)
            self._digests.clear()
            log.info(
                "round %d stage %d ended (%s), %d reports", state.round, state.stage, why, len(state.reports)
            )
        changed = why is not None or after.phase != self.state.phase
        self.state = after
        if changed:
            self.files.write(STATE, seal(replace(after, reports={}), self.identity))
            self._tidy()

    def _members(self, state: State, now: float) -> State:
        """Who has joined; and, now and then, who still gives signs of life."""
        again = now >= self._look_again_at
        if again:
            self._look_again_at = now + self.rules.peer_timeout / 4
        for node in documents(self.files, "peers"):
            if node in self._signs and not again:
                continue
            read = self._read(f"peers/{node}.json", PeerInfo)
            if read is None or read[0].swarm != self.swarm or read[0].node != node:
                continue
            peer = read[0]
            if peer.timestamp != self._signs.get(node):
                if node not in self._signs:
                    log.info("%s joined (%s, %s)", node, peer.peer_id, peer.model)
                self._signs[node] = peer.timestamp
                state = rounds.seen(state, peer.peer_id, node, now)
        return state

    def _reports(self, state: State, now: float) -> State:
        """The reports for the present stage. A member reports under its own node name or not at all."""
        known = {report.node for report in state.reports.values()}
        for node in documents(self.files, report_folder(state.round, state.stage)):
            if node in known:
                continue
            read = self._read(report_path(state.round, state.stage, node), Report)
            if read is None or read[0].swarm != self.swarm or read[0].node != node:
                continue
            report, name = read
            member = state.members.get(report.peer_id)
            if member is None or member.node == node:
                state = rounds.submitted(state, report, now)
                self._digests[report.peer_id] = name
        return state

    def _read(self, path: str, kind: type[T]) -> tuple[T, str] | None:
        """A signed document and its digest, or None: not whole yet, or not to be believed (said once)."""
        try:
            return unseal_named(self.files.read(path, MAX_BYTES), kind)
        except (OSError, Incomplete):
            return None
        except Rejected as error:
            if path not in self._refused:
                self._refused.add(path)
                log.warning("%s is not used: %s", path, error)
            return None

    def _write_history(self, state: State, why: str, now: float) -> None:
        if self._ended is not None and (state.round, state.stage) <= self._ended:
            return
        ended = Ended(
            swarm=self.swarm,
            round=state.round,
            stage=state.stage,
            started=state.started,
            ended=now,
            why=why,
            members=sorted(state.members),
            reports={peer_id: self._digests[peer_id] for peer_id in sorted(state.reports)},
        )
        self.files.append(HISTORY, seal(ended, self.identity) + b"\n")
        self._ended = (state.round, state.stage)

    def _restore(self, now: float) -> State:
        """The state in the folder. Members get time to show themselves: the silence was ours."""
        try:
            state = read_state(self.files, self.manifest)
        except FileNotFoundError:
            return State(swarm=self.swarm)
        except (OSError, Rejected) as error:
            raise NetworkError(f"{STATE} cannot be used ({error}).") from error
        members = {peer_id: replace(member, last_seen=now) for peer_id, member in state.members.items()}
        return replace(state, members=members)

    def _tidy(self) -> None:
        if not self.settings.cleanup:
            return
        present = {name: int(name[6:]) for name in self.files.names("rollouts") if name[6:].isdigit()}
        for name in expired(present.items(), self.state.round, self.settings.keep_rounds):
            if self.settings.archive:
                self.files.move(f"rollouts/{name}", f"archives/{name}")
            else:
                self.files.remove(f"rollouts/{name}")

    def _pause(self, now: float) -> float:
        """Rounds on an interval need no look at the folder before they end."""
        if self.state.phase == "finished":
            return 0.0
        if self.rules.end == "interval" and self.state.phase == "running":
            return max(0.01, self.state.started + self.rules.interval - now)
        return self.settings.poll_interval


def expired(rounds_present: Iterable[tuple[str, int]], current: int, keep: int) -> list[str]:
    """Which folders hold rounds older than the last `keep`."""
    return [name for name, number in rounds_present if number <= current - keep]


def read_history(files: Files) -> tuple[list[Ended], int]:
    """The stages that ended, and how many lines cannot be read (a crash may leave one half)."""
    try:
        lines = files.read(HISTORY, HISTORY_BYTES).splitlines()
    except FileNotFoundError:
        return [], 0
    ended, unreadable = [], 0
    for line in lines:
        try:
            ended.append(unseal(line, Ended))
        except Rejected:
            unreadable += 1
    return ended, unreadable


def last_ended(files: Files) -> tuple[int, int] | None:
    """The last stage in the history, which is closed with a line end if a crash left it open."""
    try:
        data = files.read(HISTORY, HISTORY_BYTES)
    except FileNotFoundError:
        return None
    if data and not data.endswith(b"\n"):
        files.append(HISTORY, b"\n")
    for line in reversed(data.splitlines()):
        try:
            ended = unseal(line, Ended)
        except Rejected:
            continue
        return ended.round, ended.stage
    return None
