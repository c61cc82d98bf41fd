"""Caches of every shape and order that vLLM has had: described, gathered and scattered, they keep their bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.block.layout import KVLayout, Shard
from kvcache.connector.vllm.kv_layout import LayerGroup, LayerLayout, combine_ranks, describe_layers, pages_of
from kvcache.errors import LayoutError
from kvcache.transfer.cpu import CpuCopier, ReferenceCopier

BLOCKS, HEADS, TOKENS, DIM, LAYERS = 6, 2, 4, 8, 3


@dataclass
class FullAttentionSpec:
    block_size: int = TOKENS
    num_kv_heads: int = HEADS
    head_size: int = DIM
    prefix_cacheable: bool = True


class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 9


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)


class Elsewhere:
    """A tensor that says that it is on a GPU: what is plain there is packed on a processor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.device = tensor, torch.device("cuda:0")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def filled(shape: tuple[int, ...], order: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of this shape whose axes lie in memory in this order, of numbers that occur once."""
    laid = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape([shape[i] for i in order]) + seed * 10_000
    return laid.permute([order.index(i) for i in range(len(shape))])


def moved(caches: dict[str, Any], groups: list[Group], *, source: int, target: int) -> KVLayout:
    """Copy one block to another page by way of its payload, as a store and a load do."""
    shapes = describe_layers(caches, groups, BLOCKS, packing="isa")
    layout, shards, _, _ = combine_ranks({(0, 0): shapes})
    for g, shape in enumerate(shapes):
        pages = pages_of(shape, {name: getattr(t, "_tensor", t) for name, t in caches.items()}, BLOCKS, layout, g,
                         shards[0, 0][g])  # fmt: skip
        payload, again = (memoryview(bytearray(pages.block_bytes)) for _ in range(2))
        CpuCopier().gather(pages, [source], [payload])
        ReferenceCopier().gather(pages, [source], [again])
        assert bytes(payload) == bytes(again)
        CpuCopier().scatter(pages, [target], [payload])
    return layout


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_four_axes_in_any_order_round_trip(order: tuple[int, int, int]) -> None:
    """[B, H, N, K V]: LBNHC, LBHNC, LHBNC and whatever else somebody resolves; never assumed to be contiguous."""
    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)
    tensors = [filled(shape, (*order, 3), seed) for seed in range(LAYERS)]
    caches = {f"layer{i}": Elsewhere(t) for i, t in enumerate(tensors)}
    before = [t.clone() for t in tensors]
    layout = moved(caches, [Group(list(caches))], source=1, target=4)
    assert layout.groups[0].kind == "mha"
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor[4], was[1])
        keep = [0, 1, 2, 3, 5]
        assert torch.equal(tensor[keep], was[keep])


def test_layers_side_by_side_in_a_block_round_trip() -> None:
    """BLHNC: the steps from block to block are those of all layers."""
    laid = torch.arange(BLOCKS * LAYERS * HEADS * TOKENS * 2 * DIM, dtype=torch.float32)
    laid = laid.reshape(BLOCKS, LAYERS, HEADS, TOKENS, 2 * DIM)
    tensors = [laid[:, i] for i in range(LAYERS)]
    before = laid.clone()
    moved({f"layer{i}": Elsewhere(t) for i, t in enumerate(tensors)}, [Group([f"layer{i}" for i in range(LAYERS)])],
          source=0, target=5)  # fmt: skip
    assert torch.equal(laid[5], before[0])
    assert torch.equal(laid[:5], before[:5])


@pytest.mark.parametrize(
    ("shape", "page"),
    [
        ((2, BLOCKS, TOKENS, HEADS, DIM), 1),
        ((2, BLOCKS, HEADS, TOKENS, DIM), 1),
        ((BLOCKS, 2, TOKENS, HEADS, DIM), 0),
        ((BLOCKS, 2, HEADS, TOKENS, DIM), 0),
    ],
)
def test_five_axes_of_older_versions_round_trip(shape: tuple[int, ...], page: int) -> None:
    tensor = filled(shape, tuple(range(5)), 1)
    before = tensor.clone()
    layout = moved({"layer": Elsewhere(tensor)}, [Group(["layer"])], source=2, target=3)
    assert layout.groups[0].kind == "mha"
    assert torch.equal(tensor.select(page, 3), before.select(page, 2))


@pytest.mark.parametrize("shape", [(BLOCKS, TOKENS, 24), (BLOCKS, 1, TOKENS, 24)])
def test_latents_round_trip(shape: tuple[int, ...]) -> None:
    tensor = filled(shape, tuple(range(len(shape))), 1)
    before = tensor.clone()
    layout = moved({"layer": tensor}, [Group(["layer"], MLAAttentionSpec())], source=5, target=0)
    assert (layout.groups[0].kind, layout.groups[0].head_dim) == ("mla", 24)
    assert torch.equal(tensor[0], before[5])


def test_cpu_blocks_are_opaque_and_name_their_packing() -> None:
    tensor = filled((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3), 1)
    (shape,) = describe_layers({"layer": tensor}, [Group(["layer"])], BLOCKS, packing="cpu_attn amx")
    assert (shape.layer_layout.kind, shape.layer_layout.kv_heads) == ("opaque", HEADS)
    assert shape.layer_layout.opaque_bytes == HEADS * TOKENS * 2 * DIM * 4
    (other,) = describe_layers({"layer": tensor}, [Group(["layer"])], BLOCKS, packing="cpu_attn vec")
    assert shape.layer_layout.packing != other.layer_layout.packing
    before = tensor.clone()
    moved({"layer": tensor}, [Group(["layer"])], source=0, target=1)
    assert torch.equal(tensor[1], before[0])


def test_blocks_split_for_kernels_round_trip() -> None:
    tensor = filled((BLOCKS * 2, HEADS, TOKENS // 2, 2 * DIM), (0, 1, 2, 3), 1)
    before = tensor.clone()
    moved({"layer": tensor}, [Group(["layer"])], source=1, target=3)
    assert torch.equal(tensor[6:8], before[2:4])


def test_padded_pages_round_trip() -> None:
    """What lies behind a block is not its own."""
    raw = torch.arange(BLOCKS * 400, dtype=torch.float32)
    tensor = torch.as_strided(raw, (BLOCKS, HEADS, TOKENS, 2 * DIM), (400, TOKENS * 2 * DIM, 2 * DIM, 1))
    before = raw.clone().reshape(BLOCKS, 400)
    moved({"layer": tensor}, [Group(["layer"])], source=2, target=0)
    after, size = raw.reshape(BLOCKS, 400), HEADS * TOKENS * 2 * DIM
    assert torch.equal(after[0, :size], before[2, :size])
    assert torch.equal(after[0, size:], before[0, size:])
    assert torch.equal(after[1:], before[1:])


def test_a_scattered_block_is_refused() -> None:
    tensor = filled((2, BLOCKS, HEADS, TOKENS, DIM), tuple(range(5)), 1)
    with pytest.raises(LayoutError, match="do not lie together"):
        describe_layers(
            {"layer": tensor}, [Group(["layer"])], BLOCKS, packing="isa"
        )  # on a processor: packed, and apart


@dataclass
class PerHead:
    is_per_token_head: bool = True


@dataclass
class Scaled(FullAttentionSpec):
    kv_quant_mode: PerHead = field(default_factory=PerHead)


class MambaSpec(FullAttentionSpec):
    pass


@pytest.mark.parametrize(
    ("spec", "reason"), [(Scaled(), "would not be stored"), (MambaSpec(), "not consist of whole blocks")]
)
def test_layers_without_per_block_state_are_refused(spec: Any, reason: str) -> None:
    tensor = filled((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3), 1)
    with pytest.raises(LayoutError, match=reason):
        describe_layers({"layer": tensor}, [Group(["layer"], spec)], BLOCKS, packing="isa")


def test_groups_with_blocks_of_different_sizes_are_refused() -> None:
    tensor = filled((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3), 1)
    groups = [Group(["a"]), Group(["b"], FullAttentionSpec(block_size=2 * TOKENS))]
    with pytest.raises(LayoutError, match="one size"):
        describe_layers({"a": tensor, "b": tensor}, groups, BLOCKS, packing="isa")


def test_a_window_needs_one_token_less_than_its_size() -> None:
    tensor = filled((BLOCKS, HEADS, TOKENS, 2 * DIM), (0, 1, 2, 3), 1)
    groups = [Group(["a"], SlidingWindowSpec()), Group(["b"])]
    first, second = describe_layers({"a": tensor, "b": tensor}, groups, BLOCKS, packing="isa")
    assert (first.rule, first.window_tokens, second.rule) == ("window", 8, "all")


def rank(layers: int, *, heads: int = HEADS, kind: str = "mha", first: int = 0) -> tuple[LayerGroup, ...]:
    layer_layout = LayerLayout(
        kind=kind,  # type: ignore[arg-type]
        kv_heads=heads,
        head_dim=DIM if kind != "opaque" else 0,
        opaque_bytes=heads * 64 if kind == "opaque" else 0,
        page_step=64,
    )
    return (LayerGroup(0, tuple(f"layer{first + i}" for i in range(layers)), "all", 0, TOKENS, layer_layout),)


def test_ranks_combine_into_shards() -> None:
    """Two stages of three and two layers, two tensor ranks each."""
    ranks = {(s, t): rank((3, 2)[s], first=3 * s) for s in range(2) for t in range(2)}
    layout, shards, _, _ = combine_ranks(ranks)
    assert (layout.groups[0].layers, layout.groups[0].kv_heads) == (5, 2 * HEADS)
    assert shards == {
        (0, 0): (Shard(0, 3, 0, 2),),
        (0, 1): (Shard(0, 3, 2, 4),),
        (1, 0): (Shard(3, 5, 0, 2),),
        (1, 1): (Shard(3, 5, 2, 4),),
    }


def test_ranks_with_equal_heads_or_latents_share_a_shard() -> None:
    layout, shards, _, _ = combine_ranks({(0, t): rank(1, heads=1) for t in range(4)}, replicas=2)
    assert layout.groups[0].kv_heads == 2
    assert shards[0, 0] == shards[0, 1] != shards[0, 2] == shards[0, 3]
    layout, shards, _, _ = combine_ranks({(0, t): rank(1, heads=1, kind="mla") for t in range(2)})
    assert layout.groups[0].kv_heads == 1
    assert shards[0, 0] == shards[0, 1]


def test_opaque_ranks_hold_a_share_of_each_block() -> None:
    layout, shards, _, _ = combine_ranks({(0, t): rank(2, kind="opaque") for t in range(2)})
    whole = layout.block_bytes()
    assert [layout.block_bytes(shards[0, t][0]) for t in range(2)] == [whole // 2] * 2


def test_inconsistent_ranks_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"rank \(0, 1\)"):
        combine_ranks({(0, 0): rank(3), (0, 1): rank(2)})
