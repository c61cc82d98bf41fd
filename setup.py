"""Builds the one compiled part, `kvcache._native`, where there is a C++ compiler, and packs the CUDA kernels' sources,
which are compiled where they run; all else stands in pyproject.toml."""

from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup
from setuptools.command.build_py import build_py

ParallelCompile(default=0).install()

native = Pybind11Extension(
    "kvcache._native",
    sorted(glob("csrc/host/*.cpp")),
    depends=glob("csrc/host/*.h") + glob("csrc/layout/*.h"),
    cxx_std=17,
    extra_compile_args=["-O3", "-pthread"],
    extra_link_args=["-pthread"],
    optional=True,  # without it the package works by its plain twins, and says so
)


class WithKernels(build_py):
    """csrc/cuda and csrc/layout become kvcache/csrc; an editable install finds them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source in sorted(glob("csrc/cuda/*") + glob("csrc/layout/*")):
                target = Path(self.build_lib, "kvcache", source)
                self.mkpath(str(target.parent))
                self.copy_file(source, str(target))


setup(ext_modules=[native], cmdclass={"build_py": WithKernels})
