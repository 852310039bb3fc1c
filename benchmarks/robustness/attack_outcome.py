"""Sizes an attacked swarm, and holds what came of it; torch is not needed for it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.robustness.attack_types import ATTACKS, Attack
from rl_swarm.node.evaluation import mean

LAST_EVALUATIONS = 3


@dataclass(frozen=True)
class Size:
    """Sizes the swarms of a benchmark."""

    model: str = "tiny"
    honest: int = 6
    malicious: int = 2
    identities: int = 10  # per machine, at most
    rounds: int = 60
    short_rounds: int = 8  # of attacks that a few rounds show
    long: Sequence[str] = tuple(ATTACKS)  # of attacks that need all rounds
    every: int = 5  # rounds between held-out evaluations
    held_out: int = 40
    samples: int = 2
    seed: int = 0
    learning_rate: float = 3e-4  # three times the default, so that fewer rounds suffice
    tasks: str = "auto"
    device: str = "cpu"


@dataclass
class Outcome:
    """Holds the figures of one swarm."""

    curve: list[dict[str, float]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # reasons of honest nodes to reject rollouts
    published: int = 0  # rollouts of the attack
    learned: int = 0  # of them, trained on by an honest node
    external: int = 0  # external groups that honest nodes trained on
    hostile: int = 0  # of them, the attack's
    node_rounds: int = 0
    empty: int = 0  # of them, those without any external group
    waited: float = 0.0  # seconds from the attackers' turn to the end of the round, per round
    canary: bool = False

    @property
    def held_out(self) -> float:
        return self.beside(self)

    def beside(self, other: "Outcome") -> float:
        """Return the held-out score at the round where the other swarm ended.

        It is the mean of the last evaluations, since one is noisy.
        """
        end = other.curve[-1]["round"]
        found = [point["held_out"] for point in self.curve if 0 < point["round"] <= end]
        return mean(found[-LAST_EVALUATIONS:] or [self.curve[0]["held_out"]])

    def grown(self, name: str) -> float:
        return self.curve[-1][name] - self.curve[0][name]


def rounds_of(attack: Attack | None, size: Size) -> int:
    if attack is None:
        return size.rounds
    if attack.rounds is not None:
        return attack.rounds
    long = not attack.short and type(attack) in (ATTACKS[name] for name in size.long)
    return size.rounds if long else size.short_rounds
