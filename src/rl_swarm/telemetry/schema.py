"""Defines the records of `metrics.jsonl`: one for a round and one for a held-out score.

The node writes them; reports, the page, experiments, the validator, notebooks and exporters read them. A new metric is
a field here and the line in `node/report.py` that fills it. The comment of a field is its row in docs/metrics.md:
`unit: meaning`, or the meaning alone. `python scripts/metrics_table.py` writes those rows.
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

    questions: Number | None = None  # s: making the node's questions
    generate: Number | None = None  # s: sampling completions
    score: Number | None = None  # s: scoring the node's own completions
    publish: Number | None = None  # s: writing the publication
    collect: Number | None = None  # s: fetching, verifying and scoring peers' rollouts
    train: Number | None = None  # s: the updates
    report: Number | None = None  # s: reporting to the coordinator
    other: Number | None = None  # s: phases that a role has added

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

    processor: Number | None = None  # cores: processor time of the node's process by elapsed time
    memory: Number | None = None  # bytes: memory of the node's process
    gpu: Number | None = None  # 0 to 1: share of the time in which a kernel ran on its GPUs
    gpu_memory: Number | None = None  # bytes: memory that all processes use on its GPUs


class RoundRecord(msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="round"):
    """Holds a node's metrics of one stage of a round.

    In a shared folder any member may have written it, so every value is bounded. There may be millions of them, hence
    fields and no dictionary.
    """

    round: Count  # number of the round, from 0
    reward_local: Number  # mean reward of the node's own new groups (fresh local)
    reward_training: Number  # mean reward of those and of the external groups that were chosen
    local_with_signal: Groups  # groups: own groups whose rewards differ
    external_accepted: Groups  # groups: peers' groups that were chosen for training
    tokens_per_second: Number  # tokens/s: generated tokens by the seconds of `generate`
    timestamp: Number | None = None  # s: time of writing, since 1970
    stage: Stage = 0  # number of the stage, from 0
    policy_version: Count = 0  # updates: updates of this model so far
    local_groups: Groups = 0  # groups: the node's own groups
    zero_std_fraction: Number | None = None  # 0 to 1: share of own groups in which all rewards are equal
    completion_length: Number | None = None  # tokens: mean length of an own completion
    truncated_fraction: Number | None = None  # 0 to 1: share of own completions that were cut at their longest
    entropy: Number | None = None  # nats: mean entropy of the model at the trained tokens
    clip_fraction: Number | None = None  # 0 to 1: share of trained tokens whose gradient the clip removed
    logprob_mismatch: Number | None = None  # nats: mean difference of sampler's and trainer's log-probabilities
    loss: Number | None = None  # the GRPO loss, a mean over trained tokens
    kl: Number | None = None  # nats: k3 estimate of the KL divergence from the first model; 0 without `kl_weight`
    grad_norm: Number | None = None  # norm of the gradient before it is clipped
    trained_tokens: Tokens = 0  # tokens: completion tokens trained on, own and external; each update counts
    generated_tokens: Tokens = 0  # tokens: tokens of own completions
    seconds: Seconds = Seconds()
    external_scored: Groups = 0  # groups: peers' groups that were verified and scored
    external_by_peer: dict[Id, Groups] = {}  # groups: external groups chosen for training, by peer id
    external_rejected: dict[Id, Groups] = {}  # refusals of publications or rollouts, by reason
    external_max_nll: Number | None = None  # nats: excess surprisal of the least likely span that was let through
    peak_memory: Number | None = None  # bytes: most memory that its process held; on a GPU, most that torch allocated
    load: Load = Load()
    role_metrics: dict[Id, Number] = {}  # figures of the node's role, by name
    reward_by_stage: dict[Id, Number] = {}  # `reward_local` by stage, where a round has several
    idle: bool = False  # whether the node had no questions in this stage


class AnsweredQuestion(msgspec.Struct, frozen=True):
    """Holds a held-out question and an answer to it, for people to read."""

    task: str
    prompt: str
    answer: str | None
    completion: str
    reward: Number


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Holds a score on the held-out questions."""

    questions: Groups  # questions: held-out questions, the same every time
    samples: Groups | None = None  # answers: answers sampled for every question
    temperature: Number | None = None  # temperature of the sampled answers
    sampled: Number  # mean score of the sampled answers (avg@k)
    greedy: Number | None  # mean score of the likeliest answers; at the start and the end only
    well_formed: Number  # 0 to 1: share of the sampled answers that have the form of an answer
    accuracy_well_formed: Number  # mean score of the well-formed ones
    by_task: dict[str, Number]  # `sampled` by task
    greedy_by_task: dict[str, Number]  # `greedy` by task
    well_formed_by_task: dict[str, Number]  # 0 to 1: `well_formed` by task
    accuracy_well_formed_by_task: dict[str, Number]  # `accuracy_well_formed` by task
    examples: list[AnsweredQuestion]  # a question of every task with an answer, for people to read


class HeldOutRecord(HeldOut, frozen=True, kw_only=True, tag_field="kind", tag="held_out"):
    """Holds a held-out score in the log of a node."""

    when: Id  # `start`, `now` or `end`
    round: After  # the last round that was played; -1 before the first


def line_of(record: RoundRecord | HeldOutRecord) -> dict[str, object]:
    """Return a record as it stands in the log, without what was not measured."""
    found: dict[str, object] = msgspec.to_builtins(record)
    for part in ("seconds", "load"):
        if isinstance(values := found.get(part), dict):
            found[part] = {name: value for name, value in values.items() if value is not None}
    unset = [name for name in ("role_metrics", "reward_by_stage", "idle") if not found.get(name)]
    return {n: value for n, value in found.items() if n == "greedy" or not (value is None or n in unset)}
