# SPDX-License-Identifier: MIT
"""Launches moe_gemm2's and moe_reduce's gfx950 kernels in the emulator; the right results.

All padding is poisoned: codes and scales of padding rows, of rows past the routing, of groups that
do not exist (255 is NaN), and of the half of a band that a block of 16 rows leaves free. Behind the
last expert's weights and scales there is nothing.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache

import gfx950_emulator as emu
import gfx950_kernels as kernels
import numpy as np
from gemm_kernels import DTYPE_INDEX, output_bound, to_float64
from gfx950_build import ROOT, host_library
from moe_scales import poisoned_bands
from numpy.typing import NDArray

from rotquant_hip import reference, reference_moe

__all__ = ["DTYPE_INDEX", "output_bound", "to_float64"]

FINISHES = ("atomic", "rows", "mxfp4")
ARRAY = {"bf16": np.uint16, "fp16": np.float16, "fp32": np.float32}
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}  # half a unit in the last place
SMALLEST = {"bf16": 2.0**-134, "fp16": 2.0**-25, "fp32": 2.0**-126}  # of float32: adds may flush


@dataclass(frozen=True)
class Config:
    """A row of the table: its name, tile and the kernel instance that it runs."""

    name: str
    tile_m: int
    tile_n: int
    symbol: str  # part of the kernel's mangled name
    threads: int


@cache
def _library() -> ctypes.CDLL:
    loaded = host_library(
        "moe_configs",
        '#include "core/moe_configs.h"\n'
        "using namespace rotquant;\n"
        'extern "C" const char* name(int i) { return kMoeGemm2Configs[i].name; }\n'
        'extern "C" int choose(long blocks, int block_m, long hidden) {\n'
        "  return choose_moe_gemm2_config(blocks, block_m, hidden); }\n",
    )
    loaded.name.restype = ctypes.c_char_p
    return loaded


@cache
def configs() -> list[Config]:
    """The table, in order, read from the file that generates it."""
    text = (ROOT / "csrc/core/moe_gemm2_configs.def").read_text()
    table = []
    for kind, name, numbers in re.findall(
        r"^RQ_MOE_(DIRECT|STAGED)\((?:direct, )?(\w+), ([\d, ]+)\)", text, re.M
    ):
        m_frags, n_frags, *waves = (int(number) for number in numbers.split(","))
        tile = (m_frags, n_frags * waves[0])
        if kind == "STAGED":
            tile = (m_frags * waves[0], n_frags * waves[1])
        mangled = "".join(f"Li{number.strip()}E" for number in numbers.split(","))
        symbol = f"{kind.capitalize()}TileI{mangled}EE"
        table.append(Config(name, 16 * tile[0], 16 * tile[1], symbol, 64 * waves[0] * waves[1]))
    assert [c.name.encode() for c in table] == [_library().name(i) for i in range(len(table))]
    return table


def chosen(blocks: int, block_m: int, hidden: int) -> int:
    """Index of the configuration that the host code takes."""
    return _library().choose(ctypes.c_long(blocks), block_m, ctypes.c_long(hidden))


@dataclass
class Problem:
    """Sorted rows of codes and natural scales, the experts' weights, and the routing."""

    sorting: reference_moe.Sorting
    tokens: int
    topk: int
    block_m: int
    weights: NDArray  # of routes [tokens, topk]
    a: NDArray  # codes [max_rows, I/2]
    a_scales: NDArray  # [max_rows, I/32]
    w2: NDArray  # codes [experts, H, I/2]
    w2_scales: NDArray  # [experts, H, I/32]
    bias: NDArray | None  # [experts, H]

    @property
    def inter(self) -> int:
        return 2 * self.a.shape[1]

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    @property
    def blocks(self) -> int:
        """Of sorted rows that the grid covers."""
        return len(self.sorting.sorted_ids) // self.block_m

    @property
    def kept(self) -> NDArray[np.bool_]:
        """Routes [tokens * topk] that were not dropped."""
        return self.sorting.reverse_sorted >= 0


def routing(tokens: int, topk: int, experts: int, seed: int = 0) -> NDArray[np.int32]:
    """Random distinct experts for every token, as a router gives."""
    rng = np.random.default_rng((seed, tokens, topk, experts))
    return np.argsort(rng.random((tokens, max(experts, topk))), 1)[:, :topk].astype(np.int32)


def make(
    ids: NDArray[np.int32],
    *,
    experts: int,
    block_m: int,
    inter: int,
    hidden: int,
    bias: bool = False,
    seed: int = 0,
    expert_mask: NDArray | None = None,
) -> Problem:
    """Random codes and scales, weights that sum to about 1; ids that are no expert are dropped."""
    tokens, topk = ids.shape
    rng = np.random.default_rng((seed, tokens, topk, inter, hidden))
    weights = rng.random((tokens, topk)).astype(np.float32) * np.float32(2 / topk)
    sorting = reference_moe.moe_sort(
        ids, weights, num_experts=experts, block_m=block_m, expert_mask=expert_mask
    )
    local = experts if expert_mask is None else int(np.count_nonzero(expert_mask))
    rows = len(sorting.sorted_ids)

    def operand(*shape: int) -> tuple[NDArray, NDArray]:
        codes = rng.integers(0, 256, (*shape, inter // 2), np.uint8)
        return codes, rng.integers(121, 128, (*shape, inter // 32)).astype(np.uint8)

    (a, a_scales), (w2, w2_scales) = operand(rows), operand(local, hidden)
    padding = (sorting.sorted_ids & 0xFFFFFF) == tokens
    a[padding], a_scales[padding] = 0x77, 255
    added = rng.standard_normal((local, hidden)).astype(np.float32) * 4 if bias else None
    return Problem(sorting, tokens, topk, block_m, weights, a, a_scales, w2, w2_scales, added)


def values(codes: NDArray, scales: NDArray) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return reference.dequant(codes, scales).astype(np.float64)


def expected(problem: Problem, columns: NDArray | None = None) -> tuple[NDArray, NDArray]:
    """float64 y [tokens * topk, columns] of every route and the bound on its float32 sums; NaN
    where the route was dropped. `columns`: a sample of them."""
    columns = np.arange(problem.hidden) if columns is None else columns
    exact = np.full((problem.tokens * problem.topk, len(columns)), np.nan)
    bound = np.full(exact.shape, np.nan)
    blocks = problem.sorting.sorted_expert_ids
    for expert in range(len(problem.w2)):
        routes = np.flatnonzero(problem.kept)
        rows = problem.sorting.reverse_sorted[routes]
        mine = blocks[rows // problem.block_m] == expert
        routes, rows = routes[mine], rows[mine]
        a = values(problem.a[rows], problem.a_scales[rows])
        b = values(problem.w2[expert, columns], problem.w2_scales[expert, columns])
        y, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
        if problem.bias is not None:
            y = y + problem.bias[expert, columns]
            magnitude = magnitude + np.abs(problem.bias[expert, columns])
        exact[routes], bound[routes] = y, magnitude * 2.0**-23 * (problem.inter / 32 + 8)
    return exact, bound


def expected_sum(
    problem: Problem, dtype: str, *, weighted: bool = True, columns: NDArray | None = None
) -> tuple[NDArray, NDArray]:
    """float64 [tokens, columns] of the weighted sum over slots, and the bound for the atomic
    finish: every addend is rounded to `dtype`, and so is every sum, in any order; that is topk
    roundings of the addends and at most topk of sums no larger than the magnitude."""
    y, bound = (np.nan_to_num(part) for part in expected(problem, columns))
    weight = problem.weights if weighted else np.ones_like(problem.weights)
    weight = weight.reshape(-1, 1).astype(np.float64)
    shape = (problem.tokens, problem.topk, y.shape[1])
    exact = (weight * y).reshape(shape).sum(1)
    magnitude = (np.abs(weight) * (np.abs(y) + bound)).reshape(shape).sum(1)
    slack = (np.abs(weight) * bound).reshape(shape).sum(1) + magnitude * 2.0**-23
    roundings = 1 + problem.topk
    grown = magnitude * (1 + ROUNDING[dtype]) ** roundings
    return exact, slack + roundings * (ROUNDING[dtype] * grown + SMALLEST[dtype])


def stem(finish: str) -> str:
    return f"moe_gemm2-inst-{finish}"


def run(
    problem: Problem,
    config: int = -1,
    *,
    finish: str = "rows",
    out_dtype: str = "fp32",
    weighted: bool = True,
    out: NDArray | None = None,
    outputs: tuple[NDArray, ...] | None = None,
    shuffled: tuple[NDArray, NDArray] | None = None,
    experts: int | None = None,
    **options,
) -> tuple[tuple[NDArray, ...], emu.Stats]:
    """(out,) or, of mxfp4, (codes, scales); and the counts.

    Outputs begin unwritten (0xA5) and are exactly as large as they are; that of the atomic finish
    begins as `out`, or as zeros. `outputs`: memory to use instead; `shuffled`: weights and scales,
    of `experts` if not of the problem's.
    """
    s, hidden = problem.sorting, problem.hidden
    routes = problem.tokens * problem.topk
    written = outputs is not None or finish == "atomic"
    index = chosen(problem.blocks, problem.block_m, hidden) if config < 0 else config
    instance = configs()[index]
    assert instance.tile_m == problem.block_m, "a configuration of another block_m"
    if outputs is None:
        shapes = {
            "atomic": ((problem.tokens, hidden),),
            "rows": ((routes, hidden),),
            "mxfp4": ((routes, hidden // 2), (routes, hidden // 32)),
        }[finish]
        dtype = np.uint8 if finish == "mxfp4" else ARRAY[out_dtype]
        outputs = tuple(kernels.poisoned(shape, dtype) for shape in shapes)
        if finish == "atomic":
            outputs[0][...] = 0 if out is None else out
    given = tuple(array if written else emu.Uninitialized(array) for array in outputs)
    out_given, codes, scales = (None, *given) if finish == "mxfp4" else (*given, None, None)
    if shuffled is None:
        shuffled = (
            reference.shuffle_weight(problem.w2),
            poisoned_bands(np.concatenate(problem.w2_scales)),
        )
    tiles_n = -(-hidden // instance.tile_n)
    args = emu.Struct(
        "PPPPPqqii" + "PPPPPqqiii?Pi" + "PP" + "i0q",
        *(s.sorted_ids, s.sorted_weights if weighted else None),
        *(s.sorted_expert_ids, s.num_valid, None),
        *(len(s.sorted_ids), problem.tokens, problem.topk, problem.block_m),
        *(problem.a, poisoned_bands(problem.a_scales), *shuffled, problem.bias),
        *(
            problem.inter,
            hidden,
            experts or len(problem.w2),
            index,
            FINISHES.index(finish),
            weighted,
        ),
        *(out_given, DTYPE_INDEX[out_dtype], codes, scales),
        tiles_n,
    )
    obj, name = kernels.kernel(
        stem(finish), "moe_gemm2_", instance.symbol, f"FinishE{FINISHES.index(finish)}E"
    )
    grid = problem.blocks * tiles_n
    return outputs, obj.run(name, grid=grid, block=instance.threads, args=[args], **options)


# --- moe_reduce -----------------------------------------------------------------------------------


def reduce_expected(
    rows: NDArray[np.float32],
    reverse_sorted: NDArray,
    topk: int,
    weights: NDArray | None,
    shared: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """The float32 sum in the order of the slots; rows [tokens * topk, H] as float32."""
    hidden = rows.shape[1]
    tokens = len(reverse_sorted) // topk
    total = np.zeros((tokens, hidden), np.float32) if shared is None else shared.copy()
    rows = rows.reshape(tokens, topk, hidden)
    kept = reverse_sorted.reshape(tokens, topk) >= 0
    with np.errstate(all="ignore"):
        for slot in range(topk):
            addend = rows[:, slot]
            if weights is not None:
                addend = addend * weights.reshape(tokens, topk, 1)[:, slot]
            total = np.where(kept[:, slot, None], total + addend, total)
    return total


def reduce(
    rows: NDArray | tuple[NDArray, NDArray],
    reverse_sorted: NDArray,
    topk: int,
    *,
    weights: NDArray | None = None,
    shared: NDArray | None = None,
    out_dtype: str = "bf16",
    max_grid: tuple[int, int] = (65535, 65535),
    out: NDArray | None = None,
    **options,
) -> tuple[NDArray, emu.Stats]:
    """moe_reduce of rows [tokens * topk, H] or MXFP4 (codes, scales); shared is of out_dtype.

    `max_grid`: workgroups along the columns, where all are needed, and along the tokens. `out`:
    memory to use, which then does not count as unwritten.
    """
    codes, scales = rows if isinstance(rows, tuple) else (None, None)
    plain = None if isinstance(rows, tuple) else rows
    hidden = 2 * codes.shape[1] if plain is None else plain.shape[1]
    tokens = len(reverse_sorted) // topk
    result = kernels.poisoned((tokens, hidden), ARRAY[out_dtype]) if out is None else out
    row_dtype = 3 if plain is None else kernels.DTYPE_OF[plain.dtype]
    obj, name = kernels.kernel("moe_reduce-kernel", "moe_reduce_kernel", f"FormatE{row_dtype}E")
    grid = (min(-(-hidden // 2048), max_grid[0]), min(tokens, max_grid[1]))
    args = emu.Struct(
        "PPPiPPPqqiPi0q" + "i0q",
        *(plain, codes, scales, row_dtype % 3, weights, reverse_sorted, shared),
        *(tokens, hidden, topk, emu.Uninitialized(result) if out is None else result),
        DTYPE_INDEX[out_dtype],
        grid[1],
    )
    return result, obj.run(name, grid=grid, block=256, args=[args], **options)
