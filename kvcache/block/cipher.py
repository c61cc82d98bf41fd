"""AES-256-GCM over the payload of a record: who reads where records lie learns nothing of a prompt's tensors.

The checksums of a record are taken over what is stored, so a tier audits and scrubs without a key. The tag is bound to
the header: the payload of one block cannot be put under another one's name, nor be given another length or expiry.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcache.block.keyed import read_keys
from kvcache.block.record import ENCRYPTION, ENCRYPTION_BYTES, EXPIRY, PARENT, Header, tagged
from kvcache.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

KEY_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 32, 8, 12, 16
_STEP_BYTES = 1 << 20  # between two looks of other threads at the interpreter
assert ID_BYTES + NONCE_BYTES + TAG_BYTES == ENCRYPTION_BYTES


class Keys:
    """The first key encrypts, each of them decrypts: a new one is put before the old one, which stays for as long as
    there are records of it."""

    def __init__(self, keys: list[bytes]) -> None:
        self._keys: Mapping[bytes, bytes] = {_id(key): key for key in reversed(keys)}
        self._newest = _id(keys[0])

    def __repr__(self) -> str:
        return f"Keys({', '.join(key.hex() for key in self._keys)})"  # ids, of which no key can be told

    @classmethod
    def of(cls, file: str, setting: str) -> Keys:
        """Of a file with a key a line, 64 hexadecimal digits; ConfigError, with nothing of the keys in it."""
        try:
            import cryptography  # noqa: F401  said here, and not when the first record is written
        except ModuleNotFoundError:
            raise ConfigError(f"{setting}: needs cryptography; pip install 'kvcache-tiers[encryption]'") from None
        keys = read_keys(file, setting)
        if not keys or {len(key) for key in keys} != {KEY_BYTES}:
            raise ConfigError(f"{setting} = {file!r}: expected keys of {2 * KEY_BYTES} hexadecimal digits each")
        return cls(keys)

    def encrypt(self, payload: memoryview, bound: bytes) -> bytes:
        """Encrypt in place; the header's field 0x8008. `bound`: what the tag covers beside, see `binding`."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        made = _cipher(self._keys[self._newest], nonce).encryptor()
        made.authenticate_additional_data(bound)
        for part in _parts(payload):
            made.update_into(part, part)
        made.finalize()
        return self._newest + nonce + made.tag

    def knows(self, header: Header) -> bool:
        """Whether one of these keys encrypted this record."""
        return header.fields[ENCRYPTION][:ID_BYTES] in self._keys

    def decrypt(self, payload: memoryview, header: Header, bound: bytes) -> bool:
        """Decrypt in place; False, and the payload is undefined, where it or the header is not what was encrypted."""
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


def binding(fixed: bytes, fields: Mapping[int, bytes]) -> bytes:
    """What a tag covers of a header: bytes 4 to 112 of `fixed`, then the parent and the field of the expiry, where
    there are. No two headers have the same: a parent has 32 bytes, and the field stands with its tag and length."""
    return fixed[4:112] + fields.get(PARENT, b"") + tagged(fields, [EXPIRY])


def _id(key: bytes) -> bytes:
    return hashlib.sha256(b"kvcache encryption key" + key).digest()[:ID_BYTES]


def _cipher(key: bytes, nonce: bytes) -> Cipher[GCM]:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    return Cipher(AES(key), GCM(nonce))


def _parts(payload: memoryview) -> list[memoryview]:
    return [payload[at : at + _STEP_BYTES] for at in range(0, len(payload), _STEP_BYTES)]
