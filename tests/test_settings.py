"""Settings: what is accepted, from where, with which weight; what is refused, and whether the refusal helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcache.errors import ConfigError
from kvcache.settings import TABLE, Settings
from kvcache.settings.sources import FOREIGN, REMOVED, RENAMED, load
from kvcache.settings.types import GiB, MiB

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVCACHE_DIR", raising=False)


def given_all(tmp_path: Path) -> dict[str, Any]:
    """A capacity for the drive, so that a temporary directory in memory will do."""
    return {"nvme": {"path": str(tmp_path / "nvme"), "capacity_bytes": "1GiB"}}


def refusal(**keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(environ=keywords.pop("environ", {}), **keywords)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_later_sources_weigh_more(tmp_path: Path) -> None:
    file = tmp_path / "kvcache.toml"
    file.write_text('block_tokens = 32\n[host]\ncapacity_bytes = "1GiB"\n[nvme]\nthreads = 7\nqueue_bytes = 5\n')
    variables = {"KVCACHE_HOST__CAPACITY_BYTES": "2GiB", "KVCACHE_NVME__THREADS": "8", "OTHER": "x"}
    settings = load(file, variables, host__capacity_bytes="3GiB", **given_all(tmp_path))
    assert (settings.block_tokens, settings.host.capacity_bytes) == (32, 3 * GiB)
    assert (settings.nvme.threads, settings.nvme.queue_bytes) == (8, 5)
    assert settings.origin("host.capacity_bytes") == "keyword"
    assert settings.origin("nvme.threads") == "KVCACHE_NVME__THREADS"
    assert settings.origin("block_tokens") == str(file)
    assert settings.origin("nvme.write") == "default"
    assert settings.origin("host.slab_bytes").startswith("default: 256 MiB")


def test_every_setting_has_a_variable_and_a_keyword(tmp_path: Path) -> None:
    settings = load(environ={}, **given_all(tmp_path))
    written = {name: str(settings.value(name)).lower() for name in TABLE}
    by_variable = load(environ={TABLE[name].variable: text for name, text in written.items()})
    by_keyword = load(environ={}, **{name.replace(".", "__"): text for name, text in written.items()})
    assert by_variable.model_dump() == by_keyword.model_dump()
    given = [name for name in TABLE if written[name]]  # an empty variable gives nothing
    assert {by_variable.origin(name) for name in given} == {TABLE[name].variable for name in given}
    assert {by_keyword.origin(name) for name in TABLE} == {"keyword"}


def test_nested_and_flat_keywords_are_the_same(tmp_path: Path) -> None:
    flat = load(environ={}, nvme__path=tmp_path / "nvme", nvme__capacity_bytes=GiB, evict__policy="lru")
    nested = load(environ={}, **given_all(tmp_path), evict={"policy": "lru"})
    assert flat.nvme == nested.nvme
    assert flat.evict == nested.evict


def test_a_password_setting_is_refused_and_not_echoed(tmp_path: Path) -> None:
    load(environ={"KVCACHE_REDIS_PASSWORD": "not to be seen"}, **given_all(tmp_path))
    said = refusal(redis={"url": "redis://user:secret@here:6379"})
    assert "redis.password_file" in said
    assert "secret" not in said


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    assert load(environ={"KVCACHE_BLOCK_TOKENS": ""}, **given_all(tmp_path)).block_tokens == 16


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    settings = load(environ={}, **given_all(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        settings.host.capacity_bytes = 1  # type: ignore[misc]


def test_small_tiers_get_small_pieces(tmp_path: Path) -> None:
    settings = load(environ={}, host__capacity_bytes="8MiB", nvme={"path": tmp_path, "capacity_bytes": "80MiB"})
    assert (settings.host.slab_bytes, settings.nvme.segment_bytes) == (MiB, 10 * MiB)


def test_the_directory_variable_moves_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(environ={"KVCACHE_DIR": str(tmp_path / "here")}, nvme__capacity_bytes="1GiB")
    assert settings.nvme.path == tmp_path / "here" / "nvme"
    assert settings.origin("nvme.path") == "KVCACHE_DIR"
    assert load(environ={}, nvme__capacity_bytes="1GiB").nvme.path == tmp_path / "kvcache" / "nvme"


def test_a_tmpfs_drive_needs_an_explicit_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.settings.tiers.is_memory_backed", lambda path: True)
    text = refusal(nvme__path=str(tmp_path))
    assert "nvme.path" in text
    assert str(tmp_path) in text
    assert "nvme.capacity_bytes" in text
    assert load(environ={}, nvme__path=str(tmp_path), nvme__capacity_bytes="1GiB").nvme.enabled
    assert not load(environ={}, nvme__enabled=False).nvme.enabled


def test_the_default_is_a_fifth_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = {"free": 100 * GiB, "held": 0}
    monkeypatch.setattr("kvcache.settings.tiers.is_memory_backed", lambda path: False)
    monkeypatch.setattr("kvcache.settings.tiers.disk_free_bytes", lambda path: disk["free"])
    monkeypatch.setattr("kvcache.settings.tiers.disk_used_bytes", lambda path: disk["held"])
    sizes = []
    for free, held in ((100, 0), (80, 20), (0, 20)):
        disk.update(free=free * GiB, held=held * GiB)
        sizes.append(load(environ={}).nvme.capacity_bytes)
    assert sizes == [20 * GiB, 20 * GiB, 20 * GiB]
    disk.update(free=0, held=0)
    assert load(environ={}).nvme.capacity_bytes == 256 * MiB


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"host__capacity_bytes": 0}, ("host.capacity_bytes = 0", "keyword", "65536")),
        ({"host__capacity_bytes": "2 gigs"}, ("host.capacity_bytes = '2 gigs'", "2GiB")),
        ({"host__capacity_bytes": 1.5}, ("host.capacity_bytes = 1.5", "integer")),
        ({"host__capacity_bytes": True}, ("host.capacity_bytes = True", "not a size")),
        ({"host__slab_bytes": 5000}, ("host.slab_bytes = 5000", "multiple of 4096")),
        (
            {"host": {"capacity_bytes": "1MiB", "slab_bytes": "2MiB"}},
            ("slab_bytes = 2 MiB", "capacity_bytes = 1 MiB"),
        ),
        (
            {"nvme": {"capacity_bytes": "1MiB", "segment_bytes": "2MiB"}},
            ("segment_bytes = 2 MiB", "nvme.capacity_bytes"),
        ),
        ({"nvme__durability": "batsch"}, ("nvme.durability = 'batsch'", "'block', 'batch' or 'none'")),
        ({"nvme__path": " "}, ("nvme.path = ' '", "directory")),
        ({"flow__threads": 0}, ("flow.threads = 0", "greater than or equal to 1")),
        ({"flow__threads": True}, ("flow.threads = True", "number")),
        ({"flow__deadline_s": float("nan")}, ("flow.deadline_s = nan",)),
        ({"block_tokens": 65536}, ("block_tokens = 65536", "65535")),
        ({"host": 3}, ("host = 3", "section", "host.capacity_bytes")),
        ({"hots__capacity_bytes": 1}, ("hots.capacity_bytes", "perhaps host.capacity_bytes")),
        ({"capacity_bytes": 1}, ("host.capacity_bytes or nvme.capacity_bytes",)),
        ({"nonsense": 1}, ("nonsense = 1", "kvcache config show")),
        ({"block_tokens": {"x": 1}}, ("block_tokens.x = 1", "perhaps block_tokens")),
        (
            {"environ": {"KVCACHE_HOST_CAPACITY_BYTES": "1"}},
            ("from KVCACHE_HOST_CAPACITY_BYTES", "perhaps KVCACHE_HOST__CAPACITY_BYTES"),
        ),
        ({"environ": {"KVCACHE_FLOW__THREADS": "x"}}, ("flow.threads = 'x'", "from KVCACHE_FLOW__THREADS")),
    ],
)
def test_an_error_names_setting_value_and_expectation(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    text = refusal(**keywords)
    for word in words:
        assert word in text


@pytest.mark.parametrize("foreign", sorted(FOREIGN))
def test_names_of_other_libraries_suggest_the_setting(foreign: str) -> None:
    whose, ours = FOREIGN[foreign]
    assert ours in TABLE
    assert f"{foreign} is {whose} word; here it is {ours}" in refusal(**{foreign: 1})
    assert ours in refusal(environ={f"KVCACHE_{foreign.upper()}": "1"})


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_a_renamed_setting_is_refused_with_its_new_name(old: str) -> None:
    new = RENAMED[old]
    assert new in TABLE
    variable = f"KVCACHE_{old.upper().replace('.', '__')}"
    for text in (refusal(**{old.replace(".", "__"): 1}), refusal(environ={variable: "1"})):
        assert f"{old} is called {new} now" in text
    assert old in (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_setting_is_refused_with_the_fixed_behaviour(name: str) -> None:
    assert name not in TABLE
    text = refusal(**{name.replace(".", "__"): 1})
    assert f"{name} was removed, {REMOVED[name]}; leave it out" in text
    assert name in (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_tenants_setting_of_before_is_refused_too(tier: str) -> None:
    text = refusal(evict__tenants={"acme": {f"{tier}_least_bytes": "1MiB"}})
    assert f"{tier}_least_bytes of a tenant is called {tier}_guaranteed_bytes now" in text


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content, words in (
        ("missing.toml", None, "No such file"),
        ("wrong.toml", b"block_tokens = = 3", "not TOML"),
        ("binary.toml", b"\xff\xfe\x00", "not TOML"),
    ):
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            load(file, {})
        assert name in str(caught.value)
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, {})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
    st.sampled_from([*sorted(TABLE), "host", "nonsense"]),
)
@example({"\n": None}, "block_tokens")
@example({"a\nb": {"\n": 1}}, "evict.tenants")
def test_any_value_is_accepted_or_refused_with_an_error(value: Any, name: str) -> None:
    keywords = {"nvme__path": "/nowhere", "nvme__capacity_bytes": GiB, name.replace(".", "__"): value}
    try:
        answer: Settings | str = load(environ={}, **keywords)
    except ConfigError as error:
        answer = str(error)
    assert isinstance(answer, Settings) or "\n" not in answer
