from __future__ import annotations

import copy
import json
import pickle
from enum import Enum
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcache.block.layout import Group, KVLayout
from kvcache.block.namespace import Namespace, encode
from kvcache.errors import NamespaceError

LAYOUT = KVLayout.mha(layers=2, kv_heads=2, head_dim=8)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | text
    | st.binary(max_size=8)
)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(text, v, max_size=3), max_leaves=8)
layouts = st.builds(
    lambda layers, head_dim, block_tokens, window: KVLayout(
        (Group(layers=layers, head_dim=head_dim, rule="window" if window else "all", window_tokens=window),),
        block_tokens,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 2),
)
fields = st.fixed_dictionaries(
    {
        "layout": layouts,
        "model": text,
        "revision": text,
        "adapter": st.none() | text,
        "tenant": text,
        "cache_salt": text,
        "facts": st.dictionaries(text, values, max_size=3),
    }
)


def make(**changes):
    return Namespace(**{"layout": LAYOUT, "model": "m", "revision": "r"} | changes)


def canonical(value):
    """Equal exactly where type and value are: what two encodings are compared with."""
    if isinstance(value, dict):
        return "dict", frozenset((k, canonical(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "list", tuple(map(canonical, value))
    return type(value).__name__, repr(value)


@given(values, values)
@example(1, True)
@example(0, False)
@example(1, 1.0)
@example(0.0, -0.0)
@example("", None)
@example("a", b"a")
@example([], {})
@example([["a"], "b"], [["a", "b"]])
@example({"a": "b"}, ["a", "b"])
@example([1, 2], [12])
def test_different_values_have_different_encodings(a, b):
    assert (encode(a) == encode(b)) == (canonical(a) == canonical(b))


@given(fields, fields, st.sampled_from(["layout", "model", "revision", "adapter", "tenant", "cache_salt", "facts"]))
def test_namespaces_that_differ_in_a_field_have_other_ids(a, b, field):
    one, other = Namespace(**a), Namespace(**a | {field: b[field]})
    left = a["layout"].describe() if field == "layout" else a[field]
    right = b["layout"].describe() if field == "layout" else b[field]
    assert (one.id == other.id) == (canonical(left) == canonical(right))
    assert (one == other) == (one.id == other.id)


@given(st.permutations(["a", "b", "é", "\uff5a", "\U00010000"]))
def test_the_order_of_facts_does_not_change_the_id(names):
    assert make(facts=dict.fromkeys(names, 1)).id == make(facts=dict.fromkeys(sorted(names), 1)).id


def test_every_layout_field_changes_the_id():
    base = Group(layers=2, kv_heads=2, head_dim=8)
    changes = [
        {"layers": 3},
        {"kv_heads": 1},
        {"head_dim": 4},
        {"dtype": "fp16"},
        {"kind": "mla", "kv_heads": 1, "order": ("layer", "token", "latent")},
        {"order": ("kv", "layer", "token", "head", "dim")},
        {"rule": "boundary"},
        {"rule": "window", "window_tokens": 4},
        {"name": "draft"},
        {"kind": "opaque", "opaque_bytes": 64, "order": ()},
    ]
    groups = [base] + [Group(**{"layers": 2, "kv_heads": 2, "head_dim": 8} | change) for change in changes]
    layouts = [KVLayout((g,)) for g in groups] + [KVLayout((base,), 32), KVLayout((base, base))]
    assert len({make(layout=layout).id for layout in layouts}) == len(layouts)


def test_the_max_context_does_not_change_the_id():
    assert make(layout=KVLayout(LAYOUT.groups, max_tokens=4096)).id == make().id


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "a\ud800"}, "model"),
        ({"tenant": "\udfff"}, "tenant"),
        ({"revision": b"r"}, "revision"),
        ({"adapter": 1}, "adapter"),
        ({"cache_salt": None}, "cache_salt"),
        ({"facts": [1]}, "facts"),
        ({"facts": {"a": {"b": [0.0, float("nan")]}}}, r"facts\.a\.b\[1\] is NaN"),
        ({"facts": {1: 2}}, "facts has the key 1"),
        ({"facts": {"\ud800": 2}}, "a key of facts"),
        ({"facts": {"a": {"\ud800": 2}}}, r"a key of facts\.a"),
        ({"facts": {"a": 2**64}}, r"facts\.a"),
        ({"facts": {"a": -(2**63) - 1}}, r"facts\.a"),
        ({"facts": {"a": 10**5000}}, r"facts\.a"),
        ({"facts": {"a": {1, 2}}}, r"facts\.a is a set"),
        ({"facts": {"a": np.float64(1)}}, r"facts\.a is a float64"),
        ({"facts": {"a": np.bool_(True)}}, r"facts\.a is a bool"),
        ({"facts": {"a": bytearray(b"x")}}, r"facts\.a is a bytearray"),
        ({"facts": {"a": Enum("E", {"X": "x"}, type=str).X}}, r"facts\.a is a E"),
    ],
)
def test_a_value_without_encoding_is_refused_by_name(changes, named):
    with pytest.raises(NamespaceError, match=named):
        make(**changes)


def test_recursive_values_are_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(NamespaceError, match="nested deeper"):
        make(facts={"a": loop})
    deep: object = 1
    for _ in range(30):
        deep = [deep]
    make(facts={"a": [deep]})  # lists at depth 2 to 32
    with pytest.raises(NamespaceError, match="nested deeper"):
        make(facts={"a": [[deep]]})


def test_facts_are_a_copy():
    facts = {"a": [1]}
    namespace = make(facts=MappingProxyType(facts))
    facts["a"].append(2)
    assert namespace == make(facts={"a": [1]})
    assert namespace.facts == {"a": [1]}
    namespace.describe()["facts"]["a"].append(3)
    assert namespace.facts == {"a": [1]}


def test_the_description_hides_the_salt():
    namespace = make(cache_salt="hush-hush", facts={"rope": {"theta": 1e6}})
    told = namespace.describe()
    assert told["id"] == namespace.id.hex()
    assert told["layout"]["groups"][0]["layers"] == 2
    assert told["facts"] == {"rope": {"theta": 1e6}}
    assert (told["cache_salt"], make().describe()["cache_salt"]) == ("set", "none")
    assert "hush-hush" not in json.dumps(told) + repr(namespace)


def test_a_namespace_is_a_value():
    namespace = make(facts={"a": 1})
    assert {namespace: 1}[make(facts={"a": 1})] == 1
    assert pickle.loads(pickle.dumps(namespace)) == namespace == copy.deepcopy(namespace)
    assert namespace != namespace.id
    with pytest.raises(AttributeError):
        namespace.model = "other"
