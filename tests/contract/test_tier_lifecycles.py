"""Any sequence of calls to a tier against a dict."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvcache.block.record import Address
from kvcache.testing.tier import DONE, NOT_FOUND, TierFixture, write
from kvcache.tier.tier import Outcome, SupportsColocation
from tests.contract.tier_kinds import KINDS, make
from tests.tier.blocks import buffer, chain, payload


class AgainstDict(RuleBasedStateMachine):
    """Any sequence of calls gives what a dict gives; a full or restarted tier has fewer, never others."""

    make: Callable[[], TierFixture]

    def __init__(self) -> None:
        super().__init__()
        self.bench = self.make()
        self.held: dict[Address, int] = {}

    blocks = (*chain(6), *chain(3, seed=1), *chain(3, of=1))
    some = st.lists(st.sampled_from(blocks), min_size=1, max_size=4, unique=True)
    size = st.sampled_from([1, 4096, 30_000, 200_000, 700_000])

    @rule(addresses=some, size=size)
    def write(self, addresses: list[Address], size: int) -> None:
        for address, outcome in zip(addresses, write(self.bench.tier, addresses, size), strict=True):
            if address in self.held:
                assert outcome is DONE
            elif outcome is DONE:
                self.held[address] = size
            else:
                assert outcome is Outcome.NO_CAPACITY

    @rule(addresses=some)
    def read(self, addresses: list[Address]) -> None:
        for address in addresses:
            size = self.held.get(address, 1)
            into = buffer(size)
            assert self.bench.tier.read([address], [into]) == (DONE if address in self.held else NOT_FOUND,)
            assert address not in self.held or b"".join(into[1:])[:size] == payload(address, size)

    @rule(addresses=some)
    def remove(self, addresses: list[Address]) -> None:
        expected = tuple(DONE if address in self.held else NOT_FOUND for address in addresses)
        assert self.bench.tier.remove(addresses) == expected
        for address in addresses:
            self.held.pop(address, None)

    @rule(address=st.sampled_from(blocks))
    def remove_siblings(self, address: Address) -> None:
        tier = self.bench.tier
        if isinstance(tier, SupportsColocation):
            colocated = tier.colocated(address)
        else:
            colocated = [address] if address in self.held else []
        assert (address in self.held) == (address in colocated)
        assert set(colocated) <= set(self.held)
        assert set(self.bench.tier.remove(colocated)) <= {DONE}
        for sibling in colocated:
            del self.held[sibling]

    @precondition(lambda self: self.bench.tier.durable)
    @rule()
    def restart(self) -> None:
        self.bench.reopen()

    @rule()
    def sync(self) -> None:
        self.bench.tier.sync()

    @invariant()
    def knows_what_it_holds(self) -> None:
        assert set(self.bench.tier.scan()) == set(self.held)
        usage = self.bench.tier.usage()
        assert usage.records == len(self.held)
        assert not usage.capacity_bytes or usage.used_bytes <= usage.capacity_bytes
        present = self.bench.tier.contains(self.blocks)
        assert present == tuple(DONE if address in self.held else NOT_FOUND for address in self.blocks)

    def teardown(self) -> None:
        try:
            assert self.bench.tier.check() == []
        finally:
            self.bench.tier.close()


@pytest.mark.parametrize("kind", KINDS)
def test_against_a_dict(kind: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    long = request.config.getoption("--long")
    begin = staticmethod(lambda: make(kind, tmp_path_factory.mktemp(kind)))
    machine = type("AgainstDict", (AgainstDict,), {"make": begin})
    limits = settings(max_examples=100 if long else 15, stateful_step_count=50 if long else 30)
    run_state_machine_as_test(machine, settings=limits)
