"""Debates reasoning-gym's tasks in three stages: answer; criticise the peers' answers; vote and revise.

All peers are asked the same questions. A critic is shown answers of peers, and chooses by repeating the best one. A
voter is shown what critics wrote, and answers again. So every stage ends with an answer between tags, which tells with
whom a peer agrees.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rl_swarm.environments.base import FollowUp, quoted
from rl_swarm.environments.reasoning import CLOSE, OPEN, Reasoning, extract
from rl_swarm.protocol.questions import PeerMessage, Question

ANSWER, CRITICISE, VOTE = range(3)
FORMAT = 0.1  # for an answer between tags, in every stage
RIGHT = (0.9, 0.0, 0.6)  # for a right one
CHOICE = 0.9  # for a right one that a peer gave and this critic chose
MAJORITY = 0.3  # for a right one that most critics chose
LONGEST_ANSWER, LONGEST_TEXT = 60, 240  # characters of a peer that are shown

ASKED = {
    CRITICISE: f"Say what is wrong with the answers above. Then repeat the best of them between {OPEN} and {CLOSE}.",
    VOTE: f"Weigh what was said above. Then give your final answer between {OPEN} and {CLOSE}.",
}


class Debate(Reasoning):
    stages = 3
    context_peers = 3
    shared = True

    def follow_up(self, follow_ups: Sequence[FollowUp], seconds: float | None = None) -> list[Question]:
        questions = self.questions([one.seed for one in follow_ups], seconds)
        return [_with_context(one, question) for one, question in zip(follow_ups, questions, strict=False)]

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        right = super().score(answered, seconds)  # the first of them, where time runs out
        return [_reward(question, text, score) for (question, text), score in zip(answered, right, strict=False)]


def _with_context(follow_up: FollowUp, question: Question) -> Question:
    """Put what peers wrote about the question in the stage before above it."""
    asked, stage = (question.number, question.seed), follow_up.stage
    about = [
        message
        for message in follow_up.messages
        if message.question.stage == stage - 1 and (message.question.number, message.question.seed) == asked
    ]
    lines = [_line(number, text, stage) for number, text in enumerate(shown(question.seed, about), 1)]
    prompt = "\n".join([*lines, ASKED[stage], question.prompt]) if lines else question.prompt
    return replace(question, prompt=prompt, parents=tuple(about))


def shown(seed: int, messages: Sequence[PeerMessage]) -> list[str]:
    """Draw one text of each message, the same for all peers."""
    return [one.texts[one.draw_key(seed) % len(one.texts)] for one in messages]


def _line(number: int, text: str, stage: int) -> str:
    answer = extract(text)
    rest = quoted(text if answer is None else text.rpartition(OPEN)[0], LONGEST_TEXT)
    if answer is None:
        return f"Peer {number} says {rest}"
    line = f"Peer {number} {'answers' if stage == CRITICISE else 'votes for'} {quoted(answer, LONGEST_ANSWER)}"
    return line if rest == '""' else f"{line} and says {rest}"


def _reward(question: Question, text: str, right: float) -> float:
    answer = extract(text)
    if answer is None:
        return 0.0
    reward = FORMAT + RIGHT[question.stage] * right
    if question.stage == CRITICISE:
        given = [extract(text) for text in shown(question.seed, question.parents)]
        reward += CHOICE * right * (plain(answer) in map(plain, filter(None, given)))
    if question.stage == VOTE:
        reward += MAJORITY * right * (plain(answer) == majority(question.parents))
    return reward


def majority(messages: Sequence[PeerMessage]) -> str | None:
    """Return the answer that most of the critics' texts chose, the first in the alphabet among equals."""
    chosen = [extract(text) for message in messages for text in message.texts]
    votes = Counter(plain(answer) for answer in chosen if answer is not None)
    return min(votes, key=lambda answer: (-votes[answer], answer)) if votes else None


def plain(answer: str) -> str:
    """Return an answer without differences in case and white space."""
    return " ".join(answer.split()).casefold()
