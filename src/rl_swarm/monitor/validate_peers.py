"""Checks that a running swarm among peers is sound, as far as the peers that are online show it.

No folder holds everything. Members are asked for their latest publications and reports, and the coordinator for its
history. Every document must be its author's and fit its place; a note says what could not be fetched.
"""

import random
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from rl_swarm.monitor.validate import ValidatedRun, Verdict, check_history, check_size
from rl_swarm.network.documents import PEERS, report_key, rollouts_key
from rl_swarm.network.history import read_history
from rl_swarm.network.owner_documents import read_access_list, read_manifest, read_state
from rl_swarm.network.p2p.observer import observed, read_all
from rl_swarm.network.settings import NetworkSettings
from rl_swarm.plural import counted
from rl_swarm.protocol.identity import animal_name
from rl_swarm.protocol.rollouts import Publication
from rl_swarm.protocol.rounds import Member, PeerInfo, Report, State
from rl_swarm.protocol.wire import MAX_BYTES, Rejected, unseal, unseal_with_digest

T = TypeVar("T", Publication, Report)

NEWEST = 3  # rounds whose documents are asked for
MAX_ASKED = 64  # members, drawn at random


def validate(
    address: str, rounds: int | None = None, nodes: int | None = None, network: NetworkSettings = NetworkSettings()
) -> tuple[Verdict, ValidatedRun]:
    """Check the swarm at a peer's address; `rescore` scores what its members published."""
    verdict = Verdict()
    with observed(address, network) as (place, clock):
        manifest = read_manifest(place.store)
        run = ValidatedRun(place, manifest, State(swarm=manifest.swarm()), [], published=[])
        if clock is not None:
            run.state = clock()
            verdict.notes.append(
                "this swarm has no coordinator: there is no history, and each report is its author's claim"
            )
        else:
            _check_coordinated(run, verdict)
        _check_access_list(run, verdict)
        check_size(run, verdict, rounds, nodes)
        if run.state.phase != "finished":
            verdict.notes.append(f"the run is not finished: it is at round {run.state.round} of {manifest.rounds}")
        _check_members(run, verdict)
    return verdict, run


def _check_coordinated(run: ValidatedRun, verdict: Verdict) -> None:
    """Check the coordinator's state and history. Without them, every peer that introduces itself counts as a member."""
    run.state = State(swarm=run.manifest.swarm(), members=_introduced(run, verdict))
    try:
        run.state = read_state(run.store, run.manifest)
        run.history = read_history(run.store)[0]
    except OSError:
        verdict.notes.append("the coordinator cannot be reached: its state or its history was not checked")
        return
    except Rejected as error:
        verdict.errors.append(f"the state is not valid ({error})")
        return
    finished = run.state.round + (run.state.phase == "finished")
    fetched = max((ended.round for ended in run.history), default=-1) + 1
    if fetched < finished:
        verdict.notes.append(f"only the history of the first {fetched} of {finished} rounds could be fetched")
    check_history(run, verdict, min(fetched, finished))


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
            verdict.count("access list")
    except OSError:
        verdict.notes.append("the owner's access list could not be fetched from any peer")
    except Rejected as error:
        verdict.errors.append(f"the owner's access list is not valid ({error})")


def _check_members(run: ValidatedRun, verdict: Verdict) -> None:
    """Check what members published and reported last: author, place, and what the coordinator counted."""
    members = sorted(run.state.members)
    if len(members) > MAX_ASKED:
        verdict.notes.append(f"{MAX_ASKED} of {len(members)} members were asked, drawn at random")
        members = random.sample(members, MAX_ASKED)
    expected = {(e.round, e.stage, peer): digest for e in run.history for peer, digest in e.reports.items()}
    verdict.count("member", len(members))
    places = [
        (number, stage)
        for number in range(run.state.round, max(-1, run.state.round - NEWEST), -1)
        for stage in reversed(range(run.manifest.stages))
    ]
    silent = _newest(run, verdict, members, places, Publication, {})
    _add_context(run)
    silent &= _newest(run, verdict, members, places, Report, expected)
    if silent:
        names = ", ".join(sorted(map(animal_name, silent))[:8])
        verdict.notes.append(
            f"{counted(len(silent), 'member')} published nothing in the last {NEWEST} rounds "
            f"(gone, late or new): {names}"
        )


def _add_context(run: ValidatedRun) -> None:
    """Fetch what publications of later stages were made from, so that their questions can be generated again."""
    assert run.published is not None
    for stage in range(run.manifest.stages - 1, 0, -1):
        named = {
            rollouts_key(one.round, earlier, run.node(peer_id)): (one.round, earlier, peer_id)
            for _, one in run.published
            if one.stage == stage
            for earlier, peers in enumerate(one.context_peers[:stage])
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
    expected: dict[tuple[int, int, str], str],
) -> set[str]:
    """Check the newest document of a kind of every member, and return the members that have none."""
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
            place = (document.swarm, document.peer_id, document.node, document.round, document.stage)
            if place != (run.manifest.swarm(), peer_id, run.node(peer_id), number, stage):
                verdict.errors.append(f"{path}: published for another place")
            elif expected.get((number, stage, peer_id), digest) != digest:
                verdict.errors.append(f"{path}: not the report that the coordinator counted")
            else:
                verdict.count("publication" if kind is Publication else "report")
                if isinstance(document, Publication) and run.published is not None:
                    run.published.append((key, document))
    return left
