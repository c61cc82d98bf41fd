"""The tree of settings: names, types, bounds, defaults, and what each is for.

What nobody gives is a default, of which some are made from the machine. `kvcache.config.load` makes the tree from a
file, variables and keywords; `docs/configuration.md` is written from this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from kvcache.errors import ConfigError
from kvcache.machine import cache_directory, disk_free_bytes, disk_held_bytes, in_memory, memory
from kvcache.share import local_ranks, taken_bytes
from kvcache.values import (
    PAGE_BYTES,
    Bytes,
    Count,
    GiB,
    KiB,
    MiB,
    Pages,
    Seconds,
    Section,
    as_directories,
    as_directory,
    as_number,
    as_size,
    made,
    no_larger,
)

PREFIX = "KVCACHE_"

Write = Literal["write_through", "write_back", "on_second_use", "off"]


def _host_capacity() -> int:
    now = memory()
    whole = now.allowed_bytes // 4
    mine = min(whole // local_ranks(), whole - taken_bytes(), now.free_bytes // 2)
    return max(16 * MiB, mine // MiB * MiB)


def _write() -> Any:
    return Field(
        default="write_through",
        description="When a block goes there: `write_through`, soon after it is stored; `write_back`, when it leaves "
        "host memory; `on_second_use`, when it is used again; `off`, never: what is there is read.",
    )


def _piece(data: dict[str, Any]) -> int:
    """256 MiB, or an eighth of a small tier, in whole pages."""
    eighth = int(data.get("capacity_bytes", 0)) // 8 // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(256 * MiB, eighth))


class Host(Section):
    """Host memory: the arena."""

    capacity_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=64 * KiB, le=1 << 60)] = Field(
        default_factory=_host_capacity,
        description="Memory of the arena.",
        json_schema_extra=made(
            "a quarter of what the machine or cgroup allows, shared by all caches of this user and by all ranks of a "
            "node, or half of what is free if that is less"
        ),
    )
    extent_bytes: Pages = Field(
        default_factory=_piece,
        description="Size of an extent: a piece of the arena with one slot size and one tenant. A multiple of 4,096.",
        json_schema_extra=made("256 MiB, or an eighth of the capacity if that is less"),
    )
    verify_arena: bool = Field(
        default=False, description="Compare payload checksums on reads from the arena too, not only below it."
    )

    @model_validator(mode="after")
    def _fits(self) -> Host:
        no_larger("host.extent_bytes", self.extent_bytes, "host.capacity_bytes", self.capacity_bytes)
        return self


def _nvme_path() -> Path:
    return cache_directory() / "nvme"


def _nvme_capacity(data: dict[str, Any]) -> int:
    if not data.get("enabled", True) or "path" not in data:
        return 0
    directories = data.get("paths") or (data["path"],)
    held = [disk_held_bytes(path) for path in directories]
    fifths = [(disk_free_bytes(path) + bytes_) // 5 for path, bytes_ in zip(directories, held, strict=True)]
    return len(directories) * (max(256 * MiB, *held, min(fifths)) // MiB * MiB)


class Nvme(Section):
    """A local drive: segment files and a journal, there again after a restart."""

    enabled: bool = Field(default=True, description="Whether there is this tier.")
    path: Annotated[Path, BeforeValidator(as_directory)] = Field(
        default_factory=_nvme_path,
        description="Directory of the tier, for this process alone. Made where it is missing.",
        json_schema_extra=made("`nvme` in $KVCACHE_DIR, else `kvcache/nvme` in the user's cache directory"),
    )
    paths: Annotated[tuple[Path, ...], BeforeValidator(as_directories)] = Field(
        default=(),
        description="Directories on several drives, one on each, instead of `path`: blocks are spread by key, "
        "and each takes an equal part of the capacity. A list, or one text with colons between.",
    )
    capacity_bytes: Bytes = Field(
        default_factory=_nvme_capacity,
        description="Disk room that the tier may take, journal included. "
        "To be given where the directory lies in memory (tmpfs), which is refused otherwise.",
        json_schema_extra=made("a fifth of what its file system has free without it, at least 256 MiB"),
    )
    segment_bytes: Pages = Field(
        default_factory=_piece,
        description="Size of a segment file, which has one slot size. A multiple of 4,096.",
        json_schema_extra=made("256 MiB, or an eighth of the capacity if that is less"),
    )
    durability: Literal["block", "batch", "none"] = Field(
        default="batch",
        description="When a block is forced to the medium: `block`, before it can be found; "
        "`batch`, with others soon after; `none`, when the system likes.",
    )
    codec: Literal["raw", "zstd", "fp8", "int8"] = Field(
        default="raw",
        description="How records are kept: `raw`, as they are; `zstd`, smaller and exact (`kvcache-tiers[zstd]`); "
        "`fp8`, `int8`, half or a quarter of the size, with the loss that docs/codecs.md bounds.",
    )
    write: Write = _write()
    threads: Count = Field(default=4, description="Threads that read and write.")
    queue_bytes: Bytes = Field(
        default=256 * MiB, description="Bytes waiting to be written, beyond which writes are dropped and counted."
    )
    free_floor_bytes: Bytes = Field(
        default=GiB, description="Room on the file system that the tier leaves to others, whatever its capacity."
    )

    @model_validator(mode="after")
    def _fits(self) -> Nvme:
        if not self.enabled:
            return self
        memory = [path for path in self.directories if in_memory(path)]
        if "capacity_bytes" not in self.model_fields_set and memory:
            raise ConfigError(
                f"nvme.path = {str(memory[0])!r}: lies in memory (tmpfs), not on a disk; give another path, "
                "or nvme.capacity_bytes as well if that is what you want, or nvme.enabled = false"
            )
        no_larger("nvme.segment_bytes", self.segment_bytes, "nvme.capacity_bytes", self.capacity_bytes)
        return self

    @property
    def directories(self) -> tuple[Path, ...]:
        return self.paths or (self.path,)


class Redis(Section):
    """A Redis or Valkey server that a fleet shares. One that is away is a miss until it is there."""

    enabled: bool = Field(default=False, description="Whether there is this tier.")
    mode: Literal["standalone", "sentinel", "cluster"] = Field(
        default="standalone",
        description="What `url` names: a server; sentinels, which know which server is the master; or some servers of "
        "a Redis Cluster.",
    )
    url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="`redis://HOST:PORT/DB`, `rediss://...` (TLS) or `unix:///PATH?db=0`; several hosts with commas "
        "between them. The password comes from `redis.password_file` or the variable KVCACHE_REDIS_PASSWORD (that of "
        "sentinels from KVCACHE_REDIS_SENTINEL_PASSWORD), never from here.",
    )
    master: str = Field(default="mymaster", description="What sentinels call the master.")
    username: str = Field(default="", description="The user (ACL) to come in as; nothing for the default one.")
    password_file: str = Field(
        default="", description="A file that holds the password; read for each connection, so that it can be changed."
    )
    tls_ca_file: str = Field(
        default="", description="Whom to trust over TLS; nothing for those whom the system trusts."
    )
    tls_cert_file: str = Field(default="", description="Our own certificate, where the server wants one.")
    tls_key_file: str = Field(default="", description="The key of our own certificate.")
    prefix: str = Field(default="kvcache", description="Begins every key: what has another one stands apart.")
    part_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=256 * KiB, le=16 * MiB, multiple_of=256 * KiB)] = (
        Field(default=4 * MiB, description="A longer payload is split into parts of this size. A multiple of 256 KiB.")
    )
    expire_s: Annotated[float, BeforeValidator(as_number), Field(ge=0, allow_inf_nan=False)] = Field(
        default=0, description="After so long a record goes; 0: when the server evicts it."
    )
    part_expire_s: Annotated[float, BeforeValidator(as_number), Field(ge=1, allow_inf_nan=False)] = Field(
        default=86_400, description="After so long the parts of a long record go in any case."
    )
    write: Write = _write()
    connections: Count = Field(default=4, description="Connections to each server, with a thread for each.")
    queue_bytes: Bytes = Field(
        default=256 * MiB, description="Bytes waiting to be written, beyond which writes are dropped and counted."
    )
    signing_key_file: str = Field(
        default="",
        description="A file with a key a line, 64 or more hexadecimal digits: what is written is signed with the first "
        "one, and what none of them signed is a miss.",
    )
    timeout_s: Seconds = Field(default=5.0, description="What any call to the server may take at most.")

    @model_validator(mode="after")
    def _keeps_secrets(self) -> Redis:
        if "@" in self.url:
            raise ConfigError(
                "redis.url: holds a user or a password; give redis.username, and the password in "
                "redis.password_file or the variable KVCACHE_REDIS_PASSWORD"
            )
        return self


class Evict(Section):
    """Who leaves a full tier."""

    policy: Literal["hazard", "lru"] = Field(default="hazard", description="`hazard`: expected use. `lru`: last use.")


class Flow(Section):
    """What moves between tiers, and when."""

    queue_blocks: Count = Field(default=4096, description="Blocks on their way down, beyond which more are dropped.")
    threads: Count = Field(default=2, description="Threads that move blocks between tiers.")
    deadline_s: Seconds = Field(
        default=2.0, description="After so long a block that has not come is a miss, unless the request says otherwise."
    )
    ask_deadline_s: Seconds = Field(
        default=0.5, description="After so long a shared tier that has not said what it has of a prompt has nothing."
    )
    known_blocks: Count = Field(
        default=1 << 18, description="Blocks of a shared tier to remember, at about 100 bytes of memory each."
    )


class Plan(Section):
    """Whether what was found is loaded, or computed again because that is sooner."""

    enabled: bool = Field(
        default=True,
        description="Load only what comes sooner than the engine would compute it, by rates measured here. Without "
        "effect until the engine tells what computing takes.",
    )


class Explain(Section):
    """What is remembered of the prompts that were asked for, so that a person can ask why one was not found."""

    memory_bytes: Bytes = Field(
        default=32 * MiB,
        description="Memory for their token ids and signatures, the newest of them. 0: none are kept, and it cannot be "
        "said where two prompts part.",
    )


class Canary(Section):
    """Loaded blocks that the engine computes again, where it offers to, to compare them with what was loaded."""

    one_in: Annotated[int, BeforeValidator(as_number), Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="One loaded block in so many is computed again, which costs what computing costs. 0: none.",
    )


class Daemon(Section):
    """A cache that serves other processes of this host: `kvcache daemon`."""

    socket: str = Field(
        default="",
        description="Path of the Unix socket that it listens on.",
        json_schema_extra=made("`kvcache.socket` in the user's runtime directory"),
    )
    mode: Annotated[str, Field(pattern="^0?[0-7]{3}$")] = Field(
        default="600",
        description="Who may connect: the socket's mode, in octal. Others than the owner need group or other.",
    )
    connections: Count = Field(default=512, description="Open at a time, at most; an engine's process has up to five.")
    lease_s: Seconds = Field(
        default=10.0, description="How long a client may take to copy what it was lent before it is let go."
    )
    drain_s: Seconds = Field(default=5.0, description="How long transfers under way may take to end at SIGTERM.")


class Trace(Section):
    """What is written down of the requests: times and the names of blocks, nothing of what is in them."""

    path: str = Field(
        default="",
        description="A file to append to, which `kvcache replay` reads. Without one nothing is written.",
    )
    file_bytes: Bytes = Field(
        default=64 * MiB, description="A file of this size becomes `PATH.1`, in the place of the one before."
    )


class Control(Section):
    """The socket by which `kvcache ps`, `stats`, `check` and `bypass` reach this cache; for its own user only."""

    enabled: bool = Field(default=True, description="Whether the cache listens, in the user's runtime directory.")


class Log(Section):
    """What the package says through Python's `logging`, under the name `kvcache`."""

    format: Literal["none", "text", "json"] = Field(
        default="none", description="`none` leaves it to the program around; `text`, `json`: lines on standard error."
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="warning", description="The least that is said."
    )


class Settings(Section):
    """All of them. Made by `load`; frozen."""

    block_tokens: Annotated[Count, Field(le=65535)] = Field(
        default=16, description="Tokens in a block, for engines that take it from here; a layout brings its own."
    )
    host: Host = Field(default_factory=Host)
    nvme: Nvme = Field(default_factory=Nvme)
    redis: Redis = Field(default_factory=Redis)
    evict: Evict = Field(default_factory=Evict)
    flow: Flow = Field(default_factory=Flow)
    plan: Plan = Field(default_factory=Plan)
    explain: Explain = Field(default_factory=Explain)
    canary: Canary = Field(default_factory=Canary)
    daemon: Daemon = Field(default_factory=Daemon)
    trace: Trace = Field(default_factory=Trace)
    control: Control = Field(default_factory=Control)
    log: Log = Field(default_factory=Log)
    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def origin(self, name: str) -> str:
        """Where the value of `host.capacity_bytes`, say, came from."""
        return self._origins.get(name, TABLE[name].origin)

    def value(self, name: str) -> Any:
        section, _, last = name.rpartition(".")
        return getattr(getattr(self, section) if section else self, last)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of settings."""

    name: str
    field: FieldInfo

    @property
    def made(self) -> str:
        extra = self.field.json_schema_extra
        return str(extra.get("made", "")) if isinstance(extra, dict) else ""

    @property
    def origin(self) -> str:
        return f"default: {self.made}" if self.made else "default"

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper().replace(".", "__")


def _rows(section: type[BaseModel], above: str = "") -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{above}{name}.")
        else:
            yield Setting(above + name, field)


TABLE: Mapping[str, Setting] = {row.name: row for row in _rows(Settings)}
SECTIONS = frozenset(name.split(".")[0] for name in TABLE if "." in name)
