"""How long what is written stays in a server: as the settings say, and never beyond the end that a record has."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.block.record import Header, expires_ms
from kvcache.os_env import Clock

_AFTER_MS = 1000  # a part outlives the header that needs it


@dataclass(frozen=True, slots=True)
class Life:
    """In milliseconds; 0 for no end."""

    record_ms: int
    part_ms: int
    clock: Clock

    def of_record(self, header: Header) -> int:
        """Of one in a single value."""
        return self._until_end(header, self.record_ms)

    def of_head(self, header: Header) -> int:
        """Of the first value of a long one: the others outlive it."""
        return self._until_end(header, min(self.record_ms or self.part_ms, self.part_ms * 9 // 10))

    def of_part(self, header: Header) -> int:
        return min(self.part_ms, self._until_end(header, self.part_ms) + _AFTER_MS)

    def _until_end(self, header: Header, most_ms: int) -> int:
        end = expires_ms(header.fields)
        if not end:
            return most_ms
        left = max(1, end - int(self.clock.wall() * 1000))
        return min(most_ms or left, left)
