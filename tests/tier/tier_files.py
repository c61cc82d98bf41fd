"""NVMe and object tiers for the tests of this folder, and what is done to their files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kvcache.block.record import Address
from kvcache.os_env import InlineExecutor
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.object import ObjectTier
from kvcache.tier.tier import Outcome, Tier
from tests.tier.blocks import PAYLOAD_BYTES, buffer, holds, record

DONE, NOT_FOUND, DAMAGED = Outcome.DONE, Outcome.NOT_FOUND, Outcome.DAMAGED
MIB = 1 << 20


class DeferredExecutor(InlineExecutor):
    """Runs nothing until `release`: what is submitted waits in the tier's queue."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        self.calls.append(call)
        return Future()

    def release(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def inline(threads: int, name: str) -> InlineExecutor:
    return InlineExecutor()


Open = Callable[..., NvmeTier]
OpenObjects = Callable[..., ObjectTier]


def write(tier: NvmeTier, addresses: list[Address], size: int = PAYLOAD_BYTES) -> tuple[Outcome, ...]:
    return tier.write(addresses, [record(address, size) for address in addresses])


def read(tier: Tier, address: Address, size: int = PAYLOAD_BYTES) -> Outcome:
    into = buffer(size)
    (outcome,) = tier.read([address], [into])
    assert outcome is not DONE or holds(into, address, size)
    return outcome


def place(tmp_path: Path, tier: NvmeTier, address: Address) -> tuple[Path, int]:
    """The file and offset of a record."""
    found = tier._store.catalog.find(address)
    assert found is not None
    return tmp_path / "store" / f"segment-{found[0].number:06d}", found[1] * found[0].slot_bytes


def change(path: Path, offset: int, to: Callable[[int], int]) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([to(old)]))


def objects(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "store").rglob("*") if path.is_file())
