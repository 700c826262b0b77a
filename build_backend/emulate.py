# SPDX-License-Identifier: MIT
"""ROTQUANT_HIP_EMULATE=1: the extension with its GPU code, on a machine with neither GPU nor ROCm.

The kernels and their launchers are compiled whole, host and gfx950, and linked against the
emulator's stand-in for libamdhip64; csrc/ops then sends CPU tensors there. Build it beside the
ordinary extension, never over it:

    pip install ./emulator ziglang && pip install --no-deps triton==3.6.0  # HIP's headers
    ROTQUANT_HIP_EMULATE=1 python setup.py build --build-base build/emulate \
        --build-lib build/emulate/lib
    PYTHONPATH=build/emulate/lib pytest tests/test_rotate_quant.py    # or: make test-emulate
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ARCH = "gfx950"


def requested(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this build is the one for the emulator."""
    return environ.get("ROTQUANT_HIP_EMULATE", "") not in ("", "0")


def _tools(refuse: Callable[[str], Exception]) -> Any:
    try:
        from gfx950_emulator import hipcc

        hipcc.clang(), hipcc.hip_include()
    except ModuleNotFoundError:
        raise refuse("ROTQUANT_HIP_EMULATE=1 needs `pip install ./emulator`.") from None
    except hipcc.ToolMissing as error:
        raise refuse(f"ROTQUANT_HIP_EMULATE=1: {error}.") from None
    return hipcc


def add_kernels(
    extension: dict[str, Any], root: Path, flags: list[str], refuse: Callable[[str], Exception]
) -> dict[str, Any]:
    """Compile csrc/hip and add its objects to the arguments of an extension without HIP."""
    hipcc = _tools(refuse)
    folder = root / "build" / "emulate"
    macros = [
        ("ROTQUANT_WITH_HIP", None),
        ("ROTQUANT_HIP_EMULATE", None),
        ("ROTQUANT_HIP_ARCHS", f'"{ARCH}"'),
        ("__HIP_PLATFORM_AMD__", "1"),
    ]
    defines = [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in macros]
    objects = _compile_all(hipcc, root, folder / "hip", [*flags, *defines, f"-I{root / 'csrc'}"])
    include = [f"-isystem{hipcc.hip_include()}", f"-isystem{hipcc.RUNTIME}"]
    return {
        **extension,
        "define_macros": [*extension["define_macros"], *macros],
        "extra_compile_args": {"cxx": [*extension["extra_compile_args"]["cxx"], *include]},
        "extra_objects": objects,
        "extra_link_args": hipcc.link_flags(hipcc.build_runtime(folder / "runtime")),
    }


def _compile_all(hipcc: Any, root: Path, folder: Path, flags: list[str]) -> list[str]:
    """Objects of every .hip file; those newer than all sources are kept."""
    sources = sorted((root / "csrc/hip").rglob("*.hip"))
    inputs = [p for p in (root / "csrc").rglob("*") if p.is_file() and p.suffix != ".cpp"]
    inputs += Path(__file__).parent.glob("*.py")  # the flags
    inputs += [Path(hipcc.__file__), *hipcc.RUNTIME.glob("*.h")]
    newest = max(p.stat().st_mtime for p in inputs)

    def compile(source: Path) -> str:
        out = folder / source.relative_to(root / "csrc/hip").with_suffix(".o")
        if not out.exists() or out.stat().st_mtime < newest:
            out.parent.mkdir(parents=True, exist_ok=True)
            hipcc.compile_hip(source, out, flags)
        return str(out)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        return list(pool.map(compile, sources))
