# SPDX-License-Identifier: MIT
"""Compiles csrc/hip for gfx950 (CMake target gfx950): no ROCm, no GPU."""

from __future__ import annotations

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
