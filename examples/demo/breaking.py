"""Breaking a store in every way at hand, and asking a model again each time: `scripts/demo --break`.

The prompt is answered once without any cache. Then its blocks are stored, and before each further answer something
happens to the drive or to who writes to it. What was lost is computed; what is left is loaded; the answer is the same.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvcache
from examples.demo.run import environment, shared_text
from examples.demo.stage import DemoEnvironment
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.nvme import NvmeTier

# A drive so small that it is soon full: a file system in a file, mounted for as long as it is needed.

_TOOLS = ("mkfs.ext4", "mount", "umount")


@contextmanager
def small_drive(beside: Path, size_bytes: int) -> Iterator[tuple[Path | None, str]]:
    """The directory of an empty ext4 of this size, whose image lies in `beside`; None, and the reason, where this
    machine does not let us."""
    reason = _why_not()
    if reason:
        yield None, reason
        return
    image, place = beside / "drive.img", beside / "drive"
    place.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(size_bytes)
        make, mount = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(place)]
        for command in (make, mount):
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                yield None, f"{command[0]}: {(made.stderr or made.stdout).strip().splitlines()[-1]}"
                return
        try:
            yield place, f"an ext4 of {size_bytes >> 20} MiB"
        finally:
            subprocess.run(["umount", place], capture_output=True, check=True)
    finally:
        image.unlink(missing_ok=True)
        place.rmdir()


def _why_not() -> str:
    """Why no file system can be mounted here; nothing where it may be tried."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "only root may mount"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else ""


SHARED_TOKENS = 800
_QUESTION = "\nQuestion: what is a block?\nAnswer:"
_MIB = 1 << 20
_WRITER = "import sys; from examples.demo.breaking import store_forever; store_forever(sys.argv[1])"


@dataclass(slots=True)
class FaultTrial:
    """One answer. `came`: prompt tokens by the tier they came from. `noticed`: what the cache counted."""

    fault: str
    done: str
    prompt_tokens: int = 0
    came: Mapping[str, int] = field(default_factory=dict)
    noticed: Mapping[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)  # of an audit afterwards
    token_ids: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def loaded(self) -> int:
        return sum(self.came.values())


class FaultInjector:
    def __init__(self, stage: DemoEnvironment, place: Path) -> None:
        self._stage, self._place, self._path = stage, place, place / "nvme"
        text = "".join(shared_text(stage.tokenizer, SHARED_TOKENS).values())
        self._prompt = stage.tokenizer.encode(text + _QUESTION)
        layout = stage.model.layout
        self._blocks = len(self._prompt) // layout.block_tokens
        self._store_bytes = self._blocks * (layout.block_bytes(layout.groups[0].whole) + 8192)

    def trials(self) -> Iterator[FaultTrial]:
        """The answer without a cache first, with which the others are to agree."""
        yield self._ask(FaultTrial("none", "no cache"), None)
        with self._cache() as cache:
            yield self._ask(FaultTrial("none", "an empty cache, which stores"), cache)
        for fault, breaking in FAULTS.items():
            trial = FaultTrial(fault, breaking(self))
            with self._cache() as cache:
                self._ask(trial, cache)  # and what was lost is stored again, for the next one
            yield self._audit(trial, self._path)
        yield self._full()

    @contextmanager
    def _cache(self, path: Path | None = None, capacity_bytes: int = 0) -> Iterator[kvcache.KVCache]:
        """A cache that begins with what the drive has, in a process that knows nothing else."""
        nvme = {
            "path": str(path or self._path),
            "capacity_bytes": capacity_bytes or 4 * self._store_bytes + 64 * _MIB,
            "segment_bytes": 8 * _MIB,
            "min_free_bytes": 0,
        }
        cache = kvcache.open(nvme=nvme, control={"enabled": False})
        try:
            yield cache
        finally:
            cache.close()

    def _ask(self, trial: FaultTrial, cache: kvcache.KVCache | None) -> FaultTrial:
        engine = self._stage.engine(cache)
        begun = time.monotonic()
        [result] = engine.generate([self._prompt], self._stage.params)
        trial.seconds = time.monotonic() - begun
        trial.prompt_tokens, trial.came, trial.token_ids = result.prompt_tokens, dict(result.reused), result.token_ids
        if cache is not None:
            cache.flush()
            trial.noticed = _fault_counters(cache.stats()["counters"])
        return trial

    def _audit(self, trial: FaultTrial, path: Path) -> FaultTrial:
        """What a scrub leaves of the store is sound."""
        tier = NvmeTier(str(path), NvmeSettings(capacity_bytes=1 << 60))
        try:
            damaged = tier.scrub().damaged
            if damaged:
                trial.noticed = {**trial.noticed, "damaged, by a scrub": damaged}
            trial.faults = tier.check()
        finally:
            tier.close()
        return trial

    def _full(self) -> FaultTrial:
        """A drive with room for half of the blocks."""
        with small_drive(self._place, self._store_bytes // 2 + 8 * _MIB) as (drive, how):
            if drive is not None:
                trial = FaultTrial("the drive is full", f"{how} for {self._store_bytes >> 20} MiB of blocks")
                path, capacity = drive / "nvme", 0
            else:
                trial = FaultTrial("the drive is full", f"a capacity for half of the blocks ({how})")
                path, capacity = self._place / "half", self._store_bytes // 2 + 8 * _MIB
            with self._cache(path, capacity) as cache:  # stores what fits
                engine = self._stage.engine(cache)
                engine.generate([self._prompt], self._stage.params)
                cache.flush()
                noticed = _fault_counters(cache.stats()["counters"])
            with self._cache(path, capacity) as cache:
                self._ask(trial, cache)
            trial.noticed = {**trial.noticed, **noticed}
            return self._audit(trial, path)

    # what is done

    def flip(self) -> str:
        path, offset, size = self._where(self._blocks // 2)
        with path.open("r+b") as file:
            file.seek(offset + size // 2)
            byte = file.read(1)[0]
            file.seek(offset + size // 2)
            file.write(bytes([byte ^ 1]))
        return f"one of {size * 8:,} bits of block {self._blocks // 2}"

    def truncate(self) -> str:
        path, offset, size = self._where(self._blocks // 3)
        os.truncate(path, offset + size // 3)
        return f"{path.name} ends within block {self._blocks // 3}"

    def lose(self) -> str:
        path, _, _ = self._where(0)
        path.unlink()
        return f"{path.name} is not there"

    def kill(self) -> str:
        """SIGKILL for a process that stores into this very directory as fast as it can."""
        command = [sys.executable, "-c", _WRITER, str(self._path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as child:
            assert child.stdout is not None, "it is a pipe"
            said = [child.stdout.readline() for _ in range(3)]
            child.kill()
        if not said[-1]:
            raise ChildProcessError("the writer ended by itself: it says why above")
        return f"SIGKILL for a writer at batch {said[-1].strip()}"

    def spoil(self) -> str:
        journal = max(self._path.glob("journal-*"), key=lambda path: int(path.name.split("-")[1]))
        size = journal.stat().st_size
        with journal.open("r+b") as file:
            file.seek(size // 2)
            file.write(b"\xff" * 64)
        return f"64 bytes in the middle of {journal.name}"

    def _where(self, block: int) -> tuple[Path, int, int]:
        """The file of a block of the prompt, the record's offset in it, and its bytes."""
        tier = NvmeTier(str(self._path), NvmeSettings(capacity_bytes=1 << 60))
        try:
            chain = [address for address in tier.scan() if address.namespace == self._namespace()]
            found = tier.catalog.find(chain[min(block, len(chain) - 1)])
            assert found is not None, "a scan tells what is there"
            segment, slot, entry = found
            name = tier.catalog.files.path(segment.number)
            return Path(name), slot * segment.slot_bytes, entry.record_bytes
        finally:
            tier.close()

    def _namespace(self) -> bytes:
        model = self._stage.model
        with self._cache(self._place / "names", 16 * _MIB) as cache:
            name = self._stage.wish.model
            return cache.namespace(model.layout, model=name, revision=model.revision, facts=model.facts).id


FAULTS: Mapping[str, Callable[[FaultInjector], str]] = {
    "a flipped bit": FaultInjector.flip,
    "a truncated record": FaultInjector.truncate,
    "a lost file": FaultInjector.lose,
    "a killed writer": FaultInjector.kill,
    "a damaged journal": FaultInjector.spoil,
}


def _fault_counters(counters: Mapping[str, Any]) -> dict[str, int]:
    """What of the statistics tells of something that is not as it should be."""
    found: dict[str, int] = {}
    for name in ("refused_records", "load_failures", "write_failures", "drops"):
        for labels, count in counters.get(name, {}).items():
            found[f"{name.replace('_', ' ')} ({labels.replace(',', ', ')})"] = count
    return found


def store_forever(path: str) -> None:
    """Store one prompt after the other into a directory, a line a prompt, until somebody kills this process."""
    layout = kvcache.KVLayout.mha(layers=4, kv_heads=4, head_dim=64, dtype="fp32")
    tensors = np.random.default_rng(0).random((4, 2, 32, 16, 4, 64), np.float32)
    pages = [kvcache.GroupPages.from_tensors(layout, list(tensors), axes=("kv", "page", "token", "head", "dim"))]
    nvme = {"path": path, "capacity_bytes": 256 * _MIB, "segment_bytes": 8 * _MIB, "min_free_bytes": 0}
    cache = kvcache.open(nvme=nvme, control={"enabled": False})
    handle = cache.namespace(layout, model="writer", revision="1")
    for batch in range(1 << 30):
        with handle.request() as r:
            r.match(range(1000 * batch, 1000 * batch + 32 * 16))
            r.store(pages, [list(range(32))]).wait()
        print(batch, flush=True)


# What `scripts/demo --break` shows: a row a fault, and at the end whether every answer was the one without a cache.

_COLUMNS = ("what broke", "how", "loaded", "computed", "noticed", "answer")


def run_trials(console: Console, trials: Iterable[FaultTrial]) -> list[FaultTrial]:
    """Try them all, and tell what is tried; then the table."""
    tried: list[FaultTrial] = []
    with console.status("asking without a cache") as status:
        for trial in trials:
            tried.append(trial)
            status.update(f"{trial.fault}: {trial.done}")
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for trial in tried:
        same = trial.token_ids == tried[0].token_ids
        sound = same and not trial.faults
        table.add_row(
            Text(trial.fault),
            Text(trial.done, overflow="fold"),
            f"{trial.loaded:,}",
            f"{trial.prompt_tokens - trial.loaded:,}",
            Text("\n".join(f"{name}: {count:,}" for name, count in trial.noticed.items()), overflow="fold"),
            Text("same" if same else "ANOTHER", style="green" if sound else "bold red"),
        )
    console.print(table)
    return tried


def verdict(tried: list[FaultTrial]) -> tuple[str, bool]:
    """Whether all is as it must be, in words."""
    others = [trial.fault for trial in tried if trial.token_ids != tried[0].token_ids]
    unsound = [f"{trial.fault}: {fault}" for trial in tried for fault in trial.faults]
    if others or unsound:
        said = [f"another answer after {fault}" for fault in others] + [
            f"after a scrub, after {fault}" for fault in unsound
        ]
        return f"FAILED: {'; '.join(said)}", False
    return (
        f"{len(tried) - 1} answers are the one without a cache, token for token; what a scrub left is sound.",
        True,
    )


def write(path: Path, tried: list[FaultTrial]) -> None:
    document = {"same_answers": verdict(tried)[1], "trials": [asdict(trial) for trial in tried]}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
