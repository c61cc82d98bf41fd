"""Copies between an engine's pages and block bytes. The package is independent of keys and tiers."""
