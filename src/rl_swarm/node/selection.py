"""Selects the rollouts that a node learns from: checked, made again and scored here, then chosen by its strategy.

Nothing a peer says is believed: its question is made again from the manifest and compared, its rewards
are ignored, and a text that this node's model would hardly write is left out, whatever it earned. No source
fills a batch alone. Peers are asked one after the other, by most strategies only until enough was found.
"""

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rl_swarm.environments.base import PEER_SECONDS, Environment
from rl_swarm.network.base import OnReject
from rl_swarm.node.conversation import Conversation, check_prompt
from rl_swarm.node.reputation import most_of_one
from rl_swarm.node.strategies import Strategy
from rl_swarm.protocol.manifest import Manifest, question_seed
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Group, Publication, Rollout, unpack
from rl_swarm.protocol.wire import Rejected

Key = tuple[str, int, int, int]  # peer, round, stage, number
Place = tuple[str, int, int]  # of a publication: peer, round, stage
Transcripts = Callable[[int], Conversation]  # of a round
LONG = 64  # characters from which two peers do not write the same text by chance


@dataclass(frozen=True)
class Found:
    key: Key
    group: Group
    publication: Publication


Reject = Callable[[Publication, str, str], None]


@dataclass(frozen=True)
class Checks:
    """What is checked beside question and answer."""

    sources: Mapping[str, str] = field(default_factory=dict)  # of peers: those of one source count as one
    share: float = 1.0  # of the wanted groups, that one source may contribute at most
    completions: int = 0  # of a group that are looked at, so that a larger one weighs no more; 0: all
    max_span_nlls: Callable[[Sequence[Group]], list[list[float]]] | None = None  # of every completion, in nats
    most_nats: float = 0.0


@dataclass
class Selection:
    chosen: list[Group] = field(default_factory=list)
    scored: list[Group] = field(default_factory=list)  # everything that was looked at
    keys: list[Key] = field(default_factory=list)  # of the chosen ones
    asked: dict[str, bool] = field(default_factory=dict)  # peers looked at, and whether something was wrong
    refused: set[Place] = field(default_factory=set)
    max_nll: float = 0.0  # the highest that was let through


def select(
    publications: Iterable[Publication],
    wanted: int,
    manifest: Manifest,
    environment: Environment,
    used: set[Key],
    rng: random.Random,
    on_reject: OnReject,
    checks: Checks = Checks(),
    strategy: Strategy = Strategy(),
    transcript: Transcripts | None = None,
) -> Selection:
    """Looks at publications until `wanted` groups were found, or at all, and lets the strategy choose that many."""
    selection = Selection()
    pool: list[Found] = []
    written: dict[tuple[str, str], str] = {}  # long texts and the source that showed them first
    taken: Counter[str] = Counter()
    most = most_of_one(wanted, checks.share, len(set(checks.sources.values())))
    enough = math.inf if wanted and strategy.sees_all else wanted
    if strategy.sees_all and checks.share == 1:
        most = sys.maxsize  # or a group of a peer that has many would be chosen less often

    def reject(publication: Publication, reason: str, detail: str) -> None:
        # Of what it answers to this node may know less than its author: that is not held against it.
        selection.asked[publication.peer_id] = reason != "parents" or selection.asked[publication.peer_id]
        selection.refused.add(place_of(publication))
        on_reject(publication.node, reason, detail)

    left = iter(publications)
    while len(pool) < enough:
        looked_at: list[Found] = []
        for publication in left:
            source = checks.sources.get(publication.peer_id, publication.peer_id)
            if taken[source] >= most:
                continue
            selection.asked.setdefault(publication.peer_id, False)
            try:
                rollouts = [r for r in unpack(publication, manifest.limits) if key_of(r) not in used]
                rollouts = [_shortened(r, checks.completions, rng) for r in rollouts]
                groups = check(rollouts, manifest, environment, transcript)
            except Rejected as error:
                reject(publication, error.reason, str(error))
                continue
            if late := len(rollouts) - len(groups):
                why = f"{late} of its {len(rollouts)} rollouts are left out: the others took {PEER_SECONDS:g} s"
                reject(publication, "slow", why)
            selection.scored += groups
            scored = zip(rollouts, groups, strict=False)
            found = [
                Found(key_of(r), group, publication)
                for r, group in scored
                if group.has_signal or not strategy.needs_signal
            ]
            found = rng.sample(found, min(len(found), most - taken[source]))
            found = _without_copies(found, source, written, reject)
            taken[source] += len(found)
            looked_at += found
            if len(pool) + len(looked_at) >= enough:
                break
        if not looked_at:
            break
        pool += _likely(looked_at, checks, selection, reject)
    for one in strategy.choose(pool, wanted, rng):
        selection.keys.append(one.key)
        selection.chosen.append(one.group)
    return selection


def _shortened(rollout: Rollout, most: int, rng: random.Random) -> Rollout:
    if not most or len(rollout.completions) <= most:
        return rollout
    return replace(rollout, completions=tuple(rng.sample(rollout.completions, most)))


def _without_copies(
    found: list[Found], source: str, written: dict[tuple[str, str], str], reject: Reject
) -> list[Found]:
    """The groups that do not show what another source has shown."""
    kept = []
    for one in found:
        texts = {c.text for c in one.group.completions if len(c.text) >= LONG}
        first = [written.setdefault((one.group.question.prompt, text), source) for text in texts]
        if any(other != source for other in first):
            reject(one.publication, "copy", f"question {one.key[3]}: another peer has shown the same answer")
        else:
            kept.append(one)
    return kept


def _likely(found: list[Found], checks: Checks, selection: Selection, reject: Reject) -> list[Found]:
    """The groups of which this node's model could have written every completion."""
    if checks.max_span_nlls is None:
        return found
    kept = []
    strange: dict[str, list[float]] = {}  # by node
    for one, nats in zip(found, checks.max_span_nlls([one.group for one in found]), strict=True):
        if max(nats) <= checks.most_nats:
            kept.append(one)
            selection.max_nll = max(selection.max_nll, *nats)
        else:
            strange.setdefault(one.publication.node, []).append(max(nats))
    for node, nats in strange.items():
        publication = next(one.publication for one in found if one.publication.node == node)
        reject(
            publication,
            "unlikely",
            f"this model would not write {len(nats)} of its rollouts: {max(nats):.0f} nats above the average, and at "
            f"most {checks.most_nats:g} are taken",
        )
    return kept


def check(
    rollouts: Sequence[Rollout],
    manifest: Manifest,
    environment: Environment,
    transcript: Transcripts | None = None,
) -> list[Group]:
    """The rollouts of one peer as groups that this node made and scored itself; raises `Rejected`.

    Only the first of them where all would take too long. Those of later stages are made again from the transcript.
    """
    if not rollouts:
        return []
    if transcript is not None and (rollouts[0].stage or rollouts[0].role):
        questions = transcript(rollouts[0].round).again(rollouts)
    else:
        seeds = [question_seed(manifest, r.round, r.peer_id, r.number) for r in rollouts]
        questions = environment.questions(seeds, PEER_SECONDS)
    for rollout, question in zip(rollouts, questions, strict=False):
        check_prompt(rollout, question)
    return score(
        [(r.peer_id, question, r.completions) for r, question in zip(rollouts, questions, strict=False)],
        environment,
        external=True,
    )


def score(
    answered: Sequence[tuple[str, Question, Sequence[Completion]]], environment: Environment, external: bool
) -> list[Group]:
    """Groups with rewards, all scored in one go; of a peer those that could be scored in full in its time."""
    flat = [(question, completion.text) for _, question, completions in answered for completion in completions]
    rewards = environment.score(flat, PEER_SECONDS if external else None)
    if not external:
        asked = ((question, c) for _, question, completions in answered for c in completions)
        rewards = [r + for_ending(environment, *one) for r, one in zip(rewards, asked, strict=False)]
    groups: list[Group] = []
    start = 0
    for peer_id, question, completions in answered:
        end = start + len(completions)
        if end > len(rewards):
            break
        groups.append(Group(peer_id, question, tuple(completions), tuple(rewards[start:end]), external))
        start = end
    return groups


def for_ending(environment: Environment, question: Question, completion: Completion) -> float:
    """What an own answer earns for having ended by itself, or loses where it was cut. Of a peer's only the peer
    knows."""
    if question.role:
        return 0.0
    return environment.ending if completion.ended else -environment.ending


def best_peer(groups: Iterable[Group]) -> str:
    """The peer whose rollouts, as scored here, had the highest mean reward; empty if none earned anything."""
    means: dict[str, list[float]] = {}
    for group in groups:
        means.setdefault(group.peer_id, []).append(group.mean_reward)
    ranked = sorted((-sum(values) / len(values), peer_id) for peer_id, values in means.items())
    return ranked[0][1] if ranked and ranked[0][0] < 0 else ""


def place_of(publication: Publication) -> Place:
    return (publication.peer_id, publication.round, publication.stage)


def key_of(rollout: Rollout) -> Key:
    return (rollout.peer_id, rollout.round, rollout.stage, rollout.number)
