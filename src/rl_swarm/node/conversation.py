"""Follows the earlier stages of a round: what members said there, checked, and the questions that follow from it.

Nobody chooses what to answer to. A peer hears the first members of an order that follows from the manifest, the round
and its id, and its publication names whom it heard and which rollouts each question answers to. So a receiver fetches
the same, makes the question again and compares.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rl_swarm.environments.base import PEER_SECONDS, Environment, FollowUp
from rl_swarm.protocol.manifest import Manifest, derive_seed, question_seed
from rl_swarm.protocol.questions import Question, Statement
from rl_swarm.protocol.rollouts import Publication, Rollout, unpack
from rl_swarm.protocol.untrusted import quoted
from rl_swarm.protocol.wire import Rejected, digest

Fetch = Callable[[int, str], Iterable[Publication]]  # what a member published in a stage, if it can be had
MAX_ASKED = 32  # members, for those who said something in a stage
OVERHEARD = 2  # peers that had spoken in time, and yet were not heard


@dataclass
class Conversation:
    """Of one round. Statements are checked once, by whomever they are heard."""

    manifest: Manifest
    environment: Environment
    round: int
    fetch: Fetch
    on_reject: Callable[[str, str, str], None]
    members: Sequence[str] = ()  # peer ids
    _said: dict[tuple[int, str], tuple[Statement, ...]] = field(default_factory=dict)
    _in_time: set[tuple[int, str]] = field(default_factory=set)
    _heard: dict[tuple[str, int], tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def saw(self, publication: Publication) -> None:
        """Notes that this node had a publication while its stage was played: so those who play the next could have
        it."""
        self._in_time.add((publication.stage, publication.peer_id))

    def questions(self, peer_id: str, role: str, stage: int, seeds: Sequence[int]) -> list[Question]:
        """The node's own questions in a stage."""
        heard = self.statements(self.heard(peer_id, stage))
        return self._follow_up(
            [FollowUp(peer_id, role, stage, number, seed, heard) for number, seed in enumerate(seeds)], None
        )

    def again(self, rollouts: Sequence[Rollout]) -> list[Question]:
        """The questions of one peer's rollouts, made again; the first of them where all would take too long.

        Raises `Rejected` where they cannot be: `parents` may mean that this node has not heard what their author has.
        """
        if not rollouts:
            return []
        first = rollouts[0]
        self._check_heard(first.peer_id, first.stage, first.heard)
        heard = self.statements(first.heard)
        cues = [
            FollowUp(r.peer_id, r.role, r.stage, r.number, self._seed(r), heard, claimed=r.prompt) for r in rollouts
        ]
        questions = self._follow_up(cues, PEER_SECONDS)
        for rollout, question in zip(rollouts, questions, strict=False):
            if tuple(parent.digest for parent in question.parents) != rollout.parents:
                raise Rejected("parents", f"question {rollout.number} does not answer to what this peer was to hear")
        return questions

    def heard(self, peer_id: str, stage: int) -> tuple[tuple[str, ...], ...]:
        """Whom a peer hears before a stage: for each of the earlier ones the first that said something there."""
        if (peer_id, stage) not in self._heard:
            self._heard[peer_id, stage] = tuple(
                tuple(self._speakers(earlier, self.order(peer_id), self.environment.hears))
                for earlier in range(stage if self.environment.hears else 0)
            )
        return self._heard[peer_id, stage]

    def order(self, peer_id: str) -> list[str]:
        """The other members, in the order in which a peer is to hear them."""
        root = digest(self.manifest.questions_key())
        others = [other for other in self.members if other != peer_id]
        return sorted(others, key=lambda other: (derive_seed(root, "hears", self.round, peer_id, other), other))

    def _speakers(self, stage: int, peers: Sequence[str], most: int) -> list[str]:
        """Of those who can be heard."""
        return self.speakers(stage, peers, most, self.environment.hears_from)

    def speakers(self, stage: int, peers: Sequence[str], most: int, roles: Sequence[str] = ()) -> list[str]:
        """The first so many of the peers that said something in a stage, in one of the roles if there are any here. No
        more are asked than it takes."""
        found: list[str] = []
        asked = 0
        for peer_id in peers:
            if len(found) == most or asked == MAX_ASKED:
                break
            if (stage, peer_id) not in self._said:
                asked += 1
                for publication in self.fetch(stage, peer_id):
                    self._check(publication)
            if any(not roles or one.question.role in roles for one in self.said(stage, peer_id)):
                found.append(peer_id)
        return found

    def statements(self, heard: Sequence[Sequence[str]]) -> tuple[Statement, ...]:
        """What these peers said in the stages, as far as it can be had."""
        said: list[Statement] = []
        for stage, peers in enumerate(heard):
            for peer_id in self._speakers(stage, peers, len(peers)):
                said += self.said(stage, peer_id)
        return tuple(said)

    def said(self, stage: int, peer_id: str) -> tuple[Statement, ...]:
        """What is known that a peer said in a stage."""
        return self._said.get((stage, peer_id), ())

    def _check(self, publication: Publication) -> None:
        """Notes what a publication says, if its questions are those that its author was to answer."""
        place = (publication.stage, publication.peer_id)
        if place in self._said:
            return
        said: list[Statement] = []
        try:
            rollouts = list(unpack(publication, self.manifest.limits))
            questions = self.asked(rollouts)
            for rollout, question in zip(rollouts, questions, strict=False):
                check_prompt(rollout, question)
                name = publication.digest(str(rollout.number))
                texts = tuple(completion.text for completion in rollout.completions)
                said.append(Statement(name, publication.peer_id, question, texts, rollout.number))
        except Rejected as error:
            said = []
            self.on_reject(publication.node, error.reason, str(error))
        self._said[place] = tuple(said)

    def asked(self, rollouts: Sequence[Rollout]) -> list[Question]:
        """The questions of one peer's rollouts, of any stage and role."""
        if rollouts and rollouts[0].stage == 0 and not rollouts[0].role:
            return self.environment.questions([self._seed(r) for r in rollouts], PEER_SECONDS)
        return self.again(rollouts)

    def _seed(self, rollout: Rollout) -> int:
        return question_seed(self.manifest, rollout.round, rollout.peer_id, rollout.number)

    def _follow_up(self, cues: Sequence[FollowUp], seconds: float | None) -> list[Question]:
        for cue in cues[:1]:
            if cue.role and cue.role not in list(self.environment.roles)[1:]:
                raise Rejected("role", f"there is no role {quoted(cue.role)} in {self.manifest.environment}")
        made = self.environment.follow_up(cues, seconds)
        return [replace(question, stage=cue.stage, role=cue.role) for cue, question in zip(cues, made, strict=False)]

    def _check_heard(self, peer_id: str, stage: int, heard: Sequence[Sequence[str]]) -> None:
        """Whether a peer may have heard those whom it names, and no others."""
        if not any(heard):
            return
        order = self.order(peer_id)
        for earlier, peers in enumerate(heard):
            if earlier >= stage or len(peers) > self.environment.hears:
                raise Rejected("parents", f"it names {len(peers)} peers that it heard in stage {earlier}")
            if list(peers) != [other for other in order if other in peers]:
                raise Rejected("parents", "it has heard peers that this node does not know, or in another order")
            if set(peers) != set(self._speakers(earlier, peers, len(peers))):
                raise Rejected("parents", "it has heard what this node cannot fetch")
            all_heard = bool(peers) and len(peers) == self.environment.hears
            before = order[: order.index(peers[-1])] if all_heard else order[:MAX_ASKED]
            missed = [other for other in before if other not in peers and (earlier, other) in self._in_time]
            if len(self._speakers(earlier, missed, len(missed))) > OVERHEARD:
                raise Rejected("parents", "it has not heard peers that had spoken in time")


def check_prompt(rollout: Rollout, question: Question) -> None:
    if rollout.prompt != question.prompt:
        raise Rejected("question", f"question {rollout.number} is not the one this peer was to answer")
