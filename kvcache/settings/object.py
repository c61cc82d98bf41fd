"""An object store behind the other tiers; and how what lies below host is kept to itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from kvcache.errors import ConfigError
from kvcache.settings.tiers import Write, write_mode
from kvcache.values import Bytes, Count, MiB, Seconds, Section, as_number, as_size


class Object(Section):
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
    write: Write = write_mode()
    connections: Count = Field(default=8, description="Threads that read and write.")
    queue_bytes: Bytes = Field(
        default=256 * MiB, description="Bytes waiting to be written, beyond which writes are dropped and counted."
    )
    signing_key_file: str = Field(default="", description="As `redis.signing_key_file`.")
    timeout_s: Seconds = Field(
        default=10.0, description="What any call to the store may take at most, with the retries in it."
    )

    @model_validator(mode="after")
    def _is_somewhere(self) -> Object:
        if self.enabled and not self.url:
            raise ConfigError("object.url: nothing is given; expected s3://BUCKET, gs://, az:// or file:///DIRECTORY")
        if "@" in self.url or "?" in self.url:
            raise ConfigError(
                "object.url: holds credentials; give them in object.credentials_file or in the environment"
            )
        return self


class Encryption(Section):
    """Payloads below host memory: on the drive, in Redis, in the object store (`kvcache-tiers[encryption]`)."""

    key_file: str = Field(
        default="",
        description="A file with a key a line, 64 hexadecimal digits: what goes below host is encrypted with the first "
        "one (AES-256-GCM), and what any of them encrypted is read. Nothing: as it is.",
    )
    accept_plain: bool = Field(
        default=False,
        description="With keys, read records that are not encrypted as well: while those from before are still there. "
        "Otherwise they are a miss, and left alone.",
    )
