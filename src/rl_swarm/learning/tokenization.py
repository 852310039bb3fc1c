"""Tokenizes prompts and texts, and caches the results.

The nodes of a process share a cache: several of them tokenize most questions and answers of a round.
"""

import hashlib
import threading
import weakref
from functools import lru_cache
from typing import Any

CACHED_PROMPTS, CACHED_TEXTS = 4096, 16_384
MAX_CACHED = 1024  # characters of a cached text


class CachedTokenizer:
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
