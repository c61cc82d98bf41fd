"""The model against transformers: the same tokens, for any chunks, neighbours and pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.block.layout import KVLayout
from kvcache.engine.model import Model, load_model
from kvcache.engine.scheduler import Batch, Span
from kvcache.errors import ModelError
from tests.engine import tiny_model
from tests.engine.greedy_decode import greedy, pages

BLOCK = 4
NEW_TOKENS = 5
EXAMPLES = settings.default.max_examples // 5

Reference = Callable[[tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")
    return lru_cache(None)(lambda family: tiny_model.make(root / family, family))


@pytest.fixture(scope="module", params=tiny_model.FAMILIES)
def pair(request: pytest.FixtureRequest, make: Callable[[str], str]) -> tuple[Model, Reference]:
    """The model, and transformers' greedy answers: the whole sequence computed anew for every token."""
    directory = make(request.param)
    return load_model(directory, block_tokens=BLOCK), reference(directory)


def reference(directory: str) -> Reference:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")

    @lru_cache(None)
    def answer(prompt: tuple[int, ...]) -> list[int]:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                logits = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return answer


prompts = st.lists(st.binary(min_size=1, max_size=90), min_size=1, max_size=4)


@settings(max_examples=EXAMPLES)
@given(prompts, st.randoms(use_true_random=False), st.sampled_from([1, 3, 16, 64]))
def test_greedy_tokens_equal_transformers(
    pair: tuple[Model, Reference], prompts: list[bytes], random: Any, most: int
) -> None:
    model, answer = pair
    ids = [list(prompt) for prompt in prompts]
    found = greedy(model, ids, NEW_TOKENS, chunk=lambda n: min(n, random.randint(0, most)), seed=random.randint(0, 99))
    assert found == [answer(tuple(p)) for p in ids]


def test_logits_of_every_row_equal_transformers(pair: tuple[Model, Reference], make: Callable[[str], str]) -> None:
    from transformers import AutoModelForCausalLM

    model = pair[0]
    ids = torch.arange(0, 150) * 7 % tiny_model.VOCAB
    batch = Batch(ids, torch.arange(150), [Span(0, 150, 0, list(range(38)))], torch.arange(150))
    peer = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(model.forward(batch, pages(model, 38)), peer(ids[None]).logits[0], atol=5e-5, rtol=0)


def test_a_row_does_not_change_with_its_neighbours(make: Callable[[str], str]) -> None:
    model = load_model(make("llama"), block_tokens=BLOCK)
    mine = torch.arange(9)
    alone = model.forward(Batch(mine, mine, [Span(0, 9, 0, [0, 1, 2])], torch.tensor([8])), pages(model, 40))
    for others in (1, 2, 5, 60):
        ids = torch.cat([torch.arange(others) * 3 % 256, mine])
        positions = torch.cat([torch.arange(others), mine])
        spans = [Span(0, others, 0, list(range(10, 30))), Span(others, 9, 0, [2, 0, 1])]
        logits = model.forward(Batch(ids, positions, spans, torch.tensor([others + 8])), pages(model, 40))
        torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


def test_keys_are_written_only_to_new_tokens_pages(make: Callable[[str], str]) -> None:
    model = load_model(make("smollm2"), block_tokens=BLOCK)
    kv = pages(model, 6)
    ids = torch.arange(10)
    model.forward(Batch(ids[:6], ids[:6], [Span(0, 6, 0, [4, 1, 3])], torch.tensor([], dtype=torch.int64)), kv)
    written = ~kv.isnan().flatten(4).all(-1)  # (layers, 2, pages, block_tokens)
    expected = torch.zeros_like(written)
    expected[:, :, 4] = True
    expected[:, :, 1, :2] = True
    assert torch.equal(written, expected)
    before = kv.clone()
    model.forward(Batch(ids[6:], ids[6:], [Span(0, 4, 6, [4, 1, 3])], torch.tensor([3])), kv)
    assert torch.equal(kv[:, :, 4], before[:, :, 4])
    assert torch.equal(kv[:, :, 1, :2], before[:, :, 1, :2])
    assert not kv[:, :, [1, 3], :2].isnan().any()


def test_a_window_does_not_read_earlier_pages(make: Callable[[str], str]) -> None:
    model = load_model(make("mistral-window"), block_tokens=BLOCK)
    ids = torch.arange(40)
    table = list(range(10))

    def last(kv: torch.Tensor, first: int) -> torch.Tensor:
        batch = Batch(ids[first:], ids[first:], [Span(0, 40 - first, first, table)], torch.tensor([39 - first]))
        return model.forward(batch, kv)

    kv = pages(model, 10)
    model.forward(Batch(ids[:36], ids[:36], [Span(0, 36, 0, table)], torch.tensor([35])), kv)
    spoilt = kv.clone()
    spoilt[:, :, : (36 + 1 - 21) // BLOCK] = torch.nan
    assert torch.equal(last(spoilt, 36), last(kv, 36))


def test_a_step_without_logits_works(make: Callable[[str], str]) -> None:
    model = load_model(make("llama"), block_tokens=BLOCK)
    ids = torch.arange(3)
    none = torch.tensor([], dtype=torch.int64)
    assert model.forward(Batch(ids, ids, [Span(0, 3, 0, [0])], none), pages(model, 1)).shape == (0, tiny_model.VOCAB)


def test_old_rotary_settings_are_equivalent(make: Callable[[str], str], tmp_path: Path) -> None:
    new = load_model(make("llama-rope-llama3"), block_tokens=BLOCK)
    directory = tiny_model.make(tmp_path / "old", "llama-rope-llama3")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    prompt = [list(range(100))]
    assert greedy(load_model(directory, block_tokens=BLOCK), prompt, 5) == greedy(new, prompt, 5)


def test_a_model_describes_itself_to_the_cache(make: Callable[[str], str]) -> None:
    model = load_model(make("qwen3"), dtype="bf16", block_tokens=32)
    assert model.layout == KVLayout.mha(layers=3, kv_heads=2, head_dim=24, dtype="bf16", block_tokens=32)
    assert model.layout.max_tokens == model.max_tokens == tiny_model.MAX_TOKENS
    assert model.vocab_size == tiny_model.VOCAB
    assert model.eos_token_ids == {tiny_model.EOS}
    assert model.revision.startswith("sha256:")


def test_a_setting_that_changes_keys_changes_the_facts(tmp_path: Path) -> None:
    plain = load_model(tiny_model.make(tmp_path / "a", "mistral"))
    for field in ({"rms_norm_eps": 1e-3}, {"sliding_window": 8}, {"rope": {"rope_theta": 1e6}}):
        other = load_model(tiny_model.make(tmp_path / str(field), "mistral", **field))
        assert other.revision == plain.revision
        assert other.facts != plain.facts


def test_bf16_is_near_fp32(make: Callable[[str], str]) -> None:
    ids = torch.arange(60)
    batch = Batch(ids, ids, [Span(0, 60, 0, list(range(15)))], ids)
    full, half = (load_model(make("llama"), dtype=dtype, block_tokens=BLOCK) for dtype in ("fp32", "bf16"))
    wanted, found = full.forward(batch, pages(full, 15)), half.forward(batch, pages(half, 15))
    assert (wanted - found).abs().mean() < 0.05 * wanted.std()


def test_an_unknown_dtype_is_refused(make: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match="expected one of fp32, bf16, fp16"):
        load_model(make("llama"), dtype="float32")
