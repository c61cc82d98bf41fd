"""Records on local drives: preallocated segment files of equal slots, and a journal of their contents."""

from kvcache.tier.nvme.drives import open_drives
from kvcache.tier.nvme.tier import NvmeTier

__all__ = ["NvmeTier", "open_drives"]
