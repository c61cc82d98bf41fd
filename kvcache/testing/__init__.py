"""Suites for authors: subclass one in a test file of yours, tell it what to make, and pytest runs the promises.

Needs pytest, which nothing else in the package does.
"""

from __future__ import annotations

from kvcache.testing.codec import CodecContract
from kvcache.testing.connector import ConnectorContract, Served
from kvcache.testing.copier import CopierContract
from kvcache.testing.tier import TierContract

__all__ = ["CodecContract", "ConnectorContract", "CopierContract", "Served", "TierContract"]
