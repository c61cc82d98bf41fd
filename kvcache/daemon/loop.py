"""The event loop of a daemon's one thread."""

from __future__ import annotations

import asyncio


def new_loop() -> asyncio.AbstractEventLoop:
    """Of uvloop where that is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
