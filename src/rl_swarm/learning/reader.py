"""Turns texts into tokens, and remembers what it has read lately.

The nodes of a process share what they read: most questions and answers of a round are read by several of them.
"""

import hashlib
import threading
import weakref
from functools import lru_cache
from typing import Any

PROMPTS, TEXTS = 4096, 16_384  # that are kept
LONG = 1024  # characters: a longer text of somebody else is not kept


class Reader:
    def __init__(self, tokenizer: Any, system_prompt: str, hash: str) -> None:
        self.tokenizer, self.system_prompt, self.hash = tokenizer, system_prompt, hash
        self.control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.lock = threading.Lock()  # a tokenizer is switched between texts with and without control tokens
        self.prompt_ids = lru_cache(maxsize=PROMPTS)(self._prompt_ids)
        self._kept_ids = lru_cache(maxsize=TEXTS)(self._text_ids)

    @staticmethod
    def of(tokenizer: Any, system_prompt: str) -> "Reader":
        """The reader of a tokenizer like this one, if there is one."""
        words = tokenizer.backend_tokenizer.to_str()
        key = (words, str(tokenizer.chat_template), system_prompt)
        if (found := _readers.get(key)) is None:
            found = Reader(tokenizer, system_prompt, hashlib.sha256(words.encode()).hexdigest()[:16])
            _readers[key] = found
        return found

    def text_ids(self, text: str) -> tuple[int, ...]:
        """A text as tokens, none of them a control token."""
        return self._kept_ids(text) if len(text) <= LONG else self._text_ids(text)

    def _prompt_ids(self, prompt: str) -> list[int]:
        """A question in the model's chat template, with the system prompt before it. Others may have written parts of
        it: a control token that is spelt out in it is broken up."""
        for token in self.control:
            if token in prompt:
                prompt = prompt.replace(token, f"{token[:1]}\u200b{token[1:]}")
        messages = [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": prompt}]
        if self.tokenizer.chat_template is None:
            text = f"{self.system_prompt}\n\n{prompt}\n"
            return list(self._read(text))
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception:  # noqa: BLE001 some templates refuse a system message, each with an error of its own
            merged = [{"role": "user", "content": f"{self.system_prompt}\n\n{prompt}"}]
            text = self.tokenizer.apply_chat_template(merged, add_generation_prompt=True, tokenize=False)
        return list(self._read(text, add_special_tokens=False))

    def _text_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._read(text, add_special_tokens=False, split_special_tokens=True))

    def _read(self, text: str, **how: bool) -> list[int]:
        with self.lock:
            found: list[int] = self.tokenizer(text, **how)["input_ids"]
        return found


_readers: "weakref.WeakValueDictionary[tuple[str, str, str], Reader]" = weakref.WeakValueDictionary()
