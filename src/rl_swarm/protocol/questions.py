"""Defines a question, the rollouts that it follows up, and which questions are held out."""

import hashlib
from dataclasses import dataclass

SHARE = 32  # of 256: texts whose SHA-256 begins with a smaller byte are held out


@dataclass(frozen=True)
class Question:
    """Holds the question that a task makes from a seed, the same on every machine. `answer` is None where many are
    right."""

    task: str
    number: int  # of the task in the swarm's list: one task may stand there with several configurations
    seed: int
    prompt: str
    answer: str | None
    stage: int = 0
    role: str = ""  # of the node that answers it; empty for the ordinary one
    parents: tuple["PeerMessage", ...] = ()  # rollouts that it follows up


@dataclass(frozen=True)
class PeerMessage:
    """Holds a peer's rollout of an earlier stage, signed, with its question regenerated. Its texts are untrusted."""

    digest: str
    peer_id: str
    question: Question
    texts: tuple[str, ...]
    number: int = 0  # among its author's questions in that stage

    def draw_key(self, seed: int) -> int:
        """Draw a number from a seed, its author and its place, so that no text is likelier to be drawn."""
        place = f"{seed} {self.peer_id} {self.question.stage} {self.number}"
        return int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "big")


def is_held_out(text: str) -> bool:
    """Decide by the text and not by the seed: a short task makes the same question from many seeds."""
    return hashlib.sha256(text.encode()).digest()[0] < SHARE
