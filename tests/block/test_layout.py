from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.layout import CANONICAL_ORDERS, DTYPE_BYTES, Group, KVLayout, Shard, blocks_needed
from kvcache.block.record import NAME_BYTES, Address
from kvcache.errors import LayoutError

ORDERS = [("mha", order) for order in permutations(CANONICAL_ORDERS["mha"])]
ORDERS += [("mla", order) for order in permutations(CANONICAL_ORDERS["mla"])]
NUMPY = {4: np.uint32, 2: np.uint16, 1: np.uint8}

u16 = st.integers(0, 0xFFFF)


@given(
    st.sampled_from(ORDERS),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)),
    st.data(),
)
def test_a_payload_is_one_array_without_gaps(kind_order, dtype, sizes, data):
    kind, order = kind_order
    layers, heads, dim, block_tokens = sizes
    heads = 1 if kind == "mla" else heads
    layout = KVLayout(
        (Group(layers=layers, kv_heads=heads, head_dim=dim, dtype=dtype, kind=kind, order=order),), block_tokens
    )
    first_layer, first_head = data.draw(st.integers(0, layers - 1)), data.draw(st.integers(0, heads - 1))
    shard = layout.shard((first_layer, layers), (first_head, heads))
    array = np.empty(layout.shape(shard), NUMPY[DTYPE_BYTES[dtype]])
    assert layout.strides(shard) == dict(zip(order, array.strides, strict=True))
    assert layout.block_bytes(shard) == array.nbytes
    assert layout.groups[0].token_bytes(shard) * block_tokens == array.nbytes
    extent = {"layer": shard.layers, "kv": 2, "token": block_tokens, "head": shard.heads, "dim": dim, "latent": dim}
    assert layout.shape(shard) == tuple(extent[axis] for axis in order)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))
def test_shards_concatenate_to_the_whole_payload(layers, heads, layer_cut, head_cut):
    layout = KVLayout.mha(layers=layers, kv_heads=heads, head_dim=3)
    cut_layers = sorted({0, min(layer_cut, layers), layers})
    cut_heads = sorted({0, min(head_cut, heads), heads})
    parts = [
        layout.block_bytes(layout.shard(some_layers, some_heads))
        for some_layers in pairwise(cut_layers)
        for some_heads in pairwise(cut_heads)
    ]
    assert sum(parts) == layout.block_bytes() == layout.block_bytes(layout.whole[0])


@pytest.mark.parametrize(
    ("kv_heads", "token_bytes", "context_bytes"), [(64, 2560 << 10, 80 << 30), (8, 320 << 10, 10 << 30)]
)
def test_block_bytes_of_well_known_models(kv_heads, token_bytes, context_bytes):
    layout = KVLayout.mha(layers=80, kv_heads=kv_heads, head_dim=128)
    assert layout.token_bytes == token_bytes
    assert layout.context_bytes(32_768) == context_bytes


def test_a_deepseek_latent_has_its_published_size():
    layout = KVLayout((Group(kind="mla", layers=61, head_dim=576),))
    assert layout.token_bytes == 61 * 576 * 2
    assert layout.block_bytes() == 16 * layout.token_bytes


def test_opaque_blocks_have_a_size_and_no_axes():
    layout = KVLayout((Group(kind="opaque", layers=3, kv_heads=2, opaque_bytes=200),))
    assert layout.block_bytes() == 600
    assert layout.block_bytes(layout.shard((1, 2), (1, 2))) == 100
    assert (layout.shape(), layout.strides(), layout.token_bytes) == ((), {}, 0)


def test_needed_blocks_follow_each_groups_rule():
    full = Group(layers=1, head_dim=4)
    window = Group(layers=2, head_dim=4, rule="window", window_tokens=40)
    state = Group(layers=1, kind="opaque", opaque_bytes=1000, rule="boundary")
    layout = KVLayout((full, window, state))
    block = 2 * 4 * 2 * 16
    assert layout.token_bytes == block // 16
    assert layout.context_bytes(1000) == 63 * block + 3 * 2 * block + 1000
    assert layout.context_bytes(1) == block + 2 * block + 1000
    assert layout.context_bytes(0) == 0


@given(st.integers(0, 50), st.integers(1, 100), st.integers(1, 20))
def test_a_window_needs_the_blocks_of_its_last_tokens(blocks, window_tokens, block_tokens):
    group = Group(layers=1, head_dim=1, rule="window", window_tokens=window_tokens)
    tokens = blocks * block_tokens
    covered = {token // block_tokens for token in range(max(0, tokens - window_tokens), tokens)}
    assert blocks_needed(group, blocks, block_tokens) == len(covered)


@given(u16, u16, u16, u16)
def test_shards_pack_into_eight_bytes(a, b, c, d):
    if a < b and c < d:
        shard = Shard(a, b, c, d)
        assert Shard.unpack(shard.pack()) == shard
        assert shard.pack() == np.array([a, b, c, d], "<u2").tobytes()
    else:
        with pytest.raises(LayoutError, match="expected 0 <= first < end"):
            Shard(a, b, c, d)


MHA = {"layers": 2, "kv_heads": 2, "head_dim": 8}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "gqa"}, "kind 'gqa'"),
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"rule": "last"}, "rule 'last'"),
        ({"order": ("layer", "token")}, "permutation"),
        ({"layers": 0}, "layers = 0"),
        ({"kv_heads": 1 << 16}, "kv_heads = 65536"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"opaque_bytes": 5}, "opaque_bytes = 5"),
        ({"kind": "mla"}, "kv_heads = 2 with kind mla"),
        ({"kind": "opaque", "opaque_bytes": 5}, "multiple of kv_heads"),
        ({"kind": "opaque"}, "opaque_bytes = 0"),
        ({"rule": "window"}, "window_tokens = 0"),
        ({"window_tokens": 5}, "window_tokens = 5"),
        ({"window_tokens": -5}, "window_tokens = -5"),
    ],
)
def test_inconsistent_groups_are_refused(wrong, said):
    with pytest.raises(LayoutError, match=said):
        Group(**MHA | wrong)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KVLayout(()), "without groups"),
        (lambda: KVLayout((Group(**MHA),), 0), "block_tokens = 0"),
        (lambda: KVLayout((Group(**MHA),) * 65536), "65536 groups"),
        (lambda: KVLayout.mha(**MHA).shard((0, 3)), "2 layers, 2 heads"),
        (lambda: KVLayout.mha(**MHA).shard(heads=(1, 3)), "2 layers, 2 heads"),
        (lambda: KVLayout.mha(**MHA).shard((-1, 2)), "shard layers -1:2"),
    ],
)
def test_inconsistent_layouts_are_refused(make, said):
    with pytest.raises(LayoutError, match=said):
        make()


def test_layouts_from_lists_and_tuples_are_equal():
    listed = KVLayout([Group(**MHA, order=list(CANONICAL_ORDERS["mha"]))])
    assert listed == KVLayout.mha(**MHA)
    assert hash(listed) == hash(KVLayout.mha(**MHA))


@given(st.binary(min_size=32, max_size=32), u16, st.integers(0, 9), st.integers(1, 9))
def test_a_record_name_holds_key_group_and_shard(signature, group, first, count):
    shard = Shard(first, first + count, 0, 1)
    address = Address(bytes(32), signature, b"", group, shard)
    assert address.key == signature[:16]
    assert len(address.name) == NAME_BYTES
    assert address.name == signature[:16] + group.to_bytes(2, "little") + shard.pack()
