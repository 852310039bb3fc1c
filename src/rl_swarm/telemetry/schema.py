"""Defines the records of `metrics.jsonl`: one for a round and one for a held-out score.

The node writes them; reports, the page, experiments, the validator, notebooks and exporters read them. A new metric is
a field here and the line in `node/report.py` that fills it.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from rl_swarm.protocol.wire import Count, Id

Number = Annotated[float, Meta(ge=-1e15, le=1e15)]  # a number beyond these is no measurement
Groups = Annotated[int, Meta(ge=0, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 50)]
Stage = Annotated[int, Meta(ge=0, lt=64)]
After = Annotated[int, Meta(ge=-1, lt=1 << 53)]  # the round after which something was measured


class Seconds(msgspec.Struct, frozen=True, gc=False):
    """Holds the seconds of a round's phases."""

    questions: Number | None = None
    generate: Number | None = None
    score: Number | None = None
    publish: Number | None = None
    collect: Number | None = None
    train: Number | None = None
    report: Number | None = None
    other: Number | None = None  # phases that a role has added

    @classmethod
    def of(cls, phases: dict[str, float]) -> "Seconds":
        """Take the seconds of phases by their names."""
        known = {name: phases[name] for name in PHASES if name in phases}
        other = [seconds for name, seconds in phases.items() if name not in PHASES]
        return cls(**known, other=round(sum(other), 4) if other else None)

    @property
    def total(self) -> float:
        return sum(getattr(self, name) or 0.0 for name in self.__struct_fields__)


PHASES = Seconds.__struct_fields__[:-1]


class Load(msgspec.Struct, frozen=True, gc=False):
    """Holds the load of the machine."""

    processor: Number | None = None  # cores
    memory: Number | None = None  # bytes
    gpu: Number | None = None  # share of the time
    gpu_memory: Number | None = None


class RoundRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="round"):
    """Holds a node's metrics of one stage of a round.

    In a shared folder any member may have written it, so every value is bounded. There may be millions of them, hence
    fields and no dictionary.
    """

    round: Count
    reward_local: Number  # mean of the fresh local rollouts
    reward_training: Number  # mean of all groups trained on
    local_with_signal: Groups
    external_accepted: Groups
    tokens_per_second: Number
    timestamp: Number | None = None
    stage: Stage = 0
    policy_version: Count = 0
    local_groups: Groups = 0
    zero_std_fraction: Number | None = None
    completion_length: Number | None = None
    truncated_fraction: Number | None = None
    entropy: Number | None = None
    clip_fraction: Number | None = None
    logprob_mismatch: Number | None = None  # between the sampler's and the trainer's log-probabilities
    loss: Number | None = None
    kl: Number | None = None
    grad_norm: Number | None = None
    trained_tokens: Tokens = 0
    generated_tokens: Tokens = 0
    seconds: Seconds = Seconds()
    external_scored: Groups = 0
    external_by_peer: dict[Id, Groups] = {}  # by peer id
    external_rejected: dict[Id, Groups] = {}  # by reason
    external_max_nll: Number | None = None
    peak_memory: Number | None = None
    load: Load = Load()
    role_metrics: dict[Id, Number] = {}  # of its role
    reward_by_stage: dict[Id, Number] = {}  # by stage, where a round has several
    idle: bool = False  # the node had no role in this stage


class AnsweredQuestion(msgspec.Struct, frozen=True):
    """Holds a held-out question and an answer to it, for people to read."""

    task: str
    prompt: str
    answer: str | None
    completion: str
    reward: Number


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a score on the held-out questions."""

    questions: Groups
    samples: Groups | None = None  # answers to every question
    temperature: Number | None = None
    sampled: Number
    greedy: Number | None
    well_formed: Number  # share of the sampled answers
    accuracy_well_formed: Number  # mean reward of the well-formed ones
    by_task: dict[str, Number]  # sampled
    greedy_by_task: dict[str, Number]
    well_formed_by_task: dict[str, Number]
    accuracy_well_formed_by_task: dict[str, Number]
    examples: list[AnsweredQuestion]


class HeldOutRecord(HeldOut, frozen=True, kw_only=True, tag_field="kind", tag="held_out"):
    """Holds a held-out score in the log of a node."""

    when: Id  # `start`, `now` or `end`
    round: After  # -1: before the first


def line_of(record: RoundRecord | HeldOutRecord) -> dict[str, object]:
    """Return a record as it stands in the log, without what was not measured."""
    found: dict[str, object] = msgspec.to_builtins(record)
    for part in ("seconds", "load"):
        if isinstance(values := found.get(part), dict):
            found[part] = {name: value for name, value in values.items() if value is not None}
    unset = [name for name in ("role_metrics", "reward_by_stage", "idle") if not found.get(name)]
    return {n: value for n, value in found.items() if n == "greedy" or not (value is None or n in unset)}
