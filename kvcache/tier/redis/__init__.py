"""The Redis tier: records in a Redis or Valkey server shared by a fleet. `docs/spec/redis.md` says what lies there."""

from kvcache.tier.redis.tier import RedisTier

__all__ = ["RedisTier"]
