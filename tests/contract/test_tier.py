"""What every tier promises, for each of `TIERS`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcache.errors import KVCacheError
from kvcache.os_env import OsEnv
from kvcache.testing.tier import CAPACITY, TierContract, TierFixture, chain, namespace, write
from kvcache.tier import tier as contract
from kvcache.tier.host.tier import HostTier
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme.drives import MultiDriveTier
from kvcache.tier.object import ObjectTier
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import SupportsNamespaceUsage, Tier
from tests.contract.tier_kinds import KINDS, make, nvme


class TestTier(TierContract):
    @pytest.fixture(params=KINDS)
    def bench(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TierFixture]:
        bench = make(request.param, tmp_path)
        yield bench
        assert bench.tier.check() == []
        bench.tier.close()

    def test_usage_by_namespace_equals_the_contents(self, tier: Tier) -> None:
        one, other = chain(5), [replace(address, namespace=namespace(7)) for address in chain(3, seed=1)]
        write(tier, [*one, *other])
        tier.remove(one[4:])
        if not isinstance(tier, SupportsNamespaceUsage):
            pytest.skip("it does not count by namespace")
        counted, usage = tier.usage_by_namespace(), tier.usage()
        assert {space: records for space, (records, _) in counted.items()} == {one[0].namespace: 4, namespace(7): 3}
        assert sum(size for _, size in counted.values()) <= usage.used_bytes
        assert len({size // records for records, size in counted.values()}) == 1


def test_an_unusable_path_raises_a_kvcache_error(tmp_path: Path) -> None:
    """A place that is none: one line that says what to do."""
    (tmp_path / "nvme").write_text("a file")
    with pytest.raises(KVCacheError, match="directory"):
        nvme(tmp_path, CAPACITY, OsEnv())


CAPABILITIES = {
    HostTier: {"Colocation", "Wipe"},
    NvmeTier: {"Colocation", "NamespaceUsage", "Owners", "Restore", "Scrub", "Wipe"},
    MultiDriveTier: {"Colocation", "NamespaceUsage", "Owners", "Restore", "Scrub", "Wipe"},
    RedisTier: {"Owners", "Purge"},
    ObjectTier: {"Owners", "Purge"},
}


@pytest.mark.parametrize("tier", CAPABILITIES, ids=lambda tier: tier.__name__)
def test_a_tier_has_only_the_capabilities_of_its_medium(tier: type) -> None:
    protocols = {name: value for name, value in vars(contract).items() if name.startswith("Supports")}
    assert {name.removeprefix("Supports") for name, value in protocols.items() if issubclass(tier, value)} == (
        CAPABILITIES[tier]
    )


def test_the_contract_of_a_tier_is_small() -> None:
    assert len([name for name in vars(Tier) if not name.startswith("_")]) <= 9
