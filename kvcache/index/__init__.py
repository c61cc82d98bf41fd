"""The block index: which tier holds a block, when it was used, and which block to evict next."""
