"""Eviction policies: the contract, `lru` and `hazard`, and tenants' quotas. Knows no bytes of blocks and no I/O."""
