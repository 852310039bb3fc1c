"""Runs a swarm's coordinator: reads introductions and reports, advances the rounds, writes state and history.

All it knows is in the store, so it can be killed at any moment and started again. The order of writes matters: first
the history line of a stage, then the state that follows it. A crash in between leaves a history that is ahead of the
state. The next start counts again exactly the reports that the history names.
"""

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from msgspec.structs import replace

from rl_swarm.network import retries
from rl_swarm.network.base import NetworkError
from rl_swarm.network.coordinator import position
from rl_swarm.network.documents import ACCESS_LIST, MANIFEST, PEERS, STATE, DocumentKey, DocumentStore, Kind, report_key
from rl_swarm.network.folder import FolderStore
from rl_swarm.network.history import StageHistory
from rl_swarm.network.owner_documents import read_access_list, read_manifest, read_state
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.network.submissions import Submissions
from rl_swarm.protocol import admission, rounds
from rl_swarm.protocol.admission import AccessList
from rl_swarm.protocol.identity import Identity
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.rounds import PeerInfo, Refusal, Report, Rules, StageRecord, State
from rl_swarm.protocol.untrusted import quoted
from rl_swarm.protocol.wire import Rejected, seal
from rl_swarm.storage.private import swarm_folder
from rl_swarm.storage.settings import StorageSettings

log = logging.getLogger(__name__)

MAX_MEMBERS = 1024  # so that a flood of identities leaves the state readable
MAX_REFUSED = 256  # peers that are told in the state why they are not admitted
MAX_JOINED = 100  # newcomers that are named in the log, per stage
MAX_REMOVED = 20  # rounds whose rollouts are removed at a time
MAX_REPLAYED = 10_000  # introductions that are read when the history is ahead of the state


class RoundServer:
    def __init__(
        self,
        store: DocumentStore,
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
        self.store, self.manifest, self.identity = store, manifest, identity
        self.settings, self.stop = settings, stop
        self.rules = Rules.of(manifest, settings.min_peers)
        self.swarm = manifest.swarm()
        private = swarm_folder(storage, store.root, self.swarm) / "coordinator"
        self.private = FolderStore.at(private)
        self.history = StageHistory(private / "history.jsonl", store, manifest, stop)
        self.submissions = Submissions(store, self.swarm)
        self._digests: dict[str, str] = {}  # peer id -> digest of its report in this stage
        self._joined = 0  # newcomers in this stage
        self.access_list = AccessList(swarm=self.swarm)
        self._stamps: dict[DocumentKey, tuple[int, ...] | None] = {}  # of what all nodes read
        self._look_again_at = 0.0
        self._ended = (-1, -1)  # the last stage that this process wrote into the history
        self._pauses = retries.poll_pauses(settings.poll_interval)
        self.state = self._restore(time.time())

    def run(self) -> State:
        """Advance the rounds until the last one has ended or this process is told to stop."""
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
                if failures >= retries.TRIES and (passed or retries.is_permanent(error)):
                    raise
                log.warning("the folder cannot be written, trying again: %s", error)
            pause = retries.FIRST_PAUSE * 2 ** min(failures, retries.TRIES) if failures else self._pause(time.time())
            if self.stop.wait(pause):
                break
        self.history.copy()
        return self.state

    def step(self, now: float) -> None:
        """Read what is new, and advance the round if it has ended."""
        # With rounds on an interval no member is waited for, so heartbeats decide nothing.
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
        if why is not None and not again:  # a node that has joined meanwhile is a member, and is waited for
            state = self._members(state, now, again)
            after, why = rounds.advance(state, self.rules, now)
        if len(state.reports) > len(self.state.reports):  # more will follow soon
            self._pauses = retries.poll_pauses(self.settings.poll_interval)
        if why is not None:
            self._write_history(state, why, now)
            log.info("round %d stage %d ended (%s), %d reports", state.round, state.stage, why, len(state.reports))
        if why is not None or after.phase != self.state.phase:
            self._write_state(after)
            self._end_stage()
            self.state = after
            self._remove_old_rollouts()
            return
        news = (after.access_list_number, after.refused) != (self.state.access_list_number, self.state.refused)
        if self.manifest.admission != "open":  # a newcomer waits to see that it is a member
            news = news or after.members.keys() != self.state.members.keys()
        self.state = after
        again = self._is_touched(STATE) or again
        if news or (again and not self._state_is_there(after)):
            self._write_state(after)
        if self._is_touched(MANIFEST) and not self._manifest_is_there():
            self.store.write(MANIFEST, seal(self.manifest, self.identity))

    def _members(self, state: State, now: float, again: bool) -> State:
        """Read introductions: of newcomers at every look, of members their heartbeats now and then (`again`)."""
        self._read_access_list(state)
        excluded = {
            peer_id: member.node
            for peer_id, member in state.members.items()
            if admission.refusal_reason(self.manifest, self.access_list, peer_id, member)
        }
        number = max(state.access_list_number, self.access_list.number)
        state = replace(rounds.stop_awaiting(state, excluded), access_list_number=number)
        refused: dict[str, Refusal] = {}
        introduced = {member.node for member in state.members.values()} - set(excluded.values())
        for node in self.submissions.to_read(PEERS, introduced):
            key = PEERS.of(node)
            if node in introduced and not self.submissions.is_incomplete(key) and not again:
                continue
            read = self.submissions.read(key, PeerInfo, state)
            if read is None:
                continue
            peer = read[0]
            invitation, why = admission.admit(
                self.manifest, self.access_list, state.members, peer.peer_id, peer.ticket, now
            )
            if why is None and peer.peer_id not in state.members:
                state = rounds.drop_idle(state, MAX_MEMBERS - 1, now, self.rules.peer_timeout)
                why = "full" if len(state.members) >= MAX_MEMBERS else None
            if why is not None:
                refused[peer.peer_id] = Refusal(why, peer.joined)
                self.submissions.log_once(key, f"{peer.peer_id} is not admitted ({why})")
                continue
            if node not in introduced:
                self._joined += 1
                if self._joined <= MAX_JOINED:
                    log.info("%s joined (%s, %s)", node, peer.peer_id, quoted(peer.model))
            # An old introduction that is shown again is no heartbeat.
            member = state.members.get(peer.peer_id)
            if member is None or peer.timestamp > member.heartbeat:
                state = rounds.record_presence(state, peer.peer_id, node, now, invitation, peer.timestamp)
        return replace(state, refused=dict(sorted(refused.items())[:MAX_REFUSED]))

    def _read_access_list(self, state: State) -> None:
        try:
            access_list = read_access_list(self.store, self.manifest)
        except OSError as error:  # the next look is soon
            log.debug("the access list cannot be read: %s", error)
            return
        except Rejected as error:
            self.submissions.refuse(ACCESS_LIST, str(error))
            return
        if access_list.number < max(state.access_list_number, self.access_list.number):
            why = f"number {access_list.number}, but there has been a newer one; `rl-swarm members` shows it"
            self.submissions.refuse(ACCESS_LIST, why)
        if access_list.number > self.access_list.number:
            self.access_list = access_list

    def _reports(self, state: State, now: float) -> State:
        """Read the reports of the present stage."""
        known = {report.node for report in state.reports.values()}
        members = {member.node for member in state.members.values()}
        group = report_key(state.round, state.stage)
        for node in self.submissions.to_read(group, members):
            if node in known:
                continue
            read = self.submissions.read(group.of(node), Report, state)
            if read is not None:
                report, digest = read
                member = state.members.get(report.peer_id)
                why = admission.refusal_reason(self.manifest, self.access_list, report.peer_id, member)
                if why is not None:
                    self.submissions.log_once(group.of(node), f"not admitted ({why})")
                    continue
                state = rounds.record_report(state, report, now)
                self._digests[report.peer_id] = digest
        return state

    def _end_stage(self) -> None:
        self.submissions.end_stage()
        self._digests.clear()
        if self._joined > MAX_JOINED:
            log.info("%d more joined", self._joined - MAX_JOINED)
        self._joined = 0

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
        self.history.append(ended, self.identity)
        self._ended = (state.round, state.stage)

    def _write_state(self, state: State) -> None:
        data = seal(replace(state, reports={}), self.identity)
        self.private.write(STATE, data)
        self.store.write(STATE, data)

    def _is_touched(self, key: DocumentKey) -> bool:
        """Tell whether a document has changed since the last look, which costs little."""
        before, self._stamps[key] = self._stamps.get(key), self.store.stamp(key)
        return before != self._stamps[key]

    def _manifest_is_there(self) -> bool:
        try:
            return read_manifest(self.store) == self.manifest
        except FileNotFoundError:  # its owner may remove it to keep newcomers out
            return True
        except (OSError, Rejected):
            return False

    def _state_is_there(self, state: State) -> bool:
        """Tell whether nodes can read the state. All of them need it when it is lost or replaced by a forged one."""
        if state.phase == "waiting":
            return True
        try:
            return position(read_state(self.store, self.manifest)) == position(state)
        except (OSError, Rejected):
            return False

    def _restore(self, now: float) -> State:
        """Return the stored state, brought to where the history is. No time passes for members: this process was
        away."""
        self._digests.clear()
        self._look_again_at = 0.0
        state = self._newest_state()
        history = {(ended.round, ended.stage): ended for ended in self.history.read()}
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
        """Return the state that this user's coordinator wrote last, here or on another machine."""
        found = [State(swarm=self.swarm)]
        with suppress(OSError, Rejected):
            found.append(read_state(self.private, self.manifest))
        try:
            found.append(retries.retry(lambda: read_state(self.store, self.manifest), self.stop))
        except FileNotFoundError:
            pass
        except (OSError, Rejected) as error:
            log.warning("%s cannot be used and is made again: %s", self.store.name(STATE), error)
        return max(found, key=position)

    def _recover(self, now: float) -> None:
        """Find out after a failed write what the store has. Reports are read again."""
        known, state = self.state, self._restore(now)
        self.state = state if position(state) >= position(known) else replace(known, reports={})

    def _replayed(self, state: State, history: Iterable[StageRecord]) -> State:
        """Return the state after the stages in the history, their reports counted again."""
        at_once = dataclasses.replace(self.rules, end="interval", interval=-math.inf)
        deadline = time.monotonic() + retries.FIRST_PAUSE * 2**retries.TRIES
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
                    node, invitation, heartbeat = peers[peer_id]
                    state = rounds.record_presence(state, peer_id, node, ended.ended, invitation, heartbeat)
            for report in self._counted(state, ended, deadline):
                state = rounds.record_report(state, report, ended.ended)
            state, _ = rounds.advance(state, at_once, ended.ended)
        return state

    def _introduced(self, state: State) -> dict[str, tuple[str, str, float]]:
        """Return node, invitation and heartbeat of every peer that has introduced itself, by peer id."""
        peers = {}
        for node in (self.submissions.nodes(PEERS) or [])[:MAX_REPLAYED]:
            read = self.submissions.read(PEERS.of(node), PeerInfo, state)
            if read is not None:
                peers[read[0].peer_id] = (node, self._invitation(read[0]), read[0].timestamp)
        return peers

    def _invitation(self, peer: PeerInfo) -> str:
        """Return the invitation of a peer that is a member already, even if it admits no more peers."""
        try:
            return admission.check_ticket(peer.peer_id, peer.ticket, self.manifest).name(self.manifest)
        except Rejected:
            return ""

    def _counted(self, state: State, ended: StageRecord, deadline: float) -> list[Report]:
        """Read the reports that a stage in the history ended with."""
        while True:
            nodes = [state.members[peer_id].node for peer_id in ended.reports if peer_id in state.members]
            group = report_key(ended.round, ended.stage)
            reads = [self.submissions.read(group.of(node), Report, state) for node in nodes]
            reports = [read[0] for read in reads if read and ended.reports.get(read[0].peer_id) == read[1]]
            if len(reports) == len(ended.reports):
                return reports
            if time.monotonic() >= deadline or self.stop.wait(retries.FIRST_PAUSE):
                log.warning("round %d: %d reports are lost", ended.round, len(ended.reports) - len(reports))
                return reports

    def _remove_old_rollouts(self) -> None:
        if not self.settings.cleanup_rollouts:
            return
        failed, why = 0, None
        try:
            present = self.store.rounds(Kind.ROLLOUTS)
            for number in expired(present, self.state.round, self.settings.keep_rollout_rounds)[:MAX_REMOVED]:
                try:
                    self.store.remove_rollouts(number, self.settings.archive_rollouts)
                except OSError as error:
                    failed, why = failed + 1, error
        except OSError as error:
            failed, why = failed + 1, error
        if failed:  # the end of the next stage removes them
            log.warning("old rollouts cannot be removed, of %d rounds: %s", failed, why)

    def _pause(self, now: float) -> float:
        """Return the seconds until the next look; rounds on an interval need none before they end."""
        if self.state.phase == "finished":
            return 0.0
        if self.rules.end == "interval" and self.state.phase == "running":
            return max(0.01, self.state.started + self.rules.interval - now)
        return next(self._pauses)


def expired(present: Iterable[int], current: int, keep: int) -> list[int]:
    """Return the rounds that are older than the last `keep`, the newest of them first."""
    return sorted((number for number in present if number <= current - keep), reverse=True)
