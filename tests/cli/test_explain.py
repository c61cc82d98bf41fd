"""`kvcache explain` against a running cache: a request, a prompt, the last misses; in words, with a real tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.cli.explain import ADVICE, describe_story
from kvcache.daemon.server import report as answers
from kvcache.observe.reasons import REASONS
from kvcache.transfer.pages import GroupPages

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install 'kvcache-tiers[engine]'")

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=16, dtype="fp32", block_tokens=4)
TEXT = "You are a careful assistant . Today is {} . Answer in short sentences and never invent a source ."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of words and digits, trained on the spot."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT] * 3, trainer)
    place = tmp_path_factory.mktemp("model")
    made.save(str(place / "tokenizer.json"))
    return place


@pytest.fixture(autouse=True)
def wide(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def cache(model: Path) -> Iterator[Any]:
    """Two requests whose prompts differ by a timestamp near their head."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    with closing(kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)) as made:
        tensor = np.zeros((1, 2, 64, 4, 1, 16), np.float32)
        pages = [GroupPages.from_tensors(LAYOUT, tensor, axes=("kv", "page", "token", "head", "dim"))]
        for name, when in (("first", "2026-11-29 12:03"), ("second", "2026-11-29 12:41")):
            with made.namespace(LAYOUT, model=str(model), revision="r").request(id=name) as r:
                hit = r.match(tokenizer.encode(TEXT.format(when)).ids)
                r.admit()
                ids = [list(range(len(r.signatures) - hit.blocks))]
                assert r.store(pages, ids, first_block=hit.blocks).wait(30)
        yield made


def test_explaining_a_request_names_its_timestamp(cache: Any, kv: Any, model: Path) -> None:
    code, out, _ = kv("explain", "second")
    assert code == 0
    for text in (
        "Request second",
        "The prefix ends there: diverged",
        "request first",
        "That is a timestamp: '2026-11-29 12:41' here, '2026-11-29 12:03' there.",
        "both go on alike",
        "put the parts that change between requests at the end of the prompt",
    ):
        assert text in out
    (story,) = json.loads(kv("explain", "second", "--json")[1])
    assert story["reason"] == "diverged"
    assert story["token"] == story["found_blocks"] * 4 + (story["token"] % 4)


def test_a_prompt_is_explained_without_a_request(cache: Any, kv: Any, model: Path, tmp_path: Path) -> None:
    new = TEXT.format("2026-11-30 08:00")
    for what in (new, f"@{tmp_path / 'prompt'}"):
        (tmp_path / "prompt").write_text(new)
        code, out, _ = kv("explain", what, "--model", str(model))
        assert code == 0
        assert "This prompt, looked up now" in out
        assert "a timestamp: '2026-11-30 08:00' here" in out
    known = TEXT.format("2026-11-29 12:03")
    assert "Nothing is missing." in kv("explain", known, "-m", str(model / "tokenizer.json"))[1]
    before = cache.stats()
    kv("explain", new, "-m", str(model))
    assert cache.stats() == before, "asking changes nothing"


def test_token_ids_need_no_tokenizer(cache: Any, kv: Any) -> None:
    assert "cold" in kv("explain", json.dumps(list(range(3000, 3040))))[1]
    code, _, said = kv("explain", "[1, -2]")
    assert (code, "token ids" in said) == (2, True)


def test_an_unknown_request_is_reported(cache: Any, kv: Any) -> None:
    code, _, said = kv("explain", "third")
    assert code == 2
    assert "--model" in said
    code, _, said = kv("explain", "[1, 2, 3, 4]", "--namespace", "zz")
    assert code == 1
    assert "namespace 'zz'" in said


def test_without_a_prompt_the_last_misses_are_listed(cache: Any, kv: Any) -> None:
    code, out, _ = kv("explain")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["second", "first"]
    assert len(json.loads(kv("explain", "-n", "1", "--json")[1])) == 1


@pytest.mark.parametrize("question", [{"count": -1}, {"count": "x"}, {"ids": b"123"}, {"ids": [1]}])
def test_a_wrong_question_is_refused(cache: Any, question: dict[str, Any]) -> None:
    with pytest.raises(kvcache.ConfigError, match="expected one of request"):
        answers.explain(cache, question)


def test_every_reason_has_advice() -> None:
    assert ADVICE.keys() == REASONS["misses", "reason"].keys()


@pytest.mark.parametrize("reason", sorted(ADVICE))
def test_every_reason_has_a_description(reason: str) -> None:
    story = {
        "request": "r", "ago_s": 7200.0, "namespace": {"id": "ab" * 32}, "block_tokens": 16, "blocks": 4,
        "found_blocks": 1, "reason": reason, "tier": "nvme", "why": "lru", "lost_ago_s": 3.0,
    }  # fmt: skip
    said = "\n".join(describe_story(story, None))
    assert f"The prefix ends there: {reason}" in said
    assert "Request r, 2 h ago" in said
    assert "3.0 s ago" in said
