# SPDX-License-Identifier: MIT
"""Launches single kernels of csrc/hip in the emulator, as the host code would."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import gfx950_emulator as emu
import numpy as np
from gfx950_build import code_objects, host_library
from numpy.typing import NDArray

from rotquant_hip.reference import SCALE_MODES

DTYPES = ("bf16", "fp16", "fp32")
DTYPE_OF = {np.dtype(np.uint16): 0, np.dtype(np.float16): 1, np.dtype(np.float32): 2}


class TilePlan(ctypes.Structure):
    """rotquant::device::TilePlan."""

    _fields_ = [
        ("log2_groups", ctypes.c_int),
        ("threads", ctypes.c_int),
        ("row_tiles", ctypes.c_int64),
        ("group_tiles", ctypes.c_int64),
        ("grid_rows", ctypes.c_int),
        ("grid_groups", ctypes.c_int),
    ]


PLAN_CODE = (
    '#include "hip/device/tile_plan.h"\n'
    'extern "C" void plan(long k, long rows, bool shuffle, rotquant::device::TilePlan* out) {\n'
    "  *out = rotquant::device::plan_tiles(k, rows, shuffle, 64);\n}\n"
)


def plan_tiles(k: int, rows: int, shuffle: bool) -> TilePlan:
    """What the host code asks of the kernel; compiled from the project's own header."""
    plan = TilePlan()
    host_library("tile_plan", PLAN_CODE).plan(
        ctypes.c_long(k), ctypes.c_long(rows), ctypes.c_bool(shuffle), ctypes.byref(plan)
    )
    return plan


_loaded: dict[str, emu.Object] = {}


def load(stem: str) -> emu.Object:
    if stem not in _loaded:
        _loaded[stem] = emu.load(code_objects() / f"{stem}.co")
    return _loaded[stem]


@contextmanager
def replaced(stem: str, assembly: str) -> Iterator[None]:
    """Other machine code in a code object's place, from changed assembly."""
    with TemporaryDirectory() as folder:
        source, binary = Path(folder) / "changed.s", Path(folder) / "changed.co"
        source.write_text(assembly)
        clang = [sys.executable, "-m", "ziglang", "clang", "-target", "amdgcn-amd-amdhsa"]
        object_file = binary.with_suffix(".o")
        subprocess.run([*clang, "-mcpu=gfx950", "-c", "-o", object_file, source], check=True)
        lld = [sys.executable, "-m", "ziglang", "ld.lld", "-shared"]
        subprocess.run([*lld, "-o", binary, object_file], check=True)
        changed = emu.load(binary.read_bytes())
    original = load(stem)
    _loaded[stem] = changed
    try:
        yield
    finally:
        _loaded[stem] = original


def assembly_of(stem: str, symbol: str) -> tuple[str, int, int]:
    """Assembly of a code object, and where in it the kernel begins and ends whose mangled name the
    pattern `symbol` finds."""
    text = (code_objects() / f"{stem}.s").read_text()
    begin = re.search(rf"^_ZN\S*{symbol}\S*:", text, re.M).end()
    return text, begin, text.index(".Lfunc_end", begin)


def changed(assembly: str, begin: int, end: int, change: tuple[str, str, int]) -> str:
    """The assembly with a change (pattern, replacement, count; 0 is all) made in [begin, end)."""
    pattern, replacement, count = change
    body, made = re.subn(pattern, replacement, assembly[begin:end], count=count, flags=re.M)
    assert made, f"nothing in the kernel matches {pattern}"
    return assembly[:begin] + body + assembly[end:]


def assert_caught(stem: str, assembly: str, run: Callable[[], None]) -> str:
    """run() must fail on this machine code, by a wrong result or by a check; returns how."""
    with replaced(stem, assembly):
        try:
            run()
        except (AssertionError, emu.EmulatorError) as caught:
            return str(caught).splitlines()[0][:150]
    raise AssertionError(f"{stem}: the changed kernel passed")


def assert_all_executed(stem: str, executed: set[str], *fillers: str) -> str:
    """Every mnemonic of the code object, but for fillers, is among `executed`; returns how many."""
    contained = load(stem).mnemonics()
    missing = contained - executed
    # s_code_end: behind s_endpgm, nothing ever branches there.
    assert missing <= {"s_code_end", *fillers}, f"{stem}: never executed: {sorted(missing)}"
    return f"{stem:24} {len(contained):4} mnemonics, {len(missing)} not executed"


def kernel(stem: str, *parts: str) -> tuple[emu.Object, str]:
    found = load(stem)
    names = [name for name in found.kernels if all(part in name for part in parts)]
    assert len(names) == 1, (parts, names)
    return found, names[0]


PLAN = "iiqqii"


def instances(x: NDArray) -> str:
    return f"rotate_quant-inst-{DTYPES[DTYPE_OF[x.dtype]]}"


def poisoned(shape: tuple[int, ...], dtype: type = np.uint8) -> NDArray:
    array = np.empty(shape, dtype)
    array.view(np.uint8)[...] = 0xA5
    return array


def _plan_values(plan: TilePlan) -> tuple[int, ...]:
    return tuple(getattr(plan, field) for field, _ in plan._fields_)


def activation_fields(x: NDArray) -> tuple[str, tuple]:
    """Struct fields of [rows, K]; rows may be strided, the array they are a view of is mapped."""
    owner = x if x.base is None or x.flags.c_contiguous else x.base
    assert x.ctypes.data == owner.ctypes.data, "a view must begin where its owner does"
    stride = x.strides[0] // x.itemsize if len(x) > 1 else x.shape[1]
    return "Piqqq", (np.ascontiguousarray(owner), DTYPE_OF[x.dtype], *x.shape, stride)


def rotate_quant(
    x: NDArray,
    rotation_size: int = 0,
    *,
    scale_mode: str = "round_up",
    shuffle: bool = False,
    bf16_intermediate: bool = False,
    prescale: NDArray | None = None,
    max_grid: tuple[int, int] | None = None,
    **options,
) -> tuple[NDArray, NDArray, emu.Stats]:
    """rotate_quant (rotation_size 0: quant) of [rows, K]; returns codes, scales and the counts.

    Both outputs start poisoned and count as unwritten, so that a byte nobody wrote is noticed.
    """
    rows, k = x.shape
    groups = k // 32
    padded_rows = -(-rows // 256) * 256
    codes = poisoned((rows, k // 2))
    scales = poisoned((padded_rows, -(-groups // 8) * 8) if shuffle else (rows, groups))
    plan = plan_tiles(k, padded_rows if shuffle else rows, shuffle)
    if max_grid:
        plan.grid_groups = min(plan.grid_groups, max_grid[0])
        plan.grid_rows = min(plan.grid_rows, max_grid[1])
    mse = scale_mode == "mse"
    size = f"ELi{rotation_size}E"
    obj, name = kernel(instances(x), "rotate_quant_kernel", size, f"Lb{int(mse)}E")
    fmt, activation = activation_fields(x)
    args = emu.Struct(
        fmt + "iPqPP" + "ii??PP" + PLAN,
        *activation,
        *(rotation_size, None, 0, prescale, None),
        *(4, SCALE_MODES.index(scale_mode), bf16_intermediate, shuffle),
        emu.Uninitialized(codes),
        emu.Uninitialized(scales),
        *_plan_values(plan),
    )
    grid = (plan.grid_groups, plan.grid_rows)
    stats = obj.run(name, grid=grid, block=plan.threads, args=[args], **options)
    return codes, scales, stats


def rotate(
    x: NDArray,
    rotation_size: int,
    *,
    out_dtype: type,
    prescale: NDArray | None = None,
    **options,
) -> tuple[NDArray, emu.Stats]:
    """rotate of [rows, K]; out_dtype np.uint16 is bfloat16."""
    y = poisoned(x.shape, out_dtype)
    plan = plan_tiles(x.shape[1], x.shape[0], False)
    obj, name = kernel(instances(x), "rotate_kernel", f"ELi{rotation_size}E")
    fmt, activation = activation_fields(x)
    args = emu.Struct(
        fmt + "iPqPP" + "Pi0q" + PLAN,
        *activation,
        *(rotation_size, None, 0, prescale, None),
        *(emu.Uninitialized(y), DTYPE_OF[y.dtype]),
        *_plan_values(plan),
    )
    grid = (plan.grid_groups, plan.grid_rows)
    return y, obj.run(name, grid=grid, block=plan.threads, args=[args], **options)


def dequant(
    codes: NDArray, scales: NDArray, *, shuffled: bool, out_dtype: type, **options
) -> tuple[NDArray, emu.Stats]:
    """dequant of codes [rows, K / 2]."""
    rows, k = codes.shape[0], codes.shape[1] * 2
    y = poisoned((rows, k), out_dtype)
    plan = plan_tiles(k, rows, False)
    obj, name = kernel("dequant-kernel", "dequant_kernel")
    args = emu.Struct(
        "PP?qqPi0q" + PLAN,
        *(codes, scales, shuffled, rows, k, emu.Uninitialized(y), DTYPE_OF[y.dtype]),
        *_plan_values(plan),
    )
    grid = (plan.grid_groups, plan.grid_rows)
    return y, obj.run(name, grid=grid, block=plan.threads, args=[args], **options)


def shuffle(
    kind: str,
    source: NDArray,
    out: NDArray,
    sizes: tuple[int, ...],
    *,
    ends_only: bool = False,
    **options,
) -> emu.Stats:
    """shuffle_scales or shuffle_weight, sizes (experts, rows, columns, inter, inverse).

    ends_only: one workgroup does the first and the last 256 items of however many there are.
    """
    obj, name = kernel("layout-kernel", f"shuffle_{kind}_kernel")
    *counts, inverse = sizes
    target = out if ends_only else emu.Uninitialized(out)
    args = emu.Struct("PPqqqq?", source, target, *counts, bool(inverse))
    items = (source if inverse else out).size // (4 if kind == "scales" else 16)
    blocks, stride = -(-items // 256), -(-items // 256) * 256
    if ends_only:
        blocks, stride, options["count"] = 1, items - 256, False
    return obj.run(name, grid=blocks, block=256, args=[args, items, stride], **options)
