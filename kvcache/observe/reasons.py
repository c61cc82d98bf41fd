"""The table of reasons: every value of a metric's labels, except tiers, and its meaning."""

from __future__ import annotations

from collections.abc import Mapping

_OUTCOMES = {
    "absent": "the tier does not have it any more",
    "damaged": "a check of its bytes failed; it was removed",
    "foreign": "it has another version or cannot be interpreted; it stays",
    "no_room": "no capacity for it",
    "dropped": "a queue was full",
    "late": "it did not arrive, or did not begin, before the deadline",
    "failed": "the device or the peer reported an error, or kvcache has a defect; see the log",
    "cancelled": "the caller cancelled it, or an operator bypassed loads meanwhile",
}

_BYPASS = "an operator bypasses the cache on this path: `kvcache bypass off` ends it"

_QUOTA = "its tenant exceeded its rate limit: `bandwidth`, `operations` in the tenants file"

_MISSES = {
    "cold": "the next block was never stored, within the recorded history",
    "evicted": "the next block was evicted",
    "expired": "the next block expired (`ttl_s` of its request or namespace)",
    "diverged": "an earlier prompt shares the found prefix and continues with other tokens",
    "apart": "another namespace has the same tokens: another model, adapter, tenant, salt...",
    "store_dropped": "the next block was offered and dropped",
    "store_failed": "the next block was not written, or its store failed",
    "refused": "the next block was found, but failed a check or was removed",
    "late": "the next block was found, but not loaded in time",
    "no_room": "the next block was found in a lower tier, but host memory had no capacity for it",
    "failed": "the next block was found, but the device or the peer failed, or kvcache has a defect; see the log",
    "below_plan": "the rest was found, but recomputation is faster than its load",
    "bypass": _BYPASS,
    "quota": _QUOTA,
}

REASONS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("lookups", "answer"): {
        "found": "the tier has blocks that the index did not have",
        "nothing": "the tier has no further blocks, or cannot serve",
        "late": "no answer within `flow.lookup_timeout_s`",
        "dropped": "too many lookups in progress: the prompt was matched against the index only",
    },
    ("misses", "reason"): _MISSES,
    ("missed_tokens", "reason"): _MISSES,
    ("declined", "reason"): {
        "off": "the engine runs without its cache; see its log at start",
        "embeddings": "its input is embeddings, which block identities do not cover",
        "media": "it has media, which block identities shared across engines do not cover",
        "streamed input": "its prompt may still grow, so that its blocks have no final identity",
        "adapter": "the files of its adapter could not be read; see the log",
        "starting": "it was admitted before all ranks of the engine had registered their pages",
        "unreachable": "the daemon did not answer its lookup; its blocks are stored if the daemon answers then",
        "refused": "the cache or the daemon refused its tenant or its namespace; see the log",
        "failed": "kvcache failed before any of it was found or stored; see the log",
    },
    ("drops", "reason"): {
        "no room": "no free slot and no victim in host memory: its records are held, the request's own, or "
        "guaranteed to others",
        "orphan": "its parent is not in the tier, so that it could not be found",
        "bypass": _BYPASS,
        "quota": _QUOTA,
        "{tier} queue": "more than `flow.queue_blocks` blocks waited to be written; it stays in host memory for now",
        "{tier} full": "the tier had no older victim; it stays in host memory for now",
        "{tier} quota": "its tenant is at its quota in the tier; it stays in host memory for now",
    },
    ("load_failures", "outcome"): {**_OUTCOMES, "bypass": _BYPASS, "quota": _QUOTA},
    ("write_failures", "outcome"): _OUTCOMES,
    ("refused_records", "check"): {check: _OUTCOMES[check] for check in ("absent", "damaged", "foreign")},
    ("canary_blocks", "result"): {
        "equal": "bit by bit",
        "close": "equal within rounding or the codec's loss",
        "different": "the loaded block differs from the computed one: bypass the cache; the log names the block",
        "skipped": "selected while two others waited to be recomputed",
        "failed": "it could not be recomputed; see the log",
    },
    ("tier_faults", "fault"): {
        "faults": "a server did not answer, timed out, closed the connection, or cannot serve",
        "refused": "a server refused one record: it is full, read-only, or the user lacks the permission",
        "breaker_opened": "three failures in a row: no calls until a probe succeeds",
        "writes_stopped": "three refused writes in a row: reads continue, writes are retried later",
        "damaged": "a check of a record's bytes failed; it was removed",
        "broken": "a part of a split record was missing; the rest was removed",
        "replaced": "another server became the master",
        "defects": "kvcache has a defect; see the log",
    },
    ("policy_states", "result"): {
        "read": "the policy continues with its saved state",
        "written": "beside the first drive's store; a kill loses the changes since",
        "damaged": "its checksum is wrong: ignored, the policy starts without evidence",
        "foreign": "another version or another policy: ignored, the policy starts without evidence",
        "failed": "the drive reported an error; the policy continues with its current state",
    },
    ("evicted_blocks", "kept"): {"yes": "a lower tier has it", "no": "it is gone"},
    ("bypass", "path"): {
        "loads": "a match finds nothing and a load is a miss",
        "stores": "offered blocks are dropped",
    },
}
"""Meanings by (metric, label), then by value. `{tier}` stands for the name of a tier."""


def meaning(metric: str, label: str, value: str) -> str:
    """Return the meaning of a value. An unknown value raises KeyError: a defect of the caller."""
    table = REASONS[metric, label]
    if value in table:
        return table[value]
    return table["{tier} " + value.partition(" ")[2]]
