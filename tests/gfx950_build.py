# SPDX-License-Identifier: MIT
"""Compiles csrc/hip for gfx950 (CMake target gfx950): no ROCm, no GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def code_objects() -> Path:
    """Folder with <stem>.s and <stem>.co, up to date with the sources."""
    build = ROOT / "build" / "gfx950"
    cmake = [sys.executable, "-m", "cmake"]
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    configure = [*cmake, "-S", ROOT, "-B", build, "-G", "Ninja", python]
    for command in (configure, [*cmake, "--build", build, "--target", "gfx950"]):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(result.stdout + result.stderr)
    return build


@cache
def host_library(name: str, code: str) -> ctypes.CDLL:
    """A shared library of host code that includes headers of csrc, as the launchers do."""
    source = code_objects() / f"{name}.cpp"
    source.write_text(code)
    library = source.with_suffix(".so")
    flags = ["-std=c++20", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["c++", source, *flags, "-o", library], check=True)
    return ctypes.CDLL(str(library))
