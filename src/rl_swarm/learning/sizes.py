"""Computes the sizes of a model from its configuration, without its weights."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from rl_swarm.learning import support


@dataclass(frozen=True)
class ModelShape:
    """Describes the sizes of a decoder-only model."""

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    gated: bool = True  # whether the inner layer has a gate beside it
    tied: bool = True  # whether the embedding is also the head
    packed: bool = True  # whether it takes the fast path, which never holds the logits of all tokens

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """Read the shape from a configuration of transformers; missing fields of unknown families are guessed."""
        config = config.get_text_config()
        hidden, heads = config.hidden_size, getattr(config, "num_attention_heads", None) or 1
        gpt2 = config.model_type == "gpt2"
        inner = getattr(config, "n_inner", None) if gpt2 else getattr(config, "intermediate_size", None)
        return cls(
            layers=config.num_hidden_layers,
            hidden=hidden,
            inner=inner or 4 * hidden,
            heads=heads,
            key_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or hidden // heads,
            vocabulary=config.vocab_size,
            gated=config.model_type not in ("gpt2", "gpt_neox", "opt", "phi", "bloom"),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            packed=support.obstacle(config) is None,
        )

    @property
    def _maps(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of the linear maps of a layer."""
        queries, keys = self.heads * self.head_size, self.key_heads * self.head_size
        maps = [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        return [*maps, *[(self.hidden, self.inner)] * (2 if self.gated else 1), (self.inner, self.hidden)]

    @property
    def parameters(self) -> int:
        layer = sum(inputs * outputs for inputs, outputs in self._maps) + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * self.words + self.hidden

    @property
    def words(self) -> int:
        return self.vocabulary * self.hidden

    def trained(self, lora_rank: int) -> int:
        adapters = self.layers * lora_rank * sum(inputs + outputs for inputs, outputs in self._maps)
        return adapters if lora_rank else self.parameters


def alike(model: Any) -> Hashable:
    """Return a key that is equal for models that the same kernels can compute."""
    named = ("_name_or_path", "transformers_version")
    config = model.config.to_dict()
    return tuple(sorted((name, str(value)) for name, value in config.items() if name not in named))
