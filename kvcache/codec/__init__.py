"""Bytes to fewer bytes and back. Knows nothing of tiers."""
