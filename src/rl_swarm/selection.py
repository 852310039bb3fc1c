"""Which rollouts a node learns from: checked, made again and scored here, then `external` of them with signal.

Nothing a peer says is believed: its question is made again from the manifest and compared, its rewards
are ignored. Peers are asked one after the other until enough was found, so a node's cost follows what
it asks for and not the size of the swarm.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rl_swarm.environments.base import Environment, Question
from rl_swarm.manifest import Manifest, question_seed
from rl_swarm.network.base import OnReject
from rl_swarm.rollouts import Completion, Group, Publication, Rollout, unpack
from rl_swarm.wire import Rejected

Key = tuple[str, int, int, int]  # peer, round, stage, number


@dataclass
class Selection:
    chosen: list[Group] = field(default_factory=list)
    scored: list[Group] = field(default_factory=list)  # everything that was looked at
    keys: list[Key] = field(default_factory=list)  # of the chosen ones


def select(
    publications: Iterable[Publication],
    wanted: int,
    manifest: Manifest,
    environment: Environment,
    used: set[Key],
    rng: random.Random,
    on_reject: OnReject,
) -> Selection:
    """Looks at publications until `wanted` groups with signal were found, then draws that many uniformly."""
    selection = Selection()
    pool: list[tuple[Key, Group]] = []
    if wanted == 0:
        return selection
    for publication in publications:
        try:
            rollouts = [r for r in unpack(publication, manifest.limits) if key_of(r) not in used]
            groups = check(rollouts, manifest, environment)
        except Rejected as error:
            on_reject(publication.node, error.reason, str(error))
            continue
        selection.scored += groups
        pool += [(key_of(r), g) for r, g in zip(rollouts, groups, strict=True) if g.has_signal]
        if len(pool) >= wanted:
            break
    for key, group in rng.sample(pool, min(wanted, len(pool))):
        selection.keys.append(key)
        selection.chosen.append(group)
    return selection


def check(rollouts: Sequence[Rollout], manifest: Manifest, environment: Environment) -> list[Group]:
    """The rollouts of one peer as groups that this node made and scored itself; raises `Rejected`."""
    seeds = [question_seed(manifest, r.round, r.peer_id, r.number) for r in rollouts]
    questions = environment.questions(seeds)
    for rollout, question in zip(rollouts, questions, strict=True):
        if rollout.prompt != question.prompt:
            raise Rejected("question", f"question {rollout.number} is not the one this peer was to answer")
    return score(
        [(r.peer_id, question, r.completions) for r, question in zip(rollouts, questions, strict=True)],
        environment,
        external=True,
    )


def score(
    answered: Sequence[tuple[str, Question, Sequence[Completion]]], environment: Environment, external: bool
) -> list[Group]:
    """Groups with rewards, all scored in one go."""
    flat = [
        (question, completion.text) for _, question, completions in answered for completion in completions
    ]
    rewards: Iterator[float] = iter(environment.score(flat))
    return [
        Group(peer_id, question, tuple(completions), tuple(next(rewards) for _ in completions), external)
        for peer_id, question, completions in answered
    ]


def best_peer(groups: Iterable[Group]) -> str:
    """The peer whose rollouts, as scored here, had the highest mean reward; empty if none earned anything."""
    means: dict[str, list[float]] = {}
    for group in groups:
        means.setdefault(group.peer_id, []).append(group.mean_reward)
    ranked = sorted((-sum(values) / len(values), peer_id) for peer_id, values in means.items())
    return ranked[0][1] if ranked and ranked[0][0] < 0 else ""


def key_of(rollout: Rollout) -> Key:
    return (rollout.peer_id, rollout.round, rollout.stage, rollout.number)
