"""What is in a store, counted: by namespace, by slot size, and the journal. From memory, at once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

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
