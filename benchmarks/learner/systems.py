"""Plays one round in three systems, each with its own code and defaults: ours, GenRL's and TRL's.

All of them start from the same float32 weights and take prompts and completions as token numbers.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

INSTALL = "pip install -c constraints.txt -e '.[bench]'"
NEEDS = {"ours": (), "genrl": ("genrl",), "trl": ("trl", "accelerate")}
NO_TOKEN = 1 << 30  # stands for an end of sequence that never comes


@dataclass(frozen=True)
class Workload:
    """Holds one case: where generation may end, and the answers that every trainer learns from."""

    prompts: list[list[int]]
    completions: list[list[list[int]]]  # per prompt
    logprobs: list[list[list[float]]]
    rewards: list[list[float]]
    eos: list[int]  # tokens that end a completion; empty: all have full length
    tokens: int

    @property
    def count(self) -> int:
        return len(self.completions[0])

    def cut(self, tokens: int) -> "Workload":
        """Return the workload with short answers."""
        return replace(
            self,
            completions=[[ids[:tokens] for ids in group] for group in self.completions],
            logprobs=[[values[:tokens] for values in group] for group in self.logprobs],
            tokens=min(tokens, self.tokens),
        )


def missing(names: Sequence[str]) -> str | None:
    """Say which packages of these systems are missing and how to install them; None where none is."""
    lacking = [p for name in names for p in NEEDS[name] if importlib.util.find_spec(p) is None]
    if not lacking:
        return None
    return f"{', '.join(lacking)} not installed. Type: {INSTALL}   Or measure this project alone: --systems ours"


class Ours:
    """Plays a node's round: `sample`, then one update."""

    compiles = True  # or records at its first run, which therefore has full size

    def __init__(self, model: str, device: "torch.device", workload: Workload, batch: int) -> None:
        from rl_swarm.config.settings import Settings
        from rl_swarm.learning.devices import prefers_bfloat16
        from rl_swarm.learning.policy import Policy, load_model

        loaded, tokenizer = load_model(model)
        self.model, self.pad = loaded.to(device), pad_of(tokenizer)
        self.precision = "bf16 over float32" if prefers_bfloat16(self.model) else "float32"
        self.settings = Settings.of(model=model, learning_rate=1e-6)  # 1e-6 is also what the other two default to
        self.trainer = Policy(self.model, tokenizer, model, "", self.settings).trainer
        self.take(workload)

    def take(self, workload: Workload) -> None:
        self.workload = workload

    def generate(self, seed: int) -> int:
        from rl_swarm.learning.sampler import SamplingParams, sample

        decoding = SamplingParams(self.workload.tokens, eos=frozenset(self.workload.eos), pad=self.pad)
        self.model.eval()
        groups = sample(self.model, self.workload.prompts, self.workload.count, decoding, seed)
        return sum(len(one.tokens) for group in groups for one in group)

    def train(self) -> None:
        from rl_swarm.learning import grpo
        from rl_swarm.learning.batches import TrainingGroup

        w = self.workload
        groups = [
            TrainingGroup(prompt, ids, grpo.advantages(rewards, self.settings.learning.normalize_advantages), logprobs)
            for prompt, ids, rewards, logprobs in zip(w.prompts, w.completions, w.rewards, w.logprobs, strict=True)
        ]
        self.trainer.update(groups)


class GenRL:
    """Plays GenRL's `GRPOLanguageTrainerModule`: its `generate`, `train` and defaults (float32, minibatches of 2)."""

    compiles = False
    precision = "float32"

    def __init__(self, model: str, device: "torch.device", workload: Workload, batch: int) -> None:
        from rl_swarm.learning.policy import load_model

        with stand_ins("datasets", "wandb", "torch.utils.tensorboard"):
            trainer = importlib.import_module("genrl.trainer.grpo_trainer")
        loaded, tokenizer = load_model(model)
        self.spelling = Spelling(pad_of(tokenizer), tokenizer.bos_token_id)
        config = trainer.GRPOTrainerConfig(num_generations=workload.count, max_new_tokens=workload.tokens)
        self.module = trainer.GRPOLanguageTrainerModule([loaded], config, processing_class=self.spelling)
        self.model = self.module.model
        self.take(workload)

    def take(self, workload: Workload) -> None:
        self.workload = workload
        self.eos = workload.eos or [NO_TOKEN]
        self.module.generation_config.eos_token_id = self.eos
        self.model.generation_config.eos_token_id = self.eos
        self.module.generation_config.max_new_tokens = workload.tokens

    def generate(self, seed: int) -> int:
        import torch

        torch.manual_seed(seed)
        prompts = [{"prompt": spell(prompt)} for prompt in self.workload.prompts]
        _, rollouts = self.module.generate(prompts, return_completion_ids=True)
        return sum(length(ids.tolist(), self.eos) for rollout in rollouts for ids in rollout)

    def train(self) -> None:
        """Play a game of one stage and one agent, as far as GenRL's trainer looks at it."""
        w = self.workload
        numbers = range(len(w.prompts))
        actions = [[[spell(ids) for ids in group]] for group in w.completions]
        state = types.SimpleNamespace(
            stage=1, get_stage_state=lambda stage: w.prompts, get_stage_actions=lambda stage: [actions]
        )
        data = types.SimpleNamespace(
            prepare_input=lambda prompts, stage: (
                [{"prompt": spell(prompt)} for prompt in prompts],
                {number: (0, number, 0) for number in numbers},
            )
        )
        self.module.train(state, data, [[[[rewards] for rewards in w.rewards]]])


class Spelling:
    """Stands in for the tokenizer with token numbers as words.

    GenRL learns from texts, and a real tokenizer would return other tokens than were sampled. Pads on the left, as the
    tokenizer that GenRL chooses does.
    """

    eos_token_id = None

    def __init__(self, pad: int, bos: int | None) -> None:
        self.pad_token_id, self.bos_token_id = pad, bos

    def apply_chat_template(self, prompt: str, **options: Any) -> str:
        return prompt

    def __call__(self, text: list[str], **options: Any) -> types.SimpleNamespace:
        import torch

        rows = [[int(word) for word in words.split()] for words in text]
        width = max(map(len, rows))
        ids = [[self.pad_token_id] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return types.SimpleNamespace(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))

    def batch_decode(self, rows: "torch.Tensor", skip_special_tokens: bool) -> list[str]:
        return [spell(row) for row in rows.tolist()]


class TRL:
    """Plays TRL's `GRPOTrainer`: one batch of `transformers.generate`, then its training steps and optimiser.

    It has TRL's defaults, among them bf16 autocast over float32 weights and gradient checkpointing; no KL, no vLLM.
    """

    compiles = False
    precision = "bf16 over float32"

    def __init__(self, model: str, device: "torch.device", workload: Workload, batch: int) -> None:
        from rl_swarm.learning.policy import load_model

        with stand_ins("datasets", "pandas", "pyarrow", "pyarrow.compute", "pyarrow.types", "wandb"):
            grpo = importlib.import_module("trl.trainer.grpo_trainer")
            dataset = stand_in_or_real_dataset(grpo.Dataset, len(workload.prompts))
            loaded, tokenizer = load_model(model)
            rollouts = len(workload.prompts) * workload.count
            batch = max(size for size in range(1, batch + 1) if rollouts % size == 0)
            self.folder = tempfile.TemporaryDirectory(prefix="bench-trl-")
            config = grpo.GRPOConfig(
                output_dir=self.folder.name,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=rollouts // batch,
                num_generations=workload.count,
                max_completion_length=workload.tokens,
                num_iterations=1,
                beta=0.0,
                use_cpu=device.type == "cpu",
                report_to="none",
                save_strategy="no",
            )
            self.trainer = given(grpo.GRPOTrainer)(
                model=loaded, reward_funcs=self.rewards, args=config, train_dataset=dataset, processing_class=tokenizer
            )
        if not config.bf16:
            self.precision = "float32"
        # What `train` does before its first step.
        trainer = self.trainer
        trainer.create_optimizer()
        trainer.model_wrapped, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
        trainer.model.train()
        self.model = trainer.model
        self.take(workload)

    def take(self, workload: Workload) -> None:
        self.workload = workload
        trainer = self.trainer
        trainer.eos_token_ids = workload.eos or [NO_TOKEN]
        trainer.generation_config.eos_token_id = trainer.eos_token_ids
        trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids
        trainer.generation_config.max_new_tokens = workload.tokens
        trainer.given_prompts = [prompt for prompt in workload.prompts for _ in range(workload.count)]
        trainer.given_completions = [ids for group in workload.completions for ids in group]

    def rewards(self, completions: list[str], **others: Any) -> list[float]:
        return [reward for group in self.workload.rewards for reward in group]

    def generate(self, seed: int) -> int:
        import torch

        torch.manual_seed(seed)
        completions, _ = self.trainer.really_generate()
        return sum(map(len, completions))

    def train(self) -> None:
        trainer, args = self.trainer, self.trainer.args
        batch = [{"prompt": ""} for _ in trainer.given_prompts]
        for _ in range(args.gradient_accumulation_steps):
            trainer.training_step(trainer.model_wrapped, batch, None)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()


def given(trainer: type) -> type:
    """Derive a trainer whose training steps see the given answers instead of those it generated."""

    class Given(trainer):  # type: ignore[misc]
        given_prompts: list[list[int]]
        given_completions: list[list[int]]

        def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
            return self.given_prompts, None, {}

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
            return self.given_completions, None

        def really_generate(self) -> tuple[list[list[int]], Any]:
            result: tuple[list[list[int]], Any] = super()._generate_single_turn(
                self.given_prompts, None, {}, self.num_generations
            )
            return result

    return Given


def stand_in_or_real_dataset(kind: Any, rows: int) -> Any:
    """Make the dataset that TRL demands; its training steps are handed their batches."""
    return kind.from_dict({"prompt": [""] * rows}) if hasattr(kind, "from_dict") else kind()


@contextlib.contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Let packages with missing dependencies be imported, as long as only the dependencies' names are needed.

    Installed packages are used. The stand-ins are removed afterwards, so that nothing takes them for the real ones.
    """
    absent = [name for name in names if not installed(name)]
    finder = StandIns(absent)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in absent:
            sys.modules.pop(name, None)


def installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules in which every name is an empty class."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            made = type(name, (), {"__len__": lambda self: 1, "cache_files": ()})  # all that is asked of a dataset
            setattr(module, name, made)
            return made

        module.__getattr__ = attribute  # type: ignore[method-assign]


def pad_of(tokenizer: Any) -> int:
    pad: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return pad


def spell(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def length(ids: Sequence[int], eos: Sequence[int]) -> int:
    """Return the length up to and including the token that ended it."""
    ends = set(eos)
    return next((number for number, token in enumerate(ids, 1) if token in ends), len(ids))


SYSTEMS: dict[str, Any] = {"ours": Ours, "genrl": GenRL, "trl": TRL}
