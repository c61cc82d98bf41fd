"""A disk in memory that does by a seed what disks do: tears, reorders, forgets, flips, fails, lies, fills up.

What is written lies in a cache until a sync; a power cut keeps of it any set of sectors, and of the changes to the
directory any number from the oldest on. A killed process loses nothing that was written. A sync that fails may drop
what it could not write, and the next one says yes. `crash_at` counts the calls that change something: that call is
done in part, and from then on every call raises `Crash`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence

from kvcache.os_env import File

SECTOR = 512


class Crash(BaseException):
    """The process is dead. No handler of the code under test may take it for an error."""


class Inode:
    def __init__(self) -> None:
        self.now = bytearray()
        self.safe = bytearray()  # what the medium has
        self.pending: list[tuple[int, bytes]] = []  # writes that it may have, in order

    def write(self, offset: int, data: bytes) -> None:
        _put(self.now, offset, data)
        self.pending.append((offset, data))

    def sync(self) -> None:
        for offset, data in self.pending:
            _put(self.safe, offset, data)
        self.resize(len(self.now))
        self.pending.clear()

    def resize(self, size_bytes: int) -> None:
        """The medium has the file's size."""
        del self.safe[size_bytes:]
        self.safe.extend(bytes(size_bytes - len(self.safe)))

    def fail(self, chance: random.Random) -> None:
        """A sync failed. Each sector is on the medium, or waits for another sync, or is forgotten by all but reads."""
        left = []
        for offset, data in self._sectors():
            fate = chance.random()
            if fate < 0.3:
                _put(self.safe, offset, data)
            elif fate < 0.4:
                left.append((offset, data))
        self.pending = left

    def cut(self, chance: random.Random) -> None:
        """The power goes: some of the pending sectors were written, in any order."""
        kept = chance.choice([0.0, 0.3, 0.7, 1.0])
        for offset, data in self._sectors():
            if chance.random() < kept:
                _put(self.safe, offset, data)
        if chance.random() < 0.5 and len(self.safe) < len(self.now):  # the new size, without the bytes
            self.resize(len(self.now))
        self.now = bytearray(self.safe)
        self.pending.clear()

    def _sectors(self) -> list[tuple[int, bytes]]:
        return [
            (offset + at, data[at : at + SECTOR]) for offset, data in self.pending for at in range(0, len(data), SECTOR)
        ]


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


class SimFile:
    direct = True

    def __init__(self, disk: SimDisk, inode: Inode) -> None:
        self._disk, self._inode = disk, inode

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        self._disk.ask("read")
        done = 0
        if self._disk.short and self._disk.chance.random() < self._disk.short:
            buffers = [buffer[: len(buffer) // 2] for buffer in buffers[:1]]
        for buffer in buffers:
            part = self._inode.now[offset + done : offset + done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
            if len(part) < len(buffer):
                break
        return done

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        data = b"".join(buffers)
        grows = max(0, offset + len(data) - len(self._inode.now))
        self._disk.ask("write", grows)
        cut = self._disk.dies(len(data) // SECTOR + 1)
        if cut is not None:
            self._inode.write(offset, data[: cut * SECTOR])
            raise Crash
        self._inode.write(offset, data)
        self._disk.pause()

    def size(self) -> int:
        self._disk.ask("read")
        return len(self._inode.now)

    def truncate(self, size_bytes: int) -> None:
        self._disk.ask("write")
        self._disk.step()
        del self._inode.now[size_bytes:]
        self._inode.pending = [(at, data[: size_bytes - at]) for at, data in self._inode.pending if at < size_bytes]

    def allocate(self, size_bytes: int) -> None:
        self._disk.ask("write", max(0, size_bytes - len(self._inode.now)))
        self._disk.step()
        self._inode.now.extend(bytes(max(0, size_bytes - len(self._inode.now))))

    def sync(self) -> None:
        try:
            self._disk.ask("sync")
        except OSError:
            self._inode.fail(self._disk.chance)
            raise
        self._disk.step()
        if not self._disk.lies:
            self._inode.sync()
        self._disk.pause()

    def close(self) -> None:
        pass


class SimDisk:
    def __init__(self, seed: int, *, capacity_bytes: int = 1 << 30) -> None:
        self.chance = random.Random(seed)
        self.capacity_bytes = capacity_bytes
        self.crash_at: int | None = None
        self.lies = False  # syncs say yes and do nothing
        self.fails: dict[str, tuple[float, int]] = {}  # by "read", "write", "sync": how often, with which errno
        self.short = 0.0  # how often a read returns less than there is
        self.pause: Callable[[], None] = lambda: None  # called where others may run
        self.steps = 0
        self.dead = False
        self._now: dict[str, Inode] = {}
        self._safe: dict[str, Inode] = {}
        self._changes: list[Callable[[dict[str, Inode]], None]] = []  # to the directory, since it was synced
        self._locks: dict[str, str] = {}

    # what a test does to it

    def restart(self, *, power_cut: bool) -> None:
        """The process is gone; with the power cut, also what the cache held."""
        self.dead, self.crash_at, self.fails, self.short = False, None, {}, 0.0
        self._locks.clear()
        if power_cut:
            for change in self._changes[: self.chance.randint(0, len(self._changes))]:
                change(self._safe)
            for inode in {id(inode): inode for inode in [*self._safe.values(), *self._now.values()]}.values():
                inode.cut(self.chance)
            self._now = dict(self._safe)
            self._changes.clear()

    def wipe(self) -> None:
        """An operator deletes everything."""
        self._now.clear()
        self._safe.clear()
        self._changes.clear()
        self._locks.clear()

    def data(self, path: str) -> bytearray:
        """The bytes of a file, to be damaged."""
        return self._now[path].now

    def flip(self, noun: str) -> bool:
        """Change a bit in one of the files called so; False where there is none with any."""
        files = [inode for name, inode in sorted(self._now.items()) if f"{noun}-" in name and inode.now]
        if not files:
            return False
        inode = self.chance.choice(files)
        at, bit = self.chance.randrange(len(inode.now)), 1 << self.chance.randrange(8)
        inode.now[at] ^= bit
        if at < len(inode.safe):
            inode.safe[at] ^= bit
        return True

    def used_bytes(self) -> int:
        return sum(len(inode.now) for inode in self._now.values())

    # what happens at each call

    def ask(self, kind: str, grows: int = 0) -> None:
        self.pause()
        if self.dead:
            raise Crash
        often, number = self.fails.get(kind, (0.0, 0))
        if self.chance.random() < often:
            raise OSError(number, os.strerror(number))
        if grows and self.used_bytes() + grows > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def dies(self, parts: int) -> int | None:
        """How many parts of a call are done where it is the last one, else None."""
        self.steps += 1
        if self.steps == self.crash_at:
            self.dead = True
            return self.chance.randint(0, parts)
        return None

    def step(self) -> None:
        if self.dies(1) is not None:
            raise Crash

    def _change(self, change: Callable[[dict[str, Inode]], None]) -> None:
        self.step()
        change(self._now)
        self._changes.append(change)

    # Disk

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        self.ask("write" if create else "read")
        if path not in self._now:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            inode = Inode()
            self._change(lambda names: names.__setitem__(path, inode))
        file = SimFile(self, self._now[path])
        file.direct = direct
        return file

    def lock(self, path: str, note: str) -> Callable[[], None] | str:
        self.ask("write")
        if path in self._locks:
            return self._locks[path]
        self._locks[path] = note
        self._now.setdefault(path, Inode())
        return lambda: self._locks.pop(path, None)  # type: ignore[func-returns-value]

    def make_directory(self, path: str) -> None:
        self.ask("write")

    def list(self, path: str) -> list[str]:
        self.ask("read")
        return sorted(os.path.basename(name) for name in self._now)

    def rename(self, source: str, target: str) -> None:
        self.ask("write")
        self._change(lambda names: names.__setitem__(target, names.pop(source)) if source in names else None)

    def remove(self, path: str) -> None:
        self.ask("write")
        if path not in self._now:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._change(lambda names: names.pop(path, None))  # type: ignore[arg-type,return-value]

    def sync_directory(self, path: str) -> None:
        self.ask("sync")
        self.step()
        if not self.lies:
            self._safe = dict(self._now)
            self._changes.clear()

    def free_bytes(self, path: str) -> int:
        self.ask("read")
        return max(0, self.capacity_bytes - self.used_bytes())
