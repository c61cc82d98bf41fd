"""Text to token ids and back, from a model directory's `tokenizer.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from kvcache.errors import INVALID_DATA, ModelError

_HALF = "\ufffd"  # text of bytes that are not a whole character


class Tokenizer:
    """The tokenizer in a model's `directory`, as returned by `load_model`; ModelError where it has none."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        path = os.path.join(directory, "tokenizer.json")
        if not os.path.exists(path):
            raise ModelError(f"{path}: no such file: expected beside the model's weights; fetch it")
        try:
            self._tokenizer = _Tokenizer.from_file(path)
        except Exception as error:  # noqa: BLE001  boundary to foreign code: the library raises nothing more specific
            raise ModelError(f"{path}: not a tokenizer ({error}): fetch it again") from None

    def encode(self, text: str) -> list[int]:
        """Return the ids, with the begin token where the model expects one. Names of special tokens become those
        tokens."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text without special tokens; bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(ids))

    def stream(self) -> Stream:
        return Stream(self)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the prompt for the assistant's next answer, from the model's own template.

        Args:
            messages: each with `role` and `content`.

        Raises:
            ModelError: the model has no template, or the template refuses the messages.
        """
        from jinja2 import TemplateError

        template, names = self._template
        try:
            text = template.render(messages=list(messages), add_generation_prompt=True, **names)
        except (TemplateError, *INVALID_DATA) as error:
            raise ModelError(f"{self.directory}: its chat template refuses these messages: {error}") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _template(self) -> tuple[Any, dict[str, str]]:
        """The template and the tokens it may name, from `chat_template.jinja` or `tokenizer_config.json`."""
        from jinja2 import TemplateError  # comes with torch
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        texts = {}
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            path = os.path.join(self.directory, name)
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    texts[name] = file.read()
        try:
            config = json.loads(texts.get("tokenizer_config.json", "{}"))
            source = texts.get("chat_template.jinja") or config.get("chat_template")
            tokens = {name: config.get(name) for name in ("bos_token", "eos_token")}
            names = {name: str(t["content"] if isinstance(t, dict) else t) for name, t in tokens.items() if t}
        except (ValueError, AttributeError, KeyError) as error:
            raise ModelError(f"{self.directory}: tokenizer_config.json is damaged ({error}): fetch it again") from None
        if not isinstance(source, str) or not source:
            raise ModelError(f"{self.directory}: no chat template: give a text instead of messages")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(source), names
        except TemplateError as error:
            raise ModelError(f"{self.directory}: its chat template does not compile: {error}") from None


class Stream:
    """Decodes one answer token by token. The results of `put` and `end` add up to `decode` of all the ids.

    A character may take several tokens: its bytes are held back until it is whole. This holds for byte-level
    vocabularies. Vocabularies with single bytes as a fallback decode a run of broken bytes differently from its parts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # from a place where no character is split; earlier ids keep their spaces
        self._said = 0  # ids whose text was returned
        self._ahead = 0  # characters returned of the ids after those

    def put(self, token: int) -> str:
        self._ids.append(token)
        text = self._text()
        whole = text.rstrip(_HALF)
        new = whole[self._ahead :]
        if len(whole) < len(text):
            self._ahead = max(self._ahead, len(whole))
        else:
            self._ids = self._ids[self._said :]
            self._said, self._ahead = len(self._ids), 0
        return new

    def end(self) -> str:
        """Return the text still held back: broken characters, as U+FFFD."""
        rest = self._text()[self._ahead :]
        self._ids, self._said, self._ahead = [], 0, 0
        return rest

    def _text(self) -> str:
        """Return the text not yet returned. It is decoded behind the returned ids, since the first token of a text may
        lose a space."""
        before = self._tokenizer.decode(self._ids[: self._said])
        return self._tokenizer.decode(self._ids)[len(before) :]


def _refuse(message: str) -> None:
    raise ValueError(message)
