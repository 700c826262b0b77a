# SPDX-License-Identifier: MIT
"""Builds the core once per instruction-set level of the host; the package picks one at import.

GFX950_EMULATOR_LEVELS="3" builds fewer (x86-64 only; "" is the plain build).
"""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(p) for p in Path("csrc").glob("*.cpp"))
HEADERS = sorted(str(p) for p in Path("csrc").glob("*.h"))
# NOTE: no contraction anywhere: a fused multiply-add must be one in the machine code that is
# executed.
FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wextra"]
LEVELS = {"": [], "2": ["-march=x86-64-v2"], "3": ["-march=x86-64-v3"], "4": ["-march=x86-64-v4"]}


def levels() -> list[str]:
    """The levels to build, as keys of LEVELS."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return [""]
    chosen = os.environ.get("GFX950_EMULATOR_LEVELS", "2,3,4").split(",")
    return chosen if "2" in chosen or "" in chosen else ["2", *chosen]


def extension(level: str) -> Extension:
    name = f"_core_v{level}" if level else "_core"
    return Extension(
        f"gfx950_emulator.{name}",
        SOURCES,
        depends=HEADERS,
        include_dirs=["csrc", pybind11.get_include()],
        define_macros=[("EMU_MODULE", name)],
        extra_compile_args=FLAGS + LEVELS[level],
        extra_link_args=["-pthread"],
        language="c++",
    )


class ParallelBuild(build_ext):
    """Compiles the sources of one extension side by side (MAX_JOBS)."""

    def build_extension(self, ext: Extension) -> None:
        jobs = int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))
        compile_all = self.compiler.compile

        def compile(sources, **options):
            with ThreadPoolExecutor(jobs) as pool:
                parts = pool.map(lambda source: compile_all([source], **options), sources)
            return [name for part in parts for name in part]

        self.compiler.compile = compile
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all


setup(ext_modules=[extension(level) for level in levels()], cmdclass={"build_ext": ParallelBuild})
