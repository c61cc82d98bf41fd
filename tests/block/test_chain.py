from __future__ import annotations

import os
import subprocess
import sys
from array import array
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache
from kvcache import native
from kvcache.block.chain import Chain, digest_chain, digest_chain_reference, encode_extras, tokens
from kvcache.block.layout import KVLayout
from kvcache.errors import TokenError
from tests.vectors import spec_reference

NAMESPACE = spec_reference.sha(b"a namespace")
ids = st.lists(st.integers(0, 2**32 - 1), max_size=70)
extra_pairs = st.lists(st.tuples(st.binary(min_size=1, max_size=5), st.binary(max_size=5)), max_size=2)


def chain_of(block_tokens, *parts):
    chain = Chain(NAMESPACE, block_tokens)
    for part in parts:
        chain.extend(*part)
    return chain


# the chain


@given(st.integers(1, 20), ids, st.lists(extra_pairs, max_size=4))
def test_the_chain_equals_the_specification(block_tokens, token_ids, extras):
    extras = extras[: -(-len(token_ids) // block_tokens)]
    chain = chain_of(block_tokens, (token_ids, extras))
    assert chain.signatures == spec_reference.chain(NAMESPACE, block_tokens, token_ids, extras)
    assert chain.tokens == len(token_ids)


@given(st.integers(1, 20), ids, extra_pairs, st.lists(st.integers(0, 70), max_size=5))
def test_chunking_does_not_change_signatures(block_tokens, token_ids, pairs, cuts):
    """With extras for the block of each arrival's first token, once at its first arrival."""
    whole = chain_of(block_tokens, (token_ids, [pairs] if token_ids else None))
    chain = Chain(NAMESPACE, block_tokens)
    full = 0
    bounds = [0, *sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    for first, end in pairwise(bounds):
        given_here = [pairs] if first == 0 < end else None
        full += chain.extend(token_ids[first:end], given_here)
    assert chain.signatures == whole.signatures
    assert full == len(whole.signatures) == len(token_ids) // block_tokens
    assert chain.tokens == len(token_ids)


def test_extras_belong_to_the_blocks_that_their_tokens_reach():
    a, b, c = (b"a", b"1"), (b"b", b"2"), (b"c", b"3")
    tokens12 = list(range(12))
    at_once = chain_of(4, (tokens12, [[a], [b, c], []]))
    assert chain_of(4, (tokens12[:6], [[a], [b]]), (tokens12[6:], [[c]])).signatures == at_once.signatures
    assert chain_of(4, (tokens12[:4], [[a]]), (tokens12[4:], [[b, c]])).signatures == at_once.signatures
    assert chain_of(4, (tokens12[:6], [[a], [b]]), ([], []), (tokens12[6:], [[c]])).signatures == at_once.signatures
    swapped = chain_of(4, (tokens12, [[a], [c, b]]))
    assert swapped.signatures[0] == at_once.signatures[0]
    assert swapped.signatures[1] != at_once.signatures[1]
    assert swapped.signatures[2] != at_once.signatures[2]


def test_a_signature_depends_on_every_earlier_token():
    base = chain_of(4, (range(16),)).signatures
    for changed in (0, 5, 15):
        token_ids = list(range(16))
        token_ids[changed] += 100
        other = chain_of(4, (token_ids,)).signatures
        same = [x == y for x, y in zip(base, other, strict=True)]
        assert same == [block < changed // 4 for block in range(4)]


def test_a_blocks_parent_is_the_previous_signature():
    chain = chain_of(4, (range(12),))
    assert [chain.parents(i) for i in range(3)] == [NAMESPACE, *chain.signatures[:2]]


@given(ids, st.integers(1, 20), st.booleans())
def test_the_compiled_chain_equals_the_reference(token_ids, block_tokens, with_extras):
    array_ids = np.array(token_ids[: len(token_ids) // block_tokens * block_tokens], np.uint32)
    blocks = len(array_ids) // block_tokens
    extras = [bytes([i]) * i for i in range(blocks)] if with_extras else None
    assert digest_chain(NAMESPACE, array_ids, block_tokens, extras) == digest_chain_reference(
        NAMESPACE, array_ids, block_tokens, extras
    )


@pytest.mark.skipif(not native.built, reason="the compiled core was not built, so nothing stands behind the twin")
def test_without_the_compiled_core_the_chain_is_the_same(monkeypatch):
    with_core = chain_of(16, (range(1000), [[(b"t", b"d")]])).signatures
    monkeypatch.setattr(native, "available", lambda: False)
    assert chain_of(16, (range(1000), [[(b"t", b"d")]])).signatures == with_core


def test_the_chain_copies_the_callers_buffer():
    buffer = np.arange(6, dtype=np.uint32)
    chain = Chain(NAMESPACE, 4)
    chain.extend(buffer)
    buffer[:] = 0
    chain.extend([6, 7])
    assert chain.signatures == spec_reference.chain(NAMESPACE, 4, list(range(8)))


@pytest.mark.parametrize(
    ("token_ids", "extras", "said"),
    [
        ([1, 2, -3], None, "position 2 holds -3"),
        (range(5), [[]] * 3, "extras for 3 blocks: these 5 tokens reach 2"),
        ([], [[]], "reach 0"),
        ([1], [[(b"", b"x")]], "1 to 255 bytes"),
        ([1], [[(b"t" * 256, b"x")]], "1 to 255 bytes"),
        ([1], [[("t", b"x")]], "tag 't'"),
        ([1], [[(b"t", "x")]], "data of type str"),
    ],
)
def test_a_refused_extension_changes_nothing(token_ids, extras, said):
    chain = chain_of(4, (range(6), [[], [(b"kept", b"")]]))
    with pytest.raises(TokenError, match=said):
        Chain(NAMESPACE, 4).extend(token_ids, extras)
    if extras != [[]] * 3:  # with two tokens before them, five reach three blocks
        with pytest.raises(TokenError):
            chain.extend(token_ids, extras)
    chain.extend([6, 7])
    assert chain.signatures == spec_reference.chain(NAMESPACE, 4, list(range(8)), [[], [(b"kept", b"")]])


def test_chains_begin_from_a_namespace_id():
    with pytest.raises(TokenError, match="31 bytes"):
        Chain(NAMESPACE[:31], 16)
    with pytest.raises(TokenError, match="block_tokens = 0"):
        Chain(NAMESPACE, 0)


def test_different_extras_give_different_signatures():
    many = [
        [],
        [(b"a", b"")],
        [(b"a", b""), (b"a", b"")],
        [(b"ab", b"c")],
        [(b"a", b"bc")],
        [(b"a", b"b"), (b"c", b"")],
        [(b"a", b"\x01c\0\0\0\0")],
    ]
    assert len({encode_extras(pairs) for pairs in many}) == len(many)


# digests


def test_digests_are_bound_to_the_namespace():
    digests = [spec_reference.sha(b"%d" % i) for i in range(3)]
    chain = Chain.from_digests(NAMESPACE, digests, 16)
    assert chain.signatures == spec_reference.bind(NAMESPACE, digests)
    assert (chain.tokens, chain.parents(0), chain.parents(2)) == (48, NAMESPACE, chain.signatures[1])
    assert Chain.from_digests(spec_reference.sha(b"another"), digests, 16).signatures != chain.signatures


@pytest.mark.parametrize("digest", [b"15 bytes long..", b"", "a" * 64, 7])
def test_weak_digests_are_refused(digest):
    with pytest.raises(TokenError, match=r"digest 1 is .*: expected at least 16 raw bytes"):
        Chain.from_digests(NAMESPACE, [b"x" * 16, digest], 16)


def test_a_chain_of_digests_is_not_extended_by_tokens():
    with pytest.raises(TokenError, match="cannot be extended"):
        Chain.from_digests(NAMESPACE, [b"x" * 32], 16).extend([1])


def test_a_chain_of_digests_grows_by_digests_only():
    digests = [bytes([i]) * 32 for i in range(5)]
    chain = Chain.from_digests(NAMESPACE, digests[:2], 16)
    with pytest.raises(TokenError, match="digest 1 is 3 bytes"):
        chain.extend_digests([digests[2], b"abc"])
    chain.extend_digests(digests[2:])
    assert chain.signatures == Chain.from_digests(NAMESPACE, digests, 16).signatures
    with pytest.raises(TokenError, match="extend it by token ids"):
        Chain(NAMESPACE, 16).extend_digests(digests)


# tokens


def test_a_uint32_buffer_is_not_copied():
    token_ids = np.arange(10, dtype=np.uint32)
    assert np.shares_memory(tokens(token_ids), token_ids)
    assert np.shares_memory(tokens(memoryview(token_ids)), token_ids)
    packed = array("I", range(10))
    assert np.shares_memory(tokens(packed), np.asarray(packed))


TOKENS = [0, 1, 5, 2**31, 2**32 - 1]


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda x: np.array(x, np.uint32),
        lambda x: np.array(x, np.int64),
        lambda x: np.array(x, np.uint64),
        lambda x: np.array(x, ">u4"),
        lambda x: np.array(x, "<u8")[::-1][::-1],
        lambda x: np.repeat(np.array(x, np.uint32), 2)[::2],
        lambda x: memoryview(np.array(x, np.int64)),
        lambda x: array("q", x),
        lambda x: list(np.array(x, np.int64)),
    ],
)
def test_every_integer_form_gives_the_same_ids(form):
    got = tokens(form(TOKENS))
    assert got.dtype == np.dtype("<u4")
    assert got.flags.c_contiguous
    assert got.tolist() == TOKENS


@pytest.mark.parametrize("form", [list, tuple, lambda x: np.array(x, np.uint32), lambda x: array("I", x), range])
def test_an_empty_sequence_has_no_tokens(form):
    assert tokens(form(0) if form is range else form([])).shape == (0,)


def test_small_integer_types_and_ranges():
    assert tokens(np.array([1, 127], np.int8)).tolist() == [1, 127]
    assert tokens(np.array([1, 255], np.uint8)).tolist() == [1, 255]
    assert tokens(range(3, 9, 2)).tolist() == [3, 5, 7]


def test_torch_tensors_are_accepted_or_refused_by_dtype():
    torch = pytest.importorskip("torch", reason="torch is an extra; its tensors are taken where it is installed")
    token_ids = torch.arange(5)
    assert tokens(token_ids).tolist() == [0, 1, 2, 3, 4]
    assert tokens(token_ids.to(torch.int32)).tolist() == [0, 1, 2, 3, 4]
    for wrong, said in [
        (token_ids.float(), "float32"),
        (token_ids.to(torch.bfloat16), "cannot be read"),
        (token_ids.bool(), "bool"),
        (token_ids.reshape(1, 5), "2 dimensions"),
        (-token_ids, "position 1 holds"),
        (token_ids.to("meta"), "cannot be read"),
    ]:
        with pytest.raises(TokenError, match=said):
            tokens(wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([1, 2.0], r"position 1 holds 2\.0"),
        ([1, True], "position 1 holds True"),
        ([np.True_], "position 0 holds"),
        ([0, -1], "position 1 holds -1"),
        ([0, 0, 2**32], "position 2 holds 4294967296"),
        ([10**30], "position 0 holds"),
        ([1, None], "position 1 holds None"),
        (["1"], "position 0 holds '1'"),
        ([[1, 2]], r"position 0 holds \[1, 2\]"),
        ([1, [2]], r"position 1 holds \[2\]"),
        (range(-1, 3), "position 0 holds -1"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([3, -1]), "position 1 holds"),
        (np.array([3, 2**32]), "position 1 holds"),
        (np.array([3, 2**63], np.uint64), "position 1 holds"),
        (np.array([-1], np.int8), "position 0 holds"),
        (np.array([[1]]), "2 dimensions"),
        (np.array(1), "0 dimensions"),
        (np.array([1, None]), "type object"),
        (array("d", [1.0]), "float64"),
        (b"1234", "bytes"),
        (bytearray(b"1234"), "bytearray"),
        ("1234", "str"),
        (None, "0 dimensions"),
        (7, "0 dimensions"),
        ({1, 2}, "0 dimensions"),
        ((i for i in range(3)), "0 dimensions"),
    ],
)
def test_an_invalid_token_id_is_named_in_the_error(wrong, said):
    with pytest.raises(TokenError, match=said):
        tokens(wrong)


@given(st.lists(st.integers(-10, 2**33) | st.floats() | st.booleans() | st.none() | st.text(max_size=2), max_size=6))
def test_a_list_is_accepted_only_if_all_items_are_ids(values):
    sound = all(type(v) is int and 0 <= v < 2**32 for v in values)
    if sound:
        assert tokens(values).tolist() == values
    else:
        first = next(i for i, v in enumerate(values) if not (type(v) is int and 0 <= v < 2**32))
        with pytest.raises(TokenError, match=f"position {first} holds"):
            tokens(values)


# the moment and the process


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_neither_process_nor_hash_seed_matters(seed):
    code = (
        "from kvcache.block.chain import Chain\n"
        "from kvcache.block.layout import KVLayout\n"
        "from kvcache.block.namespace import Namespace\n"
        "n = Namespace(KVLayout.mha(layers=2, kv_heads=2, head_dim=8), model='m', revision='r',\n"
        "              facts={c: {d: c + d for d in 'xyz'} for c in 'abcdefgh'})\n"
        "c = Chain(n.id, 16); c.extend(range(40), [[(b't', b'd')]])\n"
        "print(n.id.hex(), *(s.hex() for s in c.signatures))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(kvcache.__file__).parents[1],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    fields = {
        "layout": KVLayout.mha(layers=2, kv_heads=2, head_dim=8).describe(),
        "model": "m",
        "revision": "r",
        "adapter": None,
        "tenant": "default",
        "cache_salt": "",
        "facts": {c: {d: c + d for d in "xyz"} for c in "abcdefgh"},
    }
    namespace = spec_reference.namespace_id(fields)
    assert run.stdout.split() == [
        s.hex() for s in (namespace, *spec_reference.chain(namespace, 16, list(range(40)), [[(b"t", b"d")]]))
    ]
