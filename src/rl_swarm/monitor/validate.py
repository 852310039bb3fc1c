"""Checks that a finished run is sound: signatures, rewards and logs of every round, and a sample scored again.

`validate_peers.py` checks a swarm among peers, which may still be running.

The coordinator's signed history says which reports it counted, and everything else must fit it. A report that was
altered, removed or forged is an error, and so is a missing round or a log that disagrees. Gaps are fine when the node's
events explain them.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from rl_swarm.environments.base import Environment
from rl_swarm.monitor.run_reader import NodeView
from rl_swarm.network.address import Address, open_address
from rl_swarm.network.documents import DocumentKey, DocumentStore, Kind, report_key
from rl_swarm.network.history import read_history
from rl_swarm.network.owner_documents import read_manifest, read_state
from rl_swarm.node.conversation import Conversation
from rl_swarm.node.intake import Conversations, regenerate, score_external
from rl_swarm.plural import counted
from rl_swarm.protocol.identity import animal_name
from rl_swarm.protocol.manifest import Manifest
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Publication, unpack
from rl_swarm.protocol.rounds import Report, StageRecord, State
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, convert, unseal, unseal_with_digest
from rl_swarm.storage.files import LocalFiles
from rl_swarm.telemetry.journal import LOGS, read_lines
from rl_swarm.telemetry.schema import RoundRecord

T = TypeVar("T")

MAX_OTHERS = 50  # publications of other peers, read for notes
RESCORED = 24  # publications


@dataclass
class Verdict:
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)

    @property
    def sound(self) -> bool:
        return not self.errors

    def count(self, what: str, number: int = 1) -> None:
        self.checked[what] = self.checked.get(what, 0) + number


class LoggedEvent(msgspec.Struct, frozen=True):
    event: str
    round: int = -1
    first: int = 0
    last: int = -1


@dataclass
class ValidatedRun:
    address: Address
    manifest: Manifest
    state: State
    history: list[StageRecord]
    published: list[tuple[DocumentKey, Publication]] | None = None  # among peers, where no folder holds them

    @property
    def store(self) -> DocumentStore:
        return self.address.store

    def node(self, peer_id: str) -> str:
        return self.state.members[peer_id].node

    def has_log(self, node: str) -> bool:
        """Return whether a node's log is here: all logs lie at a path, and with a URL those of this machine's nodes."""
        return not self.address.is_url or LocalFiles(self.address.here).has_folder(f"logs/{node}")


def validate(
    address: Path | str, rounds: int | None = None, nodes: int | None = None
) -> tuple[Verdict, ValidatedRun | None]:
    """Check everything that needs no scoring; `rescore` does the rest."""
    verdict = Verdict()
    run = _open(open_address(address), verdict)
    if run is None:
        return verdict, None
    check_size(run, verdict, rounds, nodes)
    if run.state.phase != "finished":
        verdict.errors.append(f"the run is not finished: it is at round {run.state.round} of {run.manifest.rounds}")
    check_history(run, verdict, run.state.round + (run.state.phase == "finished"))
    reports = _check_reports(run, verdict)
    _check_gaps(run, verdict)
    _check_logs(run, reports, verdict)
    _check_rollouts(run, verdict)
    return verdict, run


def _open(address: Address, verdict: Verdict) -> ValidatedRun | None:
    store = address.store
    try:
        manifest = read_manifest(store)
        state = read_state(store, manifest)
        history, unreadable = read_history(store)
    except OSError as error:
        verdict.errors.append(f"{error.filename}: {error.strerror}")
        return None
    except Rejected as error:
        verdict.errors.append(f"the manifest or the state is not valid ({error})")
        return None
    if unreadable:
        verdict.notes.append(f"{counted(unreadable, 'line')} of the history cannot be read (a crash leaves one half)")
    return ValidatedRun(address, manifest, state, history)


def check_size(run: ValidatedRun, verdict: Verdict, rounds: int | None, nodes: int | None) -> None:
    if rounds is not None and (expected := run.state.round + (run.state.phase == "finished")) != rounds:
        verdict.errors.append(f"finished rounds: {expected}, expected: {rounds}")
    if nodes is not None and len(run.state.members) != nodes:
        verdict.errors.append(f"members: {len(run.state.members)}, expected: {nodes}")


def check_history(run: ValidatedRun, verdict: Verdict, finished: int) -> None:
    """Check the owner's signed history of all finished rounds."""
    places = set()
    for ended in run.history:
        where = f"history of round {ended.round} stage {ended.stage}"
        if ended.peer_id != run.manifest.peer_id or ended.swarm != run.manifest.swarm():
            verdict.errors.append(f"{where}: not signed by the swarm's owner")
        if (ended.round, ended.stage) in places:
            verdict.errors.append(f"{where}: recorded twice")
        places.add((ended.round, ended.stage))
    for number in range(finished):
        for stage in range(run.manifest.stages):
            if (number, stage) not in places:
                verdict.errors.append(f"round {number} stage {stage}: missing from the history")
    verdict.count("round", finished)


def _check_reports(run: ValidatedRun, verdict: Verdict) -> dict[tuple[str, int, int], Report]:
    """Check that every report that the coordinator counted is still there, unaltered."""
    found = {}
    for ended in run.history:
        if not ended.reports:
            verdict.notes.append(f"round {ended.round}: no member reported ({ended.why})")
        for peer_id, digest in ended.reports.items():
            if peer_id not in run.state.members:
                verdict.errors.append(f"round {ended.round}: reported by {peer_id}, not a member")
                continue
            key = report_key(ended.round, ended.stage, run.node(peer_id))
            path = run.store.name(key)
            try:
                report, name = unseal_with_digest(run.store.read(key, MAX_BYTES), Report)
            except FileNotFoundError:
                verdict.errors.append(f"{path}: missing")
                continue
            except OSError as error:
                verdict.errors.append(f"{path}: cannot be read ({error.strerror})")
                continue
            except Rejected as error:
                verdict.errors.append(f"{path}: altered or forged ({error})")
                continue
            if name != digest or report.peer_id != peer_id:
                verdict.errors.append(f"{path}: not the report that the coordinator counted")
                continue
            found[peer_id, ended.round, ended.stage] = report
            verdict.count("report")
    return found


def _check_gaps(run: ValidatedRun, verdict: Verdict) -> None:
    """Check that every missed round has a reason: the member joined late, skipped it, reported late, or left."""
    for peer_id, member in run.state.members.items():
        reported = {ended.round for ended in run.history if peer_id in ended.reports}
        missing = {ended.round for ended in run.history} - reported
        reasons: dict[int, str] = {}
        for event in _lines(run, member.node, "training_events.jsonl", LoggedEvent):
            if event.event == "skipped":
                reasons |= dict.fromkeys((n for n in missing if event.first <= n <= event.last), "skipped")
            elif event.event == "joined_late":
                reasons |= dict.fromkeys((n for n in missing if n < event.round), "before it joined")
        last = max(reported, default=-1)
        for number in sorted(missing):
            if number in reasons or number < member.joined_round:
                continue
            if number > last:
                reasons[number] = "after its last report"
            elif _is_there(run, report_key(number, run.manifest.stages - 1, member.node)):
                reasons[number] = "reported late"
            elif not run.has_log(member.node):
                reasons[number] = "for reasons in its log, which is on another machine"
            else:
                verdict.errors.append(f"round {number}: no report of {member.node} and no reason for it")
        explained = missing & (reasons.keys() | set(range(member.joined_round)))
        if explained:
            kinds = sorted({reasons.get(number, "before it joined") for number in explained})
            verdict.notes.append(
                f"{animal_name(peer_id)}: {counted(len(explained), 'round')} without a report ({', '.join(kinds)})"
            )


def _is_there(run: ValidatedRun, key: DocumentKey) -> bool:
    try:
        run.store.read(key, 0)
    except OSError:
        return False
    return True


def _check_logs(run: ValidatedRun, reports: dict[tuple[str, int, int], Report], verdict: Verdict) -> None:
    """Check that every node's log has the rewards that it reported."""
    elsewhere = [peer_id for peer_id, member in run.state.members.items() if not run.has_log(member.node)]
    if elsewhere:
        names = ", ".join(sorted(map(animal_name, elsewhere)))
        verdict.notes.append(f"logs that are not on this machine were not compared: {names}")
    for peer_id, member in run.state.members.items():
        if peer_id in elsewhere:
            continue
        _check_lines(run, member.node, verdict)
        logged: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for line in _lines(run, member.node, "metrics.jsonl", RoundRecord):
            pair = (line.reward_local, line.reward_training)
            logged.setdefault((line.round, line.stage), []).append(pair)
        for (owner, number, stage), report in reports.items():
            if owner != peer_id:
                continue
            logged_rewards = logged.get((number, stage), [])
            if not logged_rewards and not _killed_before_logging(run, member.node, number):
                verdict.errors.append(f"logs/{member.node}/metrics.jsonl: round {number} is missing")
            if logged_rewards and (report.reward, report.training_reward) not in logged_rewards:
                verdict.errors.append(
                    f"logs/{member.node}/metrics.jsonl: round {number} has another reward than the report"
                )
            verdict.count("log line", len(logged_rewards))


def _check_lines(run: ValidatedRun, node: str, verdict: Verdict) -> None:
    """Count the lines of a log that cannot be read. A crash leaves one half-written line; more are damage."""
    view = NodeView(node)
    view.refresh(LocalFiles(run.address.here))
    starts = sum(
        event.event in ("joined", "resumed") for event in _lines(run, node, "training_events.jsonl", LoggedEvent)
    )
    for name in LOGS:
        if lines := view.unreadable_in(name):
            why = "as a crash leaves them" if lines <= starts else "more than crashes explain"
            verdict.notes.append(f"logs/{node}/{name}: {counted(lines, 'line')} cannot be read ({why})")


def _killed_before_logging(run: ValidatedRun, node: str, number: int) -> bool:
    """Return whether a node died between its report and its log line: it comes back and skips that round."""
    events = _lines(run, node, "training_events.jsonl", LoggedEvent)
    return any(e.event == "skipped" and e.first <= number <= e.last for e in events) or any(
        e.event in ("resumed", "joined") and e.round < number for e in events[1:]
    )


def _lines(run: ValidatedRun, node: str, name: str, kind: type[T]) -> list[T]:
    """Read the lines of one kind from a node's log. The node writes it, so other lines are left out."""
    found = []
    for line in read_lines(LocalFiles(run.address.here), f"logs/{node}/{name}")[0]:
        with suppress(Rejected):
            found.append(convert(line, kind))
    return found


def _publications(run: ValidatedRun, verdict: Verdict) -> Iterator[tuple[DocumentKey, Publication]]:
    """Read what members published in the rounds that were played, and a few of the files that others left beside it."""
    members = {member.node for member in run.state.members.values()}
    played = {(run.state.round, stage) for stage in range(run.manifest.stages)}
    played |= {(ended.round, ended.stage) for ended in run.history}
    others = 0
    for kind in (Kind.ROLLOUTS, Kind.ARCHIVE):
        there = set(run.store.rounds(kind))
        for number, stage in sorted(played):
            if number not in there:
                continue
            group = DocumentKey(kind, number, stage)
            for node in run.store.nodes(group):
                others += node not in members
                if node not in members and others > MAX_OTHERS:
                    continue
                try:
                    yield group.of(node), _publication(run, group.of(node))
                except (OSError, Rejected) as error:
                    problem = f"{run.store.name(group.of(node))}: truncated, altered or forged ({error})"
                    (verdict.errors if node in members else verdict.notes).append(problem)
    if others > MAX_OTHERS:
        verdict.notes.append(f"{others} files beside the rollouts are not of members; {MAX_OTHERS} were read")


def _publication(run: ValidatedRun, key: DocumentKey) -> Publication:
    limit = run.manifest.limits.file_bytes
    return unseal(run.store.read(key, limit), Publication, limit)


def _check_rollouts(run: ValidatedRun, verdict: Verdict) -> None:
    """Check that every publication is signed by its author and lies in its place, and that no round is missing in
    between."""
    nodes = {peer_id: member.node for peer_id, member in run.state.members.items()}
    present: dict[tuple[int, int], set[str]] = {}
    for key, publication in _publications(run, verdict):
        path = run.store.name(key)
        place = (publication.swarm, publication.round, publication.stage, publication.node)
        if place != (run.manifest.swarm(), key.round, key.stage, key.node):
            verdict.errors.append(f"{path}: published for another place")
        elif publication.peer_id not in nodes and publication.node not in nodes.values():
            verdict.notes.append(f"{path}: of {publication.peer_id}, not a member")
        elif nodes.get(publication.peer_id) != publication.node:
            verdict.errors.append(f"{path}: not written by the member of that name")
        else:
            present.setdefault((publication.round, publication.stage), set()).add(publication.peer_id)
            verdict.count("publication")
    kept_from = min((number for number, _ in present), default=0)
    if kept_from:
        verdict.notes.append(f"rollouts before round {kept_from} have been removed")
    for ended in run.history:
        if ended.round < kept_from:
            continue
        for peer_id in ended.reports:
            if peer_id in nodes and peer_id not in present.get((ended.round, ended.stage), set()):
                verdict.errors.append(f"round {ended.round}: the rollouts of {nodes[peer_id]} are missing")


def rescore(run: ValidatedRun, environment: Environment, verdict: Verdict, count: int = RESCORED) -> None:
    """Generate the questions of some publications again and compare what their answers earn."""
    found = _publications(run, Verdict()) if run.published is None else run.published
    published = [
        (key, publication)
        for key, publication in found
        if publication.swarm == run.manifest.swarm() and publication.peer_id in run.state.members
    ]
    conversations = _conversations(run, environment, [publication for _, publication in published])
    for key, publication in random.Random(0).sample(published, min(count, len(published))):
        path = run.store.name(key)
        try:
            rollouts = list(unpack(publication, run.manifest.limits))
            questions = regenerate(rollouts, run.manifest, environment, conversations)
            groups = score_external(rollouts, questions, environment)
        except Rejected as error:
            # Among peers, earlier stages may not be available.
            elsewhere = error.reason is RejectReason.PARENTS and run.published is not None
            (verdict.notes if elsewhere else verdict.errors).append(f"{path}: {error}")
            continue
        for rollout, group in zip(rollouts, groups, strict=False):  # fewer where scoring takes too long
            claimed = [answer.reward for answer in publication.rollouts[str(rollout.number)]]
            scored = zip(group.rewards, group.completions, strict=True)
            if [r + environment.ending_reward(group.question, c.ended) for r, c in scored] != claimed:
                verdict.errors.append(f"{path}: question {rollout.number} claims other rewards than its answers earn")
            verdict.count("rescored answer", len(claimed))


def _conversations(run: ValidatedRun, environment: Environment, published: list[Publication]) -> Conversations:
    """Return the conversation of every round, from the publications of its earlier stages."""
    by_place = {(one.round, one.stage, one.peer_id): one for one in published}
    made: dict[int, Conversation] = {}

    def conversation(number: int) -> Conversation:
        def fetch(stage: int, peer_id: str) -> list[Publication]:
            found = by_place.get((number, stage, peer_id))
            return [found] if found is not None else []

        if number not in made:
            members = sorted(run.state.members)
            made[number] = Conversation(run.manifest, environment, number, fetch, lambda *why: None, members=members)
        return made[number]

    return conversation
