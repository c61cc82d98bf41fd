"""Blocks: layout, namespace, key and record. This package knows nothing of tiers."""
