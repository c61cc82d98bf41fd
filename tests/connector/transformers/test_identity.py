"""A model in memory is identified by its tensors and its configuration, whatever it was loaded from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import kvcache
from kvcache.connector.transformers import PrefixStore
from kvcache.connector.transformers.revision import SAMPLE_BYTES, SAMPLES, tensors_revision
from kvcache.errors import ModelError
from kvcache.testing.naive_cache import NaiveCache
from tests.engine import tiny_model

WHOLE = SAMPLES * SAMPLE_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_model.make(tmp_path_factory.mktemp("model") / "it"))


def named(place: Path, **told: Any) -> bytes:
    return named_as_it_is(AutoModelForCausalLM.from_pretrained(place, **told).eval())


def named_as_it_is(model: Any) -> bytes:
    found: bytes = PrefixStore(NaiveCache(), model)._handle.id
    return found


def test_a_copy_of_the_files_has_the_same_id(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    assert named(copy) == named(folder)


def test_options_that_select_weights_change_the_id(folder: Path, tmp_path: Path) -> None:
    top = Path(shutil.copytree(folder, tmp_path / folder.name))
    tiny_model.make(top / "inner", seed=1)
    AutoModelForCausalLM.from_pretrained(top / "inner").save_pretrained(top, variant="other")
    seen = [named(top), named(top, subfolder="inner"), named(top, dtype=torch.bfloat16), named(top, rms_norm_eps=0.5)]
    (top / "model.safetensors").unlink()
    shutil.copy(top / "inner" / "model.safetensors", top)
    assert named(top) == named(top, variant="other") == seen[1], "the same weights by three ways"
    assert len(set(seen)) == 4


def test_weights_changed_in_memory_change_the_id(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = named_as_it_is(model)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert named_as_it_is(model) != before


def test_the_commit_hash_of_transformers_is_used(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    seen = {named_as_it_is(model)}
    for commit in ("1" * 40, "2" * 40):
        model.config._commit_hash = commit
        seen.add(named_as_it_is(model))
    assert len(seen) == 3


def test_a_setting_reads_every_byte_of_the_weights(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    small: dict[str, Any] = {"host__capacity_bytes": "16MiB", "nvme__enabled": False, "control__enabled": False}
    seen = set()
    for whole in (False, True):
        with kvcache.open(**small, identity__read_every_byte=whole) as cache:
            seen.add(PrefixStore(cache, model)._handle.id)
    assert len(seen) == 2


def test_values_without_storage_are_refused(folder: Path) -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(3, device="meta")}
    with pytest.raises(ModelError, match=r"'b'.*give revision="):
        tensors_revision(tensors)
    with pytest.raises(ModelError, match=r"'c' \(dict\).*give revision="):
        tensors_revision({"c": {}})


@settings(deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float8_e4m3fn]),
    shape=st.lists(st.integers(0, 9), max_size=3),
    seed=st.integers(0, 99),
)
def test_any_change_of_a_small_tensor_changes_the_id(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    tensor = torch.from_numpy(random.integers(0, 2, shape).astype(np.float32)).to(dtype)
    before = tensors_revision({"t": tensor})
    assert tensors_revision({"t": tensor.clone()}) == before
    assert tensors_revision({"u": tensor}) != before
    assert tensors_revision({"t": tensor[None]}) != before
    if tensor.numel():
        other = tensor.clone()
        other.reshape(-1).view(torch.uint8)[int(random.integers(other.nbytes))] ^= 1
        assert tensors_revision({"t": other}) != before


@pytest.mark.parametrize("size", [WHOLE - 1, WHOLE, WHOLE + 1, 5 * WHOLE])
def test_a_large_tensor_is_sampled_to_its_last_byte(size: int) -> None:
    tensor = torch.zeros(size, dtype=torch.uint8)
    before, whole = tensors_revision({"t": tensor}), tensors_revision({"t": tensor}, read_every_byte=True)
    for at in (0, size - 1):
        other = tensor.clone()
        other[at] = 1
        assert tensors_revision({"t": other}) != before
    tensor[size // 2] = 1
    assert tensors_revision({"t": tensor}, read_every_byte=True) != whole


def test_the_memory_order_does_not_change_the_id() -> None:
    tensor = torch.arange(60_000.0).reshape(200, 300)
    turned = tensor.T.contiguous().T
    assert tensors_revision({"a": tensor, "b": turned}) == tensors_revision({"b": tensor, "a": tensor.clone()})
