"""Says in one sentence what an experiment has shown so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl_swarm.experiment.arms import Arm
from rl_swarm.experiment.measures import MAX_SHARE, Measure
from rl_swarm.plural import counted

Verdict = Literal["early", "more", "less", "unclear", "nothing"]
PUBLISHED = ("4/4", "sapo")  # the paper's best


@dataclass(frozen=True)
class ArmComparison:
    """Compares an arm with the one that trains alone: fresh local reward at the same number of generated tokens."""

    arm: Arm
    against: str | None
    change: Measure | None
    seeds: int


def of(arms: Sequence[ArmComparison], finished: Sequence[bool]) -> tuple[Verdict, str]:
    """Conclude from the paper's best arm, or else from the first that shares. The best arm is not picked: of many
    equal arms one looks good by chance."""
    if not all(finished) or not finished:
        return "early", f"Too early to say: {sum(finished)} of {counted(len(finished), 'run')} have finished."
    compared = [one for one in arms if one.change and one.against]
    chosen = [one for one in compared if (one.arm.configuration, one.arm.strategy) == PUBLISHED]
    chosen = chosen or [one for one in compared if one.arm.external_groups] or compared
    if not chosen:
        return "nothing", "There is nothing to compare: the experiment has no arm beside the one that trains alone."
    one = chosen[0]
    assert one.change
    verdict, changed = _words(one.change, "reward of fresh answers")
    way = "sharing" if one.arm.external_groups else "training another way"
    way = f"No clear difference: {way}" if verdict == "unclear" else f"{way[0].upper()}{way[1:]}"
    few = " With one seed, this is how nodes differ, not how runs do." if one.seeds == 1 else ""
    return verdict, (
        f"{way} ({one.arm.label}) {changed}, compared with training alone ({one.against}), "
        f"at the same number of generated tokens.{few}"
    )


def _words(change: Measure, what: str) -> tuple[Verdict, str]:
    """Say whether the interval lies above 0, below it or around it."""
    mean, low, high = change.mean, change.low, change.high
    if low > 0:
        return "more", f"raised the {what} by {_percent(mean)} % ({_percent(low)} to {_percent(high)})"
    if high < 0:
        return "less", f"lowered the {what} by {_percent(-mean)} % ({_percent(-high)} to {_percent(-low)})"
    signed = [_percent(value, "+") for value in (mean, low, high)]
    return "unclear", f"changed the {what} by {signed[0]} % ({signed[1]} to {signed[2]})"


def _percent(share: float, sign: str = "") -> str:
    """Format a share; small ones with a digit, so that what is clearly above 0 is not shown as 0."""
    shown = f"{100 * min(share, MAX_SHARE):{sign}.{1 if abs(share) < 0.095 else 0}f}"
    return "0" if float(shown) == 0 else shown.replace("-", "−")
