"""Builds the one compiled part, `kvcache._native`, where there is a C++ compiler; all else stands in pyproject.toml."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

ParallelCompile(default=0).install()

native = Pybind11Extension(
    "kvcache._native",
    sorted(set(glob("csrc/host/*.cpp")) - {"csrc/host/stress.cpp"}),
    depends=glob("csrc/host/*.h") + glob("csrc/layout/*.h"),
    cxx_std=17,
    extra_compile_args=["-O3", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,  # without it the package works by its plain twins, and says so
)

setup(ext_modules=[native])
