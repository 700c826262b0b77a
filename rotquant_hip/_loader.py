# SPDX-License-Identifier: MIT
"""Loads rotquant_hip._C, after a check that it was built for the torch that is running.

An extension loaded into another torch fails with an undefined symbol at best and computes nonsense
at worst, so the versions are compared from a file first.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

BUILD_INFO = Path(__file__).with_name("_build_info.json")
REBUILD = (
    "rebuild it from the source tree with "
    "`pip install --force-reinstall --no-deps .` (or `-e .` for an editable install)"
)


def _describe(torch_version: str, hip_version: str | None) -> str:
    return f"torch {torch_version} ({f'HIP {hip_version}' if hip_version else 'no HIP'})"


def build_info() -> dict[str, Any]:
    """The build record: keys "torch" (str), "hip" (str or None) and "archs" (list of gfx names).

    Raises:
        ImportError: the extension was not built, or its record is unreadable.
    """
    try:
        info = json.loads(BUILD_INFO.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ImportError(
            f"rotquant_hip: the extension rotquant_hip._C has not been built in "
            f"{BUILD_INFO.parent}; build it from the source tree with `pip install .` (or `-e .`)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ImportError(
            f"{BUILD_INFO} is not readable as a record ({error}): {REBUILD}"
        ) from None
    if not isinstance(info, dict) or not isinstance(info.get("torch"), str) or "hip" not in info:
        raise ImportError(
            f'{BUILD_INFO} is not a build record with the keys "torch" and "hip": {REBUILD}'
        )
    return info


def _refuse_second_build() -> None:
    """Torch ends the process (SIGABRT) when a second library defines the same ops: say it first."""
    if not torch._C._dispatch_has_kernel("rotquant_hip::quant"):
        return
    spec = importlib.util.find_spec("rotquant_hip._C")
    mapped = Path("/proc/self/maps").read_text().splitlines()
    ours = str(Path(spec.origin).resolve()) if spec and spec.origin else None
    if ours and any(line.endswith(ours) for line in mapped):
        return  # the same file again, as after a reload
    raise ImportError(
        "another build of rotquant_hip has already defined torch.ops.rotquant_hip in this process, "
        f"so the one in {BUILD_INFO.parent} cannot be loaded: use one build for each process"
    )


def load_extension() -> dict[str, Any]:
    """Load _C, whose static registrations define torch.ops.rotquant_hip.*; return the build record.

    Touches no device.

    Raises:
        ImportError: not built, built for another torch or Python, or not loadable.
    """
    info = build_info()
    built = _describe(info["torch"], info["hip"])
    running = _describe(torch.__version__, torch.version.hip)
    if built != running:
        raise ImportError(f"rotquant_hip was built for {built} but {running} is running: {REBUILD}")
    _refuse_second_build()
    try:
        importlib.import_module("rotquant_hip._C")
    except ImportError as error:
        raise ImportError(
            f"rotquant_hip._C, built for {built}, does not load ({error}): {REBUILD}"
        ) from error
    return info
