"""What a policy has learnt, kept beside the first drive's store and read again at start.

One file, `policy`: a line that names the format, a line with the SHA-256 of the rest, a line of JSON, then rows. The
JSON holds the counts that the policy judges by (`reused`, and as `forgotten` all that was last seen waiting, here or as
a ghost), which kind what lies on the drive is of, so that shares hold before an engine comes, and when the namespaces
that were used last were used, whatever the policy. The rows hold how often single blocks and ghosts were used and how
long ago (`Index.kept`): what lies on the drive goes on as it was, what does not is a ghost, and what there was no room
for counts as seen until then.

It is written every `SAVE_S` in which there was a request, for each MiB of it later, and at the end; a kill loses what
was learnt since. A file that is damaged, of another version or of another policy is ignored and counted: then the
policy begins anew.
"""

from __future__ import annotations

import json
import os
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from math import isfinite, prod
from struct import Struct
from typing import Any
from zlib import compress, decompressobj

import numpy as np
from numpy.typing import NDArray

from kvcache.cache.usage import UsageLog
from kvcache.evict.policy import AGE_EDGES, Policy
from kvcache.index.cost_classes import CostClasses
from kvcache.index.index import Index
from kvcache.log import logger
from kvcache.observe.metrics import Counters
from kvcache.os_env import OsEnv

FILE_NAME = "policy"
FORMAT = b"kvcache policy 2\n"
SAVE_INTERVAL_S = 60.0
MAX_COUNT = 1 << 48
MAX_JSON_BYTES = 64 << 10
"""But for the rows; places beyond them are left out. A store's own overhead has room for it."""
MAX_ROWS = 1 << 21
"""Of 8 bytes: blocks that are there, then the ghosts that left last."""

LAST_USE, MAX_NAMESPACES = Struct("<32sd"), 256
"""A namespace and when it was used last; so many are told, those used last."""

_log = logger("kvcache.learnt")


class PolicyState:
    """`directory`: where the file is; None: nothing is kept."""

    def __init__(
        self,
        directory: str | None,
        index: Index,
        cost_classes: CostClasses,
        usage_log: UsageLog,
        counters: Counters,
        os_env: OsEnv,
        submit: Callable[[Callable[[], None]], object],
    ) -> None:
        self._path = None if directory is None else os.path.join(directory, FILE_NAME)
        self._directory, self._index, self._cost_classes, self._usage_log = directory, index, cost_classes, usage_log
        self._counters, self._os_env, self._submit = counters, os_env, submit
        self._due = os_env.clock.now() + SAVE_INTERVAL_S
        self._writing = threading.Lock()

    def load(self) -> None:
        """At start, before any request. Never raises: a cache works without."""
        if self._path is None:
            return
        try:
            file = self._os_env.disk.open(self._path)
        except OSError:
            return  # there is none yet, or the drive has troubles that others will tell of
        try:
            data = bytearray(min(file.size(), MAX_JSON_BYTES + 8 * MAX_ROWS + 64))
            got = file.read(0, [memoryview(data)]) if data else 0
            result = self._take(bytes(data[:got]))
        except OSError as error:
            result = "failed"
            _log.warning("%s: %s; the policy begins anew", self._path, error.strerror or error)
        finally:
            file.close()
        self._counters.add("policy_states", result=result)

    def recall(self, data: bytes) -> None:
        """As `load`, from a process that ended, where no file has it."""
        if self._path is None:
            self._counters.add("policy_states", result=self._take(data))

    def _take(self, data: bytes) -> str:
        form, _, rest = data.partition(b"\n")
        checksum, _, body = rest.partition(b"\n")
        if form + b"\n" != FORMAT:
            return "foreign"
        if sha256(body).hexdigest().encode() != checksum:
            _log.warning("%s is damaged; the policy begins anew", self._path or FILE_NAME)
            return "damaged"
        try:
            learnt, _, rows = body.partition(b"\n")
            told = json.loads(learnt)
            used = list(LAST_USE.iter_unpack(b64decode(told.get("used", ""))))
            if not all(isfinite(last) for _, last in used):
                raise ValueError("a time that is none")
            self._usage_log.recall(used)
            if [told.get(name) for name in ("policy", "bounds", "gaps", "edges")] != _policy_shape(self._index.policy):
                return "foreign"
            shape = self._index.evidence().reused.shape
            reused, forgotten = _unpack_counts(told["reused"], shape), _unpack_counts(told["forgotten"], shape)
            if rows:
                self._index.remember(rows)
                forgotten = np.maximum(forgotten - self._index.evidence().waiting, 0)  # these wait, each by itself
            self._cost_classes.recall(told["kinds"])
            self._index.learn(reused, forgotten)
        except Exception as error:  # noqa: BLE001  whole, but not as we write it: another version's
            _log.warning(
                "%s is of another make (%s); the policy begins anew", self._path or FILE_NAME, type(error).__name__
            )
            return "foreign"
        return "read"

    def used(self) -> None:
        """A request began: write it down, where it is time."""
        if self._path is None or self._os_env.clock.now() < self._due:
            return
        self._due = self._os_env.clock.now() + SAVE_INTERVAL_S
        with suppress(RuntimeError):  # the cache is being closed
            self._submit(self.save)

    def save(self) -> None:
        """Under its name only once it is whole and on the medium. Never raises."""
        if self._path is None:
            return
        try:
            with self._writing:
                self._write(self._path)
            result = "written"
        except OSError as error:
            result = "failed"
            _log.debug("%s was not written: %s", self._path, error)
        self._counters.add("policy_states", result=result)

    def _write(self, path: str) -> None:
        disk, temporary = self._os_env.disk, f"{path}.tmp"
        file = disk.open(temporary, create=True)
        try:
            parts = self._parts(waiting=True)
            size = sum(map(len, parts))
            self._due = max(self._due, self._os_env.clock.now() + SAVE_INTERVAL_S * (1 + size // (1 << 20)))
            file.truncate(0)
            file.write(0, [memoryview(part) for part in parts])
            file.sync()
        finally:
            file.close()
        disk.rename(temporary, path)
        disk.sync_directory(str(self._directory))

    def told(self, *, waiting: bool = True) -> bytes:
        """As the file has it. Not `waiting`: without what waits now, for a life that is told of it in another way."""
        return b"".join(self._parts(waiting=waiting))

    def _parts(self, *, waiting: bool) -> list[bytes]:
        """The rows are the last of them, and never copied: others wait while Python copies 16 MiB."""
        policy, evidence = self._index.policy, self._index.evidence()
        told: dict[str, Any] = {
            **dict(zip(("policy", "bounds", "gaps", "edges"), _policy_shape(policy), strict=True)),
            "reused": _pack_counts(evidence.reused),
            "forgotten": _pack_counts(evidence.forgotten + (evidence.waiting if waiting else 0)),
            "used": b64encode(b"".join(LAST_USE.pack(*row) for row in self._usage_log.told(MAX_NAMESPACES))).decode(),
            "kinds": [],
        }
        room = MAX_JSON_BYTES - len(json.dumps(told)) - 128
        told["kinds"] = self._cost_classes.told(room)
        learnt = json.dumps(told, separators=(",", ":")).encode() + b"\n"
        rows = self._index.kept(MAX_ROWS) if waiting else b""
        checksum = sha256(learnt)
        checksum.update(rows)
        return [FORMAT, checksum.hexdigest().encode() + b"\n", learnt, rows]


def _policy_shape(policy: Policy) -> list[Any]:
    return [policy.name, list(policy.bounds), list(policy.gaps), list(AGE_EDGES)]


def _pack_counts(counts: NDArray[np.int64]) -> str:
    return b64encode(compress(counts.astype("<i8").tobytes())).decode()


def _unpack_counts(packed: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """ValueError where they are not such counts."""
    size = 8 * prod(shape)
    data = decompressobj().decompress(b64decode(packed), size + 1)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes of counts: expected {size}")
    counts = np.frombuffer(data, "<i8").astype(np.int64).reshape(shape)
    if (counts < 0).any() or (counts > MAX_COUNT).any():
        raise ValueError("a count that nobody counted")
    return counts
