"""Pages to block bytes and back. Knows nothing of keys and tiers."""
