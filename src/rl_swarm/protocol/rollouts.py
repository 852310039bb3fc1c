"""Defines what nodes share: questions with the texts a model answered with.

`Publication` is what travels, one sealed document per peer, round and stage, in the layout of the
folder swarm. `Rollout` is one question of it inside a node, before it is checked; `Group` is a rollout whose question
this node has made again, and whose answers it has scored.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from rl_swarm.protocol.manifest import Limits
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.wire import Count, Id, Name, Rejected, canonical, digest

log = logging.getLogger(__name__)
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
Bounded = Annotated[float, Meta(ge=-1e6, le=1e6)]
RolloutId = tuple[str, int, int, int]  # peer, round, stage, number
PublicationId = tuple[str, int, int]  # peer, round, stage
MAX_PARENTS = 256  # peers of a stage, and parents of a question


class Sampling(msgspec.Struct, frozen=True):
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Holds one completion. `prompt` and `reward` are for people to read: receivers compute both again."""

    prompt: str
    response: str
    reward: Bounded
    ended: bool = True
    tokens: list[Token] | None = None
    logprobs: list[Bounded] | None = None


class Publication(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds the rollouts that a peer shares in one stage of a round."""

    peer_id: Id
    kind: Literal["rollouts"]
    swarm: Id
    node: Name
    round: Count
    stage: Count
    timestamp: float
    model: Annotated[str, Meta(max_length=256)]
    policy_version: Count
    sampling: Sampling
    tokenizer: Id = ""
    rollouts: dict[str, list[Answer]]
    # Of a later stage: by earlier stage, whose rollouts its questions were made from, and for each question which.
    context_peers: Annotated[list[Annotated[list[Id], Meta(max_length=MAX_PARENTS)]], Meta(max_length=64)] = []
    parents: dict[str, Annotated[list[Id], Meta(max_length=MAX_PARENTS)]] = {}
    role: Annotated[str, Meta(max_length=64)] = ""  # of its author, where it is not the ordinary one

    @property
    def id(self) -> PublicationId:
        return (self.peer_id, self.round, self.stage)

    @property
    def min_completions(self) -> int:
        """Return the fewest completions of a question. Learning takes groups; other roles may answer once."""
        return 1 if self.role else 2

    def restricted_to(self, rollouts: dict[str, list[Answer]]) -> "Publication":
        """Return the same with these rollouts alone."""
        parents = {number: named for number, named in self.parents.items() if number in rollouts}
        return replace(self, rollouts=rollouts, parents=parents)

    def digest(self, number: str) -> str:
        """Return the digest by which a later stage refers to one of these rollouts."""
        return digest(canonical([self.swarm, self.peer_id, self.round, self.stage, number, self.rollouts[number]]))


@dataclass(frozen=True)
class Completion:
    text: str
    ended: bool
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Rollout:
    """Holds one question and the answers of a peer's model. Only its shape has been checked."""

    peer_id: str
    round: int
    stage: int
    number: int
    prompt: str
    completions: tuple[Completion, ...]
    tokenizer: str = ""
    role: str = ""
    context_peers: tuple[tuple[str, ...], ...] = ()
    parents: tuple[str, ...] = ()

    @property
    def id(self) -> RolloutId:
        return (self.peer_id, self.round, self.stage, self.number)


@dataclass(frozen=True)
class Group:
    """Holds a rollout whose question this node made itself and whose completions it scored itself."""

    peer_id: str
    question: Question
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    external: bool
    weight: float = 1.0  # what it counts in training

    @property
    def has_signal(self) -> bool:
        """Tell whether rewards differ: equal ones mean advantages of zero, and nothing to learn."""
        return max(self.rewards) > min(self.rewards)

    @property
    def mean_reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)


def to_answers(group: Group, share_logprobs: bool) -> list[Answer]:
    return [
        Answer(
            prompt=group.question.prompt,
            response=completion.text,
            reward=reward,
            ended=completion.ended,
            tokens=list(completion.tokens) if share_logprobs and completion.tokens else None,
            logprobs=[round(x, 4) for x in completion.logprobs] if share_logprobs and completion.logprobs else None,
        )
        for completion, reward in zip(group.completions, group.rewards, strict=True)
    ]


def fit_limits(publication: Publication, limits: Limits) -> Publication:
    """Cut a publication down to what receivers accept: without answers that are too long, and the last questions.

    A question that is left with too few answers goes, and so do those after it: receivers reject gaps.
    """
    kept: dict[str, list[Answer]] = {}
    for number in sorted(publication.rollouts, key=int)[: limits.questions]:
        given = publication.rollouts[number]
        fitting = [a for a in given if max(len(a.prompt), len(a.response)) <= limits.characters]
        if len(fitting) < publication.min_completions:
            break
        kept[number] = fitting[: limits.completions]
    lost = sum(map(len, publication.rollouts.values())) - sum(map(len, kept.values()))
    if lost:
        log.warning(
            "%d answers to %d questions are not published: this swarm takes at most %d questions, %d answers to each "
            "and %d characters a text",
            lost,
            len(publication.rollouts),
            limits.questions,
            limits.completions,
            limits.characters,
        )
    return publication.restricted_to(kept)


def unpack(publication: Publication, limits: Limits) -> Iterator[Rollout]:
    """Yield the rollouts in a publication, in the order of their numbers; raise `Rejected` beyond the limits."""
    if len(publication.rollouts) > limits.questions:
        raise Rejected(RejectReason.LIMITS, f"{len(publication.rollouts)} questions, at most {limits.questions}")
    numbers = []
    for key in publication.rollouts:
        if not (key.isascii() and key.isdigit() and len(key) <= 6 and str(int(key)) == key):
            raise Rejected(RejectReason.SCHEMA, "a question number is not a number")
        numbers.append(int(key))
    if sorted(numbers) != list(range(len(numbers))):
        raise Rejected(RejectReason.QUESTION, "questions were left out: nobody chooses which to answer")
    for number in range(len(numbers)):
        yield _rollout(publication, number, publication.rollouts[str(number)], limits)


def _rollout(publication: Publication, number: int, given: Sequence[Answer], limits: Limits) -> Rollout:
    if not publication.min_completions <= len(given) <= limits.completions:
        raise Rejected(
            RejectReason.LIMITS,
            f"{len(given)} completions, between {publication.min_completions} and {limits.completions} are accepted",
        )
    for answer in given:
        if max(len(answer.prompt), len(answer.response)) > limits.characters:
            raise Rejected(RejectReason.LIMITS, f"a text of more than {limits.characters} characters")
        if (answer.tokens is None) != (answer.logprobs is None) or len(answer.tokens or ()) != len(
            answer.logprobs or ()
        ):
            raise Rejected(RejectReason.SCHEMA, "tokens and log-probabilities do not fit each other")
    if len({answer.prompt for answer in given}) != 1:
        raise Rejected(RejectReason.SCHEMA, "several prompts in one rollout")
    return Rollout(
        peer_id=publication.peer_id,
        round=publication.round,
        stage=publication.stage,
        number=number,
        prompt=given[0].prompt,
        completions=tuple(
            Completion(
                answer.response,
                answer.ended,
                tuple(answer.tokens) if answer.tokens is not None else None,
                tuple(answer.logprobs) if answer.logprobs is not None else None,
            )
            for answer in given
        ),
        tokenizer=publication.tokenizer,
        role=publication.role,
        context_peers=tuple(map(tuple, publication.context_peers)),
        parents=tuple(publication.parents.get(str(number), ())),
    )
