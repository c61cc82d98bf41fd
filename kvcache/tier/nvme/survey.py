"""What is in a store, counted: by namespace, by slot size, and the journal. From memory, at once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from kvcache.tier.nvme.entry import PUT
from kvcache.tier.nvme.ledger import Ledger


def survey(ledger: Ledger) -> dict[str, Any]:
    with ledger.memory:
        entries, namespaces = ledger.index.puts()
        segments = list(ledger.space.segments.values())
        shapes: dict[int, list[int]] = defaultdict(lambda: [0] * 5)
        for segment in segments:
            counts = (1, segment.slots, segment.live, len(segment.free), segment.quarantined)
            shapes[segment.slot_bytes] = [a + b for a, b in zip(shapes[segment.slot_bytes], counts, strict=True)]
        journal = ledger.journal
        behind, number, files_bytes = journal.behind, journal.number, ledger.space.files_bytes
    return {
        "path": ledger.directory.path,
        "records": len(entries),
        "record_bytes": int(entries["record_bytes"].sum()),
        "segment_files": len(segments),
        "segment_bytes": files_bytes,
        "journal": {"number": number, "entries": behind},
        "namespaces": [
            {
                "id": namespaces[int(of)].hex(),
                "records": int((mine := entries["namespace"] == of).sum()),
                "record_bytes": int(entries["record_bytes"][mine].sum()),
                "groups": np.unique(entries["group"][mine]).tolist(),
            }
            for of in np.unique(entries["namespace"])
        ],
        "slots": [
            dict(
                zip(("slot_bytes", "segments", "slots", "records", "free", "quarantined"), (size, *counts), strict=True)
            )
            for size, counts in sorted(shapes.items())
        ],
    }


def holdings(ledger: Ledger) -> dict[bytes, tuple[int, int]]:
    """Records and bytes by namespace. Nobody waits for longer than one segment takes."""
    found: dict[int, tuple[int, int]] = {}
    with ledger.memory:
        segments, names = list(ledger.space.segments.values()), dict(ledger.index.namespaces)
    for segment in segments:
        with ledger.memory:
            rows = segment.columns()
            rows = rows[rows["kind"] == PUT][["namespace", "record_bytes"]]
        for namespace in np.unique(rows["namespace"]).tolist():
            sizes = rows["record_bytes"][rows["namespace"] == namespace]
            records, size = found.get(namespace, (0, 0))
            found[namespace] = records + len(sizes), size + int(sizes.sum())
    with ledger.memory:
        names |= ledger.index.namespaces
    return {names[namespace]: held for namespace, held in found.items() if namespace in names}
