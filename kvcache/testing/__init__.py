"""Contract suites for authors: subclass one in a test file, implement its factory method, and pytest runs the contract.

Needs pytest, which no other part of the package does.
"""

from __future__ import annotations

from kvcache.testing.codec import CodecContract
from kvcache.testing.connector import ConnectorContract, Served
from kvcache.testing.copier import CopierContract
from kvcache.testing.tier import TierContract

__all__ = ["CodecContract", "ConnectorContract", "CopierContract", "Served", "TierContract"]
