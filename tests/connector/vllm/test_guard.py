"""Whatever of the cache raises, and when: the engine gets an answer, hears of every load that it was promised, and is
told which of its pages did not come."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from kvcache.cache.operation import BlockTransfer
from kvcache.connector.guard import GuardedTransfer, call_guarded, guarded
from kvcache.testing.faulty_cache import RaisingProxy
from kvcache.testing.naive_cache import NaiveCache
from tests.connector.vllm.conftest import PAGES, TOKENS, blocks, output, request

MakeConnector = Callable[..., tuple[Any, Any]]
NAMES = ("namespace", "request", "match", "extend", "admit", "load", "store", "close", "computed",
         "done", "blocks", "wait", "cancel")  # fmt: skip


def chain(prompt: int, length: int) -> list[bytes]:
    return [sha256(b"%d %d" % (prompt, i)).digest() for i in range(length)]


def content(digest: bytes) -> Any:
    """What the block of this name holds."""
    return np.frombuffer((digest * 4)[:128], np.uint8).view(np.float16).reshape(2, TOKENS, 1, 8)


class Engine:
    """vLLM's loop around scheduler and worker, of one request after the other; pages are given out in turn."""

    def __init__(self, sides: tuple[Any, Any]) -> None:
        self.scheduling, self.working = sides
        self.at = self.count = 0

    def run(self, digests: list[bytes]) -> int:
        """The blocks that came from the cache."""
        asked, n = request(f"r{self.count}", digests), len(digests)
        self.count += 1
        tokens, _ = self.scheduling.match_tokens(asked, 0)
        ids = [1 + (self.at + i) % (PAGES - 1) for i in range(n)]
        self.at += n
        self.scheduling.on_allocated(asked, blocks(ids), tokens)
        came = self.load(asked, ids, tokens // TOKENS) if tokens else 0
        for digest, page in zip(digests[:came], ids[:came], strict=True):
            assert self.working.memory[page].tobytes() == content(digest).tobytes(), "never a wrong block"
        message = self.scheduling.build_metadata(output(asked, ids, min(came * TOKENS, asked.num_tokens - 1)))
        self.working.begin(message)
        for digest, page in zip(digests[came:], ids[came:], strict=True):
            self.working.memory[page] = content(digest)
        self.working.store(message)
        self.scheduling.step_timer.end()
        self.scheduling.on_request_finished(asked)
        self.working.begin(self.scheduling.build_metadata(output(ended=asked.request_id)))
        return came

    def load(self, asked: Any, ids: list[int], promised: int) -> int:
        message = self.scheduling.build_metadata(output())
        self.working.begin(message)
        self.working.load(message, wait=False, by_layer=False)
        for _ in range(100):
            arrived = self.working.results(idle=True).arrived
            if arrived:
                break
        assert arrived == {asked.request_id}, "told once, one way or the other"
        bad = self.working.take_invalid_pages()
        assert bad <= set(ids[:promised])
        self.scheduling.on_loads_finished(bad, [], list(arrived))
        self.scheduling.on_allocated(asked, blocks(ids), 0)
        return next((i for i, page in enumerate(ids) if page in bad), promised)


def sound(engine: Engine) -> None:
    """Whatever was before: what is computed now is found, and nothing is left behind."""
    engine.run(chain(99, 6))
    assert engine.run(chain(99, 6)) == 6
    assert engine.scheduling.requests == {}
    assert engine.working._known == engine.working._loading == {}
    assert engine.working._waiting == []


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_always_raises_fails_no_request(make_connector: MakeConnector, name: str) -> None:
    broken = [True]
    engine = Engine(
        make_connector(RaisingProxy(NaiveCache(), lambda called: broken[0] and called == name), load="async")
    )
    for prompt in (1, 2, 1, 2):
        engine.run(chain(prompt, 5))
    broken[0] = False
    sound(engine)


@pytest.mark.parametrize("seed", range(20))
def test_random_failures_fail_no_request(make_connector: MakeConnector, seed: int) -> None:
    rng = random.Random(seed)
    part = rng.choice([0.02, 0.1, 0.4])
    engine = Engine(make_connector(RaisingProxy(NaiveCache(), lambda _: rng.random() < part), load="async"))
    for _ in range(40):
        engine.run(chain(rng.randrange(4), rng.randrange(1, 9)))
    part = 0.0
    sound(engine)


def test_each_kind_of_failure_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.connector.guard._logged", set())

    def breaks() -> int:
        raise ZeroDivisionError("here")

    assert [call_guarded(7, breaks) for _ in range(3)] == [7, 7, 7]
    assert guarded(8)(breaks)() == 8
    assert sum("breaks" in record.getMessage() for record in caplog.records) == 1


def test_a_failing_transfer_counts_as_an_empty_load() -> None:
    transfer = GuardedTransfer(RaisingProxy(BlockTransfer(3), lambda _: True))  # type: ignore[arg-type]  # it stands for one
    transfer.cancel()
    assert (transfer.done, transfer.blocks, transfer.wait(1), transfer.wait_layer(0, 1)) == (True, 0, True, True)
