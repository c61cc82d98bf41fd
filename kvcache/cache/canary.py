"""The canary: the engine recomputes one in N loaded blocks, and the result is compared with the loaded one.

A cache whose checks all pass can still return wrong bytes if an engine or a key is wrong. Examples are weights that
changed under one revision, a fact missing from the namespace, or wrongly described pages. Only recomputing the block
finds that. It costs a computation, on a separate thread, and is off unless `canary.sample_rate` is set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcache.block.chain import tokens as checked_tokens
from kvcache.block.layout import KVLayout
from kvcache.block.record import header_area
from kvcache.cache.slot_copy import CopyPart, SlotCopy
from kvcache.codec.quantised import WORD_DTYPES, widen
from kvcache.observe.metrics import Counters
from kvcache.os_env import OsEnv
from kvcache.transfer.copier import CopyHandle

Recompute = Callable[[Sequence[int]], Sequence[bytes | bytearray | memoryview]]
"""Computes these tokens without any cache: the payload of the last block, one per group, as it would be stored.

Runs on the canary's thread.
"""

ROUNDING_BY_DTYPE = {"fp32": 1e-3}
DEFAULT_ROUNDING = 0.1
"""The part of a block's largest number that computing it in another batch explains.

A codec's loss may occur twice on top, because the prefix of the stored block may have passed the codec too.
"""

_MAX_PENDING_CHECKS = 2  # more checks are skipped

_log = logging.getLogger("kvcache.canary")


class Canary:
    """The canary of one cache. `worst`: the largest difference so far, relative to the largest number of its block."""

    def __init__(self, sample_rate: int, loss: float, counters: Counters, os_env: OsEnv) -> None:
        """`loss`: the largest error bound of a codec that a block may pass."""
        self.sample_rate, self._loss, self._counters = sample_rate, loss, counters
        self.worst = 0.0
        self._executor = os_env.executor(1, "canary") if sample_rate else None
        self._engines: dict[bytes, tuple[Recompute, KVLayout, Sequence[int]]] = {}
        self._loaded = self._waiting = 0
        self._lock = threading.Lock()

    def register(self, namespace: bytes, layout: KVLayout, sizes: Sequence[int], recompute: Recompute) -> None:
        """`sizes`: payload bytes by group."""
        self._engines[namespace] = recompute, layout, sizes

    def is_registered(self, namespace: bytes) -> bool:
        return self._executor is not None and namespace in self._engines

    def sampled_copy(self, slot_copy: SlotCopy, namespace: bytes, token_ids: Any, first: int) -> SlotCopy:
        """A `SlotCopy` that also compares some of the blocks that it scatters.

        Args:
            token_ids: the prompt.
            first: the prompt's block at which the transfer begins.
        """
        return _CanarySlotCopy(slot_copy, self, namespace, token_ids, first)

    def offer(self, namespace: bytes, token_ids: Any, block: int, parts: Sequence[CopyPart]) -> None:
        """Count a loaded block, and compare every Nth unless too many checks are pending."""
        with self._lock:
            self._loaded += 1
            if self._loaded % self.sample_rate:
                return
            if self._waiting >= _MAX_PENDING_CHECKS:
                self._counters.add("canary_blocks", result="skipped")
                return
            self._waiting += 1
        loaded = {}
        for _, group, slot in parts:
            size = self._engines[namespace][2][group]
            area = header_area(size)
            loaded[group] = bytes(slot.view[area : area + size])
        assert self._executor is not None, "no caller offers to a canary that is off"
        self._executor.submit(lambda: self._compare(namespace, token_ids, block, loaded))

    def _compare(self, namespace: bytes, token_ids: Any, block: int, loaded: dict[int, bytes]) -> None:
        try:
            recompute, layout, _ = self._engines[namespace]
            tokens = checked_tokens(token_ids).tolist()[: (block + 1) * layout.block_tokens]
            recomputed = recompute(tokens)
            dtypes = {group: layout.groups[group].dtype for group in loaded}
            differences = {
                g: relative_difference(payload, bytes(recomputed[g]), dtypes[g]) for g, payload in loaded.items()
            }
            close = all(d <= self._limit(dtypes[g]) for g, d in differences.items())
            worst = max(differences.values())
            self.worst = max(self.worst, worst)
            self._counters.add("canary_blocks", result="equal" if not worst else "close" if close else "different")
            if not close:
                _log.error(
                    "namespace %s, block %d of a prompt: differs by %.3g from what the engine computes; bypass the "
                    "cache (`kvcache bypass on`) and find out what its namespace does not say",
                    namespace.hex()[:16],
                    block,
                    worst,
                )
        except Exception:  # noqa: BLE001  worker thread that must survive
            self._counters.add("canary_blocks", result="failed")
            _log.exception("a block could not be recomputed")
        finally:
            with self._lock:
                self._waiting -= 1

    def _limit(self, dtype: str) -> float:
        return ROUNDING_BY_DTYPE.get(dtype, DEFAULT_ROUNDING) + 2 * self._loss

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()


class _CanarySlotCopy:
    def __init__(self, slot_copy: SlotCopy, canary: Canary, namespace: bytes, token_ids: Any, first: int) -> None:
        self._slot_copy, self._canary, self._first = slot_copy, canary, first
        self._namespace, self._token_ids = namespace, token_ids

    def gather(self, parts: Sequence[CopyPart]) -> None:
        self._slot_copy.gather(parts)

    def scatter(self, parts: Sequence[CopyPart]) -> Sequence[CopyHandle]:
        copies = self._slot_copy.scatter(parts)
        by_block: dict[int, list[CopyPart]] = {}
        for part in parts:
            by_block.setdefault(part[0], []).append(part)
        for block, of_block in by_block.items():
            self._canary.offer(self._namespace, self._token_ids, self._first + block, of_block)
        return copies


def relative_difference(loaded: bytes, recomputed: bytes, dtype: str) -> float:
    """The largest difference of two payloads, relative to the largest number.

    For other than numeric dtypes it is 1 if any byte differs.
    """
    if loaded == recomputed:
        return 0.0
    if dtype not in WORD_DTYPES or len(loaded) != len(recomputed):
        return 1.0
    one, other = (widen(np.frombuffer(payload, WORD_DTYPES[dtype]), dtype) for payload in (loaded, recomputed))
    largest = float(np.abs(other).max())
    largest_difference = float(np.abs(one - other).max())
    return largest_difference / largest if largest and np.isfinite(largest_difference) else 1.0
