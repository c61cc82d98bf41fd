"""What is built is what installs and works: the source distribution, a wheel made from it without a compiler and with
one, and what installing it beside a serving engine would change.

Those that take packages from an index are long.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "kvcache", "scripts", "tests")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
ENGINES = ("vllm==0.32.0", "sglang==0.5.23")


def run(*command: str | Path, cwd: Path, environ: Mapping[str, str] | None = None) -> str:
    """What it printed. Nothing of this checkout is on its path."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **(environ or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From a copy, so that nothing is built within the checkout and nothing already built is taken along."""
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("sdist")
    built = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc", ".*")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
        elif path.name in FOLDERS:
            shutil.copytree(path, tree / path.name, ignore=built)
    run(sys.executable, "-c", BUILD, made, cwd=tree)
    (archive,) = made.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def plain(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built where there is no compiler."""
    made = tmp_path_factory.mktemp("plain")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", made, sdist, cwd=made, environ={"CC": "false", "CXX": "false"})
    (wheel,) = made.glob("*.whl")
    return wheel


def test_the_source_distribution_is_the_source(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    mine = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    mine |= {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    mine |= {"LICENSE", "NOTICE", "README.md", "docs/spec/key.md", "examples/restart.py", "scripts/test", "mkdocs.yml"}
    assert mine - names == set()
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_a_wheel_contains_only_the_package(plain: Path) -> None:
    with zipfile.ZipFile(plain) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    assert {name.partition("/")[0].split("-")[0] for name in names} == {"kvcache", "kvcache_tiers"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kvcache").rglob("*.py")}
    kernels = {f"kvcache/{path.relative_to(ROOT)}" for path in (ROOT / "csrc" / "cuda").iterdir()}
    page = {str(path.relative_to(ROOT)) for path in (ROOT / "kvcache" / "daemon" / "http" / "page").iterdir()}
    assert (sources | kernels | page | {"kvcache/py.typed", "kvcache/_native.pyi"}) - set(names) == set()
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
    needed = [line.partition(";")[0] for line in described.splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in needed if re.search("==|~=|<", line)] == [], "lower bounds only: engines pin"


def test_the_notice_names_every_dependency() -> None:
    """With a licence beside it; `nvidia-cuda-*` stands for the packages that a GPU's kernels are compiled with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8").lower()
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += [each for extra in project["project"]["optional-dependencies"].values() for each in extra]
    names = {re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0].lower() for each in wanted} - {"kvcache-tiers"}
    names = {"nvidia-cuda" if name.startswith("nvidia-cuda") else name for name in names}
    assert [name for name in sorted(names) if not re.search(rf"\b{re.escape(name)}", notice)] == []


def test_a_build_without_a_compiler_reads_the_same_bytes(plain: Path, tmp_path: Path) -> None:
    """Installed into a folder of its own; what it depends on is this environment's."""
    place = tmp_path / "installed"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place, plain, cwd=tmp_path)
    # without the .pth files of this environment, one of which may lead to the tree and its compiled core
    environ = {"PYTHONPATH": os.pathsep.join([str(place), sysconfig.get_path("purelib")])}
    told = "import kvcache, kvcache.native; print(kvcache.__file__, kvcache.native.built)"
    assert run(sys.executable, "-S", "-c", told, cwd=tmp_path, environ=environ).split() == [
        str(place / "kvcache" / "__init__.py"),
        "False",
    ]
    assert "the same bytes" in run(sys.executable, "-S", ROOT / "examples/restart.py", cwd=tmp_path, environ=environ)


def clean(place: Path) -> Path:
    """The interpreter of a new environment with the newest pip, which resolves without fetching whole wheels."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", cwd=place)
    return python


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_into_a_clean_environment(
    kind: str, sdist: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("long: compiles, and takes what it depends on from an index")
    python, what = clean(tmp_path / "venv"), sdist
    if kind == "wheel":
        run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
        (what,) = tmp_path.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", what, cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    # A core that was not built warns: that is an error here.
    said = run(python, "-W", "error::RuntimeWarning", ROOT / "examples/restart.py", cwd=tmp_path)
    assert "the same bytes" in said
    assert "kvcache" in run(python.with_name("kvcache"), "--version", cwd=tmp_path)


def resolve(python: Path, *what: str | Path) -> dict[str, dict[str, Any]]:
    """What pip would install, by name."""
    report = python.parent / "report.json"
    pip = (python, "-m", "pip", "install", "--dry-run", "--quiet", "--only-binary", ":all:", "--report", report)
    run(*pip, *what, cwd=python.parent)
    found = (item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"])
    return {re.sub("[-_.]+", "-", metadata["name"]).lower(): metadata for metadata in found}


@pytest.mark.parametrize("extra", ["", "[engine,object,zstd]"])
@pytest.mark.parametrize("engine", ENGINES)
def test_beside_an_engine_no_installed_version_changes(
    engine: str, extra: str, plain: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The engine is resolved and each package that it needs entered as installed, by its metadata alone."""
    if not request.config.getoption("--long"):
        pytest.skip("long: resolves an engine of 200 packages")
    python = clean(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    installed = resolve(python, "--ignore-installed", engine)
    for metadata in installed.values():
        info = site / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
        info.mkdir(exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {metadata['name']}", f"Version: {metadata['version']}"]
        lines += [f"Requires-Dist: {needed}" for needed in metadata.get("requires_dist", [])]
        lines += [f"Provides-Extra: {name}" for name in metadata.get("provides_extra", [])]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
        (info / "RECORD").write_text("", encoding="utf-8")
    run(python, "-m", "pip", "check", cwd=tmp_path)
    added = resolve(python, f"{plain}{extra}")
    assert "kvcache-tiers" in added
    changed = {name: (installed[name]["version"], added[name]["version"]) for name in added.keys() & installed.keys()}
    assert changed == {}
