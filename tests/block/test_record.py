from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcache.block.layout import Shard
from kvcache.block.record import (
    CHUNK_BYTES,
    CHUNK_SUMS,
    COST,
    ENCRYPTION,
    FIXED_BYTES,
    PARENT,
    TOKEN_IDS,
    Address,
    Header,
    RecordError,
    chunk_sums,
    header_area,
    new_write_id,
    read_header,
    record_bytes,
    seal,
    verify,
)
from kvcache.errors import KVCacheError
from tests.vectors import spec_reference
from tests.vectors.generate import pattern

CHECKS = {
    "short",
    "magic",
    "version",
    "header_sum",
    "field",
    "namespace",
    "address",
    "signature",
    "parent",
    "length",
    "codec",
    "payload_sum",
}
NAMESPACE, PARENT_SIGNATURE, SIGNATURE = (spec_reference.sha(name) for name in (b"namespace", b"parent", b"signature"))
ADDRESS = Address(NAMESPACE, SIGNATURE, PARENT_SIGNATURE, 1, Shard(0, 4, 2, 6))
PAYLOAD = pattern(3000, 7)


def sealed(payload=PAYLOAD, address=ADDRESS, area=None, **more):
    """Header and payload in one piece of memory, as in a slot."""
    area = header_area(len(payload)) if area is None else area
    slot = bytearray(b"\xaa" * area) + payload
    view = memoryview(slot)
    used = seal(view[:area], view[area:], address, stored_bytes=len(payload), **more)
    return slot, area, used


def checked(slot, area, address=ADDRESS, **more):
    """The payload that a reader gets from these bytes, or the failed check."""
    view = memoryview(slot)
    try:
        header = verify(view[:area], view[area:], address, **more)
    except RecordError as error:
        return error if error.check in CHECKS else error.check
    return bytes(view[area : area + header.stored_bytes])


# sealing and reading


@given(
    st.integers(0, 600) | st.sampled_from([CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES]),
    st.booleans(),
    st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=8),
    st.integers(0, 2**64 - 1),
    st.dictionaries(st.integers(3, 0x7FFF), st.binary(max_size=20), max_size=3),
)
def test_a_sealed_record_is_read_back(size, with_parent, codec, write_id, fields):
    payload = pattern(size, 3)
    address = ADDRESS if with_parent else Address(NAMESPACE, SIGNATURE, b"", 1, ADDRESS.shard)
    slot, area, used = sealed(payload, address, codec=codec, write_id=write_id, fields=fields, decoded_bytes=size + 5)
    header = verify(slot[:area], memoryview(slot)[area:], address)
    assert header == read_header(slot[:used])
    assert header == Header(
        address=address,
        codec=codec,
        stored_bytes=size,
        decoded_bytes=size + 5,
        write_id=write_id,
        payload_sum=spec_reference.xxh3(spec_reference.sums(payload)),
        fields=header.fields,
        header_bytes=used,
    )
    assert {tag: value for tag, value in header.fields.items() if tag > CHUNK_SUMS} == fields
    assert header.chunk_sums == spec_reference.sums(payload)
    assert not any(slot[used:area])
    assert slot[area:] == payload


@given(st.lists(st.integers(0, 2 * CHUNK_BYTES), max_size=4), st.integers(0, CHUNK_BYTES))
@example([CHUNK_BYTES, 1, CHUNK_BYTES - 1], 5)
@example([100, 2 * CHUNK_BYTES, 100], 0)
def test_payload_pieces_do_not_change_the_record(sizes, padding):
    payload = pattern(sum(sizes), 11)
    slot, area, _ = sealed(payload)
    pieces, at = [], 0
    for size in sizes:
        pieces.append(memoryview(payload)[at : at + size])
        at += size
    pieces.append(memoryview(bytes(padding)))
    assert verify(slot[:area], pieces, ADDRESS).stored_bytes == len(payload)
    assert chunk_sums(pieces, len(payload)) == spec_reference.sums(payload)


def test_a_chunk_can_be_checked_alone():
    payload = pattern(2 * CHUNK_BYTES + 100, 5)
    slot, area, _ = sealed(payload)
    third = memoryview(payload)[2 * CHUNK_BYTES :]
    assert chunk_sums(third, len(third)) == read_header(slot[:area]).chunk_sums[16:]


@given(st.integers(0, 1 << 31))
def test_the_padded_form_is_page_aligned_and_fits_all_fields(payload_bytes):
    area = header_area(payload_bytes)
    sums = 8 * -(-payload_bytes // CHUNK_BYTES)
    assert area % 4096 == 0
    assert FIXED_BYTES + 6 + 32 + 6 + sums <= area
    assert record_bytes(payload_bytes) == area + spec_reference.up(payload_bytes, 4096)


def test_fields_that_do_not_fit_are_dropped_by_highest_tag():
    need = FIXED_BYTES + 6 + len(spec_reference.sums(PAYLOAD))
    ids = bytes(64)
    fields = {TOKEN_IDS: ids, COST: bytes(8)}

    def kept(area):
        slot, _, _ = sealed(area=area, fields=fields)
        return set(read_header(slot[:area]).fields)

    assert kept(need) == {CHUNK_SUMS}
    assert kept(need + 38) == {PARENT, CHUNK_SUMS}
    assert kept(need + 38 + 69) == {PARENT, CHUNK_SUMS, COST}
    assert kept(need + 38 + 70) == {PARENT, CHUNK_SUMS, TOKEN_IDS}
    assert kept(need + 38 + 70 + 14) == {PARENT, CHUNK_SUMS, TOKEN_IDS, COST}
    with pytest.raises(RecordError, match="too small"):
        kept(need - 1)
    with pytest.raises(RecordError, match="too small"):
        sealed(area=need + 38, fields={ENCRYPTION: bytes(40)})


@pytest.mark.parametrize(
    ("more", "check"),
    [
        ({"codec": ""}, "codec"),
        ({"codec": "ninechars"}, "codec"),
        ({"codec": "a b"}, "codec"),
        ({"codec": "é"}, "codec"),
        ({"codec": "\ud800"}, "codec"),
        ({"fields": {0: b""}}, "field"),
        ({"fields": {0x10000: b""}}, "field"),
        ({"area": 100}, "short"),
    ],
)
def test_an_unsealable_record_is_refused(more, check):
    with pytest.raises(RecordError) as caught:
        sealed(**more)
    assert caught.value.check == check
    assert isinstance(caught.value, KVCacheError)


def test_a_short_payload_is_not_sealed():
    with pytest.raises(RecordError, match="3001 stored bytes: 3000 are there"):
        seal(memoryview(bytearray(4096)), memoryview(PAYLOAD), ADDRESS, stored_bytes=3001)


def test_write_ids_differ():
    ids = {new_write_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(0 <= i < 2**64 for i in ids)


# whose record is it?


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"namespace": spec_reference.sha(b"x")}, "namespace"),
        ({"signature": spec_reference.sha(b"x")}, "address"),
        ({"signature": SIGNATURE[:16] + spec_reference.sha(b"x")[16:]}, "signature"),
        ({"parent": spec_reference.sha(b"x")}, "parent"),
        ({"group": 0}, "address"),
        ({"shard": Shard(0, 4, 0, 6)}, "address"),
    ],
)
def test_a_record_of_another_block_is_refused(change, check):
    slot, area, _ = sealed()
    parts = {name: getattr(ADDRESS, name) for name in ("namespace", "signature", "parent", "group", "shard")}
    error = checked(slot, area, Address(**parts | change))
    assert (error.check, error.foreign) == (check, False)


def test_parents_are_compared_only_if_both_are_known():
    without = Address(NAMESPACE, SIGNATURE, b"", 1, ADDRESS.shard)
    slot, area, _ = sealed()
    assert checked(slot, area, without) == PAYLOAD
    slot, area, _ = sealed(address=without)
    assert checked(slot, area) == PAYLOAD


def test_the_reader_checks_its_expected_length_and_codecs():
    slot, area, _ = sealed(codec="zstd", decoded_bytes=5000)
    assert checked(slot, area, decoded_bytes=5000, codecs={"raw", "zstd"}) == PAYLOAD
    assert checked(slot, area, decoded_bytes=3000).check == "length"
    error = checked(slot, area, codecs=("raw",))
    assert (error.check, error.foreign) == ("codec", True)


# damage


def test_every_flipped_bit_of_the_header_is_noticed():
    slot, area, used = sealed(fields={TOKEN_IDS: bytes(range(64))})
    for bit in range(8 * used):
        slot[bit // 8] ^= 1 << bit % 8
        error = checked(slot, area)
        assert isinstance(error, RecordError)
        assert error.foreign == (error.check == "version")
        slot[bit // 8] ^= 1 << bit % 8
    assert checked(slot, area) == PAYLOAD


def test_every_flipped_byte_of_the_payload_is_noticed():
    slot, area, _ = sealed()
    for at in range(area, len(slot)):
        slot[at] ^= 0x55
        assert checked(slot, area).check == "payload_sum"
        slot[at] ^= 0x55


def test_bytes_behind_the_used_length_are_ignored():
    slot, area, used = sealed()
    slot[used:area] = b"\xff" * (area - used)
    assert checked(slot + b"behind", area) == PAYLOAD


def test_a_record_truncated_anywhere_is_refused():
    slot, area, used = sealed()
    for length in range(used):
        error = checked(slot[:length], length)
        assert error.check == "short"
    for length in range(used, area):  # the area may be cut, the header not: the payload is what is missing then
        assert checked(slot[:length], length).check == "length"
    for length in range(area, len(slot)):
        assert checked(slot[:length], area).check == "length"


damage = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 400), st.integers(1, 255)),
        st.tuples(st.just("payload"), st.integers(0, 2999), st.integers(1, 255)),
        st.tuples(st.just("overwrite"), st.integers(0, 400), st.binary(min_size=1, max_size=40)),
        st.tuples(st.just("cut"), st.integers(0, 7100), st.none()),
        st.tuples(st.just("move"), st.integers(0, 400), st.integers(1, 64)),
    ),
    min_size=1,
    max_size=4,
)


@given(damage, st.booleans())
def test_a_corrupt_record_fails_a_named_check(harm, mend):
    """With `mend` the header's checksum is made right again, as by a program that writes nonsense."""
    slot, area, _ = sealed(fields={TOKEN_IDS: bytes(64)})
    for kind, at, what in harm:
        if at + area * (kind == "payload") >= len(slot):
            continue
        if kind == "flip":
            slot[at] ^= what
        elif kind == "payload":
            slot[area + at] ^= what
        elif kind == "overwrite":
            slot[at : at + len(what)] = what
        elif kind == "cut":
            del slot[at:]
        else:
            slot[at:] = slot[at + what :] + bytes(what)
    if mend and len(slot) >= FIXED_BYTES:
        size = int.from_bytes(slot[120:124], "little")
        slot[128:136] = spec_reference.u64(spec_reference.xxh3(bytes(slot[:128] + slot[136 : 136 + size])))
    got = checked(slot, min(area, len(slot)))
    assert isinstance(got, RecordError) or got == PAYLOAD


@given(st.binary(max_size=300), st.binary(max_size=50))
@example(b"KVCR\x01", b"")
def test_arbitrary_bytes_are_refused(header, payload):
    assert isinstance(checked(header + payload, len(header)), RecordError)


@given(st.binary(max_size=120), st.integers(0, 2**64 - 1))
def test_arbitrary_fields_with_a_valid_checksum_are_parsed(tagged, stored):
    fixed = bytearray(spec_reference.header(PAYLOAD, **_parts(), fields=[])[:128])
    fixed[88:96] = spec_reference.u64(stored)
    fixed[120:124] = spec_reference.u32(len(tagged))
    head = bytes(fixed) + spec_reference.u64(spec_reference.xxh3(bytes(fixed) + tagged)) + tagged
    error = checked(head + PAYLOAD, len(head))
    assert isinstance(error, RecordError)
    assert error.check == "field"


def _parts():
    return {
        "namespace": NAMESPACE,
        "signature": SIGNATURE,
        "group": 1,
        "shard": (0, 4, 2, 6),
        "codec": b"raw",
        "decoded": len(PAYLOAD),
        "write_id": 1,
    }


def test_every_kind_of_buffer_is_read():
    slot, area, _ = sealed()
    for header in (bytes(slot[:area]), slot[:area], memoryview(slot)[:area], memoryview(bytes(slot[:area])).cast("I")):
        assert verify(header, memoryview(PAYLOAD), ADDRESS).stored_bytes == 3000
    assert verify(slot[:area], memoryview(PAYLOAD).cast("H"), ADDRESS).stored_bytes == 3000
