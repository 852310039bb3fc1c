"""Chooses among peers' groups that were checked and scored: which ones, how many, and at what weight.

A strategy is a small class. It decides anew every round from what it is given, so that a run can be stopped and
resumed. The setting `strategy` names one of `STRATEGIES`, or a class of the user's as `module:Class`:

    class Unsure(Sapo):
        "Take groups that were solved about half of the time, at half the weight."

        def choose(self, candidates, wanted, rng):
            best = sorted(candidates, key=lambda one: abs(one.group.mean_reward - 0.5))
            return [weighted(one, 0.5) for one in best[:wanted]]
"""

import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rl_swarm.errors import UsageError, suggestion
from rl_swarm.protocol.rollouts import Group, Publication, RolloutId


class StrategyError(UsageError):
    """Reports a strategy that cannot be used; the message says what would work."""


@dataclass(frozen=True)
class CandidateGroup:
    """Holds a peer's group that a strategy may choose."""

    id: RolloutId
    group: Group
    publication: Publication


class Strategy:
    """Asks peers one after the other until enough groups with signal are found, and draws from those.

    So the cost of a round follows what a node asks for and not the size of the swarm.
    """

    settings: ClassVar[Mapping[str, object]] = {}  # that belong to it, unless the user gives others
    sees_all = False  # whether it chooses among what all peers published
    needs_signal = True  # whether groups in which all rewards are equal are dropped before it chooses

    def wanted(self, external: int, local: Sequence[Group]) -> int:
        """Return how many groups of peers this round takes.

        `external` is the setting `external_groups`, `local` the node's own groups.
        """
        return external

    def choose(self, candidates: Sequence[CandidateGroup], wanted: int, rng: random.Random) -> list[CandidateGroup]:
        """Choose the groups to train on; `weighted` makes one count more or less."""
        return rng.sample(candidates, min(wanted, len(candidates)))


class Alone(Strategy):
    """Takes no groups of peers."""

    def wanted(self, external: int, local: Sequence[Group]) -> int:
        return 0


class Sapo(Strategy):
    """Draws uniformly from all groups with signal, at the weight of own ones, as published (arXiv:2509.08721)."""

    settings: ClassVar[Mapping[str, object]] = {
        "check_likelihood": False,
        "max_source_share": 1.0,
        "negative_scale": 1.0,
    }
    sees_all = True


class Uniform(Sapo):
    """Draws uniformly from all groups, also from those without signal."""

    needs_signal = False


class Top(Sapo):
    """Takes the groups with the highest mean reward, with or without signal; chance decides among equal ones."""

    needs_signal = False

    def choose(self, candidates: Sequence[CandidateGroup], wanted: int, rng: random.Random) -> list[CandidateGroup]:
        shuffled = rng.sample(candidates, len(candidates))
        return sorted(shuffled, key=lambda one: -one.group.mean_reward)[:wanted]


class TopSignal(Top):
    """Takes the groups with the highest mean reward among those with signal."""

    needs_signal = True


class Capped(Sapo):
    """Corrects for off-policy tokens with an importance weight, which is capped."""

    settings: ClassVar[Mapping[str, object]] = {
        **Sapo.settings,
        "share_logprobs": True,
        "external_correction": "capped",
    }


class Gated(Strategy):
    """Leaves out texts that this model would hardly write, and scales the worse answers of peers to a quarter.

    It needs no log-probabilities of the senders. Each check costs a forward pass, so it asks peers until enough groups
    are found.
    """

    settings: ClassVar[Mapping[str, object]] = {"check_likelihood": True, "negative_scale": 0.25}


class Adaptive(Sapo):
    """Takes one group more for every own group without signal."""

    def wanted(self, external: int, local: Sequence[Group]) -> int:
        return external + sum(not group.has_signal for group in local)


STRATEGIES: dict[str, type[Strategy]] = {
    "frugal": Strategy,
    "alone": Alone,
    "sapo": Sapo,
    "uniform": Uniform,
    "top": Top,
    "top-signal": TopSignal,
    "capped": Capped,
    "gated": Gated,
    "adaptive": Adaptive,
}


def weighted(candidate: CandidateGroup, weight: float) -> CandidateGroup:
    """Return the candidate with a weight in training; 1 is that of an own group."""
    return replace(candidate, group=replace(candidate.group, weight=weight))


def named(name: str) -> Strategy:
    """Return the strategy of that name, or an object of the user's class."""
    if name in STRATEGIES:
        return STRATEGIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise StrategyError(
            f"strategy={name}: there is no strategy of that name. Use {', '.join(STRATEGIES)}, or a class of yours as "
            f"module:Class.{suggestion(name, STRATEGIES)}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file beside which the command is run
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise StrategyError(
            f"strategy={name} cannot be imported: {error}. Write module:Class, with module.py in this directory or "
            "installed."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise StrategyError(f"strategy={name}: {attribute} is not a subclass of rl_swarm.node.strategies.Strategy.")
    return found()
