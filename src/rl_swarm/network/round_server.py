"""Runs the coordinator of a folder swarm: looks at the folder, moves the rounds on, writes the state, tidies up.

All it knows is in the folder, so it can be killed at any moment and started again. The order of writes
matters: first the history line of a stage, then the state that follows it. A crash in between leaves a
history that is ahead of the state, and the next start counts again exactly the reports that stand there.
"""

import bisect
import dataclasses
import io
import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from rl_swarm.network.base import NetworkError
from rl_swarm.network.folder import (
    ADMISSION,
    FIRST_PAUSE,
    GIVE_UP_AFTER,
    HISTORY,
    MANIFEST,
    RECORD_BYTES,
    STATE,
    TRIES,
    Listing,
    is_lasting,
    patiently,
    pauses,
    place,
    read_access_list,
    read_manifest,
    read_state,
    report_folder,
    report_path,
)
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.protocol import admission, rounds
from rl_swarm.protocol.admission import AccessList
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rounds import PeerInfo, Refusal, Report, Rules, StageRecord, State
from rl_swarm.protocol.untrusted import quoted
from rl_swarm.protocol.wire import Incomplete, Rejected, seal, unseal, unseal_with_digest
from rl_swarm.storage.beneath import Misplaced
from rl_swarm.storage.files import MAX_NAMES, ROUND_FOLDER, Files, LocalFiles
from rl_swarm.storage.private import swarm_folder
from rl_swarm.storage.settings import StorageSettings
from rl_swarm.storage.shared_log import SharedLog

log = logging.getLogger(__name__)
T = TypeVar("T", PeerInfo, Report)
HISTORY_BYTES = 64 << 20
SHORTEST_ENDED = 200  # bytes of a line of history, signature included
MAX_MEMBERS = 1024  # so that a flood of identities leaves the state readable
MAX_REFUSED = 256  # peers that are told in the state why they are not admitted
MAX_NEW = 2000  # documents of peers that are no members, read in one look
OTHERS_SECONDS = 0.05  # that one look spends on those
MAX_LOGGED = 20  # refused documents that are named in the log, per stage
MAX_JOINED = 100  # newcomers that are, too
MAX_REMEMBERED = 100_000  # that are counted
MAX_TIDIED = 20  # rounds whose rollouts are removed at a time
MAX_REPLAYED = 10_000  # introductions that are read when the history is ahead of the state


class RoundServer:
    def __init__(
        self,
        files: Files,
        manifest: Manifest,
        identity: Identity,
        settings: NetworkSettings,
        storage: StorageSettings,
        stop: threading.Event,
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
        self.private = LocalFiles(swarm_folder(storage, files.root, self.swarm) / "coordinator")
        self.history = SharedLog(self.private.root / "history.jsonl", files, HISTORY)
        self._digests: dict[str, str] = {}  # peer id -> digest of its report in this stage
        self._refused: dict[str, tuple[int, ...] | None] = {}  # by path: the stamp of what was refused
        self._logged: set[str] = set()  # paths whose refusal has been counted
        self._named = self._joined = 0  # in the log, in this stage
        self._listing = Listing()
        self._next: dict[str, str] = {}  # by folder: where the next look at refused documents begins
        self._unread: dict[str, float] = {}  # paths that are not whole -> since when
        self.access_list = AccessList(swarm=self.swarm)
        # Stamps of what all nodes read, by path.
        self._written: dict[str, tuple[int, ...] | None] = {}
        self._look_again_at = 0.0
        self._ended = (-1, -1)  # the last stage that this process wrote into the history
        self._pauses = pauses(settings.poll_interval)
        self.state = self._restore(time.time())

    def run(self) -> State:
        """Conducts until the last round has ended or this process is told to stop."""
        failures, since = 0, 0.0
        while self.state.phase != "finished":
            try:
                if failures:
                    self._recover(time.time())
                self.step(time.time())
                failures = 0
            except OSError as error:
                failures += 1
                since = since if failures > 1 else time.monotonic()
                passed = time.monotonic() - since >= self.manifest.peer_timeout
                if failures >= TRIES and (passed or is_lasting(error)):
                    raise
                log.warning("the folder cannot be written, trying again: %s", error)
            pause = FIRST_PAUSE * 2 ** min(failures, TRIES) if failures else self._pause(time.time())
            if self.stop.wait(pause):
                break
        self.history.copy()
        return self.state

    def step(self, now: float) -> None:
        """Takes one look at the folder."""
        # With rounds on an interval nobody is waited for, so signs of life decide nothing.
        again = now >= self._look_again_at and self.rules.end != "interval"
        if again:
            self._look_again_at = now + self.rules.peer_timeout / 4
        state = self.state
        # Reports count when their authors are admitted, so introductions are read first.
        if again or state.phase == "waiting" or self.manifest.admission != "open":
            state = self._members(state, now, again)
        if state.phase == "running":
            state = self._reports(state, now)
        after, why = rounds.advance(state, self.rules, now)
        if why is not None and not again:  # who joined meanwhile is a member, and is waited for
            state = self._members(state, now, again)
            after, why = rounds.advance(state, self.rules, now)
        if len(state.reports) > len(self.state.reports):  # others will follow soon
            self._pauses = pauses(self.settings.poll_interval)
        if why is not None:
            self._write_history(state, why, now)
            log.info("round %d stage %d ended (%s), %d reports", state.round, state.stage, why, len(state.reports))
        if why is not None or after.phase != self.state.phase:
            self._write_state(after)
            self._forget_stage()
            self.state = after
            self._tidy()
            return
        news = (after.roll, after.refused) != (self.state.roll, self.state.refused)
        if self.manifest.admission != "open":  # whoever has come waits to see that it is a member
            news = news or after.members.keys() != self.state.members.keys()
        self.state = after
        again = self._is_touched(STATE) or again
        if news or (again and not self._state_is_there(after)):
            self._write_state(after)
        if self._is_touched(MANIFEST) and not self._manifest_is_there():
            self.files.write(MANIFEST, seal(self.manifest, self.identity))

    def _members(self, state: State, now: float, again: bool) -> State:
        """Who has joined and is admitted; and, now and then, who still gives signs of life."""
        self._read_access_list(state)
        out = {
            peer_id: member.node
            for peer_id, member in state.members.items()
            if admission.refusal_reason(self.manifest, self.access_list, peer_id, member)
        }
        state = replace(rounds.stop_awaiting(state, out), roll=max(state.roll, self.access_list.number))
        refused: dict[str, Refusal] = {}
        introduced = {member.node for member in state.members.values()} - set(out.values())
        for node in self._to_read("peers", introduced):
            path = f"peers/{node}.json"
            if node in introduced and path not in self._unread and not again:
                continue
            read = self._read(path, PeerInfo, node, state)
            if read is None:
                continue
            peer = read[0]
            invitation, why = admission.admit(
                self.manifest, self.access_list, state.members, peer.peer_id, peer.invitation, now
            )
            if why is None and peer.peer_id not in state.members:
                state = rounds.drop_idle(state, MAX_MEMBERS - 1, now, self.rules.peer_timeout)
                why = "full" if len(state.members) >= MAX_MEMBERS else None
            if why is not None:
                refused[peer.peer_id] = Refusal(why, peer.joined)
                self._log_once(path, f"{peer.peer_id} is not admitted ({why})")
                continue
            if node not in introduced:
                self._joined += 1
                if self._joined <= MAX_JOINED:
                    log.info("%s joined (%s, %s)", node, peer.peer_id, quoted(peer.model))
            # An old one that is shown again is no sign of life.
            member = state.members.get(peer.peer_id)
            if member is None or peer.timestamp > member.sign:
                state = rounds.record_presence(state, peer.peer_id, node, now, invitation, peer.timestamp)
        return replace(state, refused=dict(sorted(refused.items())[:MAX_REFUSED]))

    def _read_access_list(self, state: State) -> None:
        try:
            access_list = read_access_list(self.files, self.manifest)
        except OSError as error:  # the next look is soon
            log.debug("%s cannot be read: %s", ADMISSION, error)
            return
        except Rejected as error:
            self._refuse(ADMISSION, str(error))
            return
        if access_list.number < max(state.roll, self.access_list.number):
            self._refuse(
                ADMISSION, f"number {access_list.number}, but there has been a newer one; `rl-swarm members` shows it"
            )
        if access_list.number > self.access_list.number:
            self.access_list = access_list

    def _reports(self, state: State, now: float) -> State:
        """The reports for the present stage."""
        known = {report.node for report in state.reports.values()}
        members = {member.node for member in state.members.values()}
        for node in self._to_read(report_folder(state.round, state.stage), members):
            if node in known:
                continue
            read = self._read(report_path(state.round, state.stage, node), Report, node, state)
            if read is not None:
                report, name = read
                member = state.members.get(report.peer_id)
                why = admission.refusal_reason(self.manifest, self.access_list, report.peer_id, member)
                if why is not None:
                    self._log_once(report_path(state.round, state.stage, node), f"not admitted ({why})")
                    continue
                state = rounds.record_report(state, report, now)
                self._digests[report.peer_id] = name
        return state

    def _to_read(self, folder: str, members: Set[str]) -> Iterator[str]:
        """Names the documents of a folder that one look reads: those of members, and a bounded number of others.

        Anybody can fill a folder. Members are asked for by name where it is too full to list; others are looked at in
        turn, a part at a time, and what was refused is read when it has changed. So newcomers are found however many
        files lie there.
        """
        names = self._nodes(folder)
        full = names is None or len(names) >= MAX_NAMES
        names = names or []
        yield from sorted(members) if full else [node for node in names if node in members]
        others = [node for node in names if node not in members]
        new = [node for node in others if f"{folder}/{node}.json" not in self._refused]
        yield from self._turn(folder, new)
        old = [node for node in others if f"{folder}/{node}.json" in self._refused]
        for node in self._turn(f"{folder} again", old):
            if self._has_changed(f"{folder}/{node}.json"):
                yield node

    def _turn(self, what: str, nodes: list[str]) -> Iterator[str]:
        """Takes the next few of many, beginning where the last look ended."""
        begin = bisect.bisect_right(nodes, self._next.get(what, ""))
        deadline = time.monotonic() + OTHERS_SECONDS
        for number, node in enumerate([*nodes[begin:], *nodes[:begin]]):
            if number == MAX_NEW or (number and time.monotonic() >= deadline):
                return
            self._next[what] = node
            yield node

    def _has_changed(self, path: str) -> bool:
        known = self._refused[path]
        return known is None or self._stamp(path) != known

    def _stamp(self, path: str) -> tuple[int, ...] | None:
        """Returns time, size and inode of a document, where the store tells them; clocks of file systems are coarse."""
        if not isinstance(self.files, LocalFiles):
            return None
        try:
            found = self.files.stat(path)
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _nodes(self, folder: str) -> list[str] | None:
        """Lists who has a document in a folder; None where that is not known now."""
        try:
            return self._listing.nodes(self.files, folder)
        except OSError as error:  # the next look is soon
            log.debug("%s cannot be listed: %s", folder, error)
            return None

    def _read(self, path: str, kind: type[T], node: str, state: State) -> tuple[T, str] | None:
        """A signed document and its digest, or None: not whole yet, or not to be believed (said once)."""
        try:
            record, name = unseal_with_digest(self.files.read(path, RECORD_BYTES), kind, RECORD_BYTES)
            self._check(record, node, state)
        except FileNotFoundError:
            return None
        except (OSError, Incomplete) as error:
            since = self._unread.setdefault(path, time.monotonic())
            if time.monotonic() - since >= GIVE_UP_AFTER:
                self._refuse(path, str(error))
            return None
        except Rejected as error:
            self._refuse(path, str(error))
            return None
        self._unread.pop(path, None)
        return record, name

    def _refuse(self, path: str, why: str) -> None:
        """Leaves a document out until it changes."""
        self._refused[path] = self._stamp(path)
        self._log_once(path, why)

    def _log_once(self, path: str, why: str) -> None:
        if path not in self._logged and len(self._logged) < MAX_REMEMBERED:
            self._logged.add(path)
            self._named += 1
            if self._named <= MAX_LOGGED:
                log.warning("%s is not used: %s", path, why)

    def _forget_stage(self) -> None:
        for path in self._unread:
            if path.startswith("rewards/"):
                self._refuse(path, "it was not whole when the stage ended")
        self._digests.clear()
        self._unread = {path: since for path, since in self._unread.items() if path.startswith("peers/")}
        if self._named > MAX_LOGGED:
            log.warning("%d more documents are not used", self._named - MAX_LOGGED)
        if self._joined > MAX_JOINED:
            log.info("%d more joined", self._joined - MAX_JOINED)
        self._named = self._joined = 0
        self._logged = {path for path in self._logged if path.startswith("peers/")}
        self._refused = {path: stamp for path, stamp in self._refused.items() if path.startswith("peers/")}
        self._next = {what: node for what, node in self._next.items() if what.startswith("peers")}

    def _check(self, record: PeerInfo | Report, node: str, state: State) -> None:
        """A peer speaks under one node name, and nobody else under that name."""
        if record.swarm != self.swarm:
            raise Rejected(RejectReason.SWARM, "written for another swarm")
        if record.node != node:
            raise Rejected(RejectReason.PLACE, f"written by {quoted(record.node)}")
        if isinstance(record, Report) and (record.round, record.stage) != (state.round, state.stage):
            raise Rejected(RejectReason.PLACE, f"written for round {record.round}, stage {record.stage}")
        for peer_id, member in state.members.items():
            if (peer_id == record.peer_id) != (member.node == node):
                raise Rejected(
                    RejectReason.NAME, f"{peer_id} is {member.node}; this is of {record.peer_id}, who says it is {node}"
                )

    def _write_history(self, state: State, why: str, now: float) -> None:
        if (state.round, state.stage) <= self._ended:  # the state could not be written after it
            return
        ended = StageRecord(
            swarm=self.swarm,
            round=state.round,
            stage=state.stage,
            started=state.started,
            ended=now,
            why=why,
            members=sorted(state.members),
            reports={peer_id: self._digests[peer_id] for peer_id in sorted(state.reports)},
        )
        self.history.append(seal(ended, self.identity) + b"\n")
        self._ended = (state.round, state.stage)

    def _write_state(self, state: State) -> None:
        data = seal(replace(state, reports={}), self.identity)
        self.private.write(STATE, data)
        self.files.write(STATE, data)

    def _is_touched(self, path: str) -> bool:
        """Tells whether somebody has changed a document since the last look. Looking costs little, so nobody waits
        long."""
        before, self._written[path] = self._written.get(path), self._stamp(path)
        return before != self._written[path]

    def _manifest_is_there(self) -> bool:
        try:
            return read_manifest(self.files) == self.manifest
        except FileNotFoundError:  # whoever takes it away wants no more nodes
            return True
        except (OSError, Rejected):
            return False

    def _state_is_there(self, state: State) -> bool:
        """Whether nodes can read the state. One that was lost, or replaced by a stranger, is missed by all."""
        if state.phase == "waiting":
            return True
        try:
            return place(read_state(self.files, self.manifest)) == place(state)
        except (OSError, Rejected):
            return False

    def _restore(self, now: float) -> State:
        """The state in the folder, brought to where the history is. For members time has stood still: the silence
        was ours."""
        self._digests.clear()
        self._look_again_at = 0.0
        state = self._newest_state()
        history = {(ended.round, ended.stage): ended for ended in self._history()}
        ahead = sorted(where for where in history if where >= (state.round, state.stage))
        if ahead and state.phase != "finished":
            state = self._replayed(state, [history[where] for where in ahead])
            self._write_state(state)
        elif state.phase != "waiting" and not self._state_is_there(state):
            self._write_state(state)
        silence = now - state.timestamp
        members = {
            peer_id: replace(member, last_seen=min(now, member.last_seen + silence))
            for peer_id, member in state.members.items()
        }
        self._read_access_list(state)
        return replace(state, members=members)

    def _newest_state(self) -> State:
        """The state that this user's coordinator wrote last, here or on another machine."""
        found = [State(swarm=self.swarm)]
        with suppress(OSError, Rejected):
            found.append(read_state(self.private, self.manifest))
        try:
            found.append(patiently(lambda: read_state(self.files, self.manifest), self.stop))
        except FileNotFoundError:
            pass
        except (OSError, Rejected) as error:
            log.warning("%s cannot be used and is made again: %s", STATE, error)
        return max(found, key=place)

    def _recover(self, now: float) -> None:
        """After a write that failed: what was written and what was not stands in the folder. Reports are read again."""
        known, state = self.state, self._restore(now)
        self.state = state if place(state) >= place(known) else replace(known, reports={})

    def _history(self) -> Iterator[StageRecord]:
        """What this swarm's owner wrote into the history. On a machine that has none, the one in the folder is
        taken."""
        if not self.history.size:
            try:
                data = patiently(lambda: self.files.read(HISTORY, HISTORY_BYTES), self.stop)
            except (FileNotFoundError, Misplaced):
                return
            signed = [line for line in data.splitlines(keepends=True) if self._is_ours(line)]
            self.history.replace(b"".join(signed))
        self.history.copy()
        yield from parse_history(self.history.read())[0]

    def _is_ours(self, line: bytes) -> bool:
        """Tells whether this swarm's owner wrote a line of the history."""
        ended, _ = parse_history(line)
        wrote = [(each.peer_id, each.swarm) == (self.manifest.peer_id, self.swarm) for each in ended]
        return line.endswith(b"\n") and any(wrote)

    def _replayed(self, state: State, history: Iterable[StageRecord]) -> State:
        """The state after the stages that the history says have ended, their reports counted again."""
        at_once = dataclasses.replace(self.rules, end="interval", interval=-math.inf)
        deadline = time.monotonic() + FIRST_PAUSE * 2**TRIES
        history = list(history)
        peers = (
            self._introduced(state)
            if {each for ended in history for each in ended.members} - state.members.keys()
            else {}
        )
        for ended in history:
            state = replace(state, phase="running", round=ended.round, stage=ended.stage, started=ended.started)
            for peer_id in ended.members:
                if peer_id in peers and peer_id not in state.members:
                    node, invitation, sign = peers[peer_id]
                    state = rounds.record_presence(state, peer_id, node, ended.ended, invitation, sign)
            for report in self._counted(state, ended, deadline):
                state = rounds.record_report(state, report, ended.ended)
            state, _ = rounds.advance(state, at_once, ended.ended)
        return state

    def _introduced(self, state: State) -> dict[str, tuple[str, str, float]]:
        """Reads who is here, by peer id: node, invitation and sign of life."""
        peers = {}
        for node in (self._nodes("peers") or [])[:MAX_REPLAYED]:
            read = self._read(f"peers/{node}.json", PeerInfo, node, state)
            if read is not None:
                peers[read[0].peer_id] = (node, self._came_by(read[0]), read[0].timestamp)
        return peers

    def _came_by(self, peer: PeerInfo) -> str:
        """The invitation of a peer that was a member once: whether it still admits others is no matter."""
        try:
            return admission.check_ticket(peer.peer_id, peer.invitation, self.manifest).name(self.manifest)
        except Rejected:
            return ""

    def _counted(self, state: State, ended: StageRecord, deadline: float) -> list[Report]:
        """The reports that a stage in the history ended with, as they lie in the folder."""
        while True:
            nodes = [state.members[peer_id].node for peer_id in ended.reports if peer_id in state.members]
            reads = [self._read(report_path(ended.round, ended.stage, node), Report, node, state) for node in nodes]
            reports = [read[0] for read in reads if read and ended.reports.get(read[0].peer_id) == read[1]]
            if len(reports) == len(ended.reports):
                return reports
            if time.monotonic() >= deadline or self.stop.wait(FIRST_PAUSE):
                log.warning("round %d: %d reports are lost", ended.round, len(ended.reports) - len(reports))
                return reports

    def _tidy(self) -> None:
        if not self.settings.cleanup_rollouts:
            return
        failed, why = 0, None
        try:
            found = map(ROUND_FOLDER.fullmatch, self.files.names("rollouts"))
            present = [(match[0], int(match[1])) for match in found if match]
            for name in expired(present, self.state.round, self.settings.keep_rollout_rounds)[:MAX_TIDIED]:
                try:
                    if self.settings.archive_rollouts:
                        self.files.move(f"rollouts/{name}", f"archives/{name}")
                    else:
                        self.files.remove(f"rollouts/{name}")
                except OSError as error:
                    failed, why = failed + 1, error
        except OSError as error:
            failed, why = failed + 1, error
        if failed:  # the next round tidies again
            log.warning("old rollouts cannot be removed, of %d rounds: %s", failed, why)

    def _pause(self, now: float) -> float:
        """Rounds on an interval need no look at the folder before they end."""
        if self.state.phase == "finished":
            return 0.0
        if self.rules.end == "interval" and self.state.phase == "running":
            return max(0.01, self.state.started + self.rules.interval - now)
        return next(self._pauses)


def expired(rounds_present: Iterable[tuple[str, int]], current: int, keep: int) -> list[str]:
    """Which folders hold rounds older than the last `keep`, the newest of them first."""
    newest_first = sorted(rounds_present, key=lambda present: present[1], reverse=True)
    return [name for name, number in newest_first if number <= current - keep]


def read_history(files: Files) -> tuple[list[StageRecord], int]:
    """The stages that ended, and how many lines cannot be read (a crash may leave one half)."""
    try:
        return parse_history(files.read(HISTORY, HISTORY_BYTES))
    except FileNotFoundError:
        return [], 0


def parse_history(data: bytes) -> tuple[list[StageRecord], int]:
    ended, unreadable = [], 0
    for line in filter(None, (line.rstrip() for line in io.BytesIO(data))):
        try:
            if len(line) < SHORTEST_ENDED:
                raise Rejected(RejectReason.SIZE)
            ended.append(unseal(line, StageRecord))
        except Rejected:
            unreadable += 1
    return ended, unreadable
