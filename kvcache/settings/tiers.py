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
        description="When blocks are written to the tier. `write_through`: after the store. `write_back`: at "
        "eviction from host memory. `on_second_use`: at the second use. `off`: never; existing blocks "
        "are read.",
    )


def _default_slab_bytes(data: dict[str, Any]) -> int:
    """Return 256 MiB, or an eighth of a small tier, in whole memory pages."""
    eighth = int(data.get("capacity_bytes", 0)) // 8 // PAGE_BYTES * PAGE_BYTES
    return max(PAGE_BYTES, min(256 * MiB, eighth))


class HostSettings(Section):
    """Host memory: the arena."""

    capacity_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=64 * KiB, le=1 << 60)] = Field(
        default_factory=_host_capacity,
        description="Size of the arena.",
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
        default=False, description="Verify payload checksums on reads from host memory too, not only from lower tiers."
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
    """A local drive: segment files and a journal, readable again after a restart."""

    enabled: bool = Field(default=True, description="Whether the cache has this tier.")
    path: Annotated[Path, BeforeValidator(as_directory)] = Field(
        default_factory=_nvme_path,
        description="Directory of the tier. One process uses it at a time. The cache creates it if it is missing.",
        json_schema_extra=computed_default("`nvme` in $KVCACHE_DIR, else `kvcache/nvme` in the user's cache directory"),
    )
    paths: Annotated[tuple[Path, ...], BeforeValidator(as_directories)] = Field(
        default=(),
        description="Directories on several drives, one on each, instead of `path`. Blocks are spread by key, and each "
        "directory has an equal part of the capacity. A list, or one text separated by colons.",
    )
    capacity_bytes: Bytes = Field(
        default_factory=_nvme_capacity,
        description="Disk space of the tier, journal included. Required if the directory is in memory (tmpfs), which "
        "is refused otherwise.",
        json_schema_extra=computed_default("a fifth of what its file system has free without it, at least 256 MiB"),
    )
    segment_bytes: Pages = Field(
        default_factory=_default_slab_bytes,
        description="Size of a segment file, which has one slot size. A multiple of 4,096.",
        json_schema_extra=computed_default("256 MiB, or an eighth of the capacity if that is less"),
    )
    durability: Literal["block", "batch", "none"] = Field(
        default="batch",
        description="When a block is synced to the medium. `block`: before it can be found. `batch`: with others soon "
        "after. `none`: when the operating system writes it.",
    )
    codec: Literal["raw", "zstd", "fp8", "int8"] = Field(
        default="raw",
        description="Encoding of records. `raw`: unchanged. `zstd`: lossless compression (`kvcache-tiers[zstd]`). "
        "`fp8`, `int8`: half or a quarter of the size, with the loss that docs/codecs.md bounds.",
    )
    write: WriteMode = write_mode()
    threads: Count = Field(default=4, description="Threads that read and write.")
    queue_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1, le=1 << 60)] = Field(
        default=256 * MiB, description="Most bytes that wait to be written. Further writes are dropped and counted."
    )
    min_free_bytes: Bytes = Field(default=GiB, description="Free space that the tier leaves on the file system.")

    @model_validator(mode="after")
    def _fits(self) -> NvmeSettings:
        if not self.enabled:
            return self
        memory = [path for path in self.directories if is_memory_backed(path)]
        if "capacity_bytes" not in self.model_fields_set and memory:
            raise ConfigError(
                f"nvme.path = {str(memory[0])!r}: in memory (tmpfs), not on a disk; give another path, or give "
                "nvme.capacity_bytes too if this is intended, or set nvme.enabled = false"
            )
        check_at_most("nvme.segment_bytes", self.segment_bytes, "nvme.capacity_bytes", self.capacity_bytes)
        return self

    @property
    def directories(self) -> tuple[Path, ...]:
        return self.paths or (self.path,)


class RedisSettings(Section):
    """A Redis or Valkey server that a fleet shares. While it does not answer, each lookup is a miss."""

    enabled: bool = Field(default=False, description="Whether the cache has this tier.")
    mode: Literal["standalone", "sentinel", "cluster"] = Field(
        default="standalone",
        description="What `url` names: one server; sentinels of a master; or some servers of a Redis Cluster.",
    )
    url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="`redis://HOST:PORT/DB`, `rediss://...` (TLS) or `unix:///PATH?db=0`; separate several hosts by "
        "commas. Give the password in `redis.password_file` or the variable KVCACHE_REDIS_PASSWORD, never here.",
    )
    master: str = Field(default="mymaster", description="Name of the master in the sentinels' configuration.")
    username: str = Field(default="", description="User name (ACL). Empty: the default user.")
    password_file: str = Field(
        default="", description="File with the password. Each connection reads it again, so that it can be changed."
    )
    sentinel_password_file: str = Field(
        default="",
        description="The same for the sentinels. Empty: the variable KVCACHE_REDIS_SENTINEL_PASSWORD, or no password.",
    )
    tls_ca_file: str = Field(default="", description="CA certificates for TLS. Empty: those of the system.")
    tls_cert_file: str = Field(default="", description="Client certificate, if the server requires one.")
    tls_key_file: str = Field(default="", description="Key of the client certificate.")
    prefix: str = Field(
        default="kvcache", description="Prefix of every key. Caches with different prefixes share nothing."
    )
    part_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=256 * KiB, le=16 * MiB, multiple_of=256 * KiB)] = (
        Field(default=4 * MiB, description="A longer payload is split into parts of this size. A multiple of 256 KiB.")
    )
    expire_s: Annotated[float, BeforeValidator(as_number), Field(ge=0, allow_inf_nan=False)] = Field(
        default=0, description="Expiry of a record. 0: none; the server evicts it."
    )
    write: WriteMode = write_mode()
    connections: Count = Field(default=4, description="Connections to each server, with a thread for each.")
    queue_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1, le=1 << 60)] = Field(
        default=256 * MiB, description="Most bytes that wait to be written. Further writes are dropped and counted."
    )
    signing_key_file: str = Field(
        default="",
        description="File with one key per line, 64 or more hexadecimal digits. Writes are signed with the first key. "
        "Records that none of the keys signed are misses.",
    )
    timeout_s: Seconds = Field(default=5.0, description="Longest call to the server.")

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
    """An object store that a fleet shares, the tier after Redis (`kvcache-tiers[object]`)."""

    enabled: bool = Field(default=False, description="Whether the cache has this tier.")
    url: str = Field(
        default="",
        description="`s3://BUCKET`, `gs://BUCKET`, `az://ACCOUNT/CONTAINER`, or `file:///DIRECTORY`, local or NFS. "
        "Give credentials in the environment, as for the store's own tools, or in "
        "`object.credentials_file`, never here.",
    )
    endpoint: str = Field(
        default="",
        description="Address of an S3-compatible server or of an emulator, `http://HOST:PORT` or `https://...`. "
        "Empty: the provider's own.",
    )
    region: str = Field(default="", description="Region of the bucket. Empty: from the environment.")
    credentials_file: str = Field(
        default="",
        description="File with one `name = value` per line, passed to the store's client: `access_key_id`, "
        "`secret_access_key`, ...",
    )
    prefix: str = Field(
        default="kvcache", description="Prefix of every object name. Caches with different prefixes share nothing."
    )
    pack_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1 * MiB, le=1 << 30)] = Field(
        default=16 * MiB, description="Largest object. Records of a chain that are written together share an object."
    )
    refresh_s: Annotated[float, BeforeValidator(as_number), Field(ge=0, allow_inf_nan=False)] = Field(
        default=30.0,
        description="Least time between two listings. Continuations of a known prefix are found without a listing.",
    )
    write: WriteMode = write_mode()
    connections: Count = Field(default=8, description="Threads that read and write.")
    queue_bytes: Annotated[int, BeforeValidator(as_size), Field(ge=1, le=1 << 60)] = Field(
        default=256 * MiB, description="Most bytes that wait to be written. Further writes are dropped and counted."
    )
    signing_key_file: str = Field(default="", description="As `redis.signing_key_file`.")
    timeout_s: Seconds = Field(default=10.0, description="Longest call to the store, retries included.")

    @model_validator(mode="after")
    def _is_somewhere(self) -> ObjectSettings:
        if self.enabled and not self.url:
            raise ConfigError("object.url is empty: expected s3://BUCKET, gs://, az:// or file:///DIRECTORY")
        if "@" in self.url or "?" in self.url:
            raise ConfigError(
                "object.url: holds credentials; give them in object.credentials_file or in the environment"
            )
        return self


class EncryptionSettings(Section):
    """Payloads below host memory: on the drive, in Redis, in the object store (`kvcache-tiers[encryption]`)."""

    key_file: str = Field(
        default="",
        description="File with one key per line, 64 hexadecimal digits. Records in lower tiers are encrypted with the "
        "first key (AES-256-GCM) and decrypted with any of them. Empty: no encryption.",
    )
    accept_unencrypted: bool = Field(
        default=False,
        description="Read unencrypted records too, while older ones exist. Otherwise they are misses and are not "
        "removed.",
    )
