"""The client's part of a load or a store: the daemon lends slots, this copies between them and the engine's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache.cache.operation import BlockTransfer
from kvcache.cache.slot_copy import PagesMover, PlacedPart, wait_all
from kvcache.daemon.carrier import laid_out, room
from kvcache.daemon.lender import OUTCOMES
from kvcache.daemon.mapping import Lent, Mappings
from kvcache.daemon.protocol import STORE_S, ProtocolError, answer
from kvcache.daemon.wire import LateError, Wire
from kvcache.errors import KVCacheError, UnreachableError
from kvcache.log import logger, working_for
from kvcache.tier.tier import Outcome

if TYPE_CHECKING:
    from kvcache.daemon.client import RemoteCache
    from kvcache.daemon.remote import RemoteRequest

_log = logger("kvcache.daemon")


@dataclass(slots=True)
class Taker:
    cache: RemoteCache
    request: RemoteRequest
    op: str
    first: int
    end: int
    sizes: Sequence[int]  # payload bytes by group
    mover: PagesMover  # made on the engine's thread
    transfer: BlockTransfer
    deadline_s: float
    store: int = 0  # by which the daemon was told that it begins, where it is one
    spoilt: bool = False  # of what is to be sent over the socket, something could not be had
    good: int = field(init=False)  # of what comes over it: nothing from this block on goes into pages

    def __post_init__(self) -> None:
        self.good = self.end - self.first

    def run(self) -> None:
        """Never raises: an engine that waits for this must not fail for a fault of a cache."""
        outcome = Outcome.FAILED
        with working_for(self.request.work):
            try:
                self._run()
            except LateError as error:
                outcome = Outcome.LATE
                _log.debug("a %s was late: %s", self.op, error)
            except KVCacheError as error:
                _log.debug("a %s failed: %s", self.op, error)
            except Exception:  # noqa: BLE001  law: never in the way
                _log.exception("a %s failed", self.op)
            finally:
                self.over(outcome)

    def over(self, outcome: Outcome) -> None:
        """What has no outcome yet has this one; nobody waits for it any more."""
        self.transfer.settle_rest(0, outcome)
        self.request.moved(self.store)
        self.cache.moved()

    def _run(self) -> None:
        if self.transfer.cancelled:
            self.transfer.settle_rest(0, Outcome.CANCELLED)
            return
        with self.cache.asking() as link:
            number = self.request.number(link)
        timeout_s = STORE_S if self.op == "store" else self.deadline_s + self.cache.patience_s
        try:
            with link.mover(self.cache.patience_s) as wire:
                wire.send({"op": self.op, "request": number, "first": self.first, "end": self.end}, timeout_s=timeout_s)
                self._take(wire, link.mappings, timeout_s)
        except LateError:
            raise
        except (UnreachableError, ProtocolError) as error:
            self.cache.lose(link, error)
            raise

    def _take(self, wire: Wire, mappings: Mappings, timeout_s: float) -> None:
        while True:
            message, descriptors = wire.receive(timeout_s)
            if "sent" in message and self.op == "load":
                self._sent(wire, message, timeout_s)
                continue
            if "wanted" in message and self.op == "store":
                self._wanted(wire, message, timeout_s)
                continue
            if "lent" not in message:
                codes = answer(message)["outcomes"]
                break
            lent = self._lent(message, descriptors, mappings)
            taken = not self.transfer.cancelled and (
                self._fill(lent.parts) if self.op == "store" else self._empty(lent, message["blocks"])
            )
            wire.send({"taken": taken}, timeout_s=timeout_s)
        if self.transfer.cancelled:
            self.transfer.settle_rest(0, Outcome.CANCELLED)
        if len(codes) != self.end - self.first or max(codes, default=0) >= len(OUTCOMES):
            raise ProtocolError(f"{len(codes)} outcomes: expected {self.end - self.first}")
        for i, code in enumerate(codes):
            self.transfer.settle(i, OUTCOMES[code])

    def _sent(self, wire: Wire, message: dict[str, Any], timeout_s: float) -> None:
        """Take payloads off the socket and into pages; those of a bad block and behind it off the socket only."""
        rows, size = room(message["sent"], blocks=self.end - self.first, sizes=self.sizes)
        blocks = message.get("blocks")
        if not isinstance(blocks, int) or not 0 <= blocks <= self.end - self.first:
            raise ProtocolError(f"payloads of {blocks!r:.40} blocks: expected at most {self.end - self.first}")
        with self.cache.stagings.take(size) as staging:
            batch = laid_out(rows, staging)
            wire.receive_bytes(batch.payloads, timeout_s)
            if self.transfer.cancelled or batch.first >= self.good:
                return
            bad = batch.damaged()
            if bad is not None:
                self._spoil(bad, Outcome.DAMAGED)
            try:
                copies = self.mover.scatter([part for part in batch.parts if part[0] < self.good])
                self.transfer.begun(min(blocks, self.good), copies)
                wait_all(copies)
            except Exception:  # noqa: BLE001  what comes behind it must be taken off the socket all the same
                _log.exception("pages could not be filled")
                self._spoil(batch.first, Outcome.FAILED)
                return
        self.transfer.settle_run(batch.first, min(blocks, self.good), Outcome.DONE)

    def _spoil(self, block: int, outcome: Outcome) -> None:
        self.good = min(self.good, block)
        self.transfer.settle_rest(self.good, outcome)

    def _wanted(self, wire: Wire, message: dict[str, Any], timeout_s: float) -> None:
        """Send payloads out of pages, unless one could not be had before: then the daemon waits for no more."""
        rows, size = room(message["wanted"], blocks=self.end - self.first, sizes=self.sizes)
        if self.spoilt:
            return
        with self.cache.stagings.take(size) as staging:
            batch = laid_out(rows, staging)
            if self.transfer.cancelled or not self._fill(batch.parts):
                self.spoilt = True
                wire.send({"taken": False}, timeout_s=timeout_s)
                return
            wire.send({"taken": True, "sums": batch.packed_sums()}, timeout_s=timeout_s)
            wire.send_bytes(batch.payloads, timeout_s=timeout_s)

    def _lent(self, message: dict[str, Any], descriptors: list[int], mappings: Mappings) -> Lent:
        mappings.take_in(message.get("extents", ()), descriptors, message.get("gone", ()))
        if not isinstance(message["lent"], bytes) or not isinstance(message.get("blocks"), int):
            raise ProtocolError("slots that are lent in no form that is known")
        return mappings.lent(message["lent"], blocks=self.end - self.first, groups=len(self.sizes))

    def _fill(self, parts: Sequence[PlacedPart]) -> bool:
        try:
            self.mover.gather(parts)
        except Exception:  # noqa: BLE001  the daemon waits for an answer, whatever happens here
            _log.exception("pages could not be gathered")
            return False
        return True

    def _empty(self, lent: Lent, blocks: int) -> bool:
        """Copy, unless a slot was given out again before or meanwhile: then what was read is another's."""
        same = lent.unchanged()
        if same.all():
            try:
                copies = self.mover.scatter(lent.parts)
                self.transfer.begun(blocks, copies)
                wait_all(copies)
            except Exception:  # noqa: BLE001  the daemon waits for an answer, whatever happens here
                _log.exception("pages could not be filled")
                return False
            same = lent.unchanged()
        if not same.all():
            bad = min(block for (block, _, _), as_it_was in zip(lent.parts, same, strict=True) if not as_it_was)
            self.transfer.settle_rest(bad, Outcome.ABSENT)
            return False
        for i in range(lent.first, blocks):
            self.transfer.settle(i, Outcome.DONE)
        return True
