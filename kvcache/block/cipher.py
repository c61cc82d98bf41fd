"""AES-256-GCM over the payload of a record, so that a reader of the storage learns nothing of a prompt's tensors.

The checksums of a record cover the stored bytes, so a tier can check and scrub without a key. The tag covers the header
too, so that a payload moved to another block's name, or given another length or expiry, fails to decrypt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.block.record import ENCRYPTION, ENCRYPTION_BYTES, EXPIRY, KEYED_DIGEST, PARENT, Header, pack_tagged
from kvcache.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

# Keyed digests: prove that a holder of the key wrote a record, and that it is unchanged. A record's checksums protect
# against accidents; the digest protects against processes that can write to the storage.

MIN_KEY_BYTES = 32
_BEGIN, _END = 4, 112  # of the header: version to write id
_SIGNED = (EXPIRY, ENCRYPTION)  # those present are signed, so that they cannot be removed, added or changed


def read_keys(file: str, setting: str) -> list[bytes]:
    """Read a file with one key a line, in hexadecimal digits. A ConfigError contains no part of a key."""
    try:
        return [bytes.fromhex(line) for line in Path(file).read_text(encoding="ascii").split()]
    except OSError as error:
        raise ConfigError(f"{setting} = {file!r}: {error.strerror}; expected a file of keys") from None
    except ValueError:
        raise ConfigError(f"{setting} = {file!r}: expected a key a line, in hexadecimal digits") from None


class RecordSigner:
    """Signs records with the first key and accepts the digest of any.

    To rotate, put a new key before the old one in every process, then remove the old one.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = keys

    @classmethod
    def of(cls, file: str, setting: str) -> RecordSigner:
        """Read the keys from a file; ConfigError also where one is too short."""
        keys = read_keys(file, setting)
        if not keys or min(map(len, keys)) < MIN_KEY_BYTES:
            raise ConfigError(f"{setting} = {file!r}: expected keys of at least {2 * MIN_KEY_BYTES} hexadecimal digits")
        return cls(keys)

    def sign(self, head: bytes, header: Header, payload: Sequence[memoryview]) -> bytes:
        """Return the 32-byte digest. `head` is the used header as written, `payload` exactly the stored bytes."""
        return self._digest(self._keys[0], head, header, payload)

    def signed(self, head: bytes, header: Header, payload: Sequence[memoryview]) -> bool:
        """Return whether the header's digest is that of one of the keys."""
        found = header.fields.get(KEYED_DIGEST, b"")
        return any(hmac.compare_digest(found, self._digest(key, head, header, payload)) for key in self._keys)

    @staticmethod
    def _digest(key: bytes, head: bytes, header: Header, payload: Sequence[memoryview]) -> bytes:
        made = hmac.new(key, head[_BEGIN:_END], "sha256")
        made.update(header.fields.get(PARENT, b""))
        made.update(pack_tagged(header.fields, _SIGNED))
        for piece in payload:
            made.update(piece)
        return made.digest()


KEY_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 32, 8, 12, 16
_STEP_BYTES = 1 << 20  # interval at which other threads may take the interpreter lock
assert ID_BYTES + NONCE_BYTES + TAG_BYTES == ENCRYPTION_BYTES


class CipherKeys:
    """Encrypts with the first key and decrypts with any.

    To rotate, put a new key before the old one, which stays as long as records of it exist.
    """

    def __init__(self, keys: list[bytes]) -> None:
        self._keys: Mapping[bytes, bytes] = {_id(key): key for key in reversed(keys)}
        self._newest = _id(keys[0])

    def __repr__(self) -> str:
        return f"Keys({', '.join(key.hex() for key in self._keys)})"  # ids, which reveal no key

    @classmethod
    def of(cls, file: str, setting: str) -> CipherKeys:
        """Read the keys from a file, one a line, 64 hexadecimal digits each. No ConfigError contains part of a key."""
        try:
            import cryptography  # noqa: F401  a missing package fails here, and not at the first record
        except ModuleNotFoundError:
            raise ConfigError(f"{setting}: needs cryptography; pip install 'kvcache-tiers[encryption]'") from None
        keys = read_keys(file, setting)
        if not keys or {len(key) for key in keys} != {KEY_BYTES}:
            raise ConfigError(f"{setting} = {file!r}: expected keys of {2 * KEY_BYTES} hexadecimal digits each")
        return cls(keys)

    def encrypt(self, payload: memoryview, bound: bytes) -> bytes:
        """Encrypt in place; return the value of the header's field 0x8008.

        Args:
            bound: the other bytes that the tag covers, see `associated_data`.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        made = _cipher(self._keys[self._newest], nonce).encryptor()
        made.authenticate_additional_data(bound)
        for part in _parts(payload):
            made.update_into(part, part)
        made.finalize()
        return self._newest + nonce + made.tag

    def can_decrypt(self, header: Header) -> bool:
        """Return whether one of these keys encrypted this record."""
        return header.fields[ENCRYPTION][:ID_BYTES] in self._keys

    def decrypt(self, payload: memoryview, header: Header, bound: bytes) -> bool:
        """Decrypt in place; False, with the payload undefined, where payload or header differ from those encrypted."""
        from cryptography.exceptions import InvalidTag

        field = header.fields[ENCRYPTION]
        key, nonce, tag = field[:ID_BYTES], field[ID_BYTES:-TAG_BYTES], field[-TAG_BYTES:]
        made = _cipher(self._keys[key], nonce).decryptor()
        made.authenticate_additional_data(bound)
        for part in _parts(payload):
            made.update_into(part, part)
        try:
            made.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


def associated_data(fixed: bytes, fields: Mapping[int, bytes]) -> bytes:
    """Return the header bytes that a tag covers.

    They are bytes 4 to 112 of `fixed`, then the parent and the expiry field, where present. The bytes of two headers
    always differ: a parent has 32 bytes, and the expiry field includes its tag and length.
    """
    return fixed[4:112] + fields.get(PARENT, b"") + pack_tagged(fields, [EXPIRY])


def _id(key: bytes) -> bytes:
    return hashlib.sha256(b"kvcache encryption key" + key).digest()[:ID_BYTES]


def _cipher(key: bytes, nonce: bytes) -> Cipher[GCM]:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    return Cipher(AES(key), GCM(nonce))


def _parts(payload: memoryview) -> list[memoryview]:
    return [payload[at : at + _STEP_BYTES] for at in range(0, len(payload), _STEP_BYTES)]
