"""The Redis tier: records in a Redis or Valkey server that a fleet shares. Specification: `docs/spec/redis.md`."""

from kvcache.tier.redis.tier import RedisTier

__all__ = ["RedisTier"]
