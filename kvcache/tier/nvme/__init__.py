"""Records on local drives: preallocated segment files of equal slots, and a journal that says what is in them."""

from kvcache.tier.nvme.drives import open_drives
from kvcache.tier.nvme.tier import NvmeTier

__all__ = ["NvmeTier", "open_drives"]
