"""An engine on its own thread: answers, refusals, cancellation, failure and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Full
from typing import Any

import pytest

from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.loop import EngineLoop
from kvcache.engine.sampling import SamplingParams
from kvcache.errors import ClosedError, TokenError
from kvcache.testing.naive_cache import NaiveCache
from tests.engine.fake_model import FakeModel, answer

WAIT_S = 30.0  # only a broken loop takes this long


class Gate(FakeModel):
    """Computes nothing while the gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached, self.fail = threading.Event(), threading.Event(), False

    def forward(self, *given: Any) -> Any:
        self.reached.set()
        assert self.open.wait(WAIT_S)
        if self.fail:
            raise RuntimeError("no memory")
        return super().forward(*given)


@pytest.fixture
def model() -> Gate:
    return Gate()


@pytest.fixture
def loop(model: Gate) -> Iterator[EngineLoop]:
    loop = EngineLoop(Engine(model, NaiveCache(), EngineConfig(pages=40)), backlog=4)
    yield loop
    model.open.set()
    loop.close()
    assert loop.check() == []


def test_several_threads_get_their_answers(loop: EngineLoop, model: Gate) -> None:
    model.open.set()
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        answers[i] = loop.submit([i] * 6, SamplingParams(max_tokens=5)).result(WAIT_S).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {i: answer([i] * 6, 5) for i in range(4)}


def test_a_refused_prompt_fails_its_future(loop: EngineLoop, model: Gate) -> None:
    model.open.set()
    assert isinstance(loop.submit([], SamplingParams()).exception(WAIT_S), TokenError)
    assert loop.submit([1], SamplingParams(max_tokens=1)).result(WAIT_S).token_ids == answer([1], 1)


def test_a_cancelled_request_is_aborted(loop: EngineLoop, model: Gate) -> None:
    future = loop.submit([1] * 9, SamplingParams(max_tokens=40, ignore_eos=True))
    assert model.reached.wait(WAIT_S)
    assert future.cancel()
    model.open.set()
    loop.submit([2], SamplingParams(max_tokens=1)).result(WAIT_S)
    loop.submit([3], SamplingParams(max_tokens=1)).result(WAIT_S)
    assert model.rows <= 9 + 2 + 2, "it was computed further"


def test_requests_beyond_the_backlog_are_refused(loop: EngineLoop, model: Gate) -> None:
    futures = [loop.submit([i], SamplingParams(max_tokens=1)) for i in range(4)]
    with pytest.raises(Full, match="try again"):
        loop.submit([5], SamplingParams())
    model.open.set()
    assert futures[0].result(WAIT_S).token_ids == answer([0], 1)
    assert loop.submit([5], SamplingParams(max_tokens=1)).result(WAIT_S).token_ids == answer([5], 1)


def test_an_answered_client_can_submit_at_once(loop: EngineLoop, model: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free before it hears."""
    room, answered = list[bool](), Future.set_result

    def watched(future: Future[Any], result: Any) -> None:
        room.append(loop._backlog.acquire(blocking=False))
        loop._backlog.release()
        answered(future, result)

    monkeypatch.setattr(Future, "set_result", watched)
    futures = [loop.submit([i], SamplingParams(max_tokens=1)) for i in range(4)]
    model.open.set()
    assert [future.result(WAIT_S).token_ids for future in futures] == [answer([i], 1) for i in range(4)]
    assert room == [True] * 4


def test_a_failed_step_ends_only_its_requests(loop: EngineLoop, model: Gate) -> None:
    model.fail = True
    model.open.set()
    assert isinstance(loop.submit([1] * 9, SamplingParams()).exception(WAIT_S), RuntimeError)
    model.fail = False
    assert loop.submit([1] * 9, SamplingParams(max_tokens=3)).result(WAIT_S).token_ids == answer([1] * 9, 3)


def test_close_ends_unfinished_requests(loop: EngineLoop, model: Gate) -> None:
    futures = [loop.submit([i] * 9, SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(3)]
    assert model.reached.wait(WAIT_S)
    closing = threading.Thread(target=loop.close)
    closing.start()
    while not loop._closed:
        pass
    model.open.set()
    closing.join(WAIT_S)
    assert all(isinstance(future.exception(0), ClosedError) for future in futures)
    with pytest.raises(ClosedError, match="stopped"):
        loop.submit([1], SamplingParams())
    loop.close()
