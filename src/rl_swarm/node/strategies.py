"""Chooses among peers' groups that were checked and scored: which ones, how many, and at what weight.

A strategy is a small class. It is asked anew every round and decides from what it is given, so that a run can be
stopped and resumed. Name one of `STRATEGIES` in the setting `strategy`, or a class of yours as `module:Class`:

    class Unsure(Sapo):
        "Groups that were solved about half of the time, at half the weight."

        def choose(self, found, wanted, rng):
            best = sorted(found, key=lambda one: abs(one.group.mean_reward - 0.5))
            return [weighed(one, 0.5) for one in best[:wanted]]
"""

import importlib
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from rl_swarm.errors import UserError

if TYPE_CHECKING:
    from rl_swarm.node.selection import Found
    from rl_swarm.protocol.rollouts import Group


class StrategyError(UserError):
    """A strategy that cannot be used; the message says what would work."""


class Strategy:
    """Asks peers one after the other until enough groups with signal were found, and draws from those.

    So what a node spends follows what it asks for and not the size of the swarm.
    """

    settings: ClassVar[Mapping[str, object]] = {}  # that belong to it, unless the user gives others
    sees_all = False  # whether it chooses among what all peers published
    needs_signal = True  # whether groups in which all rewards are equal are dropped before it chooses

    def wanted(self, external: int, local: "Sequence[Group]") -> int:
        """How many groups of others this round takes; `external` is the setting, `local` the node's own groups."""
        return external

    def choose(self, found: "Sequence[Found]", wanted: int, rng: random.Random) -> "list[Found]":
        """Those to learn from; `weighed` makes one count more or less."""
        return rng.sample(found, min(wanted, len(found)))


class Alone(Strategy):
    """Nothing of others."""

    def wanted(self, external: int, local: "Sequence[Group]") -> int:
        return 0


class Sapo(Strategy):
    """As published (arXiv:2509.08721): a uniform draw from all groups with signal, which count like one's own."""

    settings: ClassVar[Mapping[str, object]] = {
        "check_likelihood": False,
        "max_source_share": 1.0,
        "negative_scale": 1.0,
    }
    sees_all = True


class Uniform(Sapo):
    """A uniform draw from all groups, those without signal too."""

    needs_signal = False


class Top(Sapo):
    """The groups with the highest mean reward, whether they have signal or not; among equal ones by chance."""

    needs_signal = False

    def choose(self, found: "Sequence[Found]", wanted: int, rng: random.Random) -> "list[Found]":
        shuffled = rng.sample(found, len(found))
        return sorted(shuffled, key=lambda one: -one.group.mean_reward)[:wanted]


class TopSignal(Top):
    """The groups with the highest mean reward among those with signal."""

    needs_signal = True


class Capped(Sapo):
    """Off-policy correction: tokens of others weigh what they are likelier here than with their sender, up to a cap."""

    settings: ClassVar[Mapping[str, object]] = {
        **Sapo.settings,
        "share_logprobs": True,
        "external_correction": "capped",
    }


class Gated(Strategy):
    """Without the senders' log-probabilities: texts that this model would hardly write are left out, and others' worse
    answers count a quarter. To look at a text costs a pass of the model, so peers are asked until enough was found."""

    settings: ClassVar[Mapping[str, object]] = {"check_likelihood": True, "negative_scale": 0.25}


class Adaptive(Sapo):
    """Fills up: `external` groups of others, and one more for every own group without signal."""

    def wanted(self, external: int, local: "Sequence[Group]") -> int:
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


def weighed(one: "Found", weight: float) -> "Found":
    """The same group, counting so much in training."""
    return replace(one, group=replace(one.group, weight=weight))


def named(name: str) -> Strategy:
    """The strategy of that name, or the user's own class."""
    if name in STRATEGIES:
        return STRATEGIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise StrategyError(
            f"strategy={name}: there is none of that name. Use {', '.join(STRATEGIES)}, or a class of yours as "
            "module:Class."
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
        raise StrategyError(f"strategy={name}: {attribute} is no class made from rl_swarm.node.strategies.Strategy.")
    return found()
