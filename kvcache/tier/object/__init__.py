"""The object tier: records in an object store that a fleet shares. Specification: `docs/spec/object.md`."""

from kvcache.tier.object.tier import ObjectTier

__all__ = ["ObjectTier"]
