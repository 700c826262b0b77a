# SPDX-License-Identifier: MIT
"""Launches the GEMM's gfx950 kernels in the emulator, as the host code would; the right results.

All padding is poisoned: codes of rows, columns and groups that do not exist, their scales (255 is
NaN), the memory around the output.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache

import gfx950_emulator as emu
import gfx950_kernels as kernels
import numpy as np
from gfx950_build import ROOT, host_library
from numpy.typing import NDArray
from tensors import poisoned_scales

from rotquant_hip import reference

DTYPE_INDEX = {"bf16": 0, "fp16": 1, "fp32": 2}
_NUMPY = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}
_RELATIVE = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}  # half a unit in the last place
_SMALLEST = {"bf16": 2.0**-134, "fp16": 2.0**-25, "fp32": 2.0**-150}  # and of a subnormal


class Plan(ctypes.Structure):
    """rotquant::GemmPlan."""

    _fields_ = [
        ("config", ctypes.c_int),
        ("tiles_m", ctypes.c_int64),
        ("tiles_n", ctypes.c_int64),
        ("splits", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Config:
    """A row of the table: name, tile and the kernel instance that it runs."""

    name: str
    tile_m: int
    tile_n: int
    splits: int
    stem: str
    symbol: str  # part of the kernel's mangled name
    threads: int


@cache
def _library() -> ctypes.CDLL:
    loaded = host_library(
        "gemm_configs",
        '#include "core/gemm_configs.h"\n'
        "using namespace rotquant;\n"
        "static GemmParams problem(long m, long n, long k, int config) {\n"
        "  GemmParams p{}; p.m = m; p.n = n; p.k = k; p.config = config; return p; }\n"
        'extern "C" void plan(long m, long n, long k, int config, GemmPlan* out) {\n'
        "  *out = plan_gemm(problem(m, n, k, config)); }\n"
        'extern "C" long workspace(long m, long n, long k, int config) {\n'
        "  return gemm_workspace_bytes(problem(m, n, k, config)); }\n"
        'extern "C" const char* name(int i) { return kGemmConfigs[i].name; }\n'
        'extern "C" unsigned tile(unsigned id, unsigned tiles_m, unsigned tiles_n) {\n'
        "  const auto t = gemm_tile_of(id, tiles_m, tiles_n); return t.m << 16 | t.n; }\n",
    )
    loaded.workspace.restype = ctypes.c_long
    loaded.name.restype = ctypes.c_char_p
    loaded.tile.restype = ctypes.c_uint
    return loaded


def plan(m: int, n: int, k: int, config: int = -1) -> Plan:
    """How the host code cuts the problem; compiled from the project's own header."""
    result = Plan()
    sizes = [ctypes.c_long(size) for size in (m, n, k)]
    _library().plan(*sizes, config, ctypes.byref(result))
    return result


def tile_of(workgroup: int, tiles_m: int, tiles_n: int) -> tuple[int, int]:
    """Row and column of tiles that a workgroup computes."""
    packed = _library().tile(workgroup, tiles_m, tiles_n)
    return packed >> 16, packed & 0xFFFF


@cache
def configs() -> list[Config]:
    """The table, in order, read from the file that generates it."""
    text = (ROOT / "csrc/core/gemm_configs.def").read_text()
    tiles = {}
    for kind, name, *numbers in re.findall(
        r"^RQ_GEMM_(DIRECT|STAGED)\((\w+), (\d+), (\d+), (\d+), (\d+)(?:, (\d+))?\)", text, re.M
    ):
        sizes = [int(number) for number in numbers if number]
        mangled = "".join(f"Li{size}E" for size in sizes)
        if kind == "DIRECT":
            tile = (16 * sizes[0], 16 * sizes[1] * sizes[2])
        else:
            tile = (16 * sizes[0] * sizes[2], 16 * sizes[1] * sizes[3])
        stem = f"gemm_a4w4-inst-{kind.lower()}"
        tiles[name] = (*tile, stem, f"TileI{mangled}EE", 64 * sizes[2] * sizes[3])
    table = []
    for tile, splits in re.findall(r"^RQ_GEMM_CONFIG\(\w+, (\w+), (\d+)\)", text, re.M):
        name = tile if splits == "1" else f"{tile}_split{splits}"
        tile_m, tile_n, stem, symbol, threads = tiles[tile]
        table.append(Config(name, tile_m, tile_n, int(splits), stem, symbol, threads))
    assert [config.name.encode() for config in table] == [
        _library().name(i) for i in range(len(table))
    ]
    return table


@dataclass
class Problem:
    """Codes [rows, K/2], natural scales [rows, K/32], and the shuffled, poisoned forms of both."""

    a: NDArray
    b: NDArray
    a_scales: NDArray
    b_scales: NDArray
    bias: NDArray | None

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.a), len(self.b), 2 * self.a.shape[1]

    def given(self) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """What the kernel gets: a, shuffled b, shuffled a_scales and b_scales."""
        n, row_bytes = self.b.shape
        padded = np.full((-(-n // 16) * 16, row_bytes), 0x77, np.uint8)  # 6.0 everywhere
        padded[:n] = self.b
        return (
            self.a,
            reference.shuffle_weight(padded),
            poisoned_scales(self.a_scales),
            poisoned_scales(self.b_scales),
        )


def make(m: int, n: int, k: int, *, bias: bool = False, seed: int = 0, spread: int = 3) -> Problem:
    """Random codes; scales within 2^+-spread around 2^-3."""
    rng = np.random.default_rng((seed, m, n, k))

    def operand(rows: int) -> tuple[NDArray, NDArray]:
        codes = rng.integers(0, 256, (rows, k // 2), np.uint8)
        scales = rng.integers(124 - spread, 125 + spread, (rows, k // 32)).astype(np.uint8)
        return codes, scales

    (a, a_scales), (b, b_scales) = operand(m), operand(n)
    values = rng.standard_normal(n).astype(np.float32) * 4 if bias else None
    return Problem(a, b, a_scales, b_scales, values)


def _decoded(codes: NDArray, scales: NDArray) -> NDArray[np.float64]:
    """float64 [rows, K]; NaN where the scale byte is 255."""
    with np.errstate(invalid="ignore"):
        return reference.dequant(codes, scales).astype(np.float64)


def expected(problem: Problem) -> tuple[NDArray, NDArray]:
    """float64 product and the bound on the error of float32 sums, both [m, n]."""
    a, b = _decoded(problem.a, problem.a_scales), _decoded(problem.b, problem.b_scales)
    exact, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
    if problem.bias is not None:
        exact = exact + problem.bias
        magnitude = magnitude + np.abs(problem.bias)
    return exact, magnitude * 2.0**-23 * (a.shape[1] / 32 + 8)


def output_bound(exact: NDArray, bound: NDArray, dtype: str) -> NDArray:
    """The bound after one rounding to the output dtype."""
    return bound + (np.abs(exact) + bound) * _RELATIVE[dtype] + _SMALLEST[dtype]


def run(
    problem: Problem,
    config: int = -1,
    *,
    out_dtype: str = "fp32",
    tiles: tuple[int, int] | None = None,
    **options,
) -> tuple[NDArray, list[emu.Stats]]:
    """The output [m, n] and the counts of each kernel.

    The output begins unwritten and is exactly as large as it is: writing outside, leaving a byte
    out and reading it are all noticed, and so they are for the workspace.
    """
    m, n, k = problem.size
    cut = plan(m, n, k, config)
    chosen = configs()[cut.config]
    out = kernels.poisoned((m, n), _NUMPY[out_dtype])
    sizes = [ctypes.c_long(size) for size in (m, n, k)]
    workspace_bytes = _library().workspace(*sizes, config)
    workspace = kernels.poisoned((workspace_bytes // 4,), np.float32) if workspace_bytes else None

    def arguments(workspace_argument, out_argument) -> emu.Struct:
        return emu.Struct(
            "PPPPPPi0q" + "qqqi0q" + "Pq" + "iii0q",
            *problem_arrays,
            problem.bias,
            out_argument,
            DTYPE_INDEX[out_dtype],
            *(m, n, k, cut.config),
            *(workspace_argument, workspace_bytes),
            *(cut.tiles_m, cut.tiles_n, cut.splits),
        )

    problem_arrays = problem.given()
    obj, name = kernels.kernel(chosen.stem, "gemm_", chosen.symbol)
    split = cut.splits > 1
    first = arguments(
        emu.Uninitialized(workspace) if split else None, out if split else emu.Uninitialized(out)
    )
    grid = (cut.tiles_m * cut.tiles_n, cut.splits)
    stats = [obj.run(name, grid=grid, block=chosen.threads, args=[first], **options)]
    if split:
        assert (out.view(np.uint8) == 0xA5).all(), "the parts of a split K wrote to the output"
        obj, name = kernels.kernel("gemm_a4w4-inst-sum", "gemm_sum_kernel")
        second = arguments(workspace, emu.Uninitialized(out))
        blocks = (-(-n // 256), -(-m // 8))
        stats.append(obj.run(name, grid=blocks, block=256, args=[second], **options))
    return out, stats


def to_float64(out: NDArray) -> NDArray[np.float64]:
    if out.dtype == np.uint16:
        out = reference.bf16_to_float32(out)
    return out.astype(np.float64)
