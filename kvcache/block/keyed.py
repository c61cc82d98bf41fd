"""The keyed digest of a record: that somebody who has the key wrote it, and nobody has changed it since.

A record's checksums guard against accident; this guards against those who can write where records lie.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from kvcache.block.record import ENCRYPTION, EXPIRY, KEYED_DIGEST, PARENT, Header, tagged
from kvcache.errors import ConfigError

LEAST_BYTES = 32
_BEGIN, _END = 4, 112  # of the header: version to write id
_SIGNED = (EXPIRY, ENCRYPTION)  # what is there of them, so that nobody takes it out, puts it in or changes it


def read_keys(file: str, setting: str) -> list[bytes]:
    """Of a file with a key a line, in hexadecimal digits; ConfigError, with nothing of the keys in it."""
    try:
        return [bytes.fromhex(line) for line in Path(file).read_text(encoding="ascii").split()]
    except OSError as error:
        raise ConfigError(f"{setting} = {file!r}: {error.strerror}; expected a file of keys") from None
    except ValueError:
        raise ConfigError(f"{setting} = {file!r}: expected a key a line, in hexadecimal digits") from None


class Signer:
    """The first key signs, each of them is believed: a new one is put before the old one until all know it."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    @classmethod
    def of(cls, file: str, setting: str) -> Signer:
        """Of a file as `read_keys` reads it. ConfigError also where a key is too short."""
        keys = read_keys(file, setting)
        if not keys or min(map(len, keys)) < LEAST_BYTES:
            raise ConfigError(f"{setting} = {file!r}: expected keys of at least {2 * LEAST_BYTES} hexadecimal digits")
        return cls(keys)

    def sign(self, head: bytes, header: Header, payload: Sequence[memoryview]) -> bytes:
        """32 bytes. `head` as it stands, `payload` exactly the stored bytes."""
        return self._digest(self._keys[0], head, header, payload)

    def signed(self, head: bytes, header: Header, payload: Sequence[memoryview]) -> bool:
        """Whether the digest that stands in the header is that of one of the keys."""
        found = header.fields.get(KEYED_DIGEST, b"")
        return any(hmac.compare_digest(found, self._digest(key, head, header, payload)) for key in self._keys)

    @staticmethod
    def _digest(key: bytes, head: bytes, header: Header, payload: Sequence[memoryview]) -> bytes:
        made = hmac.new(key, head[_BEGIN:_END], "sha256")
        made.update(header.fields.get(PARENT, b""))
        made.update(tagged(header.fields, _SIGNED))
        for piece in payload:
            made.update(piece)
        return made.digest()
