"""A running `vllm serve`, asked as a client asks it: for those who have a GPU and a server on it already."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

PATIENCE_S = 900


class Server:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def _tokens(self, prompt: list[int], tokens: int) -> Iterator[float]:
        """When each piece of the answer came."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({**body, "stream": True}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    yield time.perf_counter()

    def first(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        began = time.perf_counter()
        (at,) = self._tokens(prompt, 1)
        return at - began

    def reset_prefix_cache(self) -> bool:
        """vLLM's own prefix cache is emptied and the connector's kept; False where the server does not take orders:
        start it with VLLM_SERVER_DEV_MODE=1."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", b"", method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60):
                return True
        except urllib.error.URLError:
            return False

    def saturate(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """All at once: tokens a second, prompts included, and the 99th percentile of the time between tokens."""

        def gaps(prompt: list[int]) -> list[float]:
            at = list(self._tokens(prompt, tokens))
            return [b - a for a, b in pairwise(at)]

        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as clients:
            found: list[Any] = sorted(gap for gaps_of in clients.map(gaps, prompts) for gap in gaps_of)
        took = time.perf_counter() - began
        return (sum(map(len, prompts)) + tokens * len(prompts)) / took, found[int(0.99 * (len(found) - 1))]
