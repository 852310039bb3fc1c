"""Collects peers' rollouts and keeps those that pass every check: fetch, verify, regenerate, score, filter, choose.

The node believes nothing that a peer says. It regenerates every question from the manifest and compares, ignores the
rewards that come along, and leaves out text that is improbable under its own model. One source has a limited share.
Peers are asked one after the other, by most strategies only until enough groups are found.
"""

import logging
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain

from rl_swarm.environments.base import PEER_SECONDS, Environment
from rl_swarm.network.base import Exchange, OnReject
from rl_swarm.node import strategies
from rl_swarm.node.conversation import Conversation, check_prompt
from rl_swarm.node.reputation import PeerReputation, max_groups_per_source, source_by_source
from rl_swarm.node.settings import NodeSettings
from rl_swarm.node.strategies import CandidateGroup, Strategy
from rl_swarm.protocol.manifest import Manifest, derive_seed, question_seed
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Group, Publication, PublicationId, Rollout, RolloutId, unpack
from rl_swarm.protocol.rounds import Member, State
from rl_swarm.protocol.wire import Rejected
from rl_swarm.telemetry.journal import Journal

log = logging.getLogger(__name__)

LATE_ROUNDS = 3  # in which a late peer must publish in time before it is waited for again
LONG_TEXT = 64  # characters from which two peers do not write the same text by chance

Conversations = Callable[[int], Conversation]  # by round
SpanNlls = Callable[[Sequence[Group]], list[list[float]]]  # of every completion, in nats


@dataclass
class Accepted:
    """Holds what one stage's intake has found."""

    chosen: list[Group] = field(default_factory=list)  # to train on
    scored: list[Group] = field(default_factory=list)  # all groups that were looked at
    ids: list[RolloutId] = field(default_factory=list)  # of the chosen ones
    asked: dict[str, bool] = field(default_factory=dict)  # peers looked at, and whether something was wrong
    refused: set[PublicationId] = field(default_factory=set)
    max_nll: float = 0.0  # the highest that was let through


@dataclass
class Intake:
    """Collects peers' rollouts for one node, and remembers from round to round which peers to ask."""

    peer_id: str
    role: str  # whose publications the node trains on; empty for the ordinary one
    settings: NodeSettings
    manifest: Manifest
    environment: Environment
    exchange: Exchange
    journal: Journal
    max_span_nlls: SpanNlls | None = None  # None: the likelihood is not checked
    members: Mapping[str, Member] = field(default_factory=dict)  # of this stage
    rejected: Counter[RejectReason] = field(default_factory=Counter)  # in this stage
    used: set[RolloutId] = field(default_factory=set)  # rollouts that the node has trained on
    refused: set[PublicationId] = field(default_factory=set)  # publications that failed and are not read again
    late: Counter[str] = field(default_factory=Counter)  # publications in time that each late node still owes
    conversations: dict[int, Conversation] = field(default_factory=dict)  # by round

    def __post_init__(self) -> None:
        self.reputation = PeerReputation(self.settings.sharing.max_peer_failures, self.settings.sharing.ban_rounds)
        self.strategy = strategies.named(self.settings.sharing.strategy)

    def begin_stage(self, state: State) -> None:
        """Take the members of a new stage and forget rounds that are too old."""
        self.members = state.members
        self.rejected.clear()
        oldest = state.round - self.settings.sharing.max_rollout_age - 1
        self.conversations = {number: kept for number, kept in self.conversations.items() if number >= oldest}

    def collect(self, state: State, own: Sequence[Group] = ()) -> Accepted:
        """Collect peers' rollouts and keep those that pass every check, cheapest check first."""
        settings, sources = self.settings, self.sources(state)
        rng = random.Random(derive_seed(self.manifest.seed, "select", self.peer_id, state.round, state.stage))
        checks = Checks(
            self.manifest,
            self.environment,
            self.reject,
            self.conversation,
            used=self.used,
            sources={peer: source for peer, source in sources.items() if peer != self.peer_id},
            max_source_share=settings.sharing.max_source_share,
            max_completions=settings.sampling.generations,
            max_span_nlls=self.max_span_nlls,
            likelihood_threshold=settings.sharing.likelihood_threshold,
        )
        wanted = self.strategy.wanted(settings.learning.external_groups, own)
        accepted = Selection(wanted, checks, self.strategy, rng).run(self.fetch(state, rng, sources))
        for peer_id, failed in accepted.asked.items():
            if self.reputation.record(peer_id, failed, state.round):
                self.journal.event("not_asked", peer=peer_id, rounds=settings.sharing.ban_rounds)
                log.warning("%s keeps failing and is not asked for %d rounds", peer_id, settings.sharing.ban_rounds)
        oldest = state.round - settings.sharing.max_rollout_age
        self.refused = {name for name in self.refused | accepted.refused if name[1] >= oldest}
        self.used = {name for name in self.used if name[1] >= oldest} | set(accepted.ids)
        return accepted

    def fetch(self, state: State, rng: random.Random, sources: Mapping[str, str]) -> Iterator[Publication]:
        """Fetch what other members published in this round and, out of lock-step, in the rounds before."""
        nodes = {
            peer_id: member.node
            for peer_id, member in sorted(state.members.items())
            if peer_id != self.peer_id and not self.is_silent(member, state)
        }
        nodes = {peer: node for peer, node in nodes.items() if self.reputation.should_ask(peer, state.round, rng)}
        asked = [nodes[peer] for peer in source_by_source(nodes, sources, rng)[: self.settings.sharing.fetch_max_peers]]
        lockstep = self.manifest.round_end == "lockstep"
        oldest = state.round if lockstep else max(0, state.round - self.settings.sharing.max_rollout_age)
        for number in range(state.round, oldest - 1, -1):
            if lockstep:
                found = self._wait(number, state.stage, asked)
            else:
                found = self.exchange.collect(number, state.stage, asked)
            for publication in found:
                self.late[publication.node] = max(0, self.late[publication.node] - 1)
                if self.environment.context_peers and number == state.round:
                    self.conversation(number).note_in_time(publication)
                if publication.id in self.refused or publication.role != self.role:
                    continue
                if nodes.get(publication.peer_id) == publication.node:
                    yield publication
                else:
                    why = f"{publication.peer_id} is not the member of that name"
                    self.reject(publication.node, RejectReason.PEER, why)

    def _wait(self, round: int, stage: int, nodes: Sequence[str]) -> Iterator[Publication]:
        """Wait for publications in lock-step, but not for nodes that were waited for in vain lately."""
        punctual, late = ([node for node in nodes if bool(self.late[node]) == is_late] for is_late in (False, True))
        found = self.exchange.collect(round, stage, punctual, self.manifest.peer_timeout, in_order=True)
        return chain(self._note_late(found, punctual), self.exchange.collect(round, stage, late, in_order=True))

    def _note_late(self, found: Iterable[Publication], nodes: Sequence[str]) -> Iterator[Publication]:
        """Pass on what these nodes published, in their order, and note the ones that published nothing."""
        waiting = list(nodes)
        for publication in found:
            came = waiting.index(publication.node)  # exchanges give what was asked for
            for node in waiting[:came]:
                self.late[node] = LATE_ROUNDS
            del waiting[: came + 1]
            yield publication
        for node in waiting:
            self.late[node] = LATE_ROUNDS

    def sources(self, state: State) -> dict[str, str]:
        """Return the source that each member counts with: its invitation, else its part of the internet."""
        subnets = self.exchange.subnets()
        return {
            peer_id: subnets.get(peer_id, source) if source == peer_id else source
            for peer_id, source in state.sources().items()
        }

    def is_silent(self, member: Member, state: State) -> bool:
        """Tell whether a member will hardly publish. With rounds on an interval the coordinator does not know."""
        if self.manifest.round_end == "lockstep":
            return not member.is_awaited(state.timestamp, self.manifest.peer_timeout)
        silence = state.timestamp - member.last_seen
        return self.manifest.round_end != "interval" and silence > self.manifest.peer_timeout

    def conversation(self, round: int) -> Conversation:
        """Return the conversation of a round, as far as this node has followed it."""

        def fetch(stage: int, peer_id: str) -> Iterator[Publication]:
            for publication in self.exchange.collect(round, stage, [self.members[peer_id].node]):
                if publication.peer_id == peer_id:
                    yield publication

        if round not in self.conversations:
            self.conversations[round] = Conversation(self.manifest, self.environment, round, fetch, self.reject)
        self.conversations[round].members = sorted(self.members)
        return self.conversations[round]

    def reject(self, node: str, reason: RejectReason, detail: str) -> None:
        """Count and log the failure of a peer; the round goes on."""
        self.rejected[reason] += 1
        self.journal.event("rejected", node=node, reason=reason.value, detail=detail[:500])
        log.warning("rollouts of %s rejected: %s", node, detail[:200])


@dataclass(frozen=True)
class Checks:
    """Holds what peers' rollouts are checked against."""

    manifest: Manifest
    environment: Environment
    on_reject: OnReject
    conversations: Conversations | None = None
    used: Set[RolloutId] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)  # of peers: those of one source count as one
    max_source_share: float = 1.0  # of the wanted groups
    max_completions: int = 0  # of a group that are looked at, so that a larger one weighs no more; 0: all
    max_span_nlls: SpanNlls | None = None  # None: the likelihood is not checked
    likelihood_threshold: float = 0.0  # nats


class Selection:
    """Takes the publications of one stage through all checks, until `wanted` groups are found; the strategy chooses."""

    def __init__(self, wanted: int, checks: Checks, strategy: Strategy, rng: random.Random) -> None:
        self.wanted, self.checks, self.strategy, self.rng = wanted, checks, strategy, rng
        self.accepted = Accepted()
        self.enough = math.inf if wanted and strategy.sees_all else wanted
        self.quota = max_groups_per_source(wanted, checks.max_source_share, len(set(checks.sources.values())))
        if strategy.sees_all and checks.max_source_share == 1:
            self.quota = sys.maxsize  # or a group of a peer that has many would be chosen less often
        self.taken: Counter[str] = Counter()  # groups, by source
        self.first_source: dict[tuple[str, str], str] = {}  # that showed a prompt with a long text

    def run(self, publications: Iterable[Publication]) -> Accepted:
        remaining, candidates = iter(publications), list[CandidateGroup]()
        while len(candidates) < self.enough:
            batch = self._check(remaining, self.enough - len(candidates))
            if not batch:
                break
            candidates += self._likely(batch)
        for one in self.strategy.choose(candidates, self.wanted, self.rng):
            self.accepted.ids.append(one.id)
            self.accepted.chosen.append(one.group)
        return self.accepted

    def _check(self, publications: Iterator[Publication], enough: float) -> list[CandidateGroup]:
        """Verify, regenerate and score publications until there are enough candidates."""
        checks, batch = self.checks, list[CandidateGroup]()
        for publication in publications:
            if self.taken[self._source(publication)] >= self.quota:
                continue
            self.accepted.asked.setdefault(publication.peer_id, False)
            try:
                rollouts = verify(publication, checks, self.rng)
                questions = regenerate(rollouts, checks.manifest, checks.environment, checks.conversations)
                groups = score_external(rollouts, questions, checks.environment)
            except Rejected as error:
                self._reject(publication, error.reason, str(error))
                continue
            if late := len(rollouts) - len(groups):
                why = f"{late} of its {len(rollouts)} rollouts are left out: the others took {PEER_SECONDS:g} s"
                self._reject(publication, RejectReason.SLOW, why)
            self.accepted.scored += groups
            found = [
                CandidateGroup(rollout.id, group, publication)
                for rollout, group in zip(rollouts, groups, strict=False)
                if group.has_signal or not self.strategy.needs_signal
            ]
            batch += self._within_quota(found, publication)
            if len(batch) >= enough:
                break
        return batch

    def _within_quota(self, found: list[CandidateGroup], publication: Publication) -> list[CandidateGroup]:
        """Draw as many candidates as their source may still give, without copies of another source's texts."""
        source, kept = self._source(publication), list[CandidateGroup]()
        for one in self.rng.sample(found, min(len(found), self.quota - self.taken[source])):
            texts = {c.text for c in one.group.completions if len(c.text) >= LONG_TEXT}
            first = [self.first_source.setdefault((one.group.question.prompt, text), source) for text in texts]
            if any(other != source for other in first):
                why = f"question {one.id[3]}: another peer has shown the same answer"
                self._reject(publication, RejectReason.COPY, why)
            else:
                kept.append(one)
        self.taken[source] += len(kept)
        return kept

    def _likely(self, batch: list[CandidateGroup]) -> list[CandidateGroup]:
        """Keep the candidates of which this node's model could have written every completion."""
        checks = self.checks
        if checks.max_span_nlls is None:
            return batch
        kept, unlikely = list[CandidateGroup](), dict[str, list[float]]()  # by node
        for one, nlls in zip(batch, checks.max_span_nlls([one.group for one in batch]), strict=True):
            if max(nlls) <= checks.likelihood_threshold:
                kept.append(one)
                self.accepted.max_nll = max(self.accepted.max_nll, *nlls)
            else:
                unlikely.setdefault(one.publication.node, []).append(max(nlls))
        for node, nats in unlikely.items():
            publication = next(one.publication for one in batch if one.publication.node == node)
            why = (
                f"this model would not write {len(nats)} of its rollouts: {max(nats):.0f} nats above the average, and "
                f"at most {checks.likelihood_threshold:g} are taken"
            )
            self._reject(publication, RejectReason.UNLIKELY, why)
        return kept

    def _reject(self, publication: Publication, reason: RejectReason, detail: str) -> None:
        # This node may lack messages that the author has, so that is not held against the author.
        asked = self.accepted.asked
        asked[publication.peer_id] = asked[publication.peer_id] or reason is not RejectReason.PARENTS
        self.accepted.refused.add(publication.id)
        self.checks.on_reject(publication.node, reason, detail)

    def _source(self, publication: Publication) -> str:
        return self.checks.sources.get(publication.peer_id, publication.peer_id)


def verify(publication: Publication, checks: Checks, rng: random.Random) -> list[Rollout]:
    """Return the unused rollouts of a publication that keeps the limits, cut to the size of the node's own groups."""
    limit = checks.max_completions or sys.maxsize

    def cut(rollout: Rollout) -> Rollout:
        if len(rollout.completions) <= limit:
            return rollout
        return replace(rollout, completions=tuple(rng.sample(rollout.completions, limit)))

    unpacked = list(unpack(publication, checks.manifest.limits))
    return [cut(rollout) for rollout in unpacked if rollout.id not in checks.used]


def regenerate(
    rollouts: Sequence[Rollout],
    manifest: Manifest,
    environment: Environment,
    conversations: Conversations | None = None,
) -> list[Question]:
    """Make the questions of one peer's rollouts again and compare the prompts; raises `Rejected`.

    Returns only the first of them where all would take too long.
    """
    if not rollouts:
        return []
    if conversations is not None and (rollouts[0].stage or rollouts[0].role):
        questions = conversations(rollouts[0].round).regenerate(rollouts)
    else:
        seeds = [question_seed(manifest, r.round, r.peer_id, r.number) for r in rollouts]
        questions = environment.questions(seeds, PEER_SECONDS)
    for rollout, question in zip(rollouts, questions, strict=False):
        check_prompt(rollout, question)
    return questions


def score_external(rollouts: Sequence[Rollout], questions: Sequence[Question], environment: Environment) -> list[Group]:
    """Score a peer's rollouts in one go; returns those that can be scored in full in the time that a peer has."""
    asked = list(zip(rollouts, questions, strict=False))
    answered = [(question, c.text) for rollout, question in asked for c in rollout.completions]
    rewards = environment.score(answered, PEER_SECONDS) if answered else []
    groups: list[Group] = []
    start = 0
    for rollout, question in asked:
        end = start + len(rollout.completions)
        if end > len(rewards):
            break
        rewarded = tuple(rewards[start:end])
        groups.append(Group(rollout.peer_id, question, rollout.completions, rewarded, external=True))
        start = end
    return groups
