"""An engine, as anyone sees it who has its URL: OpenAI's API, asked for one token."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvcache.errors import ConfigError, KVCacheError, UnreachableError
from kvcache.fleet.prompts import Prompt

KEY = "OPENAI_API_KEY"
_WORDS = 300  # of an engine's own, in an error
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an engine is near, a proxy is not


class EngineError(KVCacheError):
    """The engine refused a prompt."""


@dataclass(frozen=True, slots=True)
class Usage:
    tokens: int  # of the prompt
    cached: int  # of these, not computed; 0 where the engine does not tell


class Engine:
    """`url`: with or without `/v1`. `model`: what to ask for; without one, the first that the engine names."""

    def __init__(self, url: str, model: str = "", *, timeout_s: float = 600.0) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"--engine {url}: expected http://HOST:PORT, an engine that speaks OpenAI's API")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model, self._timeout_s = model, timeout_s

    @property
    def model(self) -> str:
        if not self._model:
            told = self._ask("/v1/models")
            try:
                self._model = str(told["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise UnreachableError(f"{self._url}: names no model; give --model") from None
        return self._model

    def prefill(self, prompt: Prompt) -> Usage:
        """Have the engine compute a prompt, or find it; EngineError where it refuses, UnreachableError where it is
        not there."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0}
        if prompt.kind == "messages":
            said = self._ask("/v1/chat/completions", {**body, "messages": prompt.content})
        else:
            said = self._ask("/v1/completions", {**body, "prompt": prompt.content})
        usage = said.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return Usage(int(usage.get("prompt_tokens") or 0), int(details.get("cached_tokens") or 0))

    def _ask(self, path: str, body: Any = None) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY):
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode("utf-8", "surrogatepass")
        request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310  http or https, see above
        try:
            with _DIRECT.open(request, timeout=self._timeout_s) as response:
                said = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise EngineError(f"{self._url}{path}: {error.code}, {_words(error.read(_WORDS * 4))}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"{self._url}{path}: {reason}; is an engine serving there?") from None
        if not isinstance(said, dict):
            raise UnreachableError(f"{self._url}{path}: answers something else than OpenAI's API")
        return said


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:_WORDS]
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:_WORDS] or "no words"
