"""The keyed digest: every byte that counts is under it, keys can be changed, and nothing of them is shown."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.cipher import RecordSigner
from kvcache.block.record import (
    CHUNK_SUMS,
    ENCRYPTION,
    EXPIRY,
    KEYED_DIGEST,
    PARENT,
    read_header,
    seal,
    verify,
    with_field,
)
from kvcache.errors import ConfigError
from tests.tier.blocks import chain, record

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
SIZE = 1000


def signed(keys: list[bytes], data: bytes = b"\7" * SIZE) -> tuple[bytes, memoryview]:
    """A signed header in its cut form, and the payload."""
    head, body = record(chain(2)[1], SIZE, data=data)
    header = read_header(head)
    cut = bytes(head[: header.header_bytes])
    return with_field(cut, header, KEYED_DIGEST, RecordSigner(keys).sign(cut, header, [body[:SIZE]])), body[:SIZE]


def test_the_digest_equals_the_specification() -> None:
    head, body = signed([KEY])
    header = verify(head, body, chain(2)[1])
    message = head[4:112] + header.fields[PARENT] + bytes(body)
    assert header.fields[KEYED_DIGEST] == hmac.new(KEY, message, hashlib.sha256).digest()


def test_keys_can_be_changed() -> None:
    head, body = signed([KEY])
    header = read_header(head)
    assert RecordSigner([OTHER, KEY]).signed(head, header, [body])
    assert not RecordSigner([OTHER]).signed(head, header, [body])
    again = with_field(head, header, KEYED_DIGEST, RecordSigner([OTHER, KEY]).sign(head, header, [body]))
    assert RecordSigner([OTHER]).signed(again, read_header(again), [body])


def test_a_record_without_a_digest_is_not_signed() -> None:
    head, body = record(chain(1)[0], SIZE)
    header = read_header(head)
    assert not RecordSigner([KEY]).signed(bytes(head[: header.header_bytes]), header, [body[:SIZE]])


@given(at=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
def test_a_forged_payload_with_matching_sums_is_refused(at: int, bit: int) -> None:
    """Whoever writes can make every checksum right; not the digest."""
    head, _ = signed([KEY])
    data = bytearray(b"\7" * SIZE)
    data[at] ^= 1 << bit
    forged, body = signed([OTHER], bytes(data))
    header = read_header(forged)
    forged = with_field(forged, header, KEYED_DIGEST, read_header(head).fields[KEYED_DIGEST])
    assert verify(forged, body, chain(2)[1])
    assert not RecordSigner([KEY]).signed(forged, read_header(forged), [body])


@given(at=st.integers(4, 111), bit=st.integers(0, 7))
def test_each_bit_of_the_identity_counts(at: int, bit: int) -> None:
    head, body = signed([KEY])
    changed = bytearray(head)
    changed[at] ^= 1 << bit
    assert not RecordSigner([KEY]).signed(bytes(changed), read_header(head), [body])


ENDS = {EXPIRY: (1_900_000_000_000).to_bytes(8, "little"), ENCRYPTION: bytes(range(36))}


@pytest.mark.parametrize("before", [{}, {EXPIRY: ENDS[EXPIRY]}, {ENCRYPTION: ENDS[ENCRYPTION]}, ENDS])
@pytest.mark.parametrize(
    "after", [{}, {EXPIRY: ENDS[EXPIRY]}, {ENCRYPTION: ENDS[ENCRYPTION]}, ENDS, ENDS | {EXPIRY: bytes(8)}]
)
def test_expiry_and_encryption_fields_are_signed(before: dict[int, bytes], after: dict[int, bytes]) -> None:
    """Nobody takes them out, puts them in or changes them, however right he makes the checksums."""
    body, area = memoryview(b"\7" * SIZE), memoryview(bytearray(4096))
    used = seal(area, body, chain(2)[1], stored_bytes=SIZE, write_id=1, fields=before)
    digest = RecordSigner([KEY]).sign(bytes(area[:used]), read_header(area), [body])
    used = seal(area, body, chain(2)[1], stored_bytes=SIZE, write_id=1, fields={**after, KEYED_DIGEST: digest})
    header = verify(area, body, chain(2)[1])
    assert header.fields.keys() - {PARENT, CHUNK_SUMS, KEYED_DIGEST} == after.keys()
    assert RecordSigner([KEY]).signed(bytes(area[:used]), header, [body]) == (before == after)


@pytest.mark.parametrize(("text", "said"), [("", "64"), ("00" * 31, "64"), ("not hexadecimal", "hexadecimal")])
def test_a_malformed_key_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        RecordSigner.of(str(file), "redis.signing_key_file")
    assert not text or text not in str(caught.value)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="signing_key_file"):
        RecordSigner.of(str(tmp_path / "none"), "redis.signing_key_file")
