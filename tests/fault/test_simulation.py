"""The NVMe tier on a disk that lies, everything by a seed, against a plain dict; and tiers that are wrong, all found.

A failing seed prints the line that plays it again: `NvmeSimulation(17, ops=200).run()`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.record import Address, Header, RecordError, read_header, verify
from kvcache.tier.io_queue import Batch, IOQueue
from kvcache.tier.nvme import journal as frame
from kvcache.tier.nvme import store
from kvcache.tier.nvme.allocator import SegmentFiles
from kvcache.tier.nvme.catalog import Catalog
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.durability import DurabilityBarrier
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import Entry, Journal
from kvcache.tier.nvme.segment import Segment
from kvcache.tier.nvme.store import Store
from tests.fault.nvme_simulation import NvmeSimulation
from tests.fault.simulated_disk import SimFile

ROOT = Path(__file__).parents[2]
PARTS = 20


@pytest.mark.parametrize("part", range(PARTS))
def test_random_runs_agree_with_the_model(part: int, request: pytest.FixtureRequest) -> None:
    for seed in range(part, 2000 if request.config.getoption("--long") else 200, PARTS):
        NvmeSimulation(seed).run()


def test_a_seed_gives_the_same_run_again() -> None:
    """In another process too, where sets of bytes and of objects have another order."""
    code = (
        "from tests.fault.nvme_simulation import NvmeSimulation\n"
        "for seed in range(12):\n"
        "    life = NvmeSimulation(seed); life.run()\n"
        "    print(seed, life.disk.steps, life.chance.random(), life.scheduler.seconds, life.tier.counters)"
    )
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": str(number)},
        )
        for number in (1, 2)
    ]
    one, other = (run.communicate()[0] for run in runs)
    assert one.count(b"\n") == 12
    assert one == other


# tiers that are wrong

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, tuple[Patch, dict[str, str]]] = {}
"""By what is wrong: how to break the tier, and the lives in which it shows soonest."""


def mutant(**lives: str) -> Callable[[Patch], Patch]:
    def add(patch: Patch) -> Patch:
        MUTANTS[patch.__name__] = patch, lives
        return patch

    return add


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """`around` gets the original as its first argument."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **keywords: around(original, *args, **keywords))


@mutant(fault="flips")
def no_checksum(patch: pytest.MonkeyPatch) -> None:
    def check(header: memoryview, payload: Any, address: Address) -> Header:
        try:
            return verify(header, payload, address)
        except RecordError as error:
            if error.check == "payload_sum":
                return read_header(header)
            raise

    patch.setattr(store, "verify", check)


@mutant(fault="none")
def no_signature_check(patch: pytest.MonkeyPatch) -> None:
    def check(header: memoryview, payload: Any, address: Address) -> Header:
        return verify(header, payload, read_header(header).address)

    patch.setattr(store, "verify", check)
    patch.setattr(Index, "matches", lambda self, entry, address: True)


@mutant(durability="batch", fault="none")
def journal_before_payload(patch: pytest.MonkeyPatch) -> None:
    put, publish = Store._put, Store._publish
    patch.setattr(Store, "_put", lambda self, places, settle: places)

    def late(self: Store, places: Sequence[Any], settle: Any) -> None:
        publish(self, places, settle)
        put(self, places, settle)

    patch.setattr(Store, "_publish", late)


@mutant(durability="batch", fault="none")
def payload_never_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DurabilityBarrier, "sync_payloads", lambda self, segment, slots=(): True)


@mutant(durability="block", fault="none")
def journal_never_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "sync", lambda self: None)


@mutant(durability="batch", fault="sync errors")
def failed_sync_tried_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DurabilityBarrier, "_write_again", lambda self, segment, slots: True)


@mutant(durability="block", fault="sync errors")
def neighbours_failed_sync_forgotten(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Segment, "__init__", lambda init, self, *args: (init(self, *args), None)[1])
    patch.setattr(Segment, "failures", property(lambda self: 0, lambda self, value: None), raising=False)


@mutant(durability="batch", fault="sync errors")
def failed_journal_sync_tried_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "in_doubt", property(lambda self: False, lambda self, value: None), raising=False)


@mutant(fault="none")
def removal_journaled_later(patch: pytest.MonkeyPatch) -> None:
    def drop(original: Any, self: Catalog, leaving: dict[bytes, Entry], **how: bool) -> None:
        append = self._append
        self._append = self.append_deferred  # type: ignore[method-assign]
        try:
            original(self, leaving, **how)
        finally:
            self._append = append  # type: ignore[method-assign]

    wrap(patch, Catalog, "drop", drop)


@mutant(fault="flips")
def frames_unchecked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frame, "_frame_sum", lambda head, entries, number: 0)


@mutant(fault="none")
def checkpoint_named_before_it_is_safe(patch: pytest.MonkeyPatch) -> None:
    def create(original: Any, self: Directory, name: str, parts: Any) -> Any:
        sync = SimFile.sync
        SimFile.sync = lambda file: None  # type: ignore[method-assign]
        try:
            return original(self, name, parts)
        finally:
            SimFile.sync = sync  # type: ignore[method-assign]

    wrap(patch, Directory, "create", create)


@mutant(fault="none")
def old_journal_removed_first(patch: pytest.MonkeyPatch) -> None:
    def checkpoint(original: Any, self: Journal, header: Any, state: Any, count: int) -> None:
        self._remove_before(header.number)
        original(self, header, state, count)

    wrap(patch, Journal, "checkpoint", checkpoint)


@mutant(fault="none")
def state_taken_before_the_turn(patch: pytest.MonkeyPatch) -> None:
    def checkpoint(self: Catalog) -> None:
        with self.memory:
            pieces, count = self.index.state(synced=True)
        with self.journal_lock:
            header = self.journal.rotate()
        self.journal.checkpoint(header, iter(pieces), count)

    patch.setattr(Catalog, "checkpoint", checkpoint)


@mutant(durability="batch", fault="none")
def taken_for_safe_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        Segment,
        "load",
        lambda load, self, rows, synced, rewrite_slots: load(self, rows, synced | True, rewrite_slots=rewrite_slots),
    )


@mutant(durability="batch", fault="sync errors")
def failed_sync_forgotten_over_a_restart(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        Segment,
        "load",
        lambda load, self, rows, synced, rewrite_slots: load(self, rows, synced, rewrite_slots=False),
    )


@mutant(durability="batch", fault="sync errors")
def failed_journal_sync_forgotten_over_a_restart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "_write_again", lambda self: None)


@mutant(fault="write errors")
def slots_of_failed_writes_leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Catalog, "release", lambda self, place: None)


@mutant(fault="none")
def late_calls_still_run(patch: pytest.MonkeyPatch) -> None:
    def expired(self: IOQueue, now: float) -> Iterator[Batch]:
        return (b for until, _, b in self._deadlines if until < now and b.first < b.end)

    patch.setattr(IOQueue, "expired", expired)


@mutant(fault="none")
def retired_file_closed_under_a_reader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentFiles, "close_file", lambda self, segment, users=1: segment.close())


@contextmanager
def broken(name: str) -> Iterator[dict[str, str]]:
    patch, lives = MUTANTS[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        yield lives


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_tier_is_detected(name: str) -> None:
    with broken(name) as lives:
        for seed in range(150):
            try:
                NvmeSimulation(random.Random(seed).randrange(1 << 30), **lives).run()
            except Exception:  # noqa: BLE001  a wrong byte, a loss, a leak, or a fault in the broken code itself
                return
    pytest.fail(f"no life shows that {name.replace('_', ' ')}")
