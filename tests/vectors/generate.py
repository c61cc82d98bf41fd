"""Writes the vectors beside this file, from the second implementation: `python -m tests.vectors.generate`.

Values that JSON does not have stand as objects of one entry: {"int": decimal}, {"float": hex of 8 bytes}, {"bytes":
hex}, {"map": {...}}. Bytes elsewhere are hexadecimal; `write_id` is decimal in a string. A payload of `length` and
`step` has the byte (i * step + floor(i / 256)) modulo 256 at i.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tests.vectors import spec_reference

HERE = Path(__file__).parent


def tag(value):
    if type(value) is int:
        return value if abs(value) < 1 << 53 else {"int": str(value)}
    if type(value) is float:
        return {"float": struct.pack("<d", value).hex()}
    if type(value) is bytes:
        return {"bytes": value.hex()}
    if type(value) is list:
        return [tag(item) for item in value]
    if type(value) is dict:
        return {"map": {name: tag(item) for name, item in value.items()}}
    return value


def untag(value):
    if type(value) is list:
        return [untag(item) for item in value]
    if type(value) is not dict:
        return value
    ((kind, inside),) = value.items()
    if kind == "map":
        return {name: untag(item) for name, item in inside.items()}
    if kind == "float":
        return struct.unpack("<d", bytes.fromhex(inside))[0]
    return int(inside) if kind == "int" else bytes.fromhex(inside)


def pattern(length, step):
    return bytes((i * step + (i >> 8)) & 0xFF for i in range(length))


GROUP = {
    "dtype": "bf16",
    "head_dim": 64,
    "kind": "mha",
    "kv_heads": 3,
    "layers": 30,
    "name": "full",
    "opaque_bytes": 0,
    "order": ["layer", "kv", "token", "head", "dim"],
    "rule": "all",
    "window_tokens": 0,
}
FIELDS = {
    "adapter": None,
    "cache_salt": "",
    "facts": {},
    "layout": {"block_tokens": 16, "groups": [GROUP]},
    "model": "SmolLM2-135M-Instruct",
    "revision": "12fd25f77366fa6b3b4b768ec3050bf629380bac",
    "tenant": "default",
}
WINDOW = GROUP | {"name": "window", "rule": "window", "window_tokens": 512, "layers": 22}
LATENT = GROUP | {"kind": "mla", "kv_heads": 1, "head_dim": 576, "order": ["layer", "token", "latent"]}
OPAQUE = GROUP | {"kind": "opaque", "head_dim": 0, "order": [], "opaque_bytes": 12288}
FACTS = {
    "rope": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0},
    "k_scales": [0.5, -0.0, float("inf"), 1],
    "packed": True,
    "é": b"\x00\xff",
    "z": None,
    "\uff5a": 2**64 - 1,
    "\U00010000": -(2**63),
}
NAMESPACES = [
    FIELDS,
    FIELDS | {"tenant": "", "adapter": ""},
    FIELDS | {"adapter": "sql@2", "cache_salt": "salt", "tenant": "Zoë"},
    FIELDS | {"model": "模型\U0001f600\0", "layout": {"block_tokens": 64, "groups": [GROUP, WINDOW]}},
    FIELDS | {"facts": FACTS, "layout": {"block_tokens": 16, "groups": [LATENT]}},
    FIELDS
    | {"facts": {"digest": "vllm 0.11 sha256 PYTHONHASHSEED=0"}, "layout": {"block_tokens": 32, "groups": [OPAQUE]}},
]
ENCODINGS = [None, True, False, 0, 7, -1, 2**64 - 1, -(2**63), 0.0, -0.0, 1.0, float("inf"), "", "é", b"", b"\xff", []]
ENCODINGS += [{}, {"a": [1, None]}, {"b": 1, "a": {"": "x"}}, [[], [[]], "1", 1, 1.0, True, b"1"]]
CHAINS = [
    (16, list(range(48)), []),
    (16, [7] * 15, []),
    (16, [0, 1, 0xFFFFFFFF, 49151] * 10, [[(b"image", bytes(range(32))), (b"salt", b"")]]),
    (1, [5, 6, 7], [[], [(b"x", b"y")], [(b"xy", b"")]]),
    (3, [9, 8, 7, 6, 5, 4, 3], [[(b"t" * 255, b"d" * 300)], []]),
]


def key_vectors():
    ids = [spec_reference.namespace_id(fields) for fields in NAMESPACES]
    digests = [spec_reference.sha(b"an engine's digest %d" % i)[:size] for i, size in enumerate((32, 32, 16, 20))]
    pages = list(range(5, 53))
    return {
        "encodings": [{"value": tag(value), "bytes": spec_reference.encode(value).hex()} for value in ENCODINGS],
        "namespaces": [
            {"fields": tag(fields), "encoding": spec_reference.encode(fields).hex(), "id": of.hex()}
            for fields, of in zip(NAMESPACES, ids, strict=True)
        ],
        "chains": [
            {
                "namespace": of.hex(),
                "block_tokens": block_tokens,
                "token_ids": token_ids,
                "extras": [[[name.hex(), data.hex()] for name, data in pairs] for pairs in extras],
                "signatures": [s.hex() for s in spec_reference.chain(of, block_tokens, token_ids, extras)],
            }
            for of in ids[:2]
            for block_tokens, token_ids, extras in CHAINS
        ],
        "digests": [
            {
                "namespace": ids[5].hex(),
                "digests": [d.hex() for d in digests],
                "signatures": [s.hex() for s in spec_reference.bind(ids[5], digests)],
            }
        ],
        "sglang": [
            {
                "namespace": ids[5].hex(),
                "page_tokens": 16,
                "token_ids": pages,
                "digests": [d.hex() for d in spec_reference.sglang_pages(16, pages)],
                "signatures": [s.hex() for s in spec_reference.bind(ids[5], spec_reference.sglang_pages(16, pages))],
            }
        ],
    }


NAMESPACE = spec_reference.namespace_id(FIELDS)
FIRST, SECOND = spec_reference.chain(NAMESPACE, 16, list(range(32)))
ADDRESS = {"namespace": NAMESPACE, "signature": SECOND, "parent": FIRST, "group": 0, "shard": (0, 30, 0, 3)}
SOUND = [
    # name, address, codec, decoded bytes or None for the stored ones, write id, fields, payload
    ("plain", {}, b"raw", None, 1, [(1, FIRST)], (1000, 1)),
    ("first block", {"signature": FIRST, "parent": NAMESPACE}, b"raw", None, 2, [(1, NAMESPACE)], (4096, 3)),
    ("no parent", {"parent": b""}, b"raw", None, 2**64 - 1, [], (1, 1)),
    ("empty", {}, b"raw", None, 0, [(1, FIRST)], (0, 1)),
    ("coded", {"group": 1, "shard": (4, 8, 1, 2)}, b"zstd.1-x", 1_000_000, 3, [(1, FIRST)], (300_000, 5)),
    ("one chunk", {}, b"raw", None, 4, [(1, FIRST)], (262_144, 7)),
    ("one byte more", {}, b"raw", None, 5, [(1, FIRST)], (262_145, 7)),
    (
        "all fields",
        {},
        b"int8",
        2000,
        6,
        [
            (1, FIRST),
            (3, b"".join(map(spec_reference.u32, range(16, 32)))),
            (4, spec_reference.extras_bytes([(b"image", b"\1\2")])),
            (6, struct.pack("<d", 0.25)),
            (7, spec_reference.u64(1_900_000_000_000)),
            (0x7FFF, b""),
        ],
        (1000, 9),
    ),
    (
        "encrypted",
        {},
        b"raw",
        None,
        7,
        [(1, FIRST), (7, spec_reference.u64(1_900_000_000_000)), (0x8008, bytes(36))],
        (1000, 1),
    ),
]
SIGNING_KEY = bytes(range(32))


def _sound(name, address, codec, decoded, write_id, fields, payload):
    address = ADDRESS | address
    body = pattern(*payload)
    decoded = len(body) if decoded is None else decoded
    parts = {name: address[name] for name in ("namespace", "signature", "group", "shard")}
    head = spec_reference.header(body, **parts, codec=codec, decoded=decoded, write_id=write_id, fields=fields)
    return {
        "name": name,
        "address": _address(address),
        "codec": codec.decode(),
        "decoded_bytes": decoded,
        "write_id": str(write_id),
        "fields": [[number, value.hex()] for number, value in fields if number != 1],
        "payload": {"length": payload[0], "step": payload[1]},
        "header": head.hex(),
        "keyed_digest": spec_reference.keyed_digest(SIGNING_KEY, head, body, fields).hex(),
        "cut_sha256": spec_reference.sha(head + body).hex(),
        "padded_sha256": spec_reference.sha(spec_reference.padded(head, body, decoded)).hex(),
        "padded_bytes": len(spec_reference.padded(head, body, decoded)),
    }


def _address(address):
    return {
        name: value.hex() if isinstance(value, bytes) else list(value) if isinstance(value, tuple) else value
        for name, value in address.items()
    }


def _refused():
    body = pattern(40, 1)

    def head(**change):
        parts = {name: ADDRESS[name] for name in ("namespace", "signature", "group", "shard")}
        parts |= {"codec": b"raw", "decoded": 40, "write_id": 1, "fields": [(1, FIRST)]}
        return spec_reference.header(body, **parts | change)

    good = head()
    other = spec_reference.sha(b"other")
    sums = (2, spec_reference.sums(body))
    flipped = bytes([good[60] ^ 1])
    short_body = pattern(39, 1)
    changed = bytes([body[0] ^ 1]) + body[1:]
    overlong = good[136:] + spec_reference.u16(3) + spec_reference.u32(5) + b"four"
    rows = [
        ("nothing", b"", "short"),
        ("a part of the magic", good[:3], "short"),
        ("zeros", bytes(4096), "magic"),
        ("another magic", head(magic=b"KVCS"), "magic"),
        ("cut within the fixed part", good[:135], "short"),
        ("another version", head(version=2), "version foreign"),
        ("version 0", head(version=0), "version foreign"),
        ("cut within the fields", good[:-1], "short"),
        ("a flipped bit", good[:60] + flipped + good[61:], "header_sum"),
        ("reserved", head(reserved=1), "field"),
        ("must-know", head(fields=[(1, FIRST), sums, (0x8008, b"key")]), "field foreign"),
        ("no field 2", head(fields=[(1, FIRST), (2, b"")]), "field"),
        ("field 2 too long", head(fields=[(1, FIRST), (2, sums[1] * 2)]), "field"),
        ("fields out of order", head(fields=[sums, (1, FIRST)]), "field"),
        ("a field twice", head(fields=[(1, FIRST), (1, FIRST), sums]), "field"),
        ("tag 0", head(fields=[(0, b""), (1, FIRST), sums]), "field"),
        ("another sum of sums", head(sum_of_sums=5), "field"),
        ("a parent of 31 bytes", head(fields=[(1, FIRST[:31])]), "field"),
        ("an expiry of 7 bytes", head(fields=[(1, FIRST), (7, bytes(7))]), "field"),
        ("the parent in the expiry", head(fields=[(7, FIRST + spec_reference.u64(1_900_000_000_000))]), "field"),
        ("an empty shard", head(shard=(3, 3, 0, 3)), "address"),
        ("no codec", head(codec=b""), "codec foreign"),
        ("a codec with a space", head(codec=b"r w"), "codec foreign"),
        ("a codec with a zero inside", head(codec=b"r\0w"), "codec foreign"),
        ("another namespace", head(namespace=other), "namespace"),
        ("another key", head(signature=other), "address"),
        ("another group", head(group=1), "address"),
        ("another shard", head(shard=(0, 15, 0, 3)), "address"),
        ("another signature", head(signature=SECOND[:16] + other[16:]), "signature"),
        ("another parent", head(fields=[(1, other)]), "parent"),
        ("other decoded bytes", head(decoded=41), "length"),
        ("an unknown codec", head(codec=b"lzma"), "codec foreign"),
        ("more stored than there", head(stored=41), "length"),
    ]
    rows = [(name, header, body, check) for name, header, check in rows]
    rows += [
        ("payload cut", good, short_body, "length"),
        ("payload changed", good, changed, "payload_sum"),
        ("a field past the end", _with_fields(good, overlong), body, "field"),
        ("bytes behind the last field", _with_fields(good, good[136:] + b"\0\0\0"), body, "field"),
    ]
    return [
        {
            "name": name,
            "header": header.hex(),
            "payload": payload.hex(),
            "check": check.split()[0],
            "foreign": check.endswith("foreign"),
        }
        for name, header, payload, check in rows
    ]


def _with_fields(head, tagged):
    fixed = head[:120] + spec_reference.u32(len(tagged)) + head[124:128]
    return fixed + spec_reference.u64(spec_reference.xxh3(fixed + tagged)) + tagged


def record_vectors():
    areas = (1, 4096, 262_144, 262_145, 448 * 262_144, 448 * 262_144 + 1, 1 << 30)
    return {
        "signing_key": SIGNING_KEY.hex(),
        "areas": [{"payload_bytes": size, "header_bytes": spec_reference.header_area(size)} for size in areas],
        "sound": [_sound(*row) for row in SOUND],
        "expected": {"address": _address(ADDRESS), "decoded_bytes": 40, "codecs": ["raw"]},
        "refused": _refused(),
    }


def redis_vectors():
    """Where the sound records lie in a server: each value is a part of the payload, the first behind the header."""
    rows = []
    for name, address, _, _, write_id, _, payload in SOUND:
        place = {n: value for n, value in (ADDRESS | address).items() if n != "parent"}
        body = pattern(*payload)
        values = spec_reference.redis_values("kvcache", body, **place, write_id=write_id, part_bytes=262_144)
        rows.append({"record": name, "part_bytes": 262_144, "values": values})
    return rows


def text(vectors):
    return json.dumps(vectors, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    (HERE / "key.json").write_text(text(key_vectors()))
    (HERE / "record.json").write_text(text(record_vectors()))
    (HERE / "redis.json").write_text(text(redis_vectors()))
