"""Debates reasoning-gym's tasks in three stages: answer; criticise the peers' answers; vote and revise.

All peers are asked the same questions. A critic is shown answers of others, and chooses by repeating the one that it
finds best; a voter is shown what critics said, and answers again. So every stage ends with an answer between tags,
which
needs no form of its own and tells whom one agrees with.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rl_swarm.environments.base import FollowUp, quoted
from rl_swarm.environments.reasoning import CLOSE, OPEN, Reasoning, extract
from rl_swarm.protocol.questions import Question, Statement

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
    hears = 3
    shared = True

    def follow_up(self, cues: Sequence[FollowUp], seconds: float | None = None) -> list[Question]:
        asked = self.questions([cue.seed for cue in cues], seconds)
        return [_followed(cue, question) for cue, question in zip(cues, asked, strict=False)]

    def score(self, answered: Sequence[tuple[Question, str]], seconds: float | None = None) -> list[float]:
        right = super().score(answered, seconds)  # the first of them, where time runs out
        return [_reward(question, text, score) for (question, text), score in zip(answered, right, strict=False)]


def _followed(cue: FollowUp, question: Question) -> Question:
    """The question again, below what peers said about it in the stage before."""
    before = [said for said in cue.heard if said.question.stage == cue.stage - 1]
    about = [said for said in before if (said.question.number, said.question.seed) == (question.number, question.seed)]
    lines = [_line(number, text, cue.stage) for number, text in enumerate(shown(question.seed, about), 1)]
    prompt = "\n".join([*lines, ASKED[cue.stage], question.prompt]) if lines else question.prompt
    return replace(question, prompt=prompt, parents=tuple(about))


def shown(seed: int, about: Sequence[Statement]) -> list[str]:
    """One text of each peer, by chance, but the same for everybody."""
    return [one.texts[one.lot(seed) % len(one.texts)] for one in about]


def _line(number: int, text: str, stage: int) -> str:
    answer = extract(text)
    said = quoted(text if answer is None else text.rpartition(OPEN)[0], LONGEST_TEXT)
    if answer is None:
        return f"Peer {number} says {said}"
    line = f"Peer {number} {'answers' if stage == CRITICISE else 'votes for'} {quoted(answer, LONGEST_ANSWER)}"
    return line if said == '""' else f"{line} and says {said}"


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


def majority(statements: Sequence[Statement]) -> str | None:
    """What most of the critics' texts chose; the first in the alphabet where several did equally."""
    chosen = [extract(text) for statement in statements for text in statement.texts]
    votes = Counter(plain(answer) for answer in chosen if answer is not None)
    return min(votes, key=lambda answer: (-votes[answer], answer)) if votes else None


def plain(answer: str) -> str:
    """An answer without what does not matter."""
    return " ".join(answer.split()).casefold()
