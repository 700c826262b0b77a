# SPDX-License-Identifier: MIT
"""Launches the kernels of csrc/hip/rotate_matrix in the emulator, as the host code would."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import gfx950_emulator as emu
import gfx950_kernels as kernels
import numpy as np
from gfx950_build import ROOT, host_library
from numpy.typing import NDArray

from rotquant_hip import reference
from rotquant_hip.reference import SCALE_MODES


@dataclass(frozen=True)
class Config:
    """A row of csrc/hip/rotate_matrix/configs.def."""

    dtype: str
    size: int
    tiles: int  # of 16 tokens, of a wave
    waves: int
    from_tokens: int

    def __str__(self) -> str:
        return f"{self.dtype} RS {self.size} {self.tiles}x{self.waves}"


def _configs() -> list[Config]:
    text = (ROOT / "csrc/hip/rotate_matrix/configs.def").read_text()
    rows = re.findall(r"^RQ_MATRIX\((\w+), (\d+), (\d+), (\d+), (\d+)\)", text, re.M)
    return [Config(dtype, *map(int, numbers)) for dtype, *numbers in rows]


CONFIGS = _configs()


class Plan(ctypes.Structure):
    """rotquant::hip::RotateMatrixPlan."""

    _fields_ = [
        ("strips", ctypes.c_int64),
        ("row_tiles", ctypes.c_int64),
        ("grid_strips", ctypes.c_int),
        ("grid_rows", ctypes.c_int),
    ]


PLAN_CODE = (
    '#include "hip/rotate_matrix/config.h"\n'
    "using namespace rotquant;\nusing namespace rotquant::hip;\n"
    'extern "C" void plan(int dtype_, int size_, int tiles_, int waves_, long k, long rows,\n'
    "                     RotateMatrixPlan* out) {\n"
    "#define RQ_MATRIX(dtype, size, tiles, waves, from_tokens) \\\n"
    "  if (DType(dtype_) == DType::dtype && size_ == size && tiles_ == tiles && \\\n"
    "      waves_ == waves) \\\n"
    "    *out = plan_matrix<RotateMatrixConfig<DType::dtype, size, tiles, waves>>(k, rows);\n"
    '#include "hip/rotate_matrix/configs.def"\n}\n'
)


def plan_matrix(config: Config, k: int, rows: int) -> Plan:
    """What the host code asks of the kernel; compiled from the project's own header."""
    plan = Plan()
    numbers = (kernels.DTYPES.index(config.dtype), config.size, config.tiles, config.waves)
    host_library("matrix_plan", PLAN_CODE).plan(
        *numbers, ctypes.c_long(k), ctypes.c_long(rows), ctypes.byref(plan)
    )
    return plan


def stem(config: Config) -> str:
    return f"rotate_matrix-inst-{config.dtype}"


def symbol_part(config: Config) -> str:
    numbers = (config.size, config.tiles, config.waves)
    dtype = kernels.DTYPES.index(config.dtype)
    return f"DTypeE{dtype}E" + "".join(f"Li{n}E" for n in numbers)


def rotation_fields(config: Config, matrix: NDArray, prescale: NDArray | None) -> tuple[str, tuple]:
    bits = reference.float32_to_bf16(matrix)
    stride = config.size**2 if matrix.ndim == 3 else 0
    return "iPqPP", (config.size, None, stride, prescale, bits)


def _run(obj: emu.Object, name: str, plan: Plan, config: Config, args, max_grid, options):
    if max_grid:
        plan.grid_strips = min(plan.grid_strips, max_grid[0])
        plan.grid_rows = min(plan.grid_rows, max_grid[1])
    fmt, values = args
    values += (plan.strips, plan.row_tiles, plan.grid_strips, plan.grid_rows)
    grid, block = (plan.grid_strips, plan.grid_rows), 64 * config.waves
    return obj.run(
        name, grid=grid, block=block, args=[emu.Struct(fmt + "qqii", *values)], **options
    )


def rotate_quant(
    config: Config,
    x: NDArray,
    matrix: NDArray,
    *,
    scale_mode: str = "round_up",
    shuffle: bool = False,
    bf16_intermediate: bool = False,
    prescale: NDArray | None = None,
    max_grid: tuple[int, int] | None = None,
    **options,
) -> tuple[NDArray, NDArray, emu.Stats]:
    """rotate_quant of [rows, K]; returns codes, scales and the counts. Outputs start unwritten."""
    rows, k = x.shape
    groups = k // 32
    padded_rows, padded_groups = -(-rows // 256) * 256, -(-groups // 8) * 8
    codes = kernels.poisoned((rows, k // 2))
    scales = kernels.poisoned((padded_rows, padded_groups) if shuffle else (rows, groups))
    plan = plan_matrix(config, *((padded_groups * 32, padded_rows) if shuffle else (k, rows)))
    mse = scale_mode == "mse"
    parts = ("rotate_matrix_quant_kernel", symbol_part(config), f"Lb{int(mse)}E")
    obj, name = kernels.kernel(stem(config), *parts)
    fmt, values = kernels.activation_fields(x)
    rotation_fmt, rotation = rotation_fields(config, matrix, prescale)
    values += (
        *rotation,
        *(4, SCALE_MODES.index(scale_mode), bf16_intermediate, shuffle),
        emu.Uninitialized(codes),
        emu.Uninitialized(scales),
    )
    args = (fmt + rotation_fmt + "ii??PP", values)
    return codes, scales, _run(obj, name, plan, config, args, max_grid, options)


def rotate(
    config: Config,
    x: NDArray,
    matrix: NDArray,
    *,
    out_dtype: type = np.float32,
    prescale: NDArray | None = None,
    max_grid: tuple[int, int] | None = None,
    **options,
) -> tuple[NDArray, emu.Stats]:
    """rotate of [rows, K]; out_dtype np.uint16 is bfloat16."""
    y = kernels.poisoned(x.shape, out_dtype)
    plan = plan_matrix(config, x.shape[1], x.shape[0])
    obj, name = kernels.kernel(stem(config), "rotate_matrix_kernel", symbol_part(config))
    fmt, values = kernels.activation_fields(x)
    rotation_fmt, rotation = rotation_fields(config, matrix, prescale)
    values += (*rotation, emu.Uninitialized(y), kernels.DTYPE_OF[y.dtype])
    args = (fmt + rotation_fmt + "Pi0q", values)
    return y, _run(obj, name, plan, config, args, max_grid, options)
