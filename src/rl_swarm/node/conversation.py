"""Follows the earlier stages of a round: collects members' messages, checks them, and makes the questions that follow.

No node chooses what it answers to. Its context peers are the first members of an order that follows from the manifest,
the round and its id. Its publication names them, and for every question the messages that it answers to. So a receiver
fetches the same messages, makes the question again and compares.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rl_swarm.environments.base import PEER_SECONDS, Environment, FollowUp
from rl_swarm.network.base import OnReject
from rl_swarm.protocol.manifest import Manifest, derive_seed, question_seed
from rl_swarm.protocol.questions import PeerMessage, Question
from rl_swarm.protocol.reject_reason import RejectReason
from rl_swarm.protocol.rollouts import Publication, Rollout, unpack
from rl_swarm.protocol.untrusted import quoted
from rl_swarm.protocol.wire import Rejected, digest

Fetch = Callable[[int, str], Iterable[Publication]]  # the publication of a member in a stage, if it can be had
MAX_FETCHED = 32  # members that are asked, to find those that published in a stage
MAX_MISSED = 2  # peers that published in time and are missing among the context peers


@dataclass
class Conversation:
    """Holds the messages of one round, each checked once."""

    manifest: Manifest
    environment: Environment
    round: int
    fetch: Fetch
    on_reject: OnReject
    members: Sequence[str] = ()  # peer ids
    _messages: dict[tuple[int, str], tuple[PeerMessage, ...]] = field(default_factory=dict)
    _in_time: set[tuple[int, str]] = field(default_factory=set)
    _context_peers: dict[tuple[str, int], tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    def note_in_time(self, publication: Publication) -> None:
        """Note that this node had a publication while its stage was played, so peers could have it too."""
        self._in_time.add((publication.stage, publication.peer_id))

    def questions(self, peer_id: str, role: str, stage: int, seeds: Sequence[int]) -> list[Question]:
        """Make the node's own questions in a stage."""
        messages = self.messages(self.context_peers(peer_id, stage))
        return self._follow_up(
            [FollowUp(peer_id, role, stage, number, seed, messages) for number, seed in enumerate(seeds)], None
        )

    def regenerate(self, rollouts: Sequence[Rollout]) -> list[Question]:
        """Make the questions of one peer's rollouts again, or the first of them where all would take too long.

        Raises `Rejected` where that fails. `PARENTS` may mean that this node lacks messages that the author has.
        """
        if not rollouts:
            return []
        first = rollouts[0]
        self._check_context(first.peer_id, first.stage, first.context_peers)
        messages = self.messages(first.context_peers)
        follow_ups = [
            FollowUp(r.peer_id, r.role, r.stage, r.number, self._seed(r), messages, claimed=r.prompt) for r in rollouts
        ]
        questions = self._follow_up(follow_ups, PEER_SECONDS)
        for rollout, question in zip(rollouts, questions, strict=False):
            if tuple(parent.digest for parent in question.parents) != rollout.parents:
                raise Rejected(RejectReason.PARENTS, f"question {rollout.number} names other parents than it has")
        return questions

    def context_peers(self, peer_id: str, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return, for each earlier stage, the first peers in `peer_id`'s order that published something there."""
        if (peer_id, stage) not in self._context_peers:
            self._context_peers[peer_id, stage] = tuple(
                tuple(self._publishers(earlier, self.peer_order(peer_id), self.environment.context_peers))
                for earlier in range(stage if self.environment.context_peers else 0)
            )
        return self._context_peers[peer_id, stage]

    def peer_order(self, peer_id: str) -> list[str]:
        """Return the other members in the order in which they become context peers of `peer_id`."""
        root = digest(self.manifest.questions_key())
        others = [other for other in self.members if other != peer_id]
        return sorted(others, key=lambda other: (derive_seed(root, "hears", self.round, peer_id, other), other))

    def _publishers(self, stage: int, peers: Sequence[str], limit: int) -> list[str]:
        return self.publishers(stage, peers, limit, self.environment.context_roles)

    def publishers(self, stage: int, peers: Sequence[str], limit: int, roles: Sequence[str] = ()) -> list[str]:
        """Return the first `limit` of the peers with messages in a stage, in one of the roles if any are given.

        No more peers are asked than that takes.
        """
        found: list[str] = []
        asked = 0
        for peer_id in peers:
            if len(found) == limit or asked == MAX_FETCHED:
                break
            if (stage, peer_id) not in self._messages:
                asked += 1
                for publication in self.fetch(stage, peer_id):
                    self._check(publication)
            if any(not roles or message.question.role in roles for message in self.messages_of(stage, peer_id)):
                found.append(peer_id)
        return found

    def messages(self, context_peers: Sequence[Sequence[str]]) -> tuple[PeerMessage, ...]:
        """Return the messages of these peers, stage by stage, as far as this node can fetch them."""
        found: list[PeerMessage] = []
        for stage, peers in enumerate(context_peers):
            for peer_id in self._publishers(stage, peers, len(peers)):
                found += self.messages_of(stage, peer_id)
        return tuple(found)

    def messages_of(self, stage: int, peer_id: str) -> tuple[PeerMessage, ...]:
        """Return the messages of a peer in a stage, as far as this node has them."""
        return self._messages.get((stage, peer_id), ())

    def _check(self, publication: Publication) -> None:
        """Note the messages of a publication if its questions are those that its author was asked."""
        place = (publication.stage, publication.peer_id)
        if place in self._messages:
            return
        messages: list[PeerMessage] = []
        try:
            rollouts = list(unpack(publication, self.manifest.limits))
            questions = self.questions_of(rollouts)
            for rollout, question in zip(rollouts, questions, strict=False):
                check_prompt(rollout, question)
                name = publication.digest(str(rollout.number))
                texts = tuple(completion.text for completion in rollout.completions)
                messages.append(PeerMessage(name, publication.peer_id, question, texts, rollout.number))
        except Rejected as error:
            messages = []
            self.on_reject(publication.node, error.reason, str(error))
        self._messages[place] = tuple(messages)

    def questions_of(self, rollouts: Sequence[Rollout]) -> list[Question]:
        """Make the questions of one peer's rollouts again, of any stage and role."""
        if rollouts and rollouts[0].stage == 0 and not rollouts[0].role:
            return self.environment.questions([self._seed(r) for r in rollouts], PEER_SECONDS)
        return self.regenerate(rollouts)

    def _seed(self, rollout: Rollout) -> int:
        return question_seed(self.manifest, rollout.round, rollout.peer_id, rollout.number)

    def _follow_up(self, follow_ups: Sequence[FollowUp], seconds: float | None) -> list[Question]:
        for one in follow_ups[:1]:
            if one.role and one.role not in list(self.environment.roles)[1:]:
                raise Rejected(RejectReason.ROLE, f"{self.manifest.environment} has no role {quoted(one.role)}")
        questions = self.environment.follow_up(follow_ups, seconds)
        return [
            replace(question, stage=one.stage, role=one.role)
            for one, question in zip(follow_ups, questions, strict=False)
        ]

    def _check_context(self, peer_id: str, stage: int, context_peers: Sequence[Sequence[str]]) -> None:
        """Check that a peer names the context peers that it must have, and no others."""
        if not any(context_peers):
            return
        order, limit = self.peer_order(peer_id), self.environment.context_peers
        for earlier, peers in enumerate(context_peers):
            if earlier >= stage or len(peers) > limit:
                raise Rejected(RejectReason.PARENTS, f"it names {len(peers)} context peers of stage {earlier}")
            if list(peers) != [other for other in order if other in peers]:
                raise Rejected(RejectReason.PARENTS, "its context peers are unknown here or in another order")
            if set(peers) != set(self._publishers(earlier, peers, len(peers))):
                raise Rejected(RejectReason.PARENTS, "this node cannot fetch the messages of its context peers")
            is_full = bool(peers) and len(peers) == limit
            before = order[: order.index(peers[-1])] if is_full else order[:MAX_FETCHED]
            missed = [other for other in before if other not in peers and (earlier, other) in self._in_time]
            if len(self._publishers(earlier, missed, len(missed))) > MAX_MISSED:
                raise Rejected(RejectReason.PARENTS, "it leaves out context peers that had published in time")


def check_prompt(rollout: Rollout, question: Question) -> None:
    """Raise `Rejected` if a rollout shows another prompt than its question has."""
    if rollout.prompt != question.prompt:
        raise Rejected(RejectReason.QUESTION, f"question {rollout.number} is not the one this peer was to answer")
