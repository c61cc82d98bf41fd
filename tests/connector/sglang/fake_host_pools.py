"""SGLang's pools of host memory as far as they describe themselves: names, shapes and addresses, without SGLang."""

from __future__ import annotations

from typing import Any

import torch


class MHATokenToKVPoolHost:
    """Named as SGLang's, since that is how it is told apart."""

    def __init__(
        self,
        layout: str,
        *,
        pages: int = 6,
        page: int = 4,
        layers: int = 3,
        heads: int = 2,
        dim: int = 8,
        dtype: Any = None,
    ) -> None:
        self.layout, self.dtype = layout, dtype or torch.bfloat16
        self.page_num, self.page_size, self.size = pages, page, pages * page
        self.layer_num, self.head_num, self.head_dim = layers, heads, dim
        shape = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, pages, layers, page, heads, dim),
            "page_head": (2, pages, heads, page, layers, dim),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def fill(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=made).to(self.dtype))

    def page(self, number: int) -> torch.Tensor:
        """(layer, kv, token, head, dim): a page as every engine reads it."""
        buffer, at = self.kv_buffer, slice(number * self.page_size, (number + 1) * self.page_size)
        if self.layout == "layer_first":
            return buffer[:, :, at].transpose(0, 1)
        if self.layout == "page_first":
            return buffer[:, at].permute(2, 0, 1, 3, 4)
        if self.layout == "page_first_direct":
            return buffer[:, number].transpose(0, 1)
        return buffer[:, number].permute(3, 0, 2, 1, 4)

    def flat(self, number: int) -> torch.Tensor:
        """As SGLang's own `get_data_page` has it."""
        at = slice(number * self.page_size, (number + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, at].flatten()
        if self.layout == "page_first":
            return self.kv_buffer[:, at].flatten()
        return self.kv_buffer[:, number].flatten()


class MLATokenToKVPoolHost:
    def __init__(self, layout: str, *, pages: int = 6, page: int = 4, layers: int = 3, dim: int = 24) -> None:
        self.layout, self.dtype = layout, torch.bfloat16
        self.page_num, self.page_size, self.size = pages, page, pages * page
        self.layer_num, self.kv_cache_dim = layers, dim
        shape = {
            "layer_first": (layers, self.size, 1, dim),
            "page_first": (self.size, layers, 1, dim),
            "page_first_direct": (pages, layers, page, 1, dim),
        }[layout]
        self.kv_buffer = torch.zeros(shape, dtype=self.dtype)

    def fill(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=made).to(self.dtype))

    def page(self, number: int) -> torch.Tensor:
        """(layer, token, latent)."""
        at = slice(number * self.page_size, (number + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, at, 0]
        if self.layout == "page_first":
            return self.kv_buffer[at, :, 0].transpose(0, 1)
        return self.kv_buffer[number, :, :, 0]

    def flat(self, number: int) -> torch.Tensor:
        at = slice(number * self.page_size, (number + 1) * self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, at].flatten()
        return self.kv_buffer[at].flatten() if self.layout == "page_first" else self.kv_buffer[number].flatten()


class StatePoolHost:
    """A pool of another kind: two pieces a page of different sizes, in memory of their own."""

    layout, dtype, page_size = "page_first", torch.float32, 1

    def __init__(self, pages: int = 6) -> None:
        self.page_num = self.size = pages
        self.conv, self.ssm = torch.zeros((pages, 3, 8)), torch.zeros((2, pages, 16))
        self.kv_buffer = [self.conv, self.ssm]

    def fill(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        for part in self.kv_buffer:
            part.copy_(torch.randn(part.shape, generator=made))

    def page(self, number: int) -> torch.Tensor:
        return torch.cat((self.conv[number].flatten(), self.ssm[:, number].flatten()))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = [], []
        for page in indices.tolist():
            for part in (self.conv[page], self.ssm[0, page], self.ssm[1, page]):
                addresses.append(part.data_ptr())
                sizes.append(part.nbytes)
        return addresses, sizes


class LogicalPoolHost:
    layout, dtype, page_size, page_num, kv_buffer = "page_first", torch.uint8, 4, 6, None

    def get_page_buffer_element_size(self) -> None:
        return None
