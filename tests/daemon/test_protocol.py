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
    HEADER_BYTES,
    LEASE_DTYPE,
    MAX_FRAME_BYTES,
    OPS,
    ProtocolError,
    body_length,
    describe_shards,
    error_reply,
    pack,
    parse_layout,
    parse_reply,
    parse_request,
    parse_shards,
    unpack,
)
from kvcache.daemon.server.slot_lease import WIRE_OUTCOMES
from kvcache.errors import KVCacheError, LayoutError
from tests.contract.fake_engine import FULL, HYBRID

PAGE = (Path(__file__).parents[2] / "docs" / "spec" / "protocol.md").read_text(encoding="utf-8")
KINDS = {int: "int", str: "str", bytes: "bytes", dict: "dict", list: "list", (int, float): "number"}


def test_messages_equal_the_vectors() -> None:
    hello, match, lent = (bytes.fromhex(v) for v in re.findall(r"```\n([0-9a-f ]+)\n```", PAGE))
    assert pack({"op": "hello", "version": 1, "role": "control", "engine": "e"}) == hello
    assert pack({"op": "match", "request": 7, "signatures": b"\xab" * 32}) == match
    assert np.frombuffer(lent, LEASE_DTYPE).tolist() == [(1, 2, 0, 3, 4, 5)]


def test_the_page_lists_every_op_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (control|mover|any) \|(.*?)\|(.*?)\|$", PAGE, re.MULTILINE)
    assert [name for name, *_ in rows] == list(OPS)
    for name, role, fields, has_reply in rows:
        op = OPS[name]
        assert role == op.role
        assert re.findall(r"`(\w+)` (\w+)", fields) == [
            (field, KINDS[kind]) for field, kind in (*op.required.items(), *op.optional.items())
        ]
        assert set(re.findall(r"\[`(\w+)`", fields)) == set(op.optional)
        assert (has_reply.strip() == "none") == (not op.has_reply)


def test_the_page_lists_outcomes_and_errors() -> None:
    said = re.search(r"one byte a block: (.*?)\.", PAGE, re.DOTALL)
    assert said is not None
    expected = ", ".join(f"{code} {outcome.value.replace('_', ' ')}" for code, outcome in enumerate(WIRE_OUTCOMES))
    assert " ".join(said[1].split()) == expected
    kinds = re.search(r"with a kind of (.*?)\. After", PAGE, re.DOTALL)
    assert kinds is not None
    assert re.findall(r"`(\w+)`", kinds[1]) == list(ERRORS)


@given(
    st.dictionaries(st.text(max_size=8), st.one_of(st.integers(-5, 5), st.binary(max_size=9), st.none()), max_size=5)
)
def test_messages_round_trip(message: dict[str, object]) -> None:
    frame = pack(message)
    assert body_length(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    assert unpack(frame[HEADER_BYTES:]) == message


@given(st.binary(max_size=200))
def test_malformed_bytes_are_refused(body: bytes) -> None:
    try:
        message = unpack(body)
        parse_request(message, "control")
    except ProtocolError:
        return
    assert message["op"] in OPS


def test_an_oversized_message_is_neither_sent_nor_read() -> None:
    with pytest.raises(ProtocolError):
        pack({"signatures": bytes(MAX_FRAME_BYTES)})
    with pytest.raises(ProtocolError):
        body_length((MAX_FRAME_BYTES + 1).to_bytes(HEADER_BYTES, "little"))


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
def test_an_invalid_op_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        parse_request(message, "control")


def test_fields_of_a_newer_client_are_ignored() -> None:
    assert parse_request({"op": "match", "request": 1, "colour": "blue", "signatures": None}, "control")[0] == "match"


def test_errors_keep_their_class() -> None:
    for made in ERRORS.values():
        with pytest.raises(KVCacheError, match="what it was") as caught:
            parse_reply(error_reply(made("what it was")))
        assert type(caught.value) is made
    with pytest.raises(ProtocolError):
        parse_reply({"neither": 1})


@pytest.mark.parametrize("layout", [FULL, HYBRID])
def test_layouts_and_shards_round_trip(layout: KVLayout) -> None:
    assert parse_layout(unpack(pack(layout.describe())[HEADER_BYTES:])) == layout
    assert parse_shards(describe_shards(layout.whole)) == list(layout.whole)


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
def test_an_invalid_layout_is_a_layout_error(found: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        parse_layout(found)
