"""What is remembered of the blocks that left last: the plain twin of `csrc/host/ghosts`, which keeps a hash in place of
a name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from kvcache.hierarchy.node import Name


class Use(NamedTuple):
    stamp: int
    uses: int


class PlainGhosts:
    def __init__(self) -> None:
        self._left: dict[Name, tuple[int, Use]] = {}
        self._departures: deque[Name] = deque()
        self._departed = 0

    def __len__(self) -> int:
        return len(self._left)

    def add(self, name: Name, use: Use) -> None:
        """The block left; it is not here."""
        self._left[name] = self._departed, use
        self._departures.append(name)
        self._departed += 1

    def find(self, name: Name) -> Use | None:
        found = self._left.get(name)
        return None if found is None else found[1]

    def take(self, name: Name) -> Use | None:
        """As `find`, and then it is here no longer."""
        found = self._left.pop(name, None)
        return None if found is None else found[1]

    def trim(self, departures: int) -> Iterator[Use]:
        """Forget the first to leave until at most so many departures are remembered, those that came back among
        them; each that did not."""
        while len(self._departures) > departures:
            number = self._departed - len(self._departures)
            name = self._departures.popleft()
            found = self._left.get(name)
            if found is not None and found[0] == number:
                del self._left[name]
                yield found[1]
