"""Writes the archive of test_upgrade, a store of an earlier version: `python -m tests.daemon.old_version_store FILE`.

Version 0.1.0.dev0 wrote the archive once, and it is kept: a file that a later version writes does not test its reader.
Files and footers that the first version did not write are removed: segment footers, and the names of owners.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

import kvcache
from tests.daemon.daemon_process import bound_to, store

PROMPTS = {seed: list(range(1000 * seed, 1000 * seed + 16)) for seed in (1, 2, 3)}
"""By the seed of its bytes."""
CAPACITY, SEGMENT = "1MiB", "192KiB"
LABEL_BYTES = 4096


def main(file: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name, "nvme")
        nvme = {"path": str(directory), "capacity_bytes": CAPACITY, "segment_bytes": SEGMENT, "min_free_bytes": 0}
        host = {"capacity_bytes": "1MiB", "slab_bytes": "192KiB"}
        with kvcache.open(host=host, nvme=nvme, control={"enabled": False}) as cache:
            for seed, tokens in PROMPTS.items():
                store(bound_to(cache), tokens, seed)
            assert cache.flush(60)
        for segment in directory.glob("segment-*"):
            with segment.open("r+b") as opened:
                opened.truncate(segment.stat().st_size - LABEL_BYTES)
        for later in ("LOCK", "owners"):
            (directory / later).unlink()
        with tarfile.open(file, "w:xz") as archive:
            archive.add(directory, "nvme")


if __name__ == "__main__":
    main(sys.argv[1])
