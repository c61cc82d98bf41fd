"""HiCache's pools of host memory on a processor: copies by torch, whatever the layout, and no pinning."""

from __future__ import annotations

from typing import Any

import torch


def tokens_of(pool: Any, buffer: torch.Tensor, layer: int) -> torch.Tensor:
    """One layer of K, V or latents as (page, token in page, head, dim), without a copy."""
    if pool.layout == "layer_first":
        return buffer[layer].unflatten(0, (pool.page_num, pool.page_size))
    if pool.layout == "page_first":
        return buffer.unflatten(0, (pool.page_num, pool.page_size))[:, :, layer]
    if pool.layout == "page_first_direct":
        return buffer[:, layer]
    assert pool.layout == "page_head", pool.layout
    return buffer[:, :, :, layer].transpose(1, 2)


def pairs(pool: Any, device_pool: Any, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each plane of a layer what the host has and what the device has."""
    if hasattr(pool, "kv_cache_dim"):
        return [(tokens_of(pool, pool.kv_buffer, layer), device_pool.kv_buffer[layer])]
    host = tokens_of(pool, pool.k_buffer, layer), tokens_of(pool, pool.v_buffer, layer)
    return list(zip(host, (pool.device_k_buffers[layer], pool.device_v_buffers[layer]), strict=True))


def load(
    pool: Any,
    device_pool: Any,
    host: torch.Tensor,
    device: torch.Tensor,
    layer: int,
    io: str,
    *,
    is_draft: bool = False,
) -> None:
    host, device = host.cpu(), device.cpu()
    for there, here in pairs(pool, device_pool, layer):
        here[device] = there[host // pool.page_size, host % pool.page_size]


def back_up(pool: Any, device_pool: Any, host: torch.Tensor, device: torch.Tensor, io: str) -> None:
    host, device = host.cpu(), device.cpu()
    for layer in range(pool.layer_num):
        for there, here in pairs(pool, device_pool, layer):
            there[host // pool.page_size, host % pool.page_size] = here[device]


def rows_to_rows(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """What the direct backend moves of pools with one row a page (states, indexers), layer by layer."""
    assert page_size == 1
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def pages_to_rows(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Of one layer, from (page, layer, 1, ...)."""
    assert page_size == 1
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices, layer_id].view(len(dst_indices), *target.shape[1:])


def rows_to_pages(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Of all layers, to (page, layer, 1, ...)."""
    assert page_size == 1
    [target] = dst_ptrs
    for layer, source in enumerate(src_ptrs):
        target[dst_indices, layer] = source[src_indices].view(len(dst_indices), *target.shape[2:])


DIRECT = {
    "transfer_kv_direct": rows_to_rows,
    "transfer_kv_per_layer_direct_pf_lf": pages_to_rows,
    "transfer_kv_all_layer_direct_lf_pf": rows_to_pages,
}


def install() -> None:
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import base, common, dsa, mamba, mha, mla

    make = base.HostKVCache.__init__

    def unpinned(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named | {"pin_memory": False})

    base.HostKVCache.__init__ = unpinned
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # else 10 GiB of the machine have to be free
    common._cuda_host_register = common._cuda_host_unregister = lambda *_, **__: None
    for kind in (mha.MHATokenToKVPoolHost, mla.MLATokenToKVPoolHost):
        kind.load_to_device_per_layer, kind.backup_from_device_all_layer = load, back_up
    for module in (dsa, mamba):
        for name, stand_in in DIRECT.items():
            setattr(module, name, stand_in)
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
    if not hasattr(torch.cpu.Event, "elapsed_time"):
        torch.cpu.Event.elapsed_time = lambda self, other: 0.0
