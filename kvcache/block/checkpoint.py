"""A digest of a checkpoint's files other than weights that change keys and values, for `Namespace.facts`.

`config.json` selects norms, activations, scales, experts and windows; an index selects tensors; quantisation files
select kernels; Python files are the model. Every field counts except those known to change nothing, so the fields of a
new family are covered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any

from kvcache.block.hf import read_config
from kvcache.block.namespace import encode
from kvcache.errors import ModelError, NamespaceError

PREFIX = b"kvcache checkpoint 1\n"
UNUSED = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "max_position_embeddings",  # the layout has it, and the facts where rope depends on it
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of a configuration that change no logit."""

_SETTINGS = ("params.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json")


def checkpoint_digest(directory: str | Path) -> str:
    """Return the digest of a model's directory.

    Raises:
        ModelError: it has no `config.json` or `params.json`, or a file does not parse.
    """
    folder = Path(directory)
    config = read_config(folder) if (folder / "config.json").exists() else {}
    found: dict[str, Any] = {name: _json(folder / name) for name in _SETTINGS if (folder / name).is_file()}
    if not config and "params.json" not in found:
        raise ModelError(f"{folder}: no config.json; expected the directory of a model")
    found |= {file.name: _weight_map(file) for file in folder.glob("*.index.json")}
    if "auto_map" in config:
        found |= {file.name: sha256(file.read_bytes()).digest() for file in folder.glob("*.py")}
    return config_digest({"config.json": config, **found})


def config_digest(config: Any) -> str:
    """Return the digest of a configuration: a mapping, or an object with `to_dict`."""
    try:
        return f"sha256:{sha256(PREFIX + encode(_used(read_config(config)))).hexdigest()}"
    except NamespaceError as error:
        raise ModelError(f"the model's configuration: {error}; check config.json") from None


def _used(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _used(item) for name, item in value.items() if name not in UNUSED}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_used(item) for item in (sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)]
    plain = value is None or type(value) in {bool, int, float, str, bytes}
    if plain and not (type(value) is int and value.bit_length() > 63) and not (type(value) is float and isnan(value)):
        return value
    return str(value)


def _weight_map(file: Path) -> Any:
    """Return an index without its metadata, which only states sizes."""
    return {name: value for name, value in _json(file).items() if name != "metadata"}


def _json(file: Path) -> Any:
    try:
        contents = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}; make it readable") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{file}: no JSON; fetch the file again") from None
    if not isinstance(contents, dict):
        raise ModelError(f"{file}: a JSON {type(contents).__name__}; fetch the file again")
    return contents
