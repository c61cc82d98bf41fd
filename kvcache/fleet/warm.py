"""Warm-up: compute each listed prompt once in the fleet, and load it on the other nodes before requests need it.

For each prompt one node gets the lease, has its engine compute it, and marks it as stored. The other nodes continue
with other prompts meanwhile; later their engines read the stored blocks. Without a server for leases, every node's
engine computes the prompt itself: a cache fault never fails a request.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from kvcache.errors import ConfigError, KVCacheError, UnreachableError
from kvcache.fleet.coordination import LEASE_S, Coordination, LeaseResult, PromptLease
from kvcache.log import log_faults, logger
from kvcache.os_env import Clock

# The file of prompts: one JSON value a line.
#
#     {"text": "You are a helpful assistant. ..."}
#     {"messages": [{"role": "system", "content": "..."}]}
#     {"token_ids": [1, 2, 3]}
#
# A text or a list of token ids may stand alone. Empty lines, and lines that begin with #, are ignored.

PromptKind = Literal["text", "messages", "token_ids"]


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: PromptKind
    content: Any

    def digest(self, model: str) -> str:
        """Return 32 hexadecimal digits, the same on every node for the same prompt and model."""
        document = json.dumps(
            [model, self.kind, self.content], ensure_ascii=False, sort_keys=True, separators=(",", ":")
        )
        return sha256(document.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the file's prompts in order; ConfigError with the line number for an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file with one prompt per line") from None
    except ValueError:
        raise ConfigError(f"{path}: not UTF-8; give a file with one JSON value per line") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            prompts.append(_prompt(line, f"{path}, line {number}"))
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        reply = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; put text in quotation marks") from None
    if isinstance(reply, str):
        reply = {"text": reply}
    elif isinstance(reply, list):
        reply = {"token_ids": reply}
    if isinstance(reply, dict) and len(reply) == 1:
        (kind, content), *_ = reply.items()
        if kind == "text" and isinstance(content, str) and content:
            return Prompt("text", content)
        if kind == "token_ids" and _is_list_of(content, int) and min(content) >= 0:
            return Prompt("token_ids", content)
        if kind == "messages" and _is_list_of(content, dict):
            return Prompt("messages", content)
    raise ConfigError(f"{where}: expected exactly one of text, messages and token_ids")


def _is_list_of(content: object, kind: type) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(each, kind) and not isinstance(each, bool) for each in content)
    )


# A client of an engine with OpenAI's API, which requests one token.

API_KEY_VARIABLE = "OPENAI_API_KEY"
_MAX_ERROR_CHARS = 300  # most characters of an engine's error text
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an engine is not behind a proxy


class EngineError(KVCacheError):
    """The engine refused a prompt."""


@dataclass(frozen=True, slots=True)
class PrefillUsage:
    tokens: int  # tokens of the prompt
    cached: int  # of these, not computed; 0 where the engine does not report it


class EngineClient:
    """An engine at `url`, with or without `/v1`. `model` defaults to the first that the engine lists."""

    def __init__(self, url: str, model: str = "", *, timeout_s: float = 600.0) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ConfigError(f"--engine {url}: expected http://HOST:PORT of an engine with OpenAI's API")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model, self._timeout_s = model, timeout_s

    @property
    def model(self) -> str:
        if not self._model:
            document = self._ask("/v1/models")
            try:
                self._model = str(document["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise UnreachableError(f"{self._url}: the engine lists no model; give --model") from None
        return self._model

    def prefill(self, prompt: Prompt) -> PrefillUsage:
        """Have the engine compute or find a prompt.

        Raises:
            EngineError: The engine refuses the prompt.
            UnreachableError: The engine does not answer.
        """
        body: dict[str, Any] = {"model": self.model, "max_tokens": 1, "temperature": 0}
        if prompt.kind == "messages":
            reply = self._ask("/v1/chat/completions", {**body, "messages": prompt.content})
        else:
            reply = self._ask("/v1/completions", {**body, "prompt": prompt.content})
        usage = reply.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return PrefillUsage(int(usage.get("prompt_tokens") or 0), int(details.get("cached_tokens") or 0))

    def _ask(self, path: str, body: Any = None) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        if key := os.environ.get(API_KEY_VARIABLE):
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode("utf-8", "surrogatepass")
        request = urllib.request.Request(self._url + path, data, headers)  # noqa: S310  http or https, see `__init__`
        try:
            with _OPENER.open(request, timeout=self._timeout_s) as response:
                reply = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise EngineError(
                    f"{self._url}{path}: {error.code}, {_error_text(error.read(_MAX_ERROR_CHARS * 4))}"
                ) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise UnreachableError(f"{self._url}{path}: {reason}; is an engine serving there?") from None
        if not isinstance(reply, dict):
            raise UnreachableError(f"{self._url}{path}: the reply does not follow OpenAI's API")
        return reply


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:_MAX_ERROR_CHARS]
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:_MAX_ERROR_CHARS] or "no words"


POLL_S = 0.1
"""Between two attempts while other nodes compute the remaining prompts."""

_log = logger("kvcache.fleet")


class Prefiller(Protocol):
    @property
    def model(self) -> str: ...
    def prefill(self, prompt: Prompt) -> PrefillUsage: ...


@dataclass(frozen=True, slots=True)
class PromptResult:
    """The result of one prompt.

    `what` is one of:
      - `computed`: this node's engine computed it, with the lease.
      - `fetched`: another node had stored it.
      - `alone`: this node's engine computed it, without a lease.
      - `failed`: `why` has the reason.
      - `left`: no time or memory was left.
    """

    number: int
    what: str
    usage: PrefillUsage = field(default_factory=lambda: PrefillUsage(0, 0))
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeCallbacks:
    """What a warm-up asks of this node's cache."""

    begin: Callable[[], object] = lambda: None
    """Called before this node's engine computes a prompt."""
    settle: Callable[[], bool] = lambda: True
    """Waits until other nodes can read what the engine stored or used since `begin`; returns whether they can."""
    used_bytes: Callable[[], int] = lambda: 0
    """Returns the bytes that this node holds."""


@dataclass(frozen=True, kw_only=True)
class WarmLimits:
    max_bytes: int | None = None
    """Bytes that warming may add to this node; None for no limit."""
    patience_s: float = 3600.0
    """Time for all prompts."""
    lease_s: float = LEASE_S
    """Time in which one node computes a prompt before another may."""


class WarmUp:
    """Warms a list of prompts. `on_result` is called with each result."""

    def __init__(
        self,
        engine: Prefiller,
        prompts: Sequence[Prompt],
        coordination: Coordination | None,
        clock: Clock,
        node: NodeCallbacks,
        limits: WarmLimits,
        on_result: Callable[[PromptResult], object] = lambda result: None,
    ) -> None:
        self._engine, self._prompts, self._coordination, self._clock = engine, prompts, coordination, clock
        self._node, self._limits, self._on_result = node, limits, on_result
        self._done = threading.Event()
        self._stop = threading.Event()
        self.steps: list[PromptResult] = []

    @property
    def ready(self) -> bool:
        """Whether every prompt has a result."""
        return self._done.is_set()

    @property
    def counts(self) -> dict[str, int]:
        """Progress: number of prompts by result, prompts that wait, and tokens."""
        steps = list(self.steps)
        tokens, cached = (sum(getattr(step.usage, name) for step in steps) for name in ("tokens", "cached"))
        waiting = len(self._prompts) - len(steps)
        return {**Counter(step.what for step in steps), "waiting": waiting, "tokens": tokens, "cached_tokens": cached}

    def start(self) -> threading.Thread:
        """Run in the background; return the thread."""
        thread = threading.Thread(target=self.run, name="kvcache-warm", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """Stop after the current prompt."""
        self._stop.set()

    def run(self) -> None:
        """Warm every prompt. Never raises."""
        with log_faults(_log, "warm-up failed"):  # a node serves without it, too
            self._run()
        self._done.set()

    def _run(self) -> None:
        end, before = self._clock.now() + self._limits.patience_s, self._node.used_bytes()
        waiting = deque(enumerate(self._prompts))
        others = 0  # consecutive prompts that other nodes compute
        while waiting and not self._stop.is_set():
            number, prompt = waiting.popleft()
            over = self._limits.max_bytes is not None and self._node.used_bytes() - before >= self._limits.max_bytes
            if over or self._clock.now() >= end:
                self._record_result(
                    PromptResult(
                        number, "left", why="the limit on bytes is reached" if over else "the time limit is reached"
                    )
                )
                continue
            step = self._warm_prompt(number, prompt)
            if step is not None:
                self._record_result(step)
                others = 0
                continue
            waiting.append((number, prompt))
            others += 1
            if others >= len(waiting):
                self._stop.wait(POLL_S)
                others = 0

    def _record_result(self, step: PromptResult) -> None:
        self.steps.append(step)
        level = logging.WARNING if step.what == "failed" else logging.INFO
        of = len(self._prompts)
        _log.log(level, "prompt %d of %d: %s%s", step.number + 1, of, step.what, f", {step.why}" if step.why else "")
        self._on_result(step)

    def _warm_prompt(self, number: int, prompt: Prompt) -> PromptResult | None:
        """Return the prompt's result; None while another node computes it."""
        try:
            if self._coordination is None:
                return PromptResult(number, "alone", self._engine.prefill(prompt))
            lease = PromptLease(self._coordination, prompt.digest(self._engine.model), lease_s=self._limits.lease_s)
            try:
                turn = lease.acquire()
            except OSError as error:
                return PromptResult(number, "alone", self._engine.prefill(prompt), f"no lease: {error}")
            if turn is LeaseResult.HELD_ELSEWHERE:
                return None
            if turn is LeaseResult.STORED:
                return PromptResult(number, "fetched", self._engine.prefill(prompt))
            return self._with_lease(number, prompt, lease)
        except KVCacheError as error:
            return PromptResult(number, "failed", why=str(error))

    def _with_lease(self, number: int, prompt: Prompt, lease: PromptLease) -> PromptResult:
        with lease.keep_renewed():
            self._node.begin()
            usage = self._engine.prefill(prompt)
            settled = self._node.settle()
        with suppress(OSError):  # the lease then expires, and another node's engine computes the prompt
            lease.mark_stored() if settled else lease.release()
        return PromptResult(
            number, "computed", usage, "" if settled else "the computed blocks did not reach the fleet in time"
        )
