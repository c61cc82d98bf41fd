"""Settings of the tiers, a section for each, and of payload encryption."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvcache.errors import ConfigError
from kvcache.host_memory_budget import claimed_bytes, local_ranks
from kvcache.machine import cache_directory, disk_free_bytes, disk_used_bytes, is_memory_backed, memory
from kvcache.settings.types import (
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
    check_at_most,
    computed_default,
)

WriteMode = Literal["write_through", "write_back", "on_second_use", "off"]
"""When a block is intended for a tier: at store time, at eviction from host memory, at the next use, never."""


def _host_capacity() -> int:
    now = memory()
    whole = now.allowed_bytes // 4
    share = min(whole // local_ranks(), whole - claimed_bytes(), now.free_bytes // 2)
    return max(16 * MiB, share // MiB * MiB)


def write_mode() -> Any:
    return Field(
        default="write_through",
        description="When a block goes there: `write_through`, soon after it is stored; `write_back`, when it leaves "
        "host memory; `on_second_use`, when it is used again; `off`, never: what is there is read.",
    )


def _default_slab_bytes(data: dict[str, Any]) -> int:
    """Return 256 MiB, or an eighth of a small tier, in whole memory pages."""
    eighth = int(data.get("capacity_bytes", 0)) // 8 // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(256 * MiB, eighth))


class HostSettings(Section):
    """Host memory: the arena."""

    capacity_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=64 * KiB, le=1 << 60)] = Field(
        default_factory=_host_capacity,
        description="Memory of the arena.",
        json_schema_extra=computed_default(
            "a quarter of what the machine or cgroup allows, shared by all caches of this user and by all ranks of a "
            "node, or half of what is free if that is less"
        ),
    )
    slab_bytes: Pages = Field(
        default_factory=_default_slab_bytes,
        description="Size of a slab: a region of the arena with one slot size and one tenant. A multiple of 4,096.",
        json_schema_extra=computed_default("256 MiB, or an eighth of the capacity if that is less"),
    )
    verify_arena: bool = Field(
        default=False, description="Compare payload checksums on reads from the arena too, not only below it."
    )

    @model_validator(mode="after")
    def _fits(self) -> HostSettings:
        check_at_most("host.slab_bytes", self.slab_bytes, "host.capacity_bytes", self.capacity_bytes)
        return self


def _nvme_path() -> Path:
    return cache_directory() / "nvme"


def _nvme_capacity(data: dict[str, Any]) -> int:
    if not data.get("enabled", True) or "path" not in data:
        return 0
    directories = data.get("paths") or (data["path"],)
    held = [disk_used_bytes(path) for path in directories]
    fifths = [(disk_free_bytes(path) + bytes_) // 5 for path, bytes_ in zip(directories, held, strict=True)]
    return len(directories) * (max(256 * MiB, *held, min(fifths)) // MiB * MiB)


class NvmeSettings(Section):
    """A local drive: segment files and a journal, there again after a restart."""

    enabled: bool = Field(default=True, description="Whether there is this tier.")
    path: Annotated[Path, BeforeValidator(as_directory)] = Field(
        default_factory=_nvme_path,
        description="Directory of the tier, for this process alone. Made where it is missing.",
        json_schema_extra=computed_default("`nvme` in $KVCACHE_DIR, else `kvcache/nvme` in the user's cache directory"),
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
        json_schema_extra=computed_default("a fifth of what its file system has free without it, at least 256 MiB"),
    )
    segment_bytes: Pages = Field(
        default_factory=_default_slab_bytes,
        description="Size of a segment file, which has one slot size. A multiple of 4,096.",
        json_schema_extra=computed_default("256 MiB, or an eighth of the capacity if that is less"),
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
    write: WriteMode = write_mode()
    threads: Count = Field(default=4, description="Threads that read and write.")
    queue_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1, le=1 << 60)] = Field(
        default=256 * MiB, description="Bytes waiting to be written, beyond which writes are dropped and counted."
    )
    min_free_bytes: Bytes = Field(
        default=GiB, description="Room on the file system that the tier leaves to others, whatever its capacity."
    )

    @model_validator(mode="after")
    def _fits(self) -> NvmeSettings:
        if not self.enabled:
            return self
        memory = [path for path in self.directories if is_memory_backed(path)]
        if "capacity_bytes" not in self.model_fields_set and memory:
            raise ConfigError(
                f"nvme.path = {str(memory[0])!r}: lies in memory (tmpfs), not on a disk; give another path, "
                "or nvme.capacity_bytes as well if that is what you want, or nvme.enabled = false"
            )
        check_at_most("nvme.segment_bytes", self.segment_bytes, "nvme.capacity_bytes", self.capacity_bytes)
        return self

    @property
    def directories(self) -> tuple[Path, ...]:
        return self.paths or (self.path,)


class RedisSettings(Section):
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
        "between them. The password comes from `redis.password_file` or the variable KVCACHE_REDIS_PASSWORD, never "
        "from here.",
    )
    master: str = Field(default="mymaster", description="What sentinels call the master.")
    username: str = Field(default="", description="The user (ACL) to come in as; nothing for the default one.")
    password_file: str = Field(
        default="", description="A file that holds the password; read for each connection, so that it can be changed."
    )
    sentinel_password_file: str = Field(
        default="",
        description="The same for the sentinels, who are no server's users; without it, the variable "
        "KVCACHE_REDIS_SENTINEL_PASSWORD, or none.",
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
    write: WriteMode = write_mode()
    connections: Count = Field(default=4, description="Connections to each server, with a thread for each.")
    queue_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1, le=1 << 60)] = Field(
        default=256 * MiB, description="Bytes waiting to be written, beyond which writes are dropped and counted."
    )
    signing_key_file: str = Field(
        default="",
        description="A file with a key a line, 64 or more hexadecimal digits: what is written is signed with the first "
        "one, and what none of them signed is a miss.",
    )
    timeout_s: Seconds = Field(default=5.0, description="What any call to the server may take at most.")

    @model_validator(mode="after")
    def _keeps_secrets(self) -> RedisSettings:
        if "@" in self.url:
            raise ConfigError(
                "redis.url: holds a user or a password; give redis.username, and the password in "
                "redis.password_file or the variable KVCACHE_REDIS_PASSWORD"
            )
        return self


# The object store, and encryption of payloads in the tiers after host memory


class ObjectSettings(Section):
    """An object store that a fleet shares, behind Redis where there is one (`kvcache-tiers[object]`)."""

    enabled: bool = Field(default=False, description="Whether there is this tier.")
    url: str = Field(
        default="",
        description="`s3://BUCKET`, `gs://BUCKET`, `az://ACCOUNT/CONTAINER`, or `file:///DIRECTORY`, local or NFS. "
        "Credentials come from the environment, as the store's own tools have them, or from "
        "`object.credentials_file`, never from here.",
    )
    endpoint: str = Field(
        default="",
        description="Where the store is, if not at the address of its kind: `http://HOST:PORT` or `https://...` of "
        "another server that speaks S3, or of an emulator.",
    )
    region: str = Field(default="", description="The region of the bucket, where the environment does not say it.")
    credentials_file: str = Field(
        default="",
        description="A file with `name = value` a line, given to the store as they are: `access_key_id`, "
        "`secret_access_key`, ...",
    )
    prefix: str = Field(default="kvcache", description="Begins every object's name: what has another one stands apart.")
    pack_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1 * MiB, le=1 << 30)] = Field(
        default=16 * MiB, description="Records of a chain that are written together lie in one object, up to this size."
    )
    refresh_s: Annotated[float, BeforeValidator(as_number), Field(ge=0, allow_inf_nan=False)] = Field(
        default=30.0,
        description="How often the store is asked to list what is there. What goes on where a known prefix ends is "
        "found between as well.",
    )
    write: WriteMode = write_mode()
    connections: Count = Field(default=8, description="Threads that read and write.")
    queue_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1, le=1 << 60)] = Field(
        default=256 * MiB, description="Bytes waiting to be written, beyond which writes are dropped and counted."
    )
    signing_key_file: str = Field(default="", description="As `redis.signing_key_file`.")
    timeout_s: Seconds = Field(
        default=10.0, description="What any call to the store may take at most, with the retries in it."
    )

    @model_validator(mode="after")
    def _is_somewhere(self) -> ObjectSettings:
        if self.enabled and not self.url:
            raise ConfigError("object.url: nothing is given; expected s3://BUCKET, gs://, az:// or file:///DIRECTORY")
        if "@" in self.url or "?" in self.url:
            raise ConfigError(
                "object.url: holds credentials; give them in object.credentials_file or in the environment"
            )
        return self


class EncryptionSettings(Section):
    """Payloads below host memory: on the drive, in Redis, in the object store (`kvcache-tiers[encryption]`)."""

    key_file: str = Field(
        default="",
        description="A file with a key a line, 64 hexadecimal digits: what goes below host is encrypted with the first "
        "one (AES-256-GCM), and what any of them encrypted is read. Nothing: as it is.",
    )
    accept_unencrypted: bool = Field(
        default=False,
        description="With keys, read records that are not encrypted as well: while those from before are still there. "
        "Otherwise they are a miss, and left alone.",
    )
