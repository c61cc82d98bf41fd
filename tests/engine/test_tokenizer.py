"""Text to ids and back, whole, in pieces and as a chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.engine.tokenizer import Tokenizer
from kvcache.errors import ModelError
from tests.engine import tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_model.tokenizer(directory)
    return Tokenizer(str(directory))


@given(st.text())
def test_a_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, tiny_model.VOCAB - 1)))
def test_streamed_pieces_join_to_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream()
    assert "".join(map(stream.put, ids)) + stream.end() == tokenizer.decode(ids)
    assert stream.end() == ""


@given(st.text())
def test_a_stream_holds_back_less_than_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    said, ids = "", tokenizer.encode(text)
    for i, token in enumerate(ids, 1):
        said += stream.put(token)
        if "\ufffd" not in text:
            assert "\ufffd" not in said
            assert said == bytes(text.encode()[:i]).decode(errors="ignore")
    assert said + stream.end() == text


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids[1] == tiny_model.EOS
    assert tokenizer.decode(ids) == "ab"


def test_a_chat_uses_the_template(tokenizer: Tokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_file_is_used(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tiny_model.tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    config = {"bos_token": {"content": "<|im_start|>"}, "chat_template": "no"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(str(tmp_path)).chat([{"role": "user", "content": "hi"}]) == tokenizer.encode("<|im_start|>hi")


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("", "no chat template"),
        (None, "no chat template"),
        ("{% if %}", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages[5].content.x }}", "refuses these messages"),
    ],
)
def test_a_broken_template_is_refused(tmp_path: Path, template: str | None, match: str) -> None:
    tiny_model.tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ModelError, match=match):
        Tokenizer(str(tmp_path)).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_damaged_tokenizer_config_is_refused(tmp_path: Path, text: str) -> None:
    tiny_model.tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelError, match="damaged"):
        Tokenizer(str(tmp_path)).chat([])


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        Tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer"):
        Tokenizer(str(tmp_path))
