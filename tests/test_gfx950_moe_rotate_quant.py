# SPDX-License-Identifier: MIT
"""moe_rotate_quant and moe_sort_scales: the gfx950 machine code, executed with all checks on.

Codes and sorted scales are byte for byte numpy's. For a matrix: where every sum is exact, and for
all other values rotate_quant's kernel, whose sums they are. Outputs start out unwritten, so that a
cell that no work item owns is noticed; that none has two owners is counted (test_counts).
"""

from __future__ import annotations

import gfx950_kernels as kernels
import matrix_kernels
import moe_rotate_kernels as moe
import numpy as np
import pytest
from compare import assert_bytes_equal
from gfx950_asm import LANES, read_kernels
from gfx950_build import code_objects
from matrix_kernels import CONFIGS, Config
from moe_scales import random_sorting, sorted_scales
from test_gfx950_execution import ROTATION_SIZES, difficult, executed, expected, note

from rotquant_hip import layouts, reference
from rotquant_hip.reference_moe import BLOCK_M, Sorting

STEMS = [
    *(f"moe_rotate_quant-inst-{d}" for d in kernels.DTYPES),
    *(f"moe_rotate_matrix-inst-{d}" for d in kernels.DTYPES),
    moe.SORT_SCALES,
]
BF16 = [c for c in CONFIGS if c.dtype == "bf16"]


def named(configs: list[Config]):
    return pytest.mark.parametrize("config", configs, ids=str)


def check(
    x: np.ndarray,
    sorting: Sorting,
    topk: int,
    rotation_size: int,
    *,
    launch: dict | None = None,
    **options,
) -> None:
    codes, scales, stats = moe.rotate_quant(
        x, sorting, topk, rotation_size, **(launch or {}), **options
    )
    note(moe.stem(x), stats)
    want_codes, natural = expected(x, rotation_size, **options)
    what = f"{moe.stem(x)} {x.shape} RS {rotation_size} topk {topk} {options}"
    assert_bytes_equal(codes, want_codes, f"codes of {what}")
    assert_bytes_equal(scales, sorted_scales(natural, sorting, topk), f"scales of {what}")


def check_matrix(
    config: Config,
    x: np.ndarray,
    sorting: Sorting,
    topk: int,
    matrix: np.ndarray,
    *,
    launch: dict | None = None,
    natural: tuple | None = None,
    **options,
) -> None:
    """natural: what is expected; else of rotate_quant's kernel."""
    codes, scales, stats = moe.rotate_matrix(
        config, x, sorting, topk, matrix, **(launch or {}), **options
    )
    note(moe.matrix_stem(config), stats)
    unaligned = {k: v for k, v in (launch or {}).items() if k == "unaligned"}
    natural = natural or matrix_kernels.rotate_quant(config, x, matrix, **unaligned, **options)
    what = f"{config} {x.shape} topk {topk} {options}"
    assert_bytes_equal(codes, natural[0], f"codes of {what}")
    assert_bytes_equal(scales, sorted_scales(natural[1], sorting, topk), f"scales of {what}")


#: (tokens, K, topk, experts, block_m): tails of every kind, groups 1, 3, 6, 9, 12 (B03, B09); slots
#: in all registers; bands that are half used, experts without tokens.
ROUTED = (
    (1, 32, 1, 1, 16),
    (3, 96, 9, 40, 16),
    (9, 192, 4, 3, 32),
    (33, 288, 2, 8, 32),
    (5, 384, 16, 12, 64),
    (70, 256, 8, 16, 16),
    (2, 4352, 5, 385, 128),
)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("rotation_size", ROTATION_SIZES)
def test_every_instance(dtype: str, rotation_size: int) -> None:
    for index, (tokens, k, topk, experts, block_m) in enumerate(ROUTED):
        k = -(-k // max(32, rotation_size)) * max(32, rotation_size)
        x = difficult(dtype, tokens, k, seed=index)
        sorting = random_sorting(tokens, topk, experts, block_m, seed=index, dropped=0.1)
        for scale_mode in reference.SCALE_MODES if index == 3 else ("round_up", "mse"):
            check(x, sorting, topk, rotation_size, scale_mode=scale_mode)


@named(CONFIGS)
def test_every_matrix_instance(config: Config) -> None:
    """The bytes of rotate_quant's kernel, whatever the values."""
    rng = np.random.default_rng(0)
    for index, (tokens, k, topk, experts, block_m) in enumerate(ROUTED):
        step = max(32, config.size)
        k = -(-min(k, 1024) // step) * step
        x = difficult(config.dtype, tokens, k, seed=index)
        shape = (k // config.size, config.size, config.size) if index % 2 else (config.size,) * 2
        matrix = (rng.standard_normal(shape) / np.sqrt(config.size)).astype(np.float32)
        sorting = random_sorting(tokens, topk, experts, block_m, seed=index, dropped=0.1)
        for scale_mode in ("floor", "mse"):
            check_matrix(config, x, sorting, topk, matrix, scale_mode=scale_mode)


@named(CONFIGS)
def test_a_matrix_where_sums_are_exact(config: Config) -> None:
    """Small integers times halves: no order of the sums and no numpy can differ."""
    rng = np.random.default_rng(1)
    step = max(32, config.size)
    k = -(-96 // step) * step
    values = rng.integers(-8, 9, (19, k)).astype(np.float32)
    x = {"bf16": reference.float32_to_bf16, "fp16": np.float16, "fp32": np.float32}[config.dtype](
        values
    )
    matrix = rng.integers(-2, 3, (config.size, config.size)).astype(np.float32) / 2
    prescale = np.exp2(rng.integers(-2, 3, k)).astype(np.float32)
    sorting = random_sorting(19, 3, 4, 16)
    for options in ({}, {"prescale": prescale}, {"scale_mode": "even"}):
        natural = reference.rotate_quant(values, matrix, **options)
        check_matrix(config, x, sorting, 3, matrix, natural=natural, **options)


@pytest.mark.parametrize("block_m", BLOCK_M)
def test_every_number_of_tokens_and_slots(block_m: int) -> None:
    (config,) = (c for c in BF16 if c.size == 32)
    matrix = np.random.default_rng(2).standard_normal((32, 32)).astype(np.float32)
    for tokens in (1, 8, 15, 17, 32, 33, 65):
        topk = 1 + tokens * 5 % 16
        x = difficult("bf16", tokens, 352)
        for experts in (3, 40):
            sorting = random_sorting(tokens, topk, experts, block_m, seed=tokens, dropped=0.05)
            check(x, sorting, topk, 32)
            check_matrix(config, x, sorting, topk, matrix)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_prescale_bf16_intermediate_and_row_strides(dtype: str) -> None:
    sorting, prescale = random_sorting(9, 3, 5, 16), np.linspace(-2, 2, 288, dtype=np.float32)
    x = difficult(dtype, 9, 288)
    for options in ({"prescale": prescale}, {"bf16_intermediate": True}):
        check(x, sorting, 3, 32, **options)
    # Rows on any element need the unaligned access mode that ROCm runs waves in.
    wide = difficult(dtype, 9, 301)
    check(wide[:, :288], sorting, 3, 32, launch={"unaligned": True})
    config = next(c for c in CONFIGS if c.dtype == dtype and c.size == 32)
    matrix = np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32)
    check_matrix(config, wide[:, :288], sorting, 3, matrix, launch={"unaligned": True})
    for options in ({"prescale": prescale}, {"bf16_intermediate": True}):
        check_matrix(config, x, sorting, 3, matrix, **options)


# B06, B55: all is padding, or there is nothing at all.
@pytest.mark.parametrize("experts", [3, 0])
def test_b06_b55_no_route_at_all(experts: int) -> None:
    sorting = random_sorting(5, 2, 3, 16, dropped=1.0)
    assert (sorting.reverse_sorted == -1).all() and sorting.num_valid[0] == 0
    if experts == 0:  # of this rank: no rows
        empty = np.zeros(0, np.int32)
        sorting = sorting._replace(sorted_ids=empty)
    check(difficult("bf16", 5, 96), sorting, 2, 32)
    config = BF16[0]
    check_matrix(config, difficult("bf16", 5, 96), sorting, 2, np.eye(16, dtype=np.float32))
    natural = np.full((5, 3), 7, np.uint8)
    if sorting.sorted_ids.size:
        out, _ = moe.sort_scales(natural, sorting, 2)
        assert out.shape == (64, 8) and not out.any()


def test_clamped_grids_stride_over_the_rest() -> None:
    sorting = random_sorting(70, 8, 60, 32)
    assert sorting.sorted_ids.size // 32 > 8
    x = difficult("bf16", 70, 1024)
    plan, padding = moe.plan_tiles(1024, 70, sorting.sorted_ids.size)
    assert plan.grid_rows > 2 and padding > 1
    check(x, sorting, 8, 64, launch={"max_grid": (1, 2, 1)})
    config = next(c for c in BF16 if c.size == 128)
    matrix = np.random.default_rng(4).standard_normal((128, 128)).astype(np.float32)
    check_matrix(config, x, sorting, 8, matrix, launch={"max_grid": (1, 1, 1)})
    natural = np.random.default_rng(5).integers(1, 256, (70, 32)).astype(np.uint8)
    out, stats = moe.sort_scales(natural, sorting, 8, max_bands=3)
    note(moe.SORT_SCALES, stats)
    assert_bytes_equal(out, sorted_scales(natural, sorting, 8), "sorted scales")


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_waves_and_workgroups(seed: int) -> None:
    sorting = random_sorting(40, 6, 16, 16, seed=seed)
    check(difficult("bf16", 40, 288), sorting, 6, 32, launch={"seed": seed})


@pytest.mark.parametrize("by_route", [False, True])
def test_sort_scales(by_route: bool) -> None:
    """B03, B09: every number of groups in a tile, more tiles than a workgroup has."""
    for groups in (*range(1, 10), 12, 128, 137):
        topk, sorting = 3, random_sorting(21, 3, 5, 16, seed=groups, dropped=0.2)
        rng = np.random.default_rng(groups)
        natural = rng.integers(1, 256, (63 if by_route else 21, groups)).astype(np.uint8)
        # Rows begin at any byte.
        out, stats = moe.sort_scales(natural, sorting, topk, by_route=by_route, unaligned=True)
        note(moe.SORT_SCALES, stats)
        want = sorted_scales(natural, sorting, topk, by_route=by_route)
        assert_bytes_equal(out, want, f"{groups} groups, by route {by_route}")


# B23: offsets past 2^32. No other pages are touched.
def test_b23_scales_beyond_4_gib() -> None:
    groups, max_rows = 4096, (1 << 20) + 64
    assert max_rows * groups > 1 << 32
    row = max_rows - 20
    ids = np.full(max_rows, 1 << 24 | 1, np.int32)
    ids[row] = 0
    valid, reverse = (np.array(values, np.int32) for values in ([max_rows, 1], [row]))
    sorting = Sorting(ids, None, None, valid, reverse)
    x = difficult("bf16", 1, groups * 32)
    _, natural = expected(x, 64)
    scales = np.zeros((max_rows, groups), np.uint8)
    launch = {"max_grid": (1 << 20, 1, 0), "scales": scales, "count": False}
    moe.rotate_quant(x, sorting, 1, 64, **launch)
    offsets = layouts.scale_offset(row, np.arange(groups), groups)
    assert offsets.min() > 1 << 32
    assert_bytes_equal(scales.reshape(-1)[offsets], natural[0], "scales at the end")


@pytest.mark.parametrize("rotation_size", (0, 64, "matrix"))
def test_counts(rotation_size: int | str, capsys) -> None:
    """K 2048, top-8 of 128: x is read once, every cell of the outputs is written once."""
    tokens, k, topk, experts, block_m = 64, 2048, 8, 128, 32
    sorting = random_sorting(tokens, topk, experts, block_m)
    x = difficult("bf16", tokens, k)
    if rotation_size == "matrix":
        config = next(c for c in BF16 if c.size == 128)
        matrix = np.eye(128, dtype=np.float32)
        codes, scales, stats = moe.rotate_matrix(config, x, sorting, topk, matrix)
        plan, padding = moe.plan_matrix(config, k, tokens, sorting.sorted_ids.size)
        matrices, columns, waves = 2 * matrix.size, plan.grid_strips, config.waves
        staged = 2 * matrix.size * plan.grid_strips * plan.grid_rows
        lanes = k // 128 * tokens * 4
    else:
        codes, scales, stats = moe.rotate_quant(x, sorting, topk, rotation_size)
        plan, padding = moe.plan_tiles(k, tokens, sorting.sorted_ids.size)
        matrices, staged, columns, waves = 0, 0, plan.grid_groups, plan.threads // LANES
        lanes = k // 32 * tokens
    ids = 4 * (sorting.sorted_ids.size + sorting.reverse_sorted.size)
    read, written = stats.unique_read_bytes, stats.unique_written_bytes
    assert x.nbytes + matrices < read <= x.nbytes + matrices + ids + sorting.num_valid.nbytes
    assert written == codes.nbytes + scales.nbytes
    # What lanes move: x, codes and scales once, beside the ids. So no byte is stored twice.
    registers = 4 if rotation_size == "matrix" else 2
    bands = scales.shape[0] // 32
    loaded = x.nbytes + staged + lanes * registers * 8 + bands * LANES * 32
    assert stats.vmem_bytes == loaded + codes.nbytes + scales.nbytes
    assert padding * columns * waves >= bands  # a wave for each band
    floor = stats.resource_floor(chip="mi355x").us
    valu = (stats.classes["valu"] + stats.classes["packed"]) * LANES / x.size
    stores = {n: c for n, c in sorted(stats.mnemonics.items()) if n.startswith("global_store")}
    with capsys.disabled():
        print(
            f"\nmoe_rotate_quant bf16 {rotation_size}, {tokens} x {k}, top-{topk} of {experts}: "
            f"{(read + written) / x.size:.3f} bytes and {valu:.2f} VALU instructions per channel, "
            f"lines {stats.lines} of {stats.least_lines} least; {stores}; floors in us (a bound, "
            "not a timing): " + ", ".join(f"{name} {us:.3f}" for name, us in floor.items() if us)
        )


def test_counts_of_sort_scales(capsys) -> None:
    """Tokens' scales are read, everything is written once, in whole lines."""
    sorting = random_sorting(64, 8, 128, 32)
    natural = np.random.default_rng(0).integers(1, 256, (64, 64)).astype(np.uint8)
    out, stats = moe.sort_scales(natural, sorting, 8)
    assert stats.unique_written_bytes == out.nbytes
    assert stats.mnemonics["global_store_dword"] == out.nbytes // 4 // LANES
    with capsys.disabled():
        print(f"\nmoe_sort_scales: lines {stats.lines} of {stats.least_lines} least")


def test_no_scratch_and_no_spills() -> None:
    found = [k for stem in STEMS for k in read_kernels(code_objects() / f"{stem}.s")]
    assert len(found) == 36 + 2 * len(CONFIGS) + 1
    for kernel in found:
        for key in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
            assert kernel.metadata[key] == 0, f"{kernel.name}: {key} {kernel.metadata[key]}"
        assert not any(m.startswith(("scratch_", "flat_")) for m in kernel.mnemonics), kernel.name
        # RS 256: the matrix fills the LDS with one workgroup, of two waves a SIMD.
        least = 2 if "matrix" in kernel.name and " RS 256" in kernel.name else 4
        assert kernel.waves_per_simd >= least, f"{kernel.name}: {kernel.waves_per_simd} waves"


# --- wrong kernels --------------------------------------------------------------------------------

CHANGES = {
    "the padding beside a route": (r"global_store_short", "global_store_byte", 0),
    "a slot of another lane": (
        r"ds_bpermute_b32 (v\d+), (v\d+), (v\d+) offset:4$",
        r"v_mov_b32 \1, \3",
        1,
    ),
    "the wait for the exchange": (r"s_waitcnt lgkmcnt\(\d+\)\n(\tv_cmp)", r"s_nop 0\n\1", 0),
    "padding that is no zero": (r"(global_store_dword) (v\S+), v\d+,", r"\1 \2, v0,", 0),
}


@pytest.fixture(scope="module")
def assembly() -> tuple[str, int, int]:
    """The text, and where in it the kernel for RS 64 begins and ends."""
    symbol = r"23moe_rotate_quant_kernel\S*ELi64E\S*ELb0E"
    return kernels.assembly_of("moe_rotate_quant-inst-bf16", symbol)


def run_rs_64() -> None:
    sorting = random_sorting(40, 6, 16, 16, dropped=0.1)
    check(difficult("bf16", 40, 320), sorting, 6, 64)


def test_the_unchanged_kernel_passes(assembly) -> None:
    with kernels.replaced("moe_rotate_quant-inst-bf16", assembly[0]):
        run_rs_64()


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_kernel_is_caught(change: str, assembly, capsys) -> None:
    wrong = kernels.changed(*assembly, CHANGES[change])
    how = kernels.assert_caught("moe_rotate_quant-inst-bf16", wrong, run_rs_64)
    with capsys.disabled():
        print(f"\n{change}: {how}")


def test_every_instruction_was_executed() -> None:
    """Runs last: each mnemonic in the code objects has been executed by a test above."""
    for stem in STEMS:
        kernels.assert_all_executed(stem, executed[stem], "s_nop")
