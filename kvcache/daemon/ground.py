"""What a daemon needs of the system, seen to before it begins: refusals name the number that is too small."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from kvcache.cache.factory import check as check_parts
from kvcache.daemon.hall import WAITING
from kvcache.daemon.limits import limits
from kvcache.daemon.tenant import Tenants
from kvcache.errors import ConfigError
from kvcache.log import logger
from kvcache.machine import memory
from kvcache.settings import Settings
from kvcache.settings.service import CONNECTIONS
from kvcache.settings.types import show_bytes
from kvcache.tier.host.arena import Region

OWN_DESCRIPTORS = 64
"""Files, sockets and threads' ends beside those that grow with the settings."""
GPU = Path("/dev/nvidiactl")
"""There where a driver of NVIDIA's runs."""

_log = logger("kvcache.daemon")


def descriptors(settings: Settings) -> int:
    """How many this process may come to have open: an extent, a connection and the process behind it, connections that
    did not say yet whose they are, a segment, and who looks at it over HTTP."""
    host, nvme = settings.host, settings.nvme
    segments = -(-nvme.capacity_bytes // nvme.segment_bytes) if nvme.enabled else 0
    seen = CONNECTIONS if settings.http.enabled else 0
    extents = -(-host.capacity_bytes // host.extent_bytes)
    return extents + 2 * settings.daemon.connections + WAITING + segments + seen + OWN_DESCRIPTORS


def locked(settings: Settings) -> str:
    """What is wrong with the locked-memory limit, if anything. Engines with a GPU pin the arena, each for itself, and
    mostly under the limit that the daemon has too; the daemon itself locks nothing, so that it serves all the same."""
    needed, (_, hard) = settings.host.capacity_bytes, resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not GPU.exists() or hard == resource.RLIM_INFINITY or hard >= needed:
        return ""
    return (
        f"{show_bytes(hard)} of memory may be locked (ulimit -Hl): an engine with a GPU pins {show_bytes(needed)} "
        "(host.capacity_bytes), and copies at a part of the speed where it may not; LimitMEMLOCK=infinity for a "
        "service, --ulimit memlock=-1 for a container, or give less host.capacity_bytes"
    )


def check(settings: Settings, tenants: Tenants | None) -> None:
    """ConfigError for settings that a daemon would refuse once it opens its cache: asked before another daemon is told
    to end for it. An arena that nobody gave a size gets that of the one before, which may be all that there is."""
    if not settings.given("host.capacity_bytes"):
        host = settings.host.model_copy(update={"capacity_bytes": memory().allowed_bytes})
        settings = settings.model_copy(update={"host": host})
    check_parts(settings)
    limits(settings, tenants)


def prepare(settings: Settings) -> None:
    """Raise this process's limits as far as needed and allowed; ConfigError where that is not enough."""
    if not hasattr(os, "memfd_create"):
        raise ConfigError("a daemon shares files in memory (memfd), which only Linux has; open the cache in the engine")
    try:
        Region(1 << 12, shared=True)
    except OSError as error:
        raise ConfigError(
            f"no file in memory can be made ({error.strerror}): memfd_create, ftruncate and sealing must be allowed"
        ) from None
    if refused := locked(settings):
        _log.warning("%s", refused)
    needed, (soft, hard) = descriptors(settings), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{hard} descriptors (ulimit -Hn): {needed} are needed, one an extent of "
            f"{show_bytes(settings.host.extent_bytes)}, two a connection (daemon.connections), one an NVMe segment; "
            "raise the limit, or make extents and segments larger"
        )
    most = (
        max(soft, needed) if hard == resource.RLIM_INFINITY else hard
    )  # of a daemon before, more may come than is ours
    if soft != resource.RLIM_INFINITY and most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
