"""Checks that a running swarm among peers is sound, as far as the peers that are there now show it.

There is no folder in which everything lies: members are asked for what they published and reported lately, and whoever
conducts for its history. What they hand out must be theirs and fit; what cannot be had is said.
"""

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from rl_swarm.config.resolve import load
from rl_swarm.monitor.validate import ValidatedRun, Verdict, check_history, check_size
from rl_swarm.network.documents import PEERS, report_key, rollouts_key
from rl_swarm.network.history import read_history
from rl_swarm.network.owner_documents import read_access_list, read_manifest, read_state
from rl_swarm.network.p2p.observer import observed, read_all
from rl_swarm.protocol.identity import animal_name
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.rounds import Member, PeerInfo, Report, State
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, unseal, unseal_with_digest

T = TypeVar("T", Publication, Report)

NEWEST = 3  # rounds back to which documents are asked for
MAX_ASKED = 64  # members, drawn at random


def validate(address: str, rounds: int | None, nodes: int | None) -> tuple[Verdict, ValidatedRun]:
    verdict = Verdict()
    with observed(address, load().settings) as (place, clock):
        manifest = read_manifest(place.store)
        run = ValidatedRun(place, manifest, State(swarm=manifest.swarm()), [], published=[])
        if clock is not None:
            run.state = clock()
            verdict.notes.append(
                "nobody conducts this swarm: there is no history, and each report is its author's word"
            )
        else:
            _check_conducted(run, verdict)
        _check_access_list(run, verdict)
        check_size(run, verdict, rounds, nodes)
        if run.state.phase != "finished":
            verdict.notes.append(f"the run goes on: it is at round {run.state.round} of {manifest.rounds}")
        _check_members(run, verdict)
    return verdict, run


def _check_conducted(run: ValidatedRun, verdict: Verdict) -> None:
    """The coordinator's state and history; without them, who introduces itself is taken for a member."""
    run.state = State(swarm=run.manifest.swarm(), members=_introduced(run, verdict))
    try:
        run.state = read_state(run.store, run.manifest)
        run.history = read_history(run.store)[0]
    except OSError:
        verdict.notes.append("the coordinator cannot be reached: its state or its history was not checked")
        return
    except Rejected as error:
        verdict.errors.append(f"the state cannot be believed ({error})")
        return
    finished = run.state.round + (run.state.phase == "finished")
    had = max((ended.round for ended in run.history), default=-1) + 1
    if had < finished:
        verdict.notes.append(f"the history was had for the first {had} of {finished} rounds")
    check_history(run, verdict, min(had, finished))


def _introduced(run: ValidatedRun, verdict: Verdict) -> dict[str, Member]:
    found = {}
    for key, answer in read_all(run.store, map(PEERS.of, run.store.nodes(PEERS)), MAX_BYTES):
        try:
            if isinstance(answer, bytes):
                peer = unseal(answer, PeerInfo)
                found[peer.peer_id] = Member(peer.node, joined_round=0, last_seen=peer.timestamp)
        except Rejected as error:
            verdict.errors.append(f"{run.store.name(key)}: altered or forged ({error})")
    return found


def _check_access_list(run: ValidatedRun, verdict: Verdict) -> None:
    try:
        if read_access_list(run.store, run.manifest).number > 0:
            verdict.count("owner's list")
    except OSError:
        verdict.notes.append("the owner's list of who may take part was not had: nobody who is there has it")
    except Rejected as error:
        verdict.errors.append(f"the owner's list of who may take part cannot be believed ({error})")


def _check_members(run: ValidatedRun, verdict: Verdict) -> None:
    """What members published and reported last: theirs, for where it lies, and what the coordinator counted."""
    members = sorted(run.state.members)
    if len(members) > MAX_ASKED:
        verdict.notes.append(f"{MAX_ASKED} of {len(members)} members were asked, drawn at random")
        members = random.sample(members, MAX_ASKED)
    counted = {(e.round, e.stage, peer): digest for e in run.history for peer, digest in e.reports.items()}
    verdict.count("member", len(members))
    places = [
        (number, stage)
        for number in range(run.state.round, max(-1, run.state.round - NEWEST), -1)
        for stage in reversed(range(run.manifest.stages))
    ]
    silent = _newest(run, verdict, members, places, Publication, {})
    _add_heard(run)
    silent &= _newest(run, verdict, members, places, Report, counted)
    if silent:
        names = ", ".join(sorted(map(animal_name, silent))[:8])
        verdict.notes.append(
            f"nothing of the last {NEWEST} rounds was had of {len(silent)} members (gone, late or new): {names}"
        )


def _add_heard(run: ValidatedRun) -> None:
    """What those of later stages were made from, so that their questions can be made again."""
    assert run.published is not None
    for stage in range(run.manifest.stages - 1, 0, -1):
        named = {
            rollouts_key(one.round, earlier, run.node(peer_id)): (one.round, earlier, peer_id)
            for _, one in run.published
            if one.stage == stage
            for earlier, peers in enumerate(one.heard[:stage])
            for peer_id in peers
            if peer_id in run.state.members
        }
        wanted = set(named) - {key for key, _ in run.published}
        for key, answer in read_all(run.store, sorted(wanted), run.manifest.limits.file_bytes):
            with suppress(Rejected):
                if isinstance(answer, bytes):
                    document = unseal(answer, Publication, run.manifest.limits.file_bytes)
                    if (document.round, document.stage, document.peer_id) == named[key]:
                        run.published.append((key, document))


def _newest(
    run: ValidatedRun,
    verdict: Verdict,
    members: Iterable[str],
    places: Iterable[tuple[int, int]],
    kind: type[T],
    counted: dict[tuple[int, int, str], str],
) -> set[str]:
    """Checks the newest document of a kind of every member, and says of whom there is none."""
    left = set(members)
    limit = run.manifest.limits.file_bytes if kind is Publication else MAX_BYTES
    key_of = rollouts_key if kind is Publication else report_key
    for number, stage in places:
        keys = {key_of(number, stage, run.node(peer_id)): peer_id for peer_id in sorted(left)}
        for key, answer in read_all(run.store, keys, limit):
            if isinstance(answer, OSError):
                continue
            peer_id, path = keys[key], run.store.name(key)
            left.discard(peer_id)
            try:
                document, digest = unseal_with_digest(answer, kind, limit)
            except Rejected as error:
                verdict.errors.append(f"{path}: altered or forged ({error})")
                continue
            said = (document.swarm, document.peer_id, document.node, document.round, document.stage)
            if said != (run.manifest.swarm(), peer_id, run.node(peer_id), number, stage):
                verdict.errors.append(f"{path}: belongs somewhere else")
            elif counted.get((number, stage, peer_id), digest) != digest:
                verdict.errors.append(f"{path}: not the report that the coordinator counted")
            else:
                verdict.count("publication" if kind is Publication else "report")
                if isinstance(document, Publication) and run.published is not None:
                    run.published.append((key, document))
    return left
