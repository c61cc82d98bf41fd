"""The table of reasons: every value of a metric's labels, except tiers, and its meaning."""

from __future__ import annotations

from collections.abc import Mapping

_OUTCOMES = {
    "absent": "it was not there any more",
    "damaged": "a check of its bytes failed; it was removed",
    "foreign": "it is of another version or cannot be interpreted; it was left alone",
    "no_room": "there was no room for it",
    "dropped": "a queue was full",
    "late": "it did not come, or did not begin, before the deadline",
    "failed": "the device or the peer said so; or an error of ours, which the log has",
    "cancelled": "the requester gave up, or loads were bypassed meanwhile",
}

_BYPASS = "an operator has taken the cache out of this path: `kvcache bypass off` restores it"

_QUOTA = "its tenant asked for more than it may in a second: `bandwidth`, `operations` in the tenants file"

_MISSES = {
    "cold": "the next block was never stored, as far as is remembered",
    "evicted": "the next block was there and made room for others",
    "expired": "the next block was there until the end that its request or namespace gave it (`ttl_s`)",
    "diverged": "an earlier prompt shares all that was found, and goes on with other tokens",
    "apart": "the same tokens are there under another namespace: another model, adapter, tenant, salt...",
    "store_dropped": "the next block was offered and not kept",
    "store_failed": "the next block was not written, or its store ended by an error",
    "refused": "the next block was found and did not pass a check, or was there no more",
    "late": "the next block was found and did not come in time",
    "no_room": "the next block was found below host, where there was no room to bring it to",
    "failed": "the next block was found, and the device or the peer failed, or an error of ours, which the log has",
    "below_plan": "the rest was found and would have come later than the engine computes it",
    "bypass": _BYPASS,
    "quota": _QUOTA,
}

REASONS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("lookups", "answer"): {
        "found": "it has blocks that were not known here",
        "nothing": "it has no more than is known here, or said that it cannot serve",
        "late": "no answer came within `flow.lookup_timeout_s`",
        "dropped": "too many lookups were under way: the prompt was matched with what is known",
    },
    ("misses", "reason"): _MISSES,
    ("missed_tokens", "reason"): _MISSES,
    ("declined", "reason"): {
        "off": "the engine runs without its cache: its log said why as it started",
        "embeddings": "it is given as embeddings, which are not in the names of its blocks",
        "media": "it has media, which are not in the names of blocks that engines of several makes share",
        "streamed input": "its prompt may still grow, so that its blocks have no names that would hold",
        "adapter": "the files of its adapter could not be read: the log has it",
        "starting": "it was admitted before all ranks of the engine had registered their pages",
        "unreachable": "the daemon did not answer as it was looked up; what it computes is stored if that is back then",
        "refused": "the cache, or the daemon behind it, did not take its tenant or its namespace: the log has it",
        "failed": "an error of ours, which the log has, came before anything of it was found or stored",
    },
    ("drops", "reason"): {
        "no room": "no free slot and no victim in host: what is there is held, the request's own, or another's share",
        "orphan": "its parent is not in the tier that it was offered to, so that it could not be found",
        "bypass": _BYPASS,
        "quota": _QUOTA,
        "{tier} queue": "more was waiting to be written to the tier than `flow.queue_blocks`; it stays in host for now",
        "{tier} full": "the tier had no victim that is older; it stays in host for now",
        "{tier} quota": "its tenant has all that it may take of the tier; it stays in host for now",
    },
    ("load_failures", "outcome"): {**_OUTCOMES, "bypass": _BYPASS, "quota": _QUOTA},
    ("write_failures", "outcome"): _OUTCOMES,
    ("refused_records", "check"): {check: _OUTCOMES[check] for check in ("absent", "damaged", "foreign")},
    ("canary_blocks", "result"): {
        "equal": "bit by bit",
        "close": "as near as rounding, or the codec's loss, explains",
        "different": "what was loaded is not what this engine computes: bypass the cache, the log names the block",
        "skipped": "chosen while two others waited to be computed",
        "failed": "it could not be computed again: the log says why",
    },
    ("tier_faults", "fault"): {
        "faults": "a server was away, late, hung up, or said that it cannot serve",
        "refused": "a server refused one record: it is full, read-only, or the user has not the right",
        "breaker_opened": "three failures in a row: the server is left alone until a probe finds it well",
        "writes_stopped": "three refused writes in a row: reads go on, writes are tried again by and by",
        "damaged": "a check of a record's bytes failed; it was removed",
        "broken": "a part of a long record was gone; the rest was removed",
        "replaced": "another server has taken the master's place",
        "defects": "an error of ours, which the log has",
    },
    ("policy_states", "result"): {
        "read": "the policy goes on with its saved state",
        "written": "beside the first drive's store; a kill loses the changes since",
        "damaged": "its checksum is wrong: ignored, the policy begins anew",
        "foreign": "of another version or another policy: ignored, the policy begins anew",
        "failed": "the drive said so; the policy goes on with what it knows",
    },
    ("evicted_blocks", "kept"): {"yes": "a tier below has it", "no": "it is gone"},
    ("bypass", "path"): {
        "loads": "a match finds nothing and a load is a miss",
        "stores": "what is offered is dropped",
    },
}
"""Meanings by (metric, label), then by value. `{tier}` stands for the name of a tier."""


def meaning(metric: str, label: str, value: str) -> str:
    """Return the meaning of a value. An unknown value raises KeyError: a defect of the caller."""
    table = REASONS[metric, label]
    if value in table:
        return table[value]
    return table["{tier} " + value.partition(" ")[2]]
