"""`generate` with and without the store gives the same tokens; what it reuses is what was computed before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvcache
from kvcache.connector.transformers import PrefixStore
from kvcache.testing.naive_cache import NaiveCache
from tests.connector.fault_injection import FAULTS, METHODS, FaultInjector
from tests.engine import tiny_model

FAMILIES = ("llama", "llama-rope-llama3", "smollm2", "mistral-window", "qwen2-window", "qwen3", "gemma3")
BLOCK = 8


def made(place: Path, family: str) -> Any:
    if family == "gemma3":
        sizes = dict(
            tiny_model._SIZES,
            head_dim=24,
            sliding_window=20,
            layer_types=["sliding_attention"] * 2 + ["full_attention"],
        )
        torch.manual_seed(0)
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)).float()
        model.save_pretrained(place)
        return transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_model.make(place, family), dtype=torch.float32)


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    models: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in models:
            models[family] = made(tmp_path_factory.mktemp(family), family)
        return models[family]

    return get


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[kvcache.KVCache]:
    with opened(tmp_path) as cache:
        yield cache
        assert cache.flush(30)
        assert cache.check() == []


def opened(place: Path) -> kvcache.KVCache:
    nvme = {"path": place / "nvme", "capacity_bytes": "256MiB", "min_free_bytes": 0}
    return kvcache.open(host={"capacity_bytes": "64MiB"}, nvme=nvme, control={"enabled": False})


def tokens(random: Random, *shape: int) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return torch.tensor([random.randrange(1, 250) for _ in range(count)]).reshape(*shape)


def generate(run: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **named: Any) -> torch.Tensor:
    named = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "min_new_tokens": 6} | named
    out = run.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **named)
    return out if isinstance(out, torch.Tensor) else out.sequences


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_batches_and_padding_give_the_same_tokens(
    family: str, model_of: Callable[[str], Any], cache: kvcache.KVCache, request: pytest.FixtureRequest
) -> None:
    """Random conversations over shared beginnings, longer than the windows, several rows at once."""
    model, random = model_of(family), Random(family)
    store = PrefixStore(cache, model, block_tokens=BLOCK)
    stems = [tokens(random, random.randrange(30, 90)) for _ in range(2)]
    reused = 0
    for _ in range(60 if request.config.getoption("--long") else 8):
        rows = []
        for _ in range(random.choice((1, 1, 2, 3))):
            stem = random.choice(stems)
            rows.append(
                torch.cat(
                    (stem[: random.randrange(len(stem) // 2, len(stem))], tokens(random, random.randrange(1, 20)))
                )
            )
        longest = max(map(len, rows))
        ids, mask = torch.zeros((2, len(rows), longest), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
        out = generate(store, ids, mask)
        assert store.declined == ""
        assert torch.equal(out, generate(model, ids, mask))
        assert cache.flush(30)
        stems[random.randrange(2)] = out[0, longest - len(rows[0]) :][:100]  # the next turn goes on from here
        reused += store.reused
    assert reused > 0


def test_reused_blocks_equal_the_computed_ones(model_of: Callable[[str], Any], cache: kvcache.KVCache) -> None:
    model, random = model_of("llama"), Random(1)
    store = PrefixStore(cache, model, block_tokens=BLOCK)
    prompt = tokens(random, 1, 40)
    out = generate(store, prompt)
    assert store.reused == 0
    assert cache.flush(30)
    for ids, reused in (
        (prompt, 39),  # all of it is there: one token is computed, for its logits
        (prompt[:, :20], 16),
        (torch.cat((out, tokens(random, 1, 5)), 1), 40),  # of the 45 with keys, five blocks are full
        (torch.cat((prompt[:, :25], tokens(random, 1, 5)), 1), 24),
        (torch.cat((tokens(random, 1, 1), prompt), 1), 0),
        (prompt.repeat(3, 1), 39),
        (torch.cat((prompt, torch.cat((prompt[:, :17], tokens(random, 1, 23)), 1))), 16),  # as far as all rows agree
    ):
        generate(store, ids)
        assert store.reused == reused
        assert cache.flush(30)


def test_a_prefix_is_reused_after_a_restart(model_of: Callable[[str], Any], tmp_path: Path) -> None:
    model, prompt = model_of("qwen2-window"), tokens(Random(2), 1, 70)
    for reused in (0, 64):
        with opened(tmp_path) as cache:
            store = PrefixStore(cache, model, block_tokens=BLOCK)
            assert torch.equal(generate(store, prompt), generate(model, prompt))
            assert store.reused == reused


def test_past_key_values_works_with_plain_generate(model_of: Callable[[str], Any], cache: kvcache.KVCache) -> None:
    """Another's call of `generate` takes the cache, and its prompt is stored without anybody saying so."""
    model, prompt = model_of("llama"), tokens(Random(3), 1, 50)
    expected = generate(model, prompt)
    word = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    for reused in (0, 48):
        past = PrefixStore(cache, model, block_tokens=BLOCK).past_key_values(prompt)
        assert isinstance(past, DynamicCache)
        assert past.get_seq_length() == reused
        out = generate(model, prompt, **{word: past})
        assert torch.equal(out, expected)
        assert cache.flush(30)
    past.keep(out)
    assert cache.flush(30)
    longer = torch.cat((out, out[:, :4]), 1)
    assert PrefixStore(cache, model, block_tokens=BLOCK).past_key_values(longer).get_seq_length() == 48


def test_sampled_tokens_are_unchanged(model_of: Callable[[str], Any], cache: kvcache.KVCache) -> None:
    model, prompt = model_of("llama"), tokens(Random(4), 2, 40)
    store = PrefixStore(cache, model, block_tokens=BLOCK)
    answers = []
    for run in (model, store, store):
        torch.manual_seed(5)
        answers.append(generate(run, prompt, do_sample=True, return_dict_in_generate=True))
        assert cache.flush(30)
    assert store.reused == 39
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({"num_beams": 2}, "generation mode beam_search: expected greedy_search or sample"),
        ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences above 1"),
        ({"use_cache": False}, "use_cache is False"),
        ({"position_ids": torch.arange(40)[None]}, "position_ids given: token ids are required to identify blocks"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unsupported_call_is_declined(
    named: dict[str, Any], why: str, model_of: Callable[[str], Any], cache: kvcache.KVCache
) -> None:
    model, prompt = model_of("llama"), tokens(Random(6), 1, 40)
    store = PrefixStore(cache, model, block_tokens=BLOCK)
    torch.manual_seed(7)
    expected = generate(model, prompt, **named)
    torch.manual_seed(7)
    assert torch.equal(generate(store, prompt, **named), expected)
    assert store.declined == why
    assert cache.stats()["tiers"]["host"]["records"] == 0


def test_unsupported_padding_is_declined(model_of: Callable[[str], Any], cache: kvcache.KVCache) -> None:
    model, prompt = model_of("llama"), tokens(Random(8), 2, 40)
    store = PrefixStore(cache, model, block_tokens=BLOCK)
    mask = torch.ones_like(prompt)
    mask[1, 30:35] = 0
    assert torch.equal(generate(store, prompt, mask), generate(model, prompt, mask))
    assert store.declined == "expected padding on the left"
    assert cache.stats()["tiers"]["host"]["records"] == 0


def test_weights_that_differ_share_nothing(
    model_of: Callable[[str], Any], cache: kvcache.KVCache, tmp_path: Path
) -> None:
    prompt = tokens(Random(9), 1, 40)
    generate(PrefixStore(cache, model_of("llama"), block_tokens=BLOCK), prompt)
    assert cache.flush(30)
    place = tiny_model.make(tmp_path / "other", "llama", seed=1)
    other = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    for named in ({}, {"revision": "mine"}, {"tenant": "other"}, {"cache_salt": "x"}, {"adapter": "a"}):
        store = PrefixStore(cache, other, block_tokens=BLOCK, **named)
        assert torch.equal(generate(store, prompt), generate(other, prompt))
        assert store.reused == 0
        assert cache.flush(30)


@pytest.mark.parametrize("method", METHODS)
def test_a_faulty_cache_changes_no_token(method: str, model_of: Callable[[str], Any]) -> None:
    model, injector, prompt = model_of("llama"), FaultInjector(), tokens(Random(12), 1, 20)
    expected = generate(model, prompt)
    store = PrefixStore(injector.wrap(NaiveCache()), model, block_tokens=BLOCK, patience_s=0.2)
    assert torch.equal(generate(store, prompt), expected)
    for fault in FAULTS:
        injector.method, injector.fault = method, fault
        assert torch.equal(generate(store, prompt), expected), fault
    injector.method = ""
    assert torch.equal(generate(store, prompt), expected)
    assert store.reused == 16
