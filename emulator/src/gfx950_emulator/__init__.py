# SPDX-License-Identifier: MIT
"""Loads gfx950 code objects and executes their machine code on a CPU.

import gfx950_emulator as emu
obj = emu.load("kernel.co")
stats = obj.run("kernel", grid=(4, 1, 1), block=(256, 1, 1), args=[x, y, 1000])
"""

from .arguments import Struct, Uninitialized
from .core import core as _core
from .elf import Argument, KernelInfo
from .errors import Access, EmulatorError
from .program import Object, load
from .stats import Floor, Stats


def implemented() -> set[str]:
    """Mnemonics that the emulator executes."""
    return set(_core.implemented())


__all__ = [
    "Access", "Argument", "EmulatorError", "Floor", "KernelInfo", "Object", "Stats", "Struct",
    "Uninitialized", "implemented", "load",
]  # fmt: skip
