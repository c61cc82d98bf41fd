"""The page of the protocol against the code: vectors, the table of questions, bounds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.layout import KVLayout
from kvcache.daemon.protocol import (
    ERRORS,
    FRAME_BYTES,
    HEAD_BYTES,
    LENT,
    OPS,
    ProtocolError,
    answer,
    asked,
    body_bytes,
    describe_shards,
    pack,
    read_layout,
    read_shards,
    refusal,
    unpack,
)
from kvcache.daemon.server.slot_lease import OUTCOMES
from kvcache.errors import KVCacheError, LayoutError
from tests.contract.caches import FULL, HYBRID

PAGE = (Path(__file__).parents[2] / "docs" / "spec" / "protocol.md").read_text(encoding="utf-8")
KINDS = {int: "int", str: "str", bytes: "bytes", dict: "dict", list: "list", (int, float): "number"}


def test_vectors() -> None:
    hello, match, lent = (bytes.fromhex(v) for v in re.findall(r"```\n([0-9a-f ]+)\n```", PAGE))
    assert pack({"op": "hello", "version": 1, "role": "control", "engine": "e"}) == hello
    assert pack({"op": "match", "request": 7, "signatures": b"\xab" * 32}) == match
    assert np.frombuffer(lent, LENT).tolist() == [(1, 2, 0, 3, 4, 5)]


def test_the_page_has_every_question_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (control|mover|any) \|(.*?)\|(.*?)\|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == list(OPS)
    for name, role, fields, answered in rows:
        op = OPS[name]
        assert role == op.role
        assert re.findall(r"`(\w+)` (\w+)", fields) == [
            (field, KINDS[kind]) for field, kind in (*op.needs.items(), *op.may.items())
        ]
        assert set(re.findall(r"\[`(\w+)`", fields)) == set(op.may)
        assert (answered.strip() == "none") == (not op.answered)


def test_the_page_has_outcomes_and_errors() -> None:
    said = re.search(r"one byte a block: (.*?)\.", PAGE, re.DOTALL)
    assert said is not None
    expected = ", ".join(f"{code} {outcome.value.replace('_', ' ')}" for code, outcome in enumerate(OUTCOMES))
    assert " ".join(said[1].split()) == expected
    kinds = re.search(r"with a kind of (.*?)\. After", PAGE, re.DOTALL)
    assert kinds is not None
    assert re.findall(r"`(\w+)`", kinds[1]) == list(ERRORS)


@given(
    st.dictionaries(st.text(max_size=8), st.one_of(st.integers(-5, 5), st.binary(max_size=9), st.none()), max_size=5)
)
def test_what_is_packed_is_unpacked(message: dict[str, object]) -> None:
    frame = pack(message)
    assert body_bytes(frame[:HEAD_BYTES]) == len(frame) - HEAD_BYTES
    assert unpack(frame[HEAD_BYTES:]) == message


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    try:
        message = unpack(body)
        asked(message, "control")
    except ProtocolError:
        return
    assert message["op"] in OPS


def test_what_is_too_long_is_neither_sent_nor_read() -> None:
    with pytest.raises(ProtocolError):
        pack({"signatures": bytes(FRAME_BYTES)})
    with pytest.raises(ProtocolError):
        body_bytes((FRAME_BYTES + 1).to_bytes(HEAD_BYTES, "little"))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": "nothing"},
        {"op": ["match"]},
        {"op": "load", "request": 1, "first": 0, "end": 1},  # of another role
        {"op": "match"},
        {"op": "match", "request": "1"},
        {"op": "match", "request": True},
        {"op": "match", "request": 1, "signatures": "text"},
    ],
)
def test_a_question_without_sense_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        asked(message, "control")


def test_fields_of_a_newer_client_are_ignored() -> None:
    assert asked({"op": "match", "request": 1, "colour": "blue", "signatures": None}, "control")[0] == "match"


def test_errors_keep_their_class() -> None:
    for made in ERRORS.values():
        with pytest.raises(KVCacheError, match="what it was") as caught:
            answer(refusal(made("what it was")))
        assert type(caught.value) is made
    with pytest.raises(ProtocolError):
        answer({"neither": 1})


@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_layouts_and_shards_come_back(layout: KVLayout) -> None:
    assert read_layout(unpack(pack(layout.describe())[HEAD_BYTES:])) == layout
    assert read_shards(describe_shards(layout.whole)) == list(layout.whole)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"groups": 3, "block_tokens": 4},
        {"groups": [{"order": []}], "block_tokens": 4},
        {"groups": [{"order": [], "layers": "x"}], "block_tokens": 4},
        {"groups": [{"order": [], "layers": 1, "head_dim": 8, "kv_heads": 1}], "block_tokens": "4"},
        {"groups": [{"order": []}] * 1000, "block_tokens": 4},
    ],
)
def test_a_layout_without_sense_is_a_layout_error(found: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        read_layout(found)
