"""Codecs: payload bytes to fewer bytes and back. The package is independent of tiers."""
