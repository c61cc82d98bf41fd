"""The package, the second implementation and the stored vectors say the same."""

from __future__ import annotations

import json

import pytest

from kvcache.block.chain import Chain
from kvcache.block.cipher import RecordSigner
from kvcache.block.layout import Group, KVLayout, Shard
from kvcache.block.namespace import Namespace, encode
from kvcache.block.record import Address, RecordError, header_area, read_header, seal, verify
from tests.vectors import generate, spec_reference

KEY = json.loads((generate.HERE / "key.json").read_text())
RECORD = json.loads((generate.HERE / "record.json").read_text())


def test_the_stored_vectors_equal_the_spec_reference():
    assert (generate.HERE / "key.json").read_text() == generate.text(generate.key_vectors())
    assert (generate.HERE / "record.json").read_text() == generate.text(generate.record_vectors())
    assert (generate.HERE / "redis.json").read_text() == generate.text(generate.redis_vectors())


@pytest.mark.parametrize("row", KEY["encodings"], ids=lambda row: row["bytes"][:20])
def test_encodings_equal_the_vectors(row):
    assert encode(generate.untag(row["value"])).hex() == row["bytes"]


@pytest.mark.parametrize("row", KEY["namespaces"], ids=lambda row: row["id"][:8])
def test_namespace_ids_equal_the_vectors(row):
    fields = generate.untag(row["fields"])
    layout = fields.pop("layout")
    groups = tuple(Group(**group | {"order": tuple(group["order"])}) for group in layout["groups"])
    namespace = Namespace(KVLayout(groups, layout["block_tokens"]), **fields)
    assert namespace.id.hex() == row["id"]


@pytest.mark.parametrize("row", KEY["chains"])
def test_chains_equal_the_vectors(row):
    chain = Chain(bytes.fromhex(row["namespace"]), row["block_tokens"])
    extras = [[(bytes.fromhex(name), bytes.fromhex(data)) for name, data in pairs] for pairs in row["extras"]]
    chain.extend(row["token_ids"], extras)
    assert [s.hex() for s in chain.signatures] == row["signatures"]


@pytest.mark.parametrize("row", KEY["digests"] + KEY["sglang"])
def test_digest_chains_equal_the_vectors(row):
    chain = Chain.from_digests(bytes.fromhex(row["namespace"]), [bytes.fromhex(d) for d in row["digests"]], 16)
    assert [s.hex() for s in chain.signatures] == row["signatures"]


def address_of(row):
    namespace, signature, parent = (bytes.fromhex(row[name]) for name in ("namespace", "signature", "parent"))
    return Address(namespace, signature, parent, row["group"], Shard(*row["shard"]))


@pytest.mark.parametrize("row", RECORD["sound"], ids=lambda row: row["name"])
def test_valid_records_equal_the_vectors(row):
    payload = generate.pattern(**row["payload"])
    address, head = address_of(row["address"]), bytes.fromhex(row["header"])
    area = header_area(row["decoded_bytes"])
    slot = bytearray(area)
    used = seal(
        memoryview(slot),
        memoryview(payload),
        address,
        stored_bytes=len(payload),
        decoded_bytes=row["decoded_bytes"],
        codec=row["codec"],
        write_id=int(row["write_id"]),
        fields={tag: bytes.fromhex(value) for tag, value in row["fields"]},
    )
    assert slot[:used] == head
    padded = slot + payload + bytes(-len(payload) % 4096)
    assert len(padded) == row["padded_bytes"]
    assert spec_reference.sha(padded).hex() == row["padded_sha256"]
    assert spec_reference.sha(head + payload).hex() == row["cut_sha256"]
    for form in (slot, head):
        header = verify(form, memoryview(payload), address, decoded_bytes=row["decoded_bytes"], codecs=[row["codec"]])
        assert header.address == address
        assert header.header_bytes == used


@pytest.mark.parametrize("row", RECORD["sound"], ids=lambda row: row["name"])
def test_keyed_digests_equal_the_vectors(row):
    head, payload = bytes.fromhex(row["header"]), memoryview(generate.pattern(**row["payload"]))
    signer = RecordSigner([bytes.fromhex(RECORD["signing_key"])])
    assert signer.sign(head, read_header(head), [payload]).hex() == row["keyed_digest"]


@pytest.mark.parametrize("row", RECORD["refused"], ids=lambda row: row["name"])
def test_invalid_records_of_the_vectors_are_refused(row):
    expected = RECORD["expected"]
    with pytest.raises(RecordError) as caught:
        verify(
            bytes.fromhex(row["header"]),
            memoryview(bytes.fromhex(row["payload"])),
            address_of(expected["address"]),
            decoded_bytes=expected["decoded_bytes"],
            codecs=expected["codecs"],
        )
    assert (caught.value.check, caught.value.foreign) == (row["check"], row["foreign"])


@pytest.mark.parametrize("row", RECORD["areas"])
def test_header_areas_equal_the_vectors(row):
    assert header_area(row["payload_bytes"]) == row["header_bytes"]
