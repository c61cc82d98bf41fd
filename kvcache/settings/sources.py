"""The sources of settings: a file, environment variables, keywords.

    load("kvcache.toml", host__capacity_bytes="4GiB")

`load` reads a TOML file, then `KVCACHE_*` variables (`KVCACHE_HOST__CAPACITY_BYTES`), then keywords. A later source
overrides an earlier one. `settings.origin("host.capacity_bytes")` returns the source of a value.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvcache.errors import ConfigError
from kvcache.settings import PREFIX, SECTIONS, TABLE, Settings
from kvcache.settings.cache import IdentitySettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Settings", "load", "load_identity"]

_SECRETS = {
    "KVCACHE_REDIS_PASSWORD",
    "KVCACHE_REDIS_SENTINEL_PASSWORD",
    "KVCACHE_TOKEN",
}  # not settings: their users read them, and no output shows them
_DIRECTORY = "KVCACHE_DIR"  # directory of all caches of this user, models too; no setting, but it moves nvme.path

FOREIGN: Mapping[str, tuple[str, str]] = {
    "block_size": ("vLLM's", "block_tokens"),
    "cpu_bytes_to_use": ("vLLM's", "host.capacity_bytes"),
    "kv_offloading_size": ("vLLM's", "host.capacity_bytes"),
    "swap_space": ("vLLM's", "host.capacity_bytes"),
    "eviction_policy": ("vLLM's", "evict.policy"),
    "page_size": ("SGLang's", "block_tokens"),
    "hicache_ratio": ("SGLang's", "host.capacity_bytes"),
    "hicache_size": ("SGLang's", "host.capacity_bytes"),
    "hicache_write_policy": ("SGLang's", "nvme.write"),
    "radix_eviction_policy": ("SGLang's", "evict.policy"),
    "chunk_size": ("LMCache's", "block_tokens"),
    "local_cpu": ("LMCache's", "host.capacity_bytes"),
    "max_local_cpu_size": ("LMCache's", "host.capacity_bytes"),
    "local_disk": ("LMCache's", "nvme.path"),
    "max_local_disk_size": ("LMCache's", "nvme.capacity_bytes"),
    "cache_policy": ("LMCache's", "evict.policy"),
}
"""Names of settings in other projects: the project, and the name here."""

RENAMED: Mapping[str, str] = {
    "host.extent_bytes": "host.slab_bytes",
    "nvme.free_floor_bytes": "nvme.min_free_bytes",
    "encryption.accept_plain": "encryption.accept_unencrypted",
    "evict.curve_samples": "evict.mrc_samples",
    "flow.ask_deadline_s": "flow.lookup_timeout_s",
    "canary.one_in": "canary.sample_rate",
    "warm.heat": "warm.report_popularity",
    "warm.heat_every_s": "warm.popularity_interval_s",
}
"""Old and new names of settings, as in docs/migration.md. `kvcache.settings.cache` has those of a tenant."""


REMOVED: Mapping[str, str] = {
    "flow.known_blocks": "the index of a shared tier has 262,144 blocks",
    "redis.part_expire_s": "parts of a split record expire after a day, or with the record",
    "warm.heat_half_life_s": "each node needs the same half-life, an hour",
}
"""Settings without a way to choose a value, and the fixed behaviour."""


def load(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] = os.environ, **keywords: Any
) -> Settings:
    """Return the settings of this process. Raises ConfigError, of one line, for the first invalid one."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if environ.get(_DIRECTORY):
        values["nvme.path"], origins["nvme.path"] = str(Path(environ[_DIRECTORY], "nvme")), _DIRECTORY
    for name, value, origin in (*_file_settings(path), *_variable_settings(environ), *_keyword_settings(keywords)):
        values[name], origins[name] = value, origin
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[last] = value
    try:
        settings = Settings(**tree)
    except ValidationError as error:
        raise _config_error(error, origins) from None
    settings._origins.update(origins)  # noqa: SLF001  same package: only this module knows the origins
    return settings


def load_identity(
    where: str | os.PathLike[str] | None = None,
    given: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> IdentitySettings:
    """Return the `identity` section alone, for a connector that identifies its model itself.

    Args:
        where: A settings file, or a daemon's address, which has no settings of this process.
        given: Settings that override the file and variables; other sections are ignored.
    """
    remote = where is not None and str(where).startswith(("unix:", "tls:", "tcp:"))
    keywords = {name: value for name, value in _flat(given or {}) if name.startswith("identity.")}
    variables = {name: value for name, value in environ.items() if name.startswith(f"{PREFIX}IDENTITY__")}
    return load(None if remote else where, variables, **keywords).identity


def _file_settings(path: str | os.PathLike[str] | None) -> Iterator[tuple[str, Any, str]]:
    if path is None:
        return
    try:
        tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"settings file {os.fspath(path)!r}: {reason}; give the path of a TOML file") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"settings file {os.fspath(path)!r}: not TOML: {error}") from None
    for name, value in _flat(tree):
        yield _checked_name(name, value, os.fspath(path)), value, os.fspath(path)


def _variable_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for variable, value in environ.items():
        if variable.startswith(PREFIX) and variable != _DIRECTORY and variable not in _SECRETS and value:
            name = variable[len(PREFIX) :].lower().replace("__", ".")
            yield _checked_name(name, value, variable), value, variable


def _keyword_settings(keywords: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name, value in _flat({name.replace("__", "."): value for name, value in keywords.items()}):
        yield _checked_name(name, value, "keyword"), value, "keyword"


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and not (above + name in TABLE and TABLE[above + name].is_table):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, value


def _checked_name(name: str, value: Any, origin: str) -> str:
    """Return the name of a setting. For an unknown one, raise ConfigError with the most likely intended name."""
    if name in TABLE:
        return name
    found = f"{_on_one_line(name)} = {value!r} (from {origin})"
    if name in SECTIONS:
        raise ConfigError(f"{found}: {name} is a section; give {name}.<setting>, for instance {_first_setting(name)}")
    if name in REMOVED:
        raise ConfigError(f"{found}: {name} was removed, {REMOVED[name]}; leave it out")
    if name in RENAMED:
        raise ConfigError(f"{found}: {name} is called {RENAMED[name]} now; give that instead (docs/migration.md)")
    last = name.rpartition(".")[2]
    if last in FOREIGN:
        project, own_name = FOREIGN[last]
        raise ConfigError(f"{found}: {last} is {project} word; here it is {own_name} ({_description(own_name)})")
    candidates = [row for row in TABLE if row.endswith(f".{name}")] or _close_matches(name)
    if candidates:
        written = [TABLE[row].variable if origin.startswith(PREFIX) else row for row in candidates]
        raise ConfigError(f"{found}: no such setting; perhaps {' or '.join(written)}")
    raise ConfigError(f"{found}: no such setting; `kvcache config show` lists them all")


def _close_matches(name: str) -> list[str]:
    by_spelling = {row.replace(".", "_"): row for row in TABLE}
    return [
        by_spelling[match] for match in difflib.get_close_matches(name.replace(".", "_"), by_spelling, n=1, cutoff=0.7)
    ]


def _first_setting(section: str) -> str:
    return next(name for name in TABLE if name.startswith(f"{section}."))


def _description(name: str) -> str:
    return str(TABLE[name].field.description).rstrip(".")


def _config_error(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):  # a check of two settings names them itself
        return inner
    name = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    origin = next((origins[row] for row in origins if f"{name}.".startswith(f"{row}.")), "default")
    return ConfigError(f"{_on_one_line(name)} = {first['input']!r} (from {origin}): {reason}")


def _on_one_line(name: str) -> str:
    """Return a name as it is, or quoted if it has characters such as a newline."""
    return name if name.isprintable() else repr(name)
