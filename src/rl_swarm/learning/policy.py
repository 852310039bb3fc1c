"""Holds one node's model: loads it, encodes prompts, samples, trains and saves."""

import hashlib
import logging
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError

from rl_swarm.errors import ModelError
from rl_swarm.learning import grpo, lookup, lora, memory, sampler, smollm2, support
from rl_swarm.learning.batches import TrainingGroup
from rl_swarm.learning.devices import BUNDLED, out_of_memory, pick_device, pick_model, release_memory
from rl_swarm.learning.likelihood import max_span_nll
from rl_swarm.learning.sampler import Sample, SamplingParams, sample
from rl_swarm.learning.settings import PolicySettings
from rl_swarm.learning.sizes import ModelShape
from rl_swarm.learning.trainer import Trainer, Update
from rl_swarm.learning.verification import verify
from rl_swarm.learning.word_probability import word_probability
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Group
from rl_swarm.telemetry.journal import Stopwatch

if TYPE_CHECKING:
    from rl_swarm.learning.parallel.shared_device import SharedDevice

log = logging.getLogger(__name__)

CACHED_PROMPTS, CACHED_TEXTS = 4096, 16_384
MAX_CACHED = 1024  # characters of a cached text
_loading = threading.Lock()  # transformers sets a flag of the whole process while it makes a model


class Policy:
    trainer_class: type[Trainer] = Trainer

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        system_prompt: str,
        settings: PolicySettings,
        shared: "SharedDevice | None" = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.system_prompt, self.settings = system_prompt, settings
        self.version = 0  # updates made
        device = model.device
        self.pad: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.positions = support.positions(model.config)
        verify(model, name, self.pad)
        if reason := sampler.slow_path(model):
            log.warning("%s: %s", name, reason)
        if limit := support.length_limit(model.config):
            log.warning(
                "%s: rope_type=%s: past %d tokens of prompt and answer, log-probabilities depend on what else is in "
                "the batch. Keep max_new_tokens below that",
                name,
                *limit,
            )
        free = memory.available(device, 1 if shared else memory.processes_on_device(settings.model, device))
        nodes = shared.nodes if shared else 1
        shape = replace(ModelShape.of(model.config), packed=support.refusal(model) is None)
        self.plan = memory.plan(shape, free, settings, device.type, nodes)
        self.batch = self.plan.sequences  # sampled at once
        eos = model.generation_config.eos_token_id
        self.eos = frozenset(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
        self.eos -= {None}
        self.special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.tokenization = CachedTokenizer.of(tokenizer, system_prompt)
        self.tokenizer_hash = self.tokenization.hash
        planned = msgspec.structs.replace(
            settings.learning, learning_rate=settings.step_size(), batch_tokens=self.plan.batch_tokens
        )
        if shared:
            self.trainer = shared.make_trainer(model, self.pad, planned, self.plan, settings.sampling.temperature)
        else:
            self.trainer = self.trainer_class(model, self.pad, planned, settings.sampling.temperature)

    @classmethod
    def load(
        cls,
        settings: PolicySettings,
        system_prompt: str,
        path: Path | None = None,
        shared: "SharedDevice | None" = None,
    ) -> "Policy":
        """Load the model that the settings name, or the checkpoint in `path`."""
        device = pick_device(settings.model)
        name = pick_model(settings, device)
        settings = settings.changed(model=name)  # the length of answers depends on it
        model, tokenizer = load_model(
            name if settings.learning.lora_rank else str(path or name), settings.model.hf_token
        )
        if settings.learning.lora_rank:
            lora.adapt(model, settings.learning.lora_rank, settings.sampling.seed)
        if path:
            lora.load_adapters(model, path)
        policy = cls(model.to(device), tokenizer, name, system_prompt, settings, shared)
        if path and policy.trainer.reference is not None:
            policy.trainer.reference = load_model(name, settings.model.hf_token)[0].to(device).eval()
        return policy

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def prompt_ids(self, prompt: str) -> list[int]:
        """Return a question as tokens, from the cache when the trainer asks again."""
        ids, longest = self.tokenization.prompt_ids(prompt), self.settings.completion_tokens()
        if self.positions is not None and len(ids) + longest > self.positions:
            raise ModelError(
                f"MODEL_NAME={self.name}: it has {self.positions} positions, too few for a prompt of {len(ids)} tokens "
                f"and max_new_tokens={longest}. Set a lower max_new_tokens, or use a model with more positions."
            )
        return ids

    def sample(self, prompts: Sequence[str], count: int, seed: int, greedy: bool = False) -> list[list[Completion]]:
        """Sample `count` completions of every prompt, `batch` sequences at a time; fewer when memory runs out."""
        params = self.sampling_params(greedy)
        if self.model.training:
            self.model.eval()
        done: list[list[Completion]] = []
        while (start := len(done)) < len(prompts):
            step = max(1, self.batch // count)
            ids = [self.prompt_ids(prompt) for prompt in prompts[start : start + step]]
            try:
                samples = sample(self.model, ids, count, params, seed + start)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or len(ids) == 1:
                    raise
                self.batch = len(ids) * count // 2
                log.warning("out of memory: now sampling at most %d sequences at once", self.batch)
                traceback.clear_frames(error.__traceback__)  # they hold tensors
                release_memory()
                continue
            done += self.completions(samples)
        return done

    def sampling_params(self, greedy: bool = False) -> SamplingParams:
        """Return the sampling parameters of this policy."""
        settings = self.settings
        return SamplingParams(
            settings.completion_tokens(),
            self.eos,
            self.pad,
            settings.sampling.temperature,
            settings.sampling.top_p,
            settings.sampling.top_k,
            greedy,
        )

    def completions(self, samples: Sequence[Sequence[Sample]]) -> list[list[Completion]]:
        """Return the samples with their text."""
        texts = iter(self.decode([s.tokens for group in samples for s in group]))
        return [[Completion(next(texts), s.ended, s.tokens, s.logprobs) for s in group] for group in samples]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """Decode tokens without control tokens. One call for all sequences releases the interpreter lock."""
        if self.tokenizer.clean_up_tokenization_spaces:
            return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sequences]
        texts: list[str] = self.tokenizer.backend_tokenizer.decode_batch(
            list(map(list, sequences)), skip_special_tokens=True
        )
        return texts

    def learn(self, groups: Sequence[Group]) -> Update:
        """Make one update on the groups that carry signal; the others cost nothing."""
        training_groups = self.training_groups(groups)
        if not training_groups:
            return Update()
        update = self.trainer.update(training_groups)
        self.version += 1
        return update

    def word_probability(
        self, prompts: Sequence[str], word: str, other: str, seconds: float | None = None
    ) -> list[float]:
        """Return how probable `word` is as the next word of each prompt, against `other`."""
        return word_probability(self, prompts, word, other, seconds)

    def training_groups(self, groups: Sequence[Group]) -> list[TrainingGroup]:
        """Return the groups that carry signal, in this model's tokens."""
        found = (self._training_group(group) for group in groups if group.has_signal)
        return [group for group in found if group.completions]  # none where claimed rewards are not numbers

    def max_span_nlls(self, groups: Sequence[Group], allowance: float) -> list[list[float]]:
        """Return the excess negative log-likelihood, in nats, of the least likely span of every completion."""
        found = self.trainer.excess_nll([self._tokens(group) for group in groups])
        return [[max_span_nll([value - allowance for value in ids]) for ids in group] for group in found]

    def _training_group(self, group: Group) -> TrainingGroup:
        """Weigh a group, and scale the negative advantages of an external one."""
        tokens, negatives = self._tokens(group), self.settings.learning.negative_scale
        if group.weight != 1:
            tokens = replace(tokens, advantages=[group.weight * a for a in tokens.advantages])
        return tokens.scale_negatives(negatives) if group.external and negatives < 1 else tokens

    def _tokens(self, group: Group) -> TrainingGroup:
        """Return the group in this model's tokens.

        A peer's tokens are used if this model's tokenizer reads them as the same text; otherwise its text is encoded.
        A peer's completion is cut at the longest own one, so that it costs no more.
        """
        settings = self.settings
        limit = settings.completion_tokens()
        encoded, logprobs, complete, known = [], [], [], True
        for completion in group.completions:
            ids = self._own_tokens(completion) if group.external else completion.tokens
            if ids is None or completion.logprobs is None or len(ids) != len(completion.logprobs):
                ids, known = self.encode(completion), False
            encoded.append(ids[:limit])
            logprobs.append((completion.logprobs or ())[:limit])
            complete.append(completion.ended and len(ids) <= limit)
        use_claims = settings.learning.external_correction == "capped"
        return TrainingGroup(
            prompt=self.prompt_ids(group.question.prompt),
            completions=encoded,
            advantages=grpo.advantages(group.rewards, settings.learning.normalize_advantages),
            logprobs=logprobs if known and (use_claims or not group.external) else None,
            claimed=group.external and known and use_claims,
            trained=complete if settings.learning.mask_truncated else (),
        )

    def _own_tokens(self, completion: Completion) -> tuple[int, ...] | None:
        """Return the tokens that a peer sent, if they decode to its text in this model's vocabulary.

        Control tokens do not show in a text, so only the end-of-sequence token is accepted.
        """
        tokens = completion.tokens
        if not tokens or min(tokens) < 0 or max(tokens) >= len(self.tokenizer):
            return None
        if (tokens[-1] in self.eos) != completion.ended:
            return None
        words = tokens[:-1] if completion.ended else tokens
        if self.special.intersection(words) or self.tokenizer.decode(words) != completion.text:
            return None
        return tokens

    def encode(self, completion: Completion) -> tuple[int, ...]:
        """Encode a text. Control tokens spelt out in it stay text; a completion that ended gets the end token."""
        ids = self.tokenization.text_ids(completion.text)
        return (*ids, self.tokenizer.eos_token_id) if completion.ended or not ids else ids

    def save(self, path: Path) -> None:
        if lora.is_adapted(self.model):
            lora.save_adapters(self.model, path, self.name)
            self.model.save_pretrained(path, state_dict=lora.merged_state(self.model))
        else:
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def close(self) -> None:
        """Free the memory that is kept for sampling."""
        sampler.release(self.model)


class CachedTokenizer:
    """Tokenizes prompts and texts, and caches the results for all nodes of a process."""

    def __init__(self, tokenizer: Any, system_prompt: str, hash: str) -> None:
        self.tokenizer, self.system_prompt, self.hash = tokenizer, system_prompt, hash
        self.control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.lock = threading.Lock()  # a call with or without control tokens changes the tokenizer's state
        self.prompt_ids = lru_cache(maxsize=CACHED_PROMPTS)(self._prompt_ids)
        self._cached_ids = lru_cache(maxsize=CACHED_TEXTS)(self._text_ids)

    @staticmethod
    def of(tokenizer: Any, system_prompt: str) -> "CachedTokenizer":
        """Return the cache that nodes with an equal tokenizer share."""
        definition = tokenizer.backend_tokenizer.to_str()
        key = (definition, str(tokenizer.chat_template), system_prompt)
        if (found := _tokenizers.get(key)) is None:
            found = CachedTokenizer(tokenizer, system_prompt, hashlib.sha256(definition.encode()).hexdigest()[:16])
            _tokenizers[key] = found
        return found

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Tokenize a text; control tokens spelt out in it stay text."""
        return self._cached_ids(text) if len(text) <= MAX_CACHED else self._text_ids(text)

    def _prompt_ids(self, prompt: str) -> list[int]:
        """Tokenize a question in the model's chat template, behind the system prompt.

        Peers may have written parts of it, so a control token that is spelt out in it is broken up.
        """
        for token in self.control:
            if token in prompt:
                prompt = prompt.replace(token, f"{token[:1]}\u200b{token[1:]}")
        messages = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": prompt}]
        if self.tokenizer.chat_template is None:
            text = f"{self.system_prompt}\n\n{prompt}\n"
            return list(self._tokenize(text))
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:  # noqa: BLE001 templates that refuse a system message raise errors of any kind
            merged = [{"role": "user", "content": f"{self.system_prompt}\n\n{prompt}"}]
            text = self.tokenizer.apply_chat_template(merged, add_generation_prompt=True, tokenize=False)
        return list(self._tokenize(text, add_special_tokens=False))

    def _text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenize(text, add_special_tokens=False, split_special_tokens=True))

    def _tokenize(self, text: str, **how: bool) -> list[int]:
        with self.lock:
            found: list[int] = self.tokenizer(text, **how)["input_ids"]
        return found


_tokenizers: "weakref.WeakValueDictionary[tuple[str, str, str], CachedTokenizer]" = weakref.WeakValueDictionary()


@dataclass
class SampleRequest:
    """Asks for completions of these questions. A process that plays several nodes can batch their requests."""

    policy: Policy
    questions: Sequence[Question]
    count: int
    seed: int
    watch: Stopwatch
    greedy: bool = False
    completions: list[list[Completion]] = field(default_factory=list)

    @property
    def prompts(self) -> list[str]:
        return [question.prompt for question in self.questions]

    def run(self) -> None:
        with self.watch("generate"):
            self.completions = self.policy.sample(self.prompts, self.count, self.seed, self.greedy)


@dataclass
class TrainRequest:
    """Asks for one update on these groups."""

    policy: Policy
    groups: Sequence[Group]
    watch: Stopwatch
    update: Update = field(default_factory=Update)

    def run(self) -> None:
        with self.watch("train"):
            self.update = self.policy.learn(self.groups)


@dataclass
class Published:
    """Asks for nothing, and marks that the node has published and needs its peers' rollouts next."""

    def run(self) -> None: ...


def update_batches(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Split the groups of a round into one batch per update, at least one."""
    if not size:
        return [groups]
    useful = [group for group in groups if group.has_signal]
    return [useful[start : start + size] for start in range(0, len(useful), size)] or [[]]


def bundled(model: str) -> str | None:
    """Return the bundled model that this is or is a checkpoint of, found by its tokenizer."""
    tokenizer = Path(model).expanduser() / "tokenizer.json"
    if model in BUNDLED or not tokenizer.is_file():
        return model if model in BUNDLED else None
    vocabulary = _vocabulary(tokenizer)
    return next((name for name, path in BUNDLED.items() if vocabulary == _vocabulary(path / "tokenizer.json")), None)


def _vocabulary(tokenizer: Path) -> object:
    """Read the part of a tokenizer file that encodes text; saving changes others, such as padding."""
    try:
        parts = msgspec.json.decode(tokenizer.read_bytes())
        return parts["model"], parts["added_tokens"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


def load_model(name: str, token: str | None = None) -> tuple[Any, Any]:
    """Load a model in float32 and its tokenizer, from a directory, the bundle, a package or the hub."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = os.path.expanduser(name)
    if name in BUNDLED:
        source = str(BUNDLED[name])
    elif name == smollm2.NAME:
        source = str(smollm2.directory())
    is_path = os.path.isdir(source)
    lookup.check(name, token)
    started = time.monotonic()
    try:
        with _loading:
            tokenizer = AutoTokenizer.from_pretrained(source, token=token)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, token=token)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = (
            "The directory must hold a Hugging Face model: config.json, model.safetensors, tokenizer.json."
            if is_path
            else "If the hub cannot be reached from here, give a directory, or use a bundled model: MODEL_NAME=tiny."
        )
        raise ModelError(f"MODEL_NAME={name} cannot be loaded: {reason} {remedy}") from error
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ModelError(f"MODEL_NAME={name}: its tokenizer has no fast version or no end-of-sequence token.")
    tokenizer.backend_tokenizer.no_padding()  # a saved file may have it; the hash must not depend on it
    log.debug("loaded %s in %.1f s", name, time.monotonic() - started)
    return model, tokenizer


def other_models(settings: PolicySettings) -> Callable[[str], Policy]:
    """Return a function that loads another model by its name, with these settings, for inference alone."""
    return lambda name: Policy.load(settings.changed(model=name, lora_rank=0), "")
