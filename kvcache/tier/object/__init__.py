"""The object tier: records in an object store that a fleet shares. `docs/spec/object.md` says what lies there."""

from kvcache.tier.object.tier import ObjectTier

__all__ = ["ObjectTier"]
