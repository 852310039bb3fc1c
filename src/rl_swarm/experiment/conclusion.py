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
class Comparison:
    """Compares an arm with the one that trains alone: fresh local reward at the same number of generated tokens."""

    arm: Arm
    against: str | None
    change: Measure | None
    seeds: int


def of(arms: Sequence[Comparison], finished: Sequence[bool]) -> tuple[Verdict, str]:
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
    verdict, gave = _gave(one.change)
    way = "Sharing" if one.arm.external_groups else "Training another way"
    way = way if verdict != "unclear" else f"No clear difference: {way.lower()}"
    few = " With one seed, this is how nodes differ, not how runs do." if one.seeds == 1 else ""
    return verdict, (
        f"{way} ({one.arm.label}) gave {gave} of the fresh local reward of training alone ({one.against}), "
        f"at the same number of generated tokens.{few}"
    )


def _gave(change: Measure) -> tuple[Verdict, str]:
    """Return whether the interval lies above 0, below it or around it, and the change in words."""
    verdict: Verdict = "more" if change.low > 0 else "less" if change.high < 0 else "unclear"
    return verdict, f"{_signed(change.mean)} % ({_signed(change.low)} to {_signed(change.high)})"


def _signed(share: float) -> str:
    """Format a share with a digit where it is small, so that what is clearly above 0 is not shown as 0."""
    digits = 1 if abs(share) < 0.095 else 0
    shown = f"{100 * min(share, MAX_SHARE):+.{digits}f}"
    return "0" if float(shown) == 0 else shown.replace("-", "−")
