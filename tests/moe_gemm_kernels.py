# SPDX-License-Identifier: MIT
"""Launches moe_gemm1's gfx950 kernels in the emulator, as the host code would; the right results.

Everything that does not exist is poisoned: scales of padding rows and groups (255 is NaN), the
memory around the output.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from dataclasses import dataclass, field, replace
from functools import cache

import gfx950_emulator as emu
import gfx950_kernels as kernels
import interval
import numpy as np
from gfx950_build import ROOT, host_library
from moe_scales import poisoned_bands
from numpy.typing import NDArray
from tensors import poisoned_scales

from rotquant_hip import reference
from rotquant_hip.reference import GATE_MODES, SCALE_MODES
from rotquant_hip.reference_moe import SLOT_SHIFT, Sorting, moe_sort

ACTIVATIONS = ("silu", "swiglu", "gelu", "gelu_tanh")
ROTATIONS = (0, 16, 32, 64, 128)
GROUP = reference.GROUP
F64 = NDArray[np.float64]


# --- the table ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """A row of csrc/core/moe_gemm1_configs.def and the kernel that it names."""

    name: str
    kind: str
    block_m: int
    tile_n: int
    threads: int
    symbol: str  # part of the kernel's mangled name

    @property
    def stem(self) -> str:
        return f"moe_gemm1-inst-{self.kind}"


@cache
def _library() -> ctypes.CDLL:
    return host_library(
        "moe_gemm1_configs",
        '#include "core/moe_configs.h"\n'
        "using namespace rotquant;\n"
        'extern "C" int choose(long blocks, int block_m, long inter, bool inside, int rotation) {\n'
        "  return choose_moe_gemm1_config(blocks, block_m, inter, inside, rotation); }\n"
        'extern "C" bool fits(int i, int block_m, bool inside, int rotation) {\n'
        "  return moe_gemm1_fits(kMoeGemm1Configs[i], block_m, inside, rotation); }\n",
    )


def choose(blocks: int, block_m: int, inter: int, inside: bool, rotation: int) -> int:
    args = (ctypes.c_long(blocks), block_m, ctypes.c_long(inter), ctypes.c_bool(inside), rotation)
    return _library().choose(*args)


@cache
def configs() -> list[Config]:
    """The table, in order, read from the file that generates it."""
    text = (ROOT / "csrc/core/moe_gemm1_configs.def").read_text()
    table = []
    for direct_kind, name, numbers in re.findall(
        r"^RQ_MOE_(?:DIRECT\((\w+), |STAGED\()(\w+), ([\d, ]+)\)", text, re.M
    ):
        sizes = [int(number) for number in numbers.split(",")]
        tokens, weights, first, second = sizes[:4]
        waves_m, waves_n = (1, first) if direct_kind else (first, second)
        mangled = "".join(f"Li{size}E" for size in sizes)
        table.append(
            Config(
                name=name,
                kind=direct_kind.rstrip("_") or "staged",
                block_m=16 * tokens * waves_m,
                tile_n=16 * weights * waves_n,
                threads=64 * first * second,
                symbol=f"TileI{mangled}EE",
            )
        )
    return table


def fits(config: Config, problem: Problem) -> bool:
    return (
        config.block_m == problem.block_m
        and (config.kind == "inline") == (problem.x is not None)
        and config.tile_n // 2 >= problem.inter_size
    )


# --- problems -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Natural layouts: a codes [M, H/2], scales [M, H/32]; w1 [E, 2I, H/2], gate rows first."""

    sorting: Sorting
    topk: int
    block_m: int
    a: NDArray
    a_scales: NDArray
    w1: NDArray
    w1_scale: NDArray
    bias: NDArray | None = None
    gate_mode: str = "separated"
    apply_weight: bool = False
    activation: str = "silu"
    limit: float = math.inf
    alpha: float = 1.702
    scale_mode: str = "round_up"
    inter_size: int = 0
    inter_matrix: NDArray | None = None  # float32 [RS, RS] or [I / RS, RS, RS], y = x @ R
    inter_prescale: NDArray | None = None
    x: NDArray | None = None  # [M, H] bf16 (uint16) or fp16, quantised inside; a is what it gives
    rotation_size: int = 0
    prescale: NDArray | None = None
    seed: int = 0
    first_expert: int = 0  # w1 has the experts from this one on, and the sorting counts from it

    @property
    def inter(self) -> int:
        return self.w1.shape[1] // 2

    @property
    def hidden(self) -> int:
        return self.w1.shape[2] * 2

    @property
    def tokens(self) -> int:
        return len(self.a)

    @property
    def rows(self) -> int:
        """In use, padding included."""
        return int(self.sorting.num_valid[0])

    @property
    def routes(self) -> NDArray:
        """The sorted rows that are routes."""
        tokens = self.sorting.sorted_ids[: self.rows] & ((1 << SLOT_SHIFT) - 1)
        return np.flatnonzero(tokens < self.tokens)


def make(
    *,
    tokens: int = 5,
    hidden: int = 288,
    inter: int = 96,
    experts: int = 3,
    topk: int = 2,
    block_m: int = 16,
    bias: bool = False,
    seed: int = 0,
    spread: int = 2,
    topk_ids: NDArray | None = None,
    expert_mask: NDArray | None = None,
    **options,
) -> Problem:
    """Random codes; scales such that gate and up are a few units in size."""
    if topk_ids is not None:
        tokens, topk = topk_ids.shape
    rng = np.random.default_rng((seed, tokens, hidden, inter, experts, topk))
    if topk_ids is None:
        order = rng.permuted(np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), axis=1)
        topk_ids = order[:, :topk]
    weights = rng.uniform(0.05, 1, topk_ids.shape).astype(np.float32)
    global_experts = experts if expert_mask is None else len(expert_mask)
    sorting = moe_sort(
        topk_ids,
        weights,
        num_experts=global_experts,
        block_m=block_m,
        expert_mask=expert_mask,
        num_local_experts=experts,
    )
    # Products of codes have a standard deviation of 9, their sums over k of 9 sqrt(k).
    middle = 127 - round(math.log2(9 * math.sqrt(hidden)) / 2)

    def operand(*rows: int) -> tuple[NDArray, NDArray]:
        codes = rng.integers(0, 256, (*rows, hidden // 2), np.uint8)
        scales = rng.integers(middle - spread, middle + spread + 1, (*rows, hidden // 32))
        return codes, scales.astype(np.uint8)

    a, a_scales = operand(tokens)
    w1, w1_scale = operand(experts, 2 * inter)
    values = rng.standard_normal((experts, 2 * inter)).astype(np.float32) if bias else None
    return Problem(sorting, topk, block_m, a, a_scales, w1, w1_scale, values, seed=seed, **options)


def with_matrix(problem: Problem, size: int, *, per_block: bool = False) -> Problem:
    """A random orthogonal matrix, or one for each block, as the intermediate's rotation."""
    rng = np.random.default_rng((problem.seed, size, 1))
    count = problem.inter // size if per_block else 1
    matrices = np.linalg.qr(rng.standard_normal((count, size, size)))[0].astype(np.float32)
    return replace(problem, inter_size=size, inter_matrix=matrices if per_block else matrices[0])


def with_prescale(problem: Problem) -> Problem:
    rng = np.random.default_rng((problem.seed, 2))
    scale = rng.uniform(0.5, 2, problem.inter) * rng.choice([-1, 1], problem.inter)
    return replace(problem, inter_prescale=scale.astype(np.float32))


def with_x(
    problem: Problem, dtype: str = "bf16", rotation_size: int = 0, *, prescale: bool = False
) -> Problem:
    """Tokens to quantise inside instead of codes; the codes are what rotate_quant makes of them."""
    rng = np.random.default_rng((problem.seed, 3))
    shape = (problem.tokens, problem.hidden)
    # Groups of different sizes, some of them zeros.
    sizes = np.exp2(rng.integers(-6, 3, (*shape[:-1], shape[-1] // 32))) * rng.choice(
        [0, 1, 1, 1, 1, 1], (*shape[:-1], shape[-1] // 32)
    )
    values = (rng.standard_normal(shape) * np.repeat(sizes, 32, -1) / 16).astype(np.float32)
    scale = rng.uniform(0.5, 2, shape[-1]).astype(np.float32) if prescale else None
    if dtype == "bf16":
        x = reference.float32_to_bf16(values)
        values = reference.bf16_to_float32(x)
    else:
        x = values.astype(np.float16)
        values = x.astype(np.float32)
    return quantised(replace(problem, x=x, rotation_size=rotation_size, prescale=scale))


def quantised(problem: Problem) -> Problem:
    """The problem with the codes that its x has."""
    x = problem.x
    values = reference.bf16_to_float32(x) if x.dtype == np.uint16 else x.astype(np.float32)
    if problem.rotation_size:
        a, a_scales = reference.rotate_quant(
            values,
            rotation_size=problem.rotation_size,
            prescale=problem.prescale,
            scale_mode=problem.scale_mode,
        )
    else:
        a, a_scales = reference.quant(values, scale_mode=problem.scale_mode)
    return replace(problem, a=a, a_scales=a_scales)


# --- what is right ------------------------------------------------------------------------------


def _decoded(codes: NDArray, scales: NDArray) -> F64:
    with np.errstate(invalid="ignore"):
        return reference.dequant(codes, scales).astype(np.float64)


def expected(problem: Problem) -> interval.Values:
    """The intermediate of every route before it is quantised [routes, I], rotated."""
    p = problem
    rows = p.routes
    experts = np.repeat(p.sorting.sorted_expert_ids, p.block_m)[rows]
    tokens = p.sorting.sorted_ids[rows] & ((1 << SLOT_SHIFT) - 1)
    a = _decoded(p.a, p.a_scales)
    exact = np.empty((len(rows), 2 * p.inter))
    magnitude = np.empty_like(exact)
    for expert in np.unique(experts):
        mine = np.flatnonzero(experts == expert)
        w = _decoded(p.w1[expert], p.w1_scale[expert])
        exact[mine] = a[tokens[mine]] @ w.T
        magnitude[mine] = np.abs(a[tokens[mine]]) @ np.abs(w).T
    if p.apply_weight:
        weight = p.sorting.sorted_weights[rows, None].astype(np.float64)
        exact, magnitude = exact * weight, magnitude * np.abs(weight)
    if p.bias is not None:
        exact = exact + p.bias[experts]
        magnitude = magnitude + np.abs(p.bias[experts])
    bound = magnitude * 2.0**-23 * (p.hidden / 32 + 8)
    return rotated(problem, activated(problem, exact, bound))


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def _sigmoid_argument(problem: Problem, g: F64) -> F64:
    if problem.activation == "gelu_tanh":
        return 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    return g * (problem.alpha if problem.activation == "swiglu" else 1.0)


def _gate(problem: Problem, g: F64) -> F64:
    if problem.activation == "gelu":
        return g * 0.5 * _erfc(-g / math.sqrt(2))
    with np.errstate(over="ignore"):
        return g / (1 + np.exp(-_sigmoid_argument(problem, g)))


def _gate_error(problem: Problem, g: F64) -> F64:
    """The relative error that the kernel's formula may add (csrc/hip/moe_gemm1/activation.h)."""
    if problem.activation == "gelu":
        return np.where(g < 0, g * g, 0) * 2.0**-22 + 2.0**-20
    return (2 * np.abs(np.minimum(_sigmoid_argument(problem, g), 0)) + 8) * 2.0**-23


def activated(problem: Problem, exact: F64, bound: F64) -> interval.Values:
    """Of [routes, 2I], gate first."""
    limit = problem.limit
    gate, gate_bound = _through(lambda g: np.minimum(g, limit), *_half(exact, bound, 0))
    up, up_bound = _through(lambda u: np.clip(u, -limit, limit), *_half(exact, bound, 1))
    if problem.activation == "swiglu":
        up = up + 1
        up_bound = up_bound + np.abs(up) * 2.0**-24
    value, value_bound = _through(lambda g: _gate(problem, g), gate, gate_bound)
    # A gate is monotone but for one place, where its curvature is below 2.
    near = np.abs(_sigmoid_argument(problem, gate)) < 3
    value_bound = value_bound + near * gate_bound**2
    value_bound = value_bound + np.abs(value) * _gate_error(problem, gate)
    error = value_bound * (np.abs(up) + up_bound) + np.abs(value) * (
        up_bound + np.abs(up) * 2.0**-22
    )
    # Where a sigmoid is below the normal range the kernel has 0.
    return interval.Values(value * up, error + np.abs(gate * up) * 2.0**-125)


def _half(exact: F64, bound: F64, half: int) -> tuple[F64, F64]:
    return np.split(exact, 2, axis=1)[half], np.split(bound, 2, axis=1)[half]


def _through(function, exact: F64, bound: F64) -> tuple[F64, F64]:
    """A monotone function of every value in exact +- bound."""
    middle = function(exact)
    ends = function(exact - bound), function(exact + bound)
    return middle, np.maximum(*(np.abs(end - middle) for end in ends))


def rotated(problem: Problem, values: interval.Values) -> interval.Values:
    p, exact, bound = problem, values.exact, values.bound
    if not p.inter_size:
        return values
    if p.inter_prescale is not None:
        scale = p.inter_prescale.astype(np.float64)
        exact = exact * scale
        bound = bound * np.abs(scale) + np.abs(exact) * 2.0**-23
    blocks = (len(exact), p.inter // p.inter_size, p.inter_size)
    if p.inter_matrix is None:
        matrix = reference.hadamard(np.eye(p.inter_size), p.inter_size) / np.sqrt(p.inter_size)
    else:
        # Both operands are rounded to bf16, and that keeps the order of values.
        low, high = interval.through_bf16(interval.Values(exact, bound))
        exact, bound = (low + high) / 2, (high - low) / 2
        matrix = reference.bf16_to_float32(reference.float32_to_bf16(p.inter_matrix))
    matrix = np.broadcast_to(matrix.astype(np.float64), (blocks[1], p.inter_size, p.inter_size))

    def times(v: F64, m: F64) -> F64:
        return np.einsum("mbi,bij->mbj", v.reshape(blocks), m).reshape(len(v), p.inter)

    sums = times(np.abs(exact) + bound, np.abs(matrix))
    rounding = (p.inter_size + 2) * 2.0**-24 * sums + p.inter_size * 2.0**-150
    return interval.Values(times(exact, matrix), times(bound, np.abs(matrix)) + rounding)


# --- running ------------------------------------------------------------------------------------


def sorted_scales(problem: Problem) -> NDArray:
    """The scales of a in sorted order; 255 in padding rows, which must not matter."""
    p = problem
    natural = np.full((len(p.sorting.sorted_ids), p.hidden // 32), 255, np.uint8)
    natural[p.routes] = p.a_scales[p.sorting.sorted_ids[p.routes] & ((1 << SLOT_SHIFT) - 1)]
    return poisoned_bands(natural)


def given_weights(problem: Problem) -> tuple[NDArray, NDArray]:
    p = problem
    w1 = np.ascontiguousarray(reference.shuffle_weight(p.w1, gate_mode=p.gate_mode))
    experts, rows, _ = p.w1_scale.shape
    scale = poisoned_scales(p.w1_scale, gate_mode=p.gate_mode)
    return w1, scale.reshape(-1, scale.shape[-1])[: experts * rows].copy()


_ROTATION = "iPqPP"


def _rotation(size: int, matrix: NDArray | None, prescale: NDArray | None) -> tuple:
    """The fields of Rotation on a GPU; the matrix goes in transposed, as the op passes it."""
    if matrix is None:
        return (size, None, 0, prescale, None)
    bf16 = reference.float32_to_bf16(np.ascontiguousarray(np.swapaxes(matrix, -1, -2)))
    return (size, None, size * size if matrix.ndim == 3 else 0, prescale, bf16)


@dataclass
class Output:
    codes: NDArray  # [max_rows, I / 2]
    scales: NDArray  # shuffled [ceil32(max_rows), ceil8(I / 32)]
    stats: emu.Stats = field(repr=False)

    def natural_scales(self) -> NDArray:
        rows, groups = self.scales.shape
        padded = np.zeros((-(-rows // 256) * 256, groups), np.uint8)
        padded[:rows] = self.scales
        return reference.unshuffle_scales(padded, rows=rows, groups=groups)


def run(problem: Problem, config: int | str, **options) -> Output:
    """One launch. The outputs begin unwritten and are exactly as large as they are."""
    p = problem
    index = config if isinstance(config, int) else [c.name for c in configs()].index(config)
    chosen = configs()[index]
    assert fits(chosen, p), f"{chosen} does not fit"
    max_rows = len(p.sorting.sorted_ids)
    codes = kernels.poisoned((max_rows, p.inter // 2))
    scales = kernels.poisoned((-(-max_rows // 32) * 32, -(-p.inter // 256) * 8))
    inside = p.x is not None
    x_format, x_fields = kernels.activation_fields(p.x) if inside else ("Piqqq", (None, 0, 0, 0, 0))
    tiles_n = -(-2 * p.inter // chosen.tile_n)
    sorting = p.sorting._replace(sorted_expert_ids=p.sorting.sorted_expert_ids + p.first_expert)
    w1, w1_scale = given_weights(p)
    layout = "PPPPPqqii" + "PP" + x_format + _ROTATION + "PPP??iff" + _ROTATION + "iqqiiPP" + "i0q"
    values = [
        *sorting,
        *(max_rows, p.tokens, p.topk, p.block_m),
        *((None, None) if inside else (p.a, sorted_scales(p))),
        *x_fields,
        *_rotation(p.rotation_size, None, p.prescale),
        *(w1, w1_scale, p.bias),
        *(p.gate_mode == GATE_MODES[1], p.apply_weight),
        *(ACTIVATIONS.index(p.activation), p.limit, p.alpha),
        *_rotation(p.inter_size, p.inter_matrix, p.inter_prescale),
        SCALE_MODES.index(p.scale_mode),
        *(p.hidden, p.inter, p.first_expert + len(p.w1), index),
        *(emu.Uninitialized(codes), emu.Uninitialized(scales)),
        tiles_n,
    ]
    buffers = [v for v in values if isinstance(v, (np.ndarray, emu.Uninitialized))]

    def segment(addresses: list[int]) -> bytes:
        at = {id(buffer): address for buffer, address in zip(buffers, addresses, strict=True)}
        for buffer in (w1, w1_scale):
            at[id(buffer)] -= p.first_expert * (buffer.nbytes // len(p.w1))
        plain = (0 if v is None else at.get(id(v), v) for v in values)
        return struct.pack("@" + layout, *plain)

    obj, name = kernels.kernel(chosen.stem, "moe_gemm1", chosen.symbol)
    grid = max_rows // p.block_m * tiles_n
    # Rows of x may begin at any even address.
    options = {"unaligned": inside, **options}
    launch = {"grid": grid, "block": chosen.threads, "kernarg": segment, "buffers": buffers}
    stats = obj.run(name, **launch, **options)
    return Output(codes, scales, stats)


def check(problem: Problem, output: Output, what: str, *, most_choices: float = 0.02) -> float:
    """Holds every byte of the output against the oracle; returns the share of codes and scales that
    may be either of two."""
    p, rows, groups = problem, problem.rows, problem.inter // GROUP
    scales = output.natural_scales()
    assert (output.codes[rows:] == 0xA5).all(), f"{what}: codes behind the rows in use"
    bands = -(-rows // 32) * 32  # gemm2 loads whole bands: of a half used one the rest is 0
    assert (scales[rows:bands] == 0).all(), f"{what}: scales that fill the last band"
    assert (scales[bands:] == 0xA5).all(), f"{what}: scales behind the rows in use"
    padding = np.setdiff1d(np.arange(rows), p.routes)
    assert not output.codes[padding].any(), f"{what}: codes of padding rows"
    assert not scales[padding].any(), f"{what}: scales of padding rows"
    assert not scales[:rows, groups:].any(), f"{what}: scales of padding groups"
    values = expected(p)
    choices = interval.assert_quantised(
        output.codes[p.routes], scales[p.routes, :groups], values.ends, p.scale_mode, what
    )
    assert choices <= most_choices, f"{what}: {choices:.1%} of the places have a choice"
    return choices


def counts(problem: Problem, config: int | str) -> dict[str, float]:
    """What a launch executes, for benchmarks: share of issue slots that are matrix instructions (4
    clocks' worth each), LDS clocks over the least, memory lines over the least, weight bytes."""
    stats = run(problem, config).stats
    mfma = 4 * sum(n for name, n in stats.mnemonics.items() if "mfma_scale" in name)
    other = stats.instructions - mfma / 4
    p = problem
    used = np.unique(p.sorting.sorted_expert_ids[: p.rows // p.block_m])
    return {
        "mfma_share": mfma / (mfma + other),
        "lds_conflicts": stats.lds_cycles / max(1, stats.lds_least_cycles),
        "lines": stats.lines / max(1, stats.least_lines),
        "weight_bytes": len(used) * (p.w1[0].nbytes + p.w1_scale[0].nbytes),
        "vmem_bytes": stats.vmem_bytes,
        "unique_read_bytes": stats.unique_read_bytes,
        "floor_us": stats.resource_floor("mi355x").us,
    }
