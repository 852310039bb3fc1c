"""Holds a model that answers questions and gets better: loading, prompts, sampling, learning, saving."""

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from rl_swarm.learning.reader import Reader
from rl_swarm.learning.sampler import Decoding, Sample, sample
from rl_swarm.learning.settings import PolicySettings
from rl_swarm.learning.sizes import ModelShape
from rl_swarm.learning.trainer import Trainer, Update
from rl_swarm.learning.verification import verify
from rl_swarm.learning.word_probability import word_probability
from rl_swarm.protocol.questions import Question
from rl_swarm.protocol.rollouts import Completion, Group
from rl_swarm.telemetry.journal import Stopwatch

if TYPE_CHECKING:
    from rl_swarm.learning.parallel.sharing import Sharing

log = logging.getLogger(__name__)

_loading = threading.Lock()  # transformers makes models under a switch of the whole process


class Policy:
    trainer_class: type[Trainer] = Trainer

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        system_prompt: str,
        settings: PolicySettings,
        sharing: "Sharing | None" = None,
    ) -> None:
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.system_prompt, self.settings = system_prompt, settings
        self.version = 0  # updates done
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
        free = memory.available(device, 1 if sharing else memory.sharing(settings.model, device))
        nodes = sharing.nodes if sharing else 1
        shape = replace(ModelShape.of(model.config), packed=support.refusal(model) is None)
        self.plan = memory.plan(shape, free, settings, device.type, nodes)
        self.batch = self.plan.sequences  # sampled at once
        eos = model.generation_config.eos_token_id
        self.eos = frozenset(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
        self.eos -= {None}
        self.special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.reader = Reader.of(tokenizer, system_prompt)
        self.tokenizer_hash = self.reader.hash
        planned = msgspec.structs.replace(
            settings.learning, learning_rate=settings.step_size(), batch_tokens=self.plan.batch_tokens
        )
        if sharing:
            self.trainer = sharing.admit(model, self.pad, planned, self.plan, settings.sampling.temperature)
        else:
            self.trainer = self.trainer_class(model, self.pad, planned, settings.sampling.temperature)

    @classmethod
    def load(
        cls,
        settings: PolicySettings,
        system_prompt: str,
        path: Path | None = None,
        sharing: "Sharing | None" = None,
    ) -> "Policy":
        """The model that the settings name, or the one in `path` (a checkpoint)."""
        device = pick_device(settings.model)
        name = pick_model(settings, device)
        settings = settings.changed(model=name)  # how long its answers are depends on it
        model, tokenizer = load_model(
            name if settings.learning.lora_rank else str(path or name), settings.model.hf_token
        )
        if settings.learning.lora_rank:
            lora.adapt(model, settings.learning.lora_rank, settings.sampling.seed)
        if path:
            lora.load_adapters(model, path)
        policy = cls(model.to(device), tokenizer, name, system_prompt, settings, sharing)
        if path and policy.trainer.reference is not None:
            policy.trainer.reference = load_model(name, settings.model.hf_token)[0].to(device).eval()
        return policy

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def prompt_ids(self, prompt: str) -> list[int]:
        """A question as tokens; it is asked for again when it is learned from."""
        ids, longest = self.reader.prompt_ids(prompt), self.settings.completion_tokens()
        if self.positions is not None and len(ids) + longest > self.positions:
            raise ModelError(
                f"MODEL_NAME={self.name}: it has {self.positions} positions, too few for a prompt of {len(ids)} tokens "
                f"and max_new_tokens={longest}. Set a lower max_new_tokens, or use a model with more positions."
            )
        return ids

    def sample(self, prompts: Sequence[str], count: int, seed: int, greedy: bool = False) -> list[list[Completion]]:
        """`count` completions of every prompt, `batch` at a time; fewer when memory runs out."""
        decoding = self.decoding(greedy)
        if self.model.training:
            self.model.eval()
        done: list[list[Completion]] = []
        while (start := len(done)) < len(prompts):
            step = max(1, self.batch // count)
            ids = [self.prompt_ids(prompt) for prompt in prompts[start : start + step]]
            try:
                samples = sample(self.model, ids, count, decoding, seed + start)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or len(ids) == 1:
                    raise
                self.batch = len(ids) * count // 2
                log.warning("out of memory: now sampling at most %d sequences at once", self.batch)
                traceback.clear_frames(error.__traceback__)  # they hold what did fit
                release_memory()
                continue
            done += self.completions(samples)
        return done

    def decoding(self, greedy: bool = False) -> Decoding:
        """How this policy's tokens are drawn."""
        settings = self.settings
        return Decoding(
            settings.completion_tokens(),
            self.eos,
            self.pad,
            settings.sampling.temperature,
            settings.sampling.top_p,
            settings.sampling.top_k,
            greedy,
        )

    def completions(self, samples: Sequence[Sequence[Sample]]) -> list[list[Completion]]:
        """What was drawn, with its text."""
        texts = iter(self.decode([s.tokens for group in samples for s in group]))
        return [[Completion(next(texts), s.ended, s.tokens, s.logprobs) for s in group] for group in samples]

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """What the tokens say, control tokens left out; all at once, while other threads go on."""
        if self.tokenizer.clean_up_tokenization_spaces:
            return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sequences]
        texts: list[str] = self.tokenizer.backend_tokenizer.decode_batch(
            list(map(list, sequences)), skip_special_tokens=True
        )
        return texts

    def learn(self, groups: Sequence[Group]) -> Update:
        """One update on the groups that carry signal; the others cost nothing."""
        lessons = self.lessons(groups)
        if not lessons:
            return Update()
        update = self.trainer.update(lessons)
        self.version += 1
        return update

    def word_probability(
        self, prompts: Sequence[str], word: str, other: str, seconds: float | None = None
    ) -> list[float]:
        """Return how probable `word` is as the next word of each prompt, against `other`."""
        return word_probability(self, prompts, word, other, seconds)

    def lessons(self, groups: Sequence[Group]) -> list[TrainingGroup]:
        """What there is to learn from groups, in this model's tokens."""
        found = (self._lesson(group) for group in groups if group.has_signal)
        return [lesson for lesson in found if lesson.completions]  # of claimed rewards that are no numbers, none

    def max_span_nlls(self, groups: Sequence[Group], allowance: float) -> list[list[float]]:
        """By how many nats the strangest stretch of every completion is less likely than what this model writes."""
        found = self.trainer.excess([self._tokens(group) for group in groups])
        return [[max_span_nll([value - allowance for value in ids]) for ids in group] for group in found]

    def _lesson(self, group: Group) -> TrainingGroup:
        """What is learned from a group: of others', their better answers."""
        tokens, negatives = self._tokens(group), self.settings.learning.negative_scale
        if group.weight != 1:
            tokens = replace(tokens, advantages=[group.weight * a for a in tokens.advantages])
        return tokens.leaning(negatives) if group.external and negatives < 1 else tokens

    def _tokens(self, group: Group) -> TrainingGroup:
        """The group in this model's tokens. Text of others is encoded anew: their tokens may mean something else.

        A stranger's completion that is longer than any of our own is cut, so that it costs no more than one.
        """
        settings = self.settings
        limit = settings.completion_tokens()
        encoded, logprobs, whole, known = [], [], [], True
        for completion in group.completions:
            ids = self._own_tokens(completion) if group.external else completion.tokens
            if ids is None or completion.logprobs is None or len(ids) != len(completion.logprobs):
                ids, known = self.encode(completion), False
            encoded.append(ids[:limit])
            logprobs.append((completion.logprobs or ())[:limit])
            whole.append(completion.ended and len(ids) <= limit)
        use_claims = settings.learning.external_correction == "capped"
        return TrainingGroup(
            prompt=self.prompt_ids(group.question.prompt),
            completions=encoded,
            advantages=grpo.advantages(group.rewards, settings.learning.normalize_advantages),
            logprobs=logprobs if known and (use_claims or not group.external) else None,
            claimed=group.external and known and use_claims,
            trained=whole if settings.learning.mask_truncated else (),
        )

    def _own_tokens(self, completion: Completion) -> tuple[int, ...] | None:
        """The tokens that a peer sent, if they say in this model's vocabulary what its text says, and no more.

        Control tokens do not show in a text. The end is the only one that a stranger can teach.
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
        """A text as tokens. Control tokens spelt out in it stay text; the end is added if it ended by itself."""
        ids = self.reader.text_ids(completion.text)
        return (*ids, self.tokenizer.eos_token_id) if completion.ended or not ids else ids

    def save(self, path: Path) -> None:
        if lora.is_adapted(self.model):
            lora.save_adapters(self.model, path, self.name)
            self.model.save_pretrained(path, state_dict=lora.merged_state(self.model))
        else:
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def close(self) -> None:
        """Gives back what is kept for this policy."""
        sampler.release(self.model)


@dataclass
class SampleRequest:
    """Asks for completions of these questions. A process that plays several nodes can serve all requests together."""

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
    """Asks for nothing: it marks that the node has published, and needs its peers' rollouts from here on."""

    def run(self) -> None: ...


Work = SampleRequest | Published | TrainRequest


def update_batches(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Split the groups of a round into one batch per update; there is at least one batch."""
    if not size:
        return [groups]
    useful = [group for group in groups if group.has_signal]
    return [useful[start : start + size] for start in range(0, len(useful), size)] or [[]]


def bundled(model: str) -> str | None:
    """The name of the bundled model that this is, or is a checkpoint of, by its tokenizer."""
    theirs = Path(model).expanduser() / "tokenizer.json"
    if model in BUNDLED or not theirs.is_file():
        return model if model in BUNDLED else None
    words = _words(theirs)
    return next((name for name, path in BUNDLED.items() if words == _words(path / "tokenizer.json")), None)


def _words(tokenizer: Path) -> object:
    """What a tokenizer file says about text; the rest, such as padding, is what its last user did with it."""
    try:
        parts = msgspec.json.decode(tokenizer.read_bytes())
        return parts["model"], parts["added_tokens"]
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        return None


def load_model(name: str, token: str | None = None) -> tuple[Any, Any]:
    """A model and its tokenizer from a directory, the bundle, a package or the hub, in float32."""
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
    tokenizer.backend_tokenizer.no_padding()  # kept in the file, undone by the first use: the hash would change
    log.debug("loaded %s in %.1f s", name, time.monotonic() - started)
    return model, tokenizer


def other_models(settings: PolicySettings) -> Callable[[str], Policy]:
    """Return a function that loads another model by its name, with these settings; nothing is trained in it."""
    return lambda name: Policy.load(settings.changed(model=name, lora_rank=0), "")
