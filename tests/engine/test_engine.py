"""The engine on a model whose answers depend on every byte that it reads: a wrong byte is a wrong answer."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.block.layout import Group, KVLayout
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.sequence import SequenceState
from kvcache.errors import ConfigError, KVCacheError, LayoutError, TokenError
from kvcache.testing.naive_cache import NaiveCache
from tests.engine.fake_model import BLOCK, EOS, VOCAB, FakeModel, FlakyCache, ManualClock, answer

PROMPT = [i % 11 for i in range(22)]  # five full blocks and two tokens


def engine(cache: Any = None, *, pages: int = 64, decode: Any = None, clock: Any = None, **config: Any) -> Engine:
    return Engine(FakeModel(), cache, EngineConfig(pages=pages, **config), decode=decode, clock=clock)


def finish(engine: Engine) -> None:
    while engine.unfinished:
        engine.step()


def test_an_engine_without_a_cache_reuses_nothing() -> None:
    e = engine()
    for _ in range(2):
        [result] = e.generate([PROMPT], SamplingParams(max_tokens=8))
        assert result.token_ids == answer(PROMPT, 8)
        assert (result.prompt_tokens, result.reused, result.reused_tokens) == (22, {}, 0)
    assert e.check() == []
    assert e.pool.available == 64


@pytest.mark.parametrize(("budget", "pages"), [(1, 16), (3, 16), (7, 9), (2048, 64)])
def test_chunk_size_does_not_change_answers(budget: int, pages: int) -> None:
    prompts = [PROMPT, PROMPT[:9], PROMPT[5:], [3], PROMPT[:8]]
    e = engine(NaiveCache(), pages=pages, max_batch_tokens=budget)
    results = e.generate(prompts, SamplingParams(max_tokens=10))
    assert [r.token_ids for r in results] == [answer(p, 10) for p in prompts]
    assert e.check() == []


def test_a_step_decodes_first_within_its_token_budget() -> None:
    e = engine(max_batch_tokens=6)
    short = e.add([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
    e.step()
    long = e.add(PROMPT, SamplingParams(max_tokens=1))
    while not long.answer:
        before, rows = len(short.answer), e.model.rows  # type: ignore[attr-defined]
        e.step()
        assert len(short.answer) == before + 1, "a long prompt held up another's next token"
        assert e.model.rows - rows <= 6  # type: ignore[attr-defined]


def test_reuse_takes_the_pool_then_the_cache() -> None:
    cache = NaiveCache()
    e = engine(cache)
    [cold] = e.generate([PROMPT], SamplingParams(max_tokens=1))
    [pool] = e.generate([PROMPT], SamplingParams(max_tokens=1))
    e.pool.clear()
    [host] = e.generate([PROMPT], SamplingParams(max_tokens=1))
    [whole] = e.generate(
        [PROMPT[:20]], SamplingParams(max_tokens=1)
    )  # all of it is known: the last block is computed again
    assert cold.reused == {}
    assert pool.reused == {"hbm": 20}
    assert host.reused == {"host": 20}
    assert whole.reused == {"hbm": 16}
    assert [cold.token_ids, pool.token_ids, host.token_ids] == [answer(PROMPT, 1)] * 3
    assert e.check() == []


def test_blocks_in_the_pool_are_not_loaded() -> None:
    cache = NaiveCache()
    first = engine(cache)
    first.generate([PROMPT], SamplingParams(max_tokens=1))
    second = engine(cache, pages=64)
    second.generate([PROMPT[:10]], SamplingParams(max_tokens=1))
    [result] = second.generate([PROMPT], SamplingParams(max_tokens=4))
    assert result.reused == {"hbm": 8, "host": 12}
    assert result.token_ids == answer(PROMPT, 4)


def test_only_new_tokens_are_computed() -> None:
    cache = NaiveCache()
    engine(cache).generate([PROMPT], SamplingParams(max_tokens=1))
    e = engine(cache)
    e.generate([PROMPT], SamplingParams(max_tokens=1))
    assert e.model.rows == 2  # type: ignore[attr-defined]


def test_a_growing_answer_is_stored_for_the_next_turn() -> None:
    e = engine(NaiveCache())
    [first] = e.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))
    turn = PROMPT + first.token_ids + [5, 6, 7]
    [second] = e.generate([turn], SamplingParams(max_tokens=1))
    known = (len(PROMPT) + len(first.token_ids) - 1) // BLOCK * BLOCK  # the last token was chosen, not computed
    assert second.reused == {"hbm": known}
    assert second.token_ids == answer(turn, 1)


def test_pool_blocks_lost_by_the_cache_are_stored_again() -> None:
    cache = NaiveCache()
    e = engine(cache)
    e.generate([PROMPT], SamplingParams(max_tokens=1))
    cache.blocks.clear()
    e.generate([[*PROMPT, 1, 2]], SamplingParams(max_tokens=1))  # fills the sixth block
    [result] = engine(cache).generate([[*PROMPT, 1, 2, 3]], SamplingParams(max_tokens=1))
    assert result.reused == {"host": 24}


def test_concurrent_requests_share_a_prefix() -> None:
    prompts = [[*PROMPT, i] for i in range(6)]
    e = engine(NaiveCache(), max_batch_tokens=16)
    results = e.generate(prompts, SamplingParams(max_tokens=6))
    assert [r.token_ids for r in results] == [answer(p, 6) for p in prompts]
    shared = len(PROMPT) // BLOCK
    assert e.pool.idle <= shared + 6 * 3, "the same block has several pages"
    assert e.check() == []


def test_preemption_keeps_answers_correct() -> None:
    prompts = [[i] * 8 for i in range(1, 5)]
    e = engine(NaiveCache(), pages=13)
    results = e.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [r.token_ids for r in results] == [_answer_on(p, 20) for p in prompts]
    assert sum(r.preemptions for r in results) > 0
    assert results[0].preemptions == 0, "the first arrival is never preempted"
    assert e.check() == []


def _answer_on(prompt: list[int], count: int) -> list[int]:
    """The answer that goes on after an end token."""
    given: list[int] = []
    while len(given) < count:
        given += answer(prompt + given, count - len(given))
    return given


def test_an_answer_ends_at_eos_limit_or_context() -> None:
    e = engine()
    ended = next(p for p in ([i, j] for i in range(9) for j in range(9)) if EOS in answer(p, 30))
    [stop] = e.generate([ended], SamplingParams(max_tokens=30))
    assert (stop.finish, stop.token_ids[-1]) == ("stop", EOS)
    [length] = e.generate([ended], SamplingParams(max_tokens=30, ignore_eos=True))
    assert (length.finish, len(length.token_ids)) == ("length", 30)
    [context] = e.generate([[1] * 60], SamplingParams(max_tokens=30, ignore_eos=True))
    assert (context.finish, len(context.token_ids)) == ("length", 4)


def test_a_stop_string_of_several_tokens_ends_an_answer() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)

    text = decode(_answer_on(PROMPT, 20))
    e = engine(decode=decode)
    [result] = e.generate([PROMPT], SamplingParams(max_tokens=20, stop=("never", text[6:9]), ignore_eos=True))
    assert result.finish == "stop"
    assert decode(result.token_ids) == text[: text.index(text[6:9]) + 3]


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        ([], TokenError, "empty prompt"),
        ([1] * 64, TokenError, "64 tokens: 64, answer included, is the model's context"),
        ([1, VOCAB], TokenError, f"vocabulary ends at {VOCAB - 1}"),
        ([1, -1], TokenError, "position 1"),
        ([0.5], TokenError, "position 0"),
        ("text", TokenError, "str"),
    ],
)
def test_an_impossible_prompt_is_refused(prompt: Any, error: type[KVCacheError], said: str) -> None:
    e = engine(NaiveCache())
    with pytest.raises(error, match=said):
        e.add(prompt)
    with pytest.raises(error):
        e.generate([PROMPT, prompt])
    assert e.unfinished == 0
    assert e.check() == []


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(TokenError, match="give the engine more pages"):
        engine(pages=4).add([1] * 16)


@pytest.mark.parametrize(
    ("named", "said"),
    [({"pages": 0}, "pages"), ({"max_batch_tokens": 0}, "max_batch_tokens"), ({"max_sequences": 0}, "max_sequences")],
)
def test_an_invalid_engine_config_is_refused(named: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine(**named)


def test_stop_strings_need_a_decoder() -> None:
    with pytest.raises(ConfigError, match="decode"):
        engine().add(PROMPT, SamplingParams(stop=("x",)))


def test_a_layout_of_several_groups_is_refused() -> None:
    model = FakeModel()
    model.layout = KVLayout((Group(layers=1, head_dim=4), Group(layers=1, head_dim=4, name="other")), BLOCK)
    with pytest.raises(LayoutError, match="2 groups"):
        Engine(model, None, EngineConfig(pages=4))


def test_other_weights_share_nothing() -> None:
    cache = NaiveCache()
    engine(cache).generate([PROMPT], SamplingParams(max_tokens=1))
    other = FakeModel()
    other.revision = "fake-2"
    [result] = Engine(other, cache, EngineConfig(pages=64)).generate([PROMPT], SamplingParams(max_tokens=1))
    assert result.reused == {}


def test_a_hung_load_is_abandoned_and_keeps_its_pages() -> None:
    clock, cache = ManualClock(), FlakyCache(trouble=0)
    engine(cache).generate([PROMPT], SamplingParams(max_tokens=1))
    e = engine(cache, clock=clock, patience_s=5.0, pages=12)
    cache.hang = "load"
    sequence = e.add(PROMPT, SamplingParams(max_tokens=3))
    for _ in range(20):
        e.step()
    assert sequence.state is SequenceState.LOADING
    clock.advance(6.0)
    finish(e)
    assert sequence.answer == answer(PROMPT, 3)
    assert sequence.reused == {}
    assert e.check() == []
    assert e.pool.busy, "pages that a load may still write into were given up"
    assert e.pool.available == 12 - 5
    cache.release()
    e.pool.poll()
    assert e.pool.available == 12
    assert e.check() == []


def test_a_page_under_store_is_not_overwritten() -> None:
    cache = FlakyCache(trouble=0)
    e = engine(cache, pages=8)
    cache.hang = "store"
    e.generate([PROMPT], SamplingParams(max_tokens=1))
    assert e.pool.available == 8 - 5
    waiting = e.add([7] * 20, SamplingParams(max_tokens=1))
    for _ in range(3):
        e.step()
    assert waiting.state is SequenceState.WAITING
    cache.release()
    finish(e)
    [result] = engine(cache).generate([PROMPT], SamplingParams(max_tokens=5))
    assert result.reused == {"host": 20}
    assert result.token_ids == answer(PROMPT, 5)


def test_a_lookup_without_an_answer_times_out() -> None:
    clock, cache = ManualClock(), FlakyCache(trouble=0)
    e = engine(cache, clock=clock, patience_s=5.0)
    sequence = e.add(PROMPT, SamplingParams(max_tokens=3))
    assert sequence.request is not None
    sequence.request.pending = 10**9  # type: ignore[attr-defined]
    e.step()
    assert sequence.state is SequenceState.WAITING
    clock.advance(6.0)
    finish(e)
    assert sequence.answer == answer(PROMPT, 3)


def test_reused_tokens_are_counted_by_tier() -> None:
    cache = FlakyCache(trouble=0)
    cache.tiers = ["host"] * 3 + ["nvme"] * 2
    engine(cache).generate([PROMPT], SamplingParams(max_tokens=1))
    [result] = engine(cache).generate([PROMPT], SamplingParams(max_tokens=1))
    assert result.reused == {"host": 12, "nvme": 8}
    e = engine(cache)
    e.generate([PROMPT[:9]], SamplingParams(max_tokens=1))
    [result] = e.generate([PROMPT], SamplingParams(max_tokens=1))
    assert result.reused == {"hbm": 8, "host": 4, "nvme": 8}


def test_a_request_can_be_aborted_in_any_state() -> None:
    cache = FlakyCache(trouble=0)
    engine(cache).generate([PROMPT], SamplingParams(max_tokens=1))
    cache.hang = "load"
    e = engine(cache, max_sequences=2, pages=24)
    loading = e.add(PROMPT)
    running = e.add([7] * 9)
    waiting = e.add([8] * 9)
    e.step()
    assert [s.state for s in (loading, running, waiting)] == [
        SequenceState.LOADING,
        SequenceState.RUNNING,
        SequenceState.WAITING,
    ]
    load = loading.transfer
    for sequence in (loading, running, waiting):
        e.abort(sequence)
        e.abort(sequence)  # twice is once
        assert sequence.result().finish == "abort"
        assert e.check() == []
    assert (e.unfinished, e.pool.held, len(cache.open_requests)) == (0, 0, 0)
    assert load is not None
    assert load.cancelled  # type: ignore[attr-defined]
    cache.release()
    e.pool.poll()
    assert e.pool.available == 24
    assert e.check() == []


def test_close_releases_all_pages_and_holds() -> None:
    cache = FlakyCache(trouble=0)
    e = engine(cache)
    for i in range(4):
        e.add([i] * 9, SamplingParams(max_tokens=30))
    e.step()
    e.close()
    assert (e.unfinished, e.pool.held, len(cache.open_requests)) == (0, 0, 0)
    assert e.check() == []


def test_a_failed_step_leaves_the_engine_consistent() -> None:
    e = engine(NaiveCache())
    forward, e.model.forward = e.model.forward, _fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        e.generate([PROMPT, PROMPT[:5]])
    assert (e.unfinished, e.pool.held) == (0, 0)
    assert e.check() == []
    e.model.forward = forward  # type: ignore[method-assign]
    [result] = e.generate([PROMPT], SamplingParams(max_tokens=5))
    assert result.token_ids == answer(PROMPT, 5)


def _fail(*_: Any) -> Any:
    raise RuntimeError("no memory")


def test_a_seeded_answer_does_not_depend_on_the_batch() -> None:
    wish = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    [alone] = engine().generate([PROMPT], wish)
    e = engine(NaiveCache(), max_batch_tokens=5, pages=20)
    company = SamplingParams(max_tokens=20, temperature=2.0, seed=1)
    results = e.generate([[1] * 9, PROMPT, [2] * 9], [company, wish, company])
    assert results[1].token_ids == alone.token_ids
    [other] = engine().generate([PROMPT], SamplingParams(max_tokens=12, temperature=1.0, seed=8, ignore_eos=True))
    assert other.token_ids != alone.token_ids


def test_times_are_measured_from_add() -> None:
    clock = ManualClock()
    e = engine(clock=clock)
    sequence = e.add(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    clock.advance(1.0)
    forward = e.model.forward

    def slowly(*given: Any) -> Any:
        clock.advance(2.0)
        return forward(*given)

    e.model.forward = slowly  # type: ignore[method-assign]
    finish(e)
    result = sequence.result()
    assert (result.start_s, result.ttft_s, result.total_s) == (1.0, 3.0, 5.0)
