"""Encrypted payloads: what was encrypted comes back, and nothing else is ever taken for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.cipher import CipherKeys, associated_data
from kvcache.block.record import (
    ENCRYPTION,
    EXPIRY,
    FIXED_BYTES,
    PARENT,
    Address,
    RecordError,
    fixed_part,
    read_header,
    seal,
    verify,
)
from kvcache.errors import ConfigError
from kvcache.testing.tier import chain

pytest.importorskip("cryptography", reason="encryption needs cryptography")

KEY, OLD, OTHER = bytes(range(32)), b"o" * 32, b"x" * 32
ADDRESS = chain(2)[1]


def encrypted(
    payload: bytes, keys: CipherKeys, address: Address = ADDRESS, write_id: int = 7, expiry: bytes = b""
) -> tuple[memoryview, memoryview]:
    """A record's header and stored bytes."""
    body, header = memoryview(bytearray(payload)), memoryview(bytearray(4096))
    fields = {EXPIRY: expiry} if expiry else {}
    known = {**fields, PARENT: address.parent}
    bound = associated_data(fixed_part(address, "raw", len(body), len(body), write_id), known)
    fields[ENCRYPTION] = keys.encrypt(body, bound)
    seal(header, body, address, stored_bytes=len(body), write_id=write_id, fields=fields)
    return header, body


def decrypted(header: memoryview, body: memoryview, keys: CipherKeys) -> bytes | None:
    found = read_header(header)
    plain = memoryview(bytearray(body))
    right = keys.decrypt(plain, found, associated_data(bytes(header[:FIXED_BYTES]), found.fields))
    return bytes(plain) if right else None


@given(st.binary(max_size=3000))
def test_a_payload_decrypts_to_itself(payload: bytes) -> None:
    header, body = encrypted(payload, CipherKeys([KEY]))
    assert verify(header, body, ADDRESS).stored_bytes == len(payload)
    assert len(payload) < 16 or payload not in bytes(body)
    assert decrypted(header, body, CipherKeys([KEY])) == payload


def test_a_payload_longer_than_a_step_decrypts() -> None:
    payload = bytes(range(256)) * 12_000
    header, body = encrypted(payload, CipherKeys([KEY]))
    assert decrypted(header, body, CipherKeys([KEY])) == payload


def test_equal_payloads_have_different_ciphertexts() -> None:
    one, other = (encrypted(bytes(1000), CipherKeys([KEY]))[1] for _ in range(2))
    assert bytes(one) != bytes(other)


@given(st.data())
def test_a_changed_bit_is_detected(data: st.DataObject) -> None:
    """Also where he writes all checksums anew, which anybody can."""
    header, body = encrypted(b"secret" * 50, CipherKeys([KEY]), expiry=bytes(8))
    found = read_header(header)
    what = data.draw(st.sampled_from(["payload", "nonce", "tag", "write id", "address", "parent", "expiry", "length"]))
    field, address, write_id = bytearray(found.fields[ENCRYPTION]), ADDRESS, found.write_id
    expiry, forged = bytes(8), bytearray(body)
    if what == "payload":
        forged[data.draw(st.integers(0, len(forged) - 1))] ^= data.draw(st.integers(1, 255))
    elif what in ("nonce", "tag"):
        field[data.draw(st.integers(8, 19) if what == "nonce" else st.integers(20, 35))] ^= 1
    elif what == "write id":
        write_id += 1
    elif what == "address":
        address = replace(ADDRESS, signature=bytes(32))
    elif what == "parent":
        address = replace(ADDRESS, parent=bytes(32))
    elif what == "expiry":
        expiry = b"\xff" * 8
    else:
        del forged[-1]
    area = memoryview(bytearray(4096))
    fields = {ENCRYPTION: bytes(field), EXPIRY: expiry}
    seal(area, memoryview(forged), address, stored_bytes=len(forged), write_id=write_id, fields=fields)
    assert decrypted(area, memoryview(forged), CipherKeys([KEY])) is None


def test_a_parent_in_the_expiry_field_is_refused() -> None:
    """What is covered tells where one ends and the other begins."""
    end = (1_900_000_000_000).to_bytes(8, "little")
    header, body = encrypted(b"secret" * 50, CipherKeys([KEY]), expiry=end)
    found = read_header(header)
    area = memoryview(bytearray(4096))
    fields = {ENCRYPTION: found.fields[ENCRYPTION], EXPIRY: ADDRESS.parent + end}
    orphan = replace(ADDRESS, parent=b"")
    seal(area, body, orphan, stored_bytes=len(body), write_id=found.write_id, fields=fields)
    with pytest.raises(RecordError, match="expiry of 40 bytes"):
        read_header(area)
    fixed = fixed_part(orphan, "raw", len(body), len(body), found.write_id)
    assert not CipherKeys([KEY]).decrypt(memoryview(bytearray(body)), found, associated_data(fixed, fields))


def test_the_first_key_encrypts_and_later_keys_decrypt() -> None:
    before, both, after = CipherKeys([OLD]), CipherKeys([KEY, OLD]), CipherKeys([KEY])
    old, new = encrypted(b"one", before), encrypted(b"two", both)
    assert decrypted(*old, both) == b"one"
    assert decrypted(*new, after) == b"two"
    assert [after.can_decrypt(read_header(header)) for header, _ in (old, new)] == [False, True]
    assert not CipherKeys([OTHER]).can_decrypt(read_header(new[0]))


def test_a_cipher_field_of_another_length_is_foreign() -> None:
    header = memoryview(bytearray(4096))
    seal(header, memoryview(b"x"), ADDRESS, stored_bytes=1, fields={ENCRYPTION: bytes(40)})
    with pytest.raises(RecordError) as caught:
        read_header(header)
    assert caught.value.foreign


@pytest.mark.parametrize("content", ["", "00" * 31, "xy" * 32, "00" * 32 + "\n" + "11" * 16])
def test_a_file_without_keys_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match=r"encryption\.key_file") as caught:
        CipherKeys.of(str(tmp_path / "keys"), "encryption.key_file")
    assert not content or content not in str(caught.value)
    with pytest.raises(ConfigError, match="file of keys"):
        CipherKeys.of(str(tmp_path / "none"), "encryption.key_file")


def test_repr_of_keys_shows_no_key() -> None:
    assert KEY.hex() not in repr(CipherKeys([KEY]))
