# SPDX-License-Identifier: MIT
"""The CPU kernels for the instruction sets that this machine would not choose.

The library picks the widest at run time; here each is compiled as the library does it, into a
library of its own (isa_shim.cpp). The fixture `isa_libraries` is in conftest.py.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import torch
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
_LEVELS = {"DEFAULT": 1, "AVX2": 2, "AVX512": 3}
ISA_NAMES = ("baseline", "avx2", "avx512")[
    : _LEVELS.get(torch.backends.cpu.get_cpu_capability(), 1)
]


def build_libraries(folder: Path) -> dict[str, ctypes.CDLL]:
    """The kernels of every instruction set that this machine has."""
    sys.path.insert(0, str(ROOT / "build_backend"))
    import build_config

    compilers = {}
    for isa in ISA_NAMES:
        # The library hides its symbols; those of the shim have to be found.
        flags = [*build_config.COMMON_FLAGS, "-fvisibility=default", "-shared", "-fPIC"]
        flags += [f"-DRQ_SHIM_ISA={isa}", f'-DRQ_SHIM_SOURCE="cpu/isa/{isa}.cpp"']
        source = [f"-I{ROOT / 'csrc'}", str(ROOT / "tests/isa_shim.cpp")]
        command = [os.environ.get("CXX", "c++"), *flags, *source]
        compilers[isa] = subprocess.Popen([*command, "-o", str(folder / f"{isa}.so")])
    assert all([compiler.wait() == 0 for compiler in compilers.values()])
    return {isa: ctypes.CDLL(str(folder / f"{isa}.so")) for isa in ISA_NAMES}


def address(array: NDArray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)
