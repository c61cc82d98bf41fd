"""A drive so small that it is soon full: a file system in a file, mounted for as long as it is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TOOLS = ("mkfs.ext4", "mount", "umount")


@contextmanager
def small_drive(beside: Path, size_bytes: int) -> Iterator[tuple[Path | None, str]]:
    """The directory of an empty ext4 of this size, whose image lies in `beside`; None, and the reason, where this
    machine does not let us."""
    reason = _why_not()
    if reason:
        yield None, reason
        return
    image, place = beside / "drive.img", beside / "drive"
    place.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(size_bytes)
        make, mount = ["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], ["mount", "-o", "loop", str(image), str(place)]
        for command in (make, mount):
            made = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  our own words
            if made.returncode:
                yield None, f"{command[0]}: {(made.stderr or made.stdout).strip().splitlines()[-1]}"
                return
        try:
            yield place, f"an ext4 of {size_bytes >> 20} MiB"
        finally:
            subprocess.run(["umount", place], capture_output=True, check=True)  # noqa: S603, S607  a tool of the system
    finally:
        image.unlink(missing_ok=True)
        place.rmdir()


def _why_not() -> str:
    """Why no file system can be mounted here; nothing where it may be tried."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "only root may mount"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else ""
