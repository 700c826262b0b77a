# SPDX-License-Identifier: MIT
"""Picks the build of the core that fits this CPU."""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"gfx950_emulator.{name}")
    except ModuleNotFoundError:
        return None


def load() -> ModuleType:
    """The fastest build that the CPU runs, or level GFX950_EMULATOR_LEVEL (2, 3, 4).

    Raises ImportError when there is none.
    """
    forced = os.environ.get("GFX950_EMULATOR_LEVEL")
    if forced and (module := _import(f"_core_v{forced}")) is not None:
        return module
    base = _import("_core") or _import("_core_v2")
    if base is None or forced:
        raise ImportError(
            "gfx950_emulator: the compiled core is missing; install with `pip install ./emulator`"
            + (f" (level {forced} was asked for)" if forced else "")
        )
    for level in range(base.cpu_level(), 2, -1):
        if (better := _import(f"_core_v{level}")) is not None:
            return better
    return base


core = load()
