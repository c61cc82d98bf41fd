"""The caches that run: can an operator reach them, and are they in their engines' path?"""

from __future__ import annotations

from collections.abc import Iterator

from kvcache.cli.doctor.finding import Finding, ok, warn
from kvcache.daemon.client.control import find
from kvcache.daemon.discovery import prepare
from kvcache.errors import StoreError


def checks() -> Iterator[Finding]:
    try:
        yield ok("control socket", f"in {prepare()}")
    except StoreError as error:
        yield warn("control socket", str(error), "caches run without; `kvcache ps` and `bypass` do not reach them")
    running = list(find())
    yield ok("running caches", ", ".join(found.address for found in running) or "none")
    for found in running:
        if found.fault:
            yield warn(found.address, f"does not answer: {found.fault}", "its process hangs, or is of another version")
        elif found.info["bypass"] != "off":
            state = f"bypassed: {found.info['bypass']}"
            yield warn(found.address, state, f"`kvcache bypass off --address {found.address}` puts it back")
