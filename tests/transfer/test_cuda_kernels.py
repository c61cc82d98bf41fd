"""Every kernel compiles for every architecture that is meant, without a GPU: with NVRTC's library, and with nvcc.

NVRTC is reached by its C interface, since CuPy's own calls want a driver; the options are those that CuPy adds.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvcache.transfer.cuda import kernels
from kvcache.transfer.cuda.kernels import OPTIONS, WIDTHS, source

ARCHITECTURES = ("80", "90", "100", "120")
FILES = {
    "copy.cu": [f"{verb}_{width}" for verb in ("gather", "scatter") for width in WIDTHS],
    "quantise.cu": [
        f"{verb}_{form}_{dtype}_{count}"
        for verb in ("quantise", "restore")
        for form in ("fp8", "int8")
        for dtype in ("bf16", "fp16", "fp32")
        for count in ("wide", "one")
    ],
}


@cache
def nvrtc() -> Any:
    places = (find_spec("nvidia") or pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")).submodule_search_locations
    found = sorted(path for place in places or () for path in Path(place).rglob("libnvrtc.so.*"))
    if not found:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    return ctypes.CDLL(str(found[-1]))


def compiled(file: str, option: str, kind: str) -> bytes:
    """What NVRTC makes of a file: CUBIN or PTX."""
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    options = [option, *OPTIONS, "-ftz=true"]
    given = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    assert library.nvrtcCreateProgram(ctypes.byref(program), source(file).encode(), file.encode(), 0, None, None) == 0
    failed = library.nvrtcCompileProgram(program, len(options), given)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    assert (failed, log.value.decode()) == (0, "")
    assert getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
    made = ctypes.create_string_buffer(size.value)
    assert getattr(library, f"nvrtcGet{kind}")(program, made) == 0
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return made.raw


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_with_nvrtc(file: str, architecture: str) -> None:
    cubin = compiled(file, f"-arch=sm_{architecture}", "CUBIN")
    missing = [name for name in FILES[file] if f"\0{name}\0".encode() not in cubin]
    assert missing == []


@cache
def ptx(file: str) -> dict[str, str]:
    """The text of each kernel."""
    text = compiled(file, "-arch=compute_90", "PTX").decode()
    return {body.split("(")[0]: body for body in text.split(".visible .entry ")[1:]}


def test_kernel_names_equal_the_sources() -> None:
    assert {file: sorted(ptx(file)) for file in FILES} == {file: sorted(names) for file, names in FILES.items()}


ACCESS = re.compile(r"\b(ld|st)(?:\.global)?\.(?:v(\d)\.)?[a-z](\d+)\s")


def accesses(body: str) -> set[tuple[str, int]]:
    """Loads and stores and their bytes, without those of arguments."""
    return {(verb, int(vector or 1) * int(bits) // 8) for verb, vector, bits in ACCESS.findall(body)}


@pytest.mark.parametrize("name", FILES["copy.cu"])
def test_copies_access_memory_by_their_width(name: str) -> None:
    width = int(name.split("_")[1])
    assert accesses(ptx("copy.cu")[name]) == {("ld", width), ("st", width)}


@pytest.mark.parametrize("name", FILES["quantise.cu"])
def test_elements_are_accessed_16_bytes_at_a_time(name: str) -> None:
    verb, _, dtype, count = name.split("_")
    item = 4 if dtype == "fp32" else 2
    elements, codes, scale = (16, 16 // item, 4) if count == "wide" else (item, 1, 4)
    expected = {("ld", elements), ("st", codes), ("st", scale)}
    if verb == "restore":
        expected = {("st", elements), ("ld", codes), ("ld", scale)}
    assert accesses(ptx("quantise.cu")[name]) == expected


@pytest.mark.parametrize("name", FILES["quantise.cu"])
def test_no_product_is_fused_or_flushed(name: str) -> None:
    """Under CuPy's own options: what could come out in other bits than the codec's is the instruction itself."""
    floats = set(re.findall(r"\b((?:mul|div|fma|mad|rcp|add|sub)[a-z.]*\.f32)", ptx("quantise.cu")[name]))
    assert floats <= {"mul.rn.f32", "div.rn.f32", "add.ftz.f32", "mul.ftz.f32", "sub.ftz.f32"}
    assert "mul.rn.f32" in floats


@pytest.mark.parametrize("file", FILES)
def test_kernels_compile_with_nvcc(file: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Nothing goes through local memory but a register over the call of a division: a job is read where it came in."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc here")
    (tmp_path / file).write_text(source(file))
    architectures = ARCHITECTURES if request.config.getoption("--long") else ("90",)  # seconds each
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    command = [nvcc, *OPTIONS, "-O3", "-Werror", "all-warnings", "-Xptxas", "-v", "--threads", "2", "-fatbin", *targets]
    ran = subprocess.run(
        [*command, tmp_path / file, "-o", tmp_path / "made"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ran.stderr)
    assert len(frames) == len(FILES[file]) * len(architectures)
    assert max(int(stack) for stack, _, _ in frames) <= 8


def test_sources_are_found_where_a_wheel_puts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(kernels.__file__).parents[3]
    for part in ("cuda", "layout"):
        shutil.copytree(root / "csrc" / part, tmp_path / "kvcache" / "csrc" / part)
    before = {file: source(file) for file in FILES}
    monkeypatch.setattr(kernels, "_PACKAGE_DIR", tmp_path / "kvcache")
    assert {file: source(file) for file in FILES} == before
    assert not any("#include" in text for text in before.values())
