"""The host tier's audit, while the cache goes on."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.os_env import InlineExecutor, OsEnv
from kvcache.tier.host import tier as host
from kvcache.tier.host.tier import HostTier
from kvcache.tier.tier import Outcome
from tests.tier.blocks import chain, record


def test_check_ignores_records_that_change_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(capacity_bytes=1 << 20, slab_bytes=1 << 18, os_env=OsEnv(executor=lambda *_: InlineExecutor()))
    blocks = chain(6)
    assert all(o is Outcome.DONE for o in tier.write(blocks[:4], [record(a) for a in blocks[:4]]))
    verify, audited = host.verify, []

    def meanwhile(*parts: Any) -> Any:
        if not audited:  # the second block's slot is another one's by the time it is looked at, the third one is gone
            assert tier.unpublish(blocks[1])
            assert tier.write([blocks[4]], [record(blocks[4])]) == (Outcome.DONE,)
            assert tier.unpublish(blocks[2])
        audited.append(parts[-1])
        return verify(*parts)

    monkeypatch.setattr(host, "verify", meanwhile)
    assert tier.check() == []
    assert audited == [blocks[0], blocks[3]]
    monkeypatch.undo()
    held = tier.acquire(blocks[0])
    assert held is not None
    held.slot.view[4096] ^= 1
    tier.arena.release(held.slot)
    assert len(tier.check()) == 1
    tier.close()
