"""The page of settings, docs/configuration.md, written from the tree of settings; a test keeps the two the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal, get_args, get_origin

from kvcache.settings import TABLE, Setting, Settings
from kvcache.settings.types import show_bytes

_HEAD = """\
# Configuration

A setting comes from a TOML file, from an environment variable or from a keyword of `kvcache.open`; the later of these
weighs more. One setting in its three forms:

```toml
[host]
capacity_bytes = "4GiB"
```

```sh
KVCACHE_HOST__CAPACITY_BYTES=4GiB
```

```python
kvcache.open(host={"capacity_bytes": "4GiB"})  # or host__capacity_bytes="4GiB"
```

Sizes are bytes as a number, or as in `512MiB`, `2GiB` (powers of 1,024) and `2GB` (powers of 1,000). A setting that
makes no sense is refused at start with its name, what was given and where, and what would do. `kvcache config show`
prints every setting that holds and where it came from.

`KVCACHE_DIR` is no setting: it names the directory of everything that this user's caches keep, converted models too,
and moves the default of `nvme.path` with it.

This page is written by `python -m scripts.generate.configuration_page`.
"""


_COLUMNS = "| setting | type | default | what it is |\n| --- | --- | --- | --- |"


def configuration_page() -> str:
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    for section, rows in groupby(TABLE.values(), lambda row: row.name.rpartition(".")[0]):
        about = Settings.model_fields[section].annotation.__doc__ if section else "Outside any section."
        yield f"## {section or 'Top'}\n\n{about}\n\n{_COLUMNS}"
        yield from map(_row, rows)
        yield ""


def _row(row: Setting) -> str:
    default = row.made or (f"`{_default(row)}`" if row.field.default not in ("", ()) and not row.is_table else "none")
    return f"| `{row.name}` | {_kind(row)} | {default} | {row.field.description} |"


def _default(row: Setting) -> str:
    value = row.field.default
    if row.name.endswith("_bytes"):
        return show_bytes(value).replace(" ", "")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(row: Setting) -> str:
    kind = row.field.annotation
    if row.name.endswith("_bytes"):
        return "size"
    if get_origin(kind) is Literal:
        return " or ".join(f"`{word}`" for word in get_args(kind))
    names = {
        "Path": "directory",
        "bool": "`true` or `false`",
        "int": "number",
        "float": "seconds",
        "str": "text",
        "tuple": "list",
        "dict": "table",
    }
    return names[getattr(kind, "__name__", "")]


if __name__ == "__main__":
    print(configuration_page(), end="")
