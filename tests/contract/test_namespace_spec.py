"""`NamespaceSpec` and the keyword form of `KVCache.namespace`, for every implementation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvcache import LayoutError, NamespaceError, NamespaceSpec, RequestError
from kvcache.block.layout import Shard
from kvcache.cache.api import NamespaceFields
from kvcache.daemon.protocol import encode_spec, parse_spec
from tests.contract.fake_engine import FULL

FIELDS: dict[str, Any] = {
    "model": "m",
    "revision": "r",
    "adapter": "a",
    "tenant": "default",
    "cache_salt": "secret",
    "facts": {"rope": 1.5},
    "shards": None,
    "ranks": None,
    "ttl_s": 60.0,
}


def test_keyword_form_has_the_fields_of_the_spec() -> None:
    names = {field.name for field in dataclasses.fields(NamespaceSpec)}
    assert NamespaceFields.__annotations__.keys() | {"layout"} == names
    assert FIELDS.keys() | {"layout"} == names


def test_spec_and_keywords_bind_the_same_namespace(cache: Any) -> None:
    spec = NamespaceSpec(FULL, **FIELDS)
    by_spec, by_fields = cache.namespace(spec), cache.namespace(FULL, **FIELDS)
    assert by_spec.id == by_fields.id
    assert by_spec.ttl_s == by_fields.ttl_s == 60.0
    assert cache.namespace(spec, cache_salt="other").id != by_spec.id


@pytest.mark.parametrize("name", ["model", "revision", "adapter", "cache_salt", "facts"])
def test_each_identity_field_changes_the_namespace(cache: Any, name: str) -> None:
    spec = NamespaceSpec(FULL, **FIELDS)
    other: Any = {"rope": 2.5} if name == "facts" else "changed"
    assert cache.namespace(dataclasses.replace(spec, **{name: other})).id != cache.namespace(spec).id


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"facts": [1]}, NamespaceError),
        ({"model": 7}, NamespaceError),
        ({"ttl_s": -1}, RequestError),
        ({"shards": [Shard(0, 99, 0, 1)]}, LayoutError),
        ({"shards": [Shard(0, 1, 0, 1)] * 5}, LayoutError),
    ],
)
def test_invalid_field_is_refused(cache: Any, fields: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        cache.namespace(FULL, **{**FIELDS, **fields})


def test_unknown_field_is_refused(cache: Any) -> None:
    with pytest.raises(TypeError, match="modle"):
        cache.namespace(FULL, **FIELDS, modle="m")


def test_salt_is_not_shown() -> None:
    assert "secret" not in repr(NamespaceSpec(FULL, **FIELDS))


def test_wire_form_gives_the_spec_back_without_ttl() -> None:
    whole = [Shard(0, FULL.groups[0].layers, 0, FULL.groups[0].kv_heads)]
    spec = NamespaceSpec(FULL, **{**FIELDS, "shards": whole, "ranks": [whole]})
    assert parse_spec(encode_spec(spec)) == dataclasses.replace(spec, ttl_s=None)
