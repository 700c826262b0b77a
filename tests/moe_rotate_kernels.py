# SPDX-License-Identifier: MIT
"""Launches the kernels of csrc/hip/moe_rotate_quant, moe_rotate_matrix and moe_sort_scales in the
emulator, as the host code would."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import gfx950_emulator as emu
import gfx950_kernels as kernels
import matrix_kernels
import numpy as np
from gfx950_build import host_library
from matrix_kernels import Config
from numpy.typing import NDArray

from rotquant_hip.reference import SCALE_MODES
from rotquant_hip.reference_moe import Sorting

SORT_SCALES = "moe_sort_scales-kernel"

PLAN_CODE = (
    '#include "hip/moe_rotate_matrix/config.h"\n'
    "using namespace rotquant;\nusing namespace rotquant::hip;\n"
    'extern "C" int plan(long k, long rows, long max_rows, device::TilePlan* out) {\n'
    "  MoeRotateQuantParams p{};\n"
    "  p.x.rows = rows, p.x.k = k, p.sorting.max_rows = max_rows;\n"
    "  const MoeRotateQuantArgs args = plan_moe_rotate_quant(p, 64);\n"
    "  *out = args.plan;\n  return args.padding_rows;\n}\n"
    'extern "C" int plan_by_matrix(int dtype_, int size_, int tiles_, int waves_, long k,\n'
    "                              long rows, long max_rows, RotateMatrixPlan* out) {\n"
    "  MoeRotateQuantParams p{};\n"
    "  p.x.rows = rows, p.x.k = k, p.sorting.max_rows = max_rows;\n"
    "#define RQ_MATRIX(dtype, size, tiles, waves, from_tokens) \\\n"
    "  if (DType(dtype_) == DType::dtype && size_ == size && tiles_ == tiles && \\\n"
    "      waves_ == waves) { \\\n"
    "    const auto args = \\\n"
    "        plan_moe_rotate_matrix<RotateMatrixConfig<DType::dtype, size, tiles, waves>>(p); \\\n"
    "    *out = args.plan; \\\n    return args.padding_rows; \\\n  }\n"
    '#include "hip/rotate_matrix/configs.def"\n  return -1;\n}\n'
)


def _plan_library() -> ctypes.CDLL:
    return host_library("moe_rotate_plan", PLAN_CODE)


def plan_tiles(k: int, rows: int, max_rows: int) -> tuple[kernels.TilePlan, int]:
    """What the host code asks of the Hadamard kernel: its tiles, and the grid's rows of padding."""
    plan = kernels.TilePlan()
    sizes = (ctypes.c_long(k), ctypes.c_long(rows), ctypes.c_long(max_rows))
    return plan, _plan_library().plan(*sizes, ctypes.byref(plan))


def plan_matrix(
    config: Config, k: int, rows: int, max_rows: int
) -> tuple[matrix_kernels.Plan, int]:
    plan = matrix_kernels.Plan()
    numbers = (kernels.DTYPES.index(config.dtype), config.size, config.tiles, config.waves)
    sizes = (ctypes.c_long(k), ctypes.c_long(rows), ctypes.c_long(max_rows))
    return plan, _plan_library().plan_by_matrix(*numbers, *sizes, ctypes.byref(plan))


def scales_shape(sorting: Sorting, groups: int) -> tuple[int, int]:
    return -(-sorting.sorted_ids.size // 32) * 32, -(-groups // 8) * 8


def _sorting_fields(sorting: Sorting, tokens: int, topk: int) -> tuple[str, tuple]:
    """rotquant::MoeSorting, with null for what these kernels have no use for."""
    # Empty arrays have no address.
    ids, reverse = (a if a.size else None for a in (sorting.sorted_ids, sorting.reverse_sorted))
    pointers = (ids, None, None, sorting.num_valid, reverse)
    return "PPPPPqqii", (*pointers, sorting.sorted_ids.size, tokens, topk, 0)


@dataclass
class Launch:
    """The arguments that a launch of either kernel begins with, and its outputs."""

    fmt: str
    values: tuple
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]


def _launch(
    x: NDArray,
    sorting: Sorting,
    topk: int,
    rotation: tuple,
    scale_mode: str,
    via_bf16: bool,
    scales: NDArray | None = None,
) -> Launch:
    tokens, k = x.shape
    codes = kernels.poisoned((tokens, k // 2))
    target = scales
    if scales is None:
        scales = kernels.poisoned(scales_shape(sorting, k // 32))
        target = emu.Uninitialized(scales) if scales.size else None
    fmt, activation = kernels.activation_fields(x)
    sorting_fmt, sorting_values = _sorting_fields(sorting, tokens, topk)
    values = (*activation, *rotation, 4, SCALE_MODES.index(scale_mode), via_bf16)
    return Launch(
        fmt + "iPqPP" + "ii?" + sorting_fmt + "PP",
        (*values, *sorting_values, emu.Uninitialized(codes), target),
        codes,
        scales,
    )


def rotate_quant(
    x: NDArray,
    sorting: Sorting,
    topk: int,
    rotation_size: int = 0,
    *,
    scale_mode: str = "round_up",
    bf16_intermediate: bool = False,
    prescale: NDArray | None = None,
    max_grid: tuple[int, int, int] | None = None,
    scales: NDArray | None = None,
    **options,
) -> tuple[NDArray, NDArray, emu.Stats]:
    """moe_rotate_quant of [tokens, K]; returns codes, sorted scales and the counts.

    max_grid: at most so many workgroups along the groups, the rows and the padding's rows.
    scales: the output, if not a new one in which every byte counts as unwritten.
    """
    rotation = (rotation_size, None, 0, prescale, None)
    launch = _launch(x, sorting, topk, rotation, scale_mode, bf16_intermediate, scales)
    plan, padding = plan_tiles(x.shape[1], x.shape[0], sorting.sorted_ids.size)
    if max_grid:
        plan.grid_groups = min(plan.grid_groups, max_grid[0])
        plan.grid_rows = min(plan.grid_rows, max_grid[1])
        padding = min(padding, max_grid[2])
    parts = (f"ELi{rotation_size}E", f"Lb{int(scale_mode == 'mse')}E")
    obj, name = kernels.kernel(stem(x), "moe_rotate_quant_kernel", *parts)
    plan_values = tuple(getattr(plan, field) for field, _ in plan._fields_)
    args = emu.Struct(launch.fmt + kernels.PLAN + "i0q", *launch.values, *plan_values, padding)
    grid = (plan.grid_groups, plan.grid_rows + padding)
    stats = obj.run(name, grid=grid, block=plan.threads, args=[args], **options)
    return launch.codes, launch.scales, stats


def stem(x: NDArray) -> str:
    return f"moe_rotate_quant-inst-{kernels.DTYPES[kernels.DTYPE_OF[x.dtype]]}"


def rotate_matrix(
    config: Config,
    x: NDArray,
    sorting: Sorting,
    topk: int,
    matrix: NDArray,
    *,
    scale_mode: str = "round_up",
    bf16_intermediate: bool = False,
    prescale: NDArray | None = None,
    max_grid: tuple[int, int, int] | None = None,
    **options,
) -> tuple[NDArray, NDArray, emu.Stats]:
    """moe_rotate_quant by a matrix; as rotate_quant()."""
    _, rotation = matrix_kernels.rotation_fields(config, matrix, prescale)
    launch = _launch(x, sorting, topk, rotation, scale_mode, bf16_intermediate)
    plan, padding = plan_matrix(config, x.shape[1], x.shape[0], sorting.sorted_ids.size)
    if max_grid:
        plan.grid_strips = min(plan.grid_strips, max_grid[0])
        plan.grid_rows = min(plan.grid_rows, max_grid[1])
        padding = min(padding, max_grid[2])
    parts = (matrix_kernels.symbol_part(config), f"Lb{int(scale_mode == 'mse')}E")
    obj, name = kernels.kernel(matrix_stem(config), "moe_rotate_matrix_kernel", *parts)
    plan_values = (plan.strips, plan.row_tiles, plan.grid_strips, plan.grid_rows)
    args = emu.Struct(launch.fmt + "qqiii0q", *launch.values, *plan_values, padding)
    grid, block = (plan.grid_strips, plan.grid_rows + padding), 64 * config.waves
    stats = obj.run(name, grid=grid, block=block, args=[args], **options)
    return launch.codes, launch.scales, stats


def matrix_stem(config: Config) -> str:
    return f"moe_rotate_matrix-inst-{config.dtype}"


def sort_scales(
    natural: NDArray[np.uint8],
    sorting: Sorting,
    topk: int,
    *,
    by_route: bool = False,
    max_bands: int = 65535,
    **options,
) -> tuple[NDArray, emu.Stats]:
    """moe_sort_scales of [tokens, G], or with by_route of [tokens * topk, G]."""
    groups = natural.shape[1]
    out = kernels.poisoned(scales_shape(sorting, groups))
    tokens = len(natural) // topk if by_route else len(natural)
    bands, tiles = out.shape[0] // 32, out.shape[1] // 8
    grid = (-(-tiles // 16), min(bands, max_bands))
    obj, name = kernels.kernel(SORT_SCALES, "moe_sort_scales_kernel")
    fmt, values = _sorting_fields(sorting, tokens, topk)
    args = emu.Struct("P?q" + fmt + "P", natural, by_route, groups, *values, emu.Uninitialized(out))
    return out, obj.run(name, grid=grid, block=256, args=[args, bands, tiles, grid[1]], **options)
