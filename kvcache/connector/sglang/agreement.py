"""What the tensor ranks of one model have to decide alike: each says what it can, and they do what all of them can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Agreement:
    """`groups`: of torch.distributed, those over which SGLang itself reduces what a lookup found."""

    rank: int = 0
    size: int = 1
    groups: Sequence[Any] = ()

    @classmethod
    def of(cls, params: Any) -> Agreement:
        import torch.distributed as dist

        named = [getattr(params, name, None) for name in ("attn_cp_cache_group", "attn_tp_cache_group")]
        groups = [group for group in named if group is not None and dist.get_world_size(group) > 1]
        tensor = named[1] if named[1] is not None else getattr(params, "tp_cache_group", None)
        if tensor is None:
            return cls()
        size = dist.get_world_size(tensor)
        if not groups and size > 1:
            groups = [tensor]
        return cls(dist.get_rank(tensor), size, tuple(groups))

    def all(self, mine: bool) -> bool:
        """Whether every rank says yes. Each of them has to ask, in the same order."""
        if not self.groups:
            return mine
        import torch
        import torch.distributed as dist

        told = torch.tensor([int(mine)], dtype=torch.int)
        for group in self.groups:
            dist.all_reduce(told, op=dist.ReduceOp.MIN, group=group)
        return bool(told.item())
