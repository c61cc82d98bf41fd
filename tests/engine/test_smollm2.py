"""SmolLM2, as its package ships it: the tokens of transformers, for text, code and chat."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.engine.checkpoint import PACKAGED, resolve_model
from kvcache.engine.model import Model, load_model
from kvcache.engine.tokenizer import Tokenizer
from tests.engine.greedy_decode import greedy

NEW_TOKENS = 8
PROMPTS = (
    "The capital of France is",
    Path(__file__).read_text(encoding="utf-8")[:600],
    "En été, la température moyenne à Paris est de 25 °C; 東京では",
)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("smollm2")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("smollm2"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    chat = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    return [*map(tokenizer.encode, PROMPTS), chat]


@pytest.fixture(scope="module")
def wanted(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    """Transformers' greedy answers."""
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32, attn_implementation="sdpa")
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = peer.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def test_greedy_tokens_equal_transformers(model: Model, prompts: list[list[int]], wanted: list[list[int]]) -> None:
    assert [greedy(model, [prompt], NEW_TOKENS)[0] for prompt in prompts] == wanted


@pytest.mark.parametrize("seed", [1, 2])
def test_chunks_and_neighbours_change_nothing(
    model: Model, prompts: list[list[int]], wanted: list[list[int]], seed: int
) -> None:
    random = Random(seed)
    assert greedy(model, prompts, NEW_TOKENS, chunk=lambda n: min(n, random.randint(0, 64)), seed=seed) == wanted


def test_the_model_knows_the_capital_of_france(tokenizer: Tokenizer, wanted: list[list[int]]) -> None:
    """Weights turned the wrong way still agree with transformers, which reads the same directory."""
    assert "Paris" in tokenizer.decode(wanted[0])
    assert "Paris" in tokenizer.decode(wanted[-1])


def test_the_model_describes_itself_to_the_cache(model: Model) -> None:
    group = model.layout.groups[0]
    assert (group.layers, group.kv_heads, group.head_dim) == (30, 3, 64)
    assert (model.max_tokens, model.vocab_size, model.eos_token_ids) == (8192, 49152, {2})
    assert model.facts["rope_theta"] == 100000.0
    assert model.facts["rms_norm_eps"] == 1e-5


@pytest.fixture(scope="module")
def peer() -> Any:
    """Transformers' reading of the same GGUF file, which splits words as we do but does not part digits."""
    from importlib.metadata import distribution

    from transformers import AutoTokenizer

    package, file = PACKAGED["smollm2"]
    path = Path(str(distribution(package).locate_file(file)))
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_tokens_equal_transformers_with_single_digits(tokenizer: Tokenizer, peer: Any) -> None:
    @given(st.text(st.characters(exclude_categories=("Cs", "Cn"))) | st.sampled_from(PROMPTS))
    def same(text: str) -> None:
        expected: list[int] = []
        for piece in _parts(text):
            expected += peer(piece, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == peer.decode(expected)  # not the text: the vocabulary lacks some bytes

    same()


def test_a_chat_prompt_equals_transformers(tokenizer: Tokenizer, peer: Any) -> None:
    for messages in (
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}],
        [{"role": r, "content": r} for r in ("user", "assistant", "user")],
    ):
        expected = peer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.chat(messages) == expected


def _parts(text: str) -> Iterator[str]:
    """Cut before and behind every numeral."""
    start = 0
    for i, character in enumerate(text):
        if unicodedata.category(character).startswith("N"):
            yield from filter(None, (text[start:i], character))
            start = i + 1
    if start < len(text):
        yield text[start:]
