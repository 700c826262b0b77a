# SPDX-License-Identifier: MIT
"""The GEMM's gfx950 machine code, executed by the emulator with all its checks on.

Every result is held against float64 with a bound from float32 summation; every padding byte is
poisoned (codes 6.0, scales NaN, outputs unwritten), so that nothing outside the real rows, columns
and groups can take part unnoticed.

Bug reports from other implementations that this table covers: B01 (small N wrong), B02 (split K
for few tokens), B03 and B04 (K that does not fill a step, data and scales masked apart), B05 (N
that is not a multiple of the tile wraps around), B06 (NaN scales in the padding), B07 (fewer than
32 tokens), B15 (overhang in N written into the next token).
"""

from __future__ import annotations

from collections import defaultdict

import gemm_kernels as gemm
import gfx950_kernels as kernels
import numpy as np
import pytest
from compare import assert_bytes_equal, assert_close
from gfx950_asm import Kernel, read_kernels
from gfx950_build import code_objects

STEMS = ("gemm_a4w4-inst-direct", "gemm_a4w4-inst-staged", "gemm_a4w4-inst-sum")
OUT_DTYPES = ("bf16", "fp16", "fp32")
CONFIGS = range(len(gemm.configs()))
BY_NAME = {config.name: index for index, config in enumerate(gemm.configs())}

# Around every edge: of fragments, scale bands, tiles, vector stores; of groups, halves and steps.
M = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 300)
N = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 96, 100, 127, 129, 191, 256, 258, 320, 513, 640, 1025)
K = (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512, 544, 768, 1056, 1312, 2080, 2112)
REPORTED = (
    *((32, 64, 256), (32, 320, 512), (4, 448, 1024)),  # B01, also the N that tiles do not divide
    *((1, 256, 512), (8, 256, 512), (128, 256, 512)),  # B02
    *((64, 128, 192), (7, 64, 288)),  # B03
    *((64, 256, 32), (1, 16, 32)),  # B04
    *((16, 258, 256), (3, 258, 1024)),  # B05
    *((1, 512, 512), (2, 512, 512), (8, 512, 512), (16, 512, 512)),  # B07
    (2, 96, 256),  # B15
)
SHAPES = REPORTED + tuple((M[i % len(M)], N[8 * i % len(N)], K[11 * i % len(K)]) for i in range(66))

#: Mnemonics executed so far; test_every_instruction_was_executed reads it.
executed: dict[str, set[str]] = defaultdict(set)


def run(problem: gemm.Problem, config: int, **options) -> np.ndarray:
    out, stats = gemm.run(problem, config, **options)
    chosen = gemm.configs()[gemm.plan(*problem.size, config).config]
    for stem, counted in zip((chosen.stem, "gemm_a4w4-inst-sum"), stats, strict=False):
        executed[stem] |= set(counted.mnemonics)
    return out


def check(shape: tuple[int, int, int], config: int, out_dtype: str, **options) -> None:
    problem = gemm.make(*shape, bias=options.pop("bias", False), seed=config + 1)
    out = run(problem, config, out_dtype=out_dtype, **options)
    exact, bound = gemm.expected(problem)
    chosen = gemm.configs()[gemm.plan(*shape, config).config]
    what = f"{chosen.name} (config {config}), M, N, K = {shape}, {out_dtype}"
    bound = gemm.output_bound(exact, bound, out_dtype)
    assert_close(gemm.to_float64(out), exact, what, bound=bound)


def test_the_table_of_shapes_covers_the_tails() -> None:
    assert len(set(SHAPES)) >= 60
    assert {m for m, _, _ in SHAPES} >= set(M) and {n for _, n, _ in SHAPES} >= set(N)
    assert {k for _, _, k in SHAPES} >= set(K)


@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_against_float64(index: int) -> None:
    """Every shape with the chosen configuration and two others: each of these has 4 and more."""
    out_dtypes = [OUT_DTYPES[(index + i) % 3] for i in range(3)]
    configs = (-1, index % len(CONFIGS), (5 * index + 3) % len(CONFIGS))
    for config, out_dtype in zip(configs, out_dtypes, strict=True):
        check(SHAPES[index], config, out_dtype, bias=index % 2 == 0)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration(config: int) -> None:
    """Inside one tile, across several, and steps of K for both parities of the buffers."""
    chosen = gemm.configs()[config]
    for k in (512, 1056):
        check((chosen.tile_m + 3, 2 * chosen.tile_n + 16, k), config, "bf16", bias=True)
    check((chosen.tile_m, chosen.tile_n, 1280), config, "fp32")
    check((1, 1, 2048), config, "fp16")


@pytest.mark.parametrize("m, n", [(1, 6144), (16, 6144), (3, 24576)])
def test_decode_of_qwen3_8b(m: int, n: int, capsys) -> None:
    """K 4096 in full; a sample of the columns is compared."""
    problem = gemm.make(m, n, 4096)
    raw, stats = gemm.run(problem, -1, out_dtype="bf16")
    out = gemm.to_float64(raw)
    sample = np.unique(np.r_[0, n - 1, np.random.default_rng(0).integers(0, n, 300)])
    thinned = gemm.Problem(
        problem.a, problem.b[sample], problem.a_scales, problem.b_scales[sample], None
    )
    exact, bound = gemm.expected(thinned)
    bound = gemm.output_bound(exact, bound, "bf16")
    assert_close(out[:, sample], exact, f"decode {m} x {n} x 4096", bound=bound)
    assert np.isfinite(out).all()
    # The least: each operand once, and the output.
    least = (m + n) * (4096 // 2 + 4096 // 32) + 2 * m * n
    unique = stats[0].unique_read_bytes + stats[-1].unique_written_bytes
    assert unique == pytest.approx(least, rel=0.02)
    floor = stats[0].resource_floor("mi355x")
    with capsys.disabled():
        print(
            f"\n{m} x {n} x 4096, {gemm.configs()[gemm.plan(m, n, 4096).config].name}: distinct"
            f" bytes {unique / least:.3f} of the least, floors in us (a bound, not a timing): "
            + ", ".join(f"{name} {us:.2f}" for name, us in floor.us.items() if us)
        )


@pytest.mark.parametrize("name", ["direct_16x32_split4", "staged_64x128_split4"])
def test_split_k_gives_the_same_bytes_in_any_order(name: str) -> None:
    """B02. Seeds shuffle the order of workgroups and waves."""
    problem = gemm.make(9, 200, 2080, bias=True)
    first = run(problem, BY_NAME[name], out_dtype="fp32")
    for seed in (None, 1, 2, 3):
        again = run(problem, BY_NAME[name], out_dtype="fp32", seed=seed)
        assert_bytes_equal(again, first, f"{name}, seed {seed}")


def test_exact_sums_are_exact() -> None:
    """Scales of 1 and sums below 2^24 quarters: every configuration gives the exact float32."""
    for config in CONFIGS:
        problem = gemm.make(5, 37, 544, spread=0)
        problem.a_scales[:], problem.b_scales[:] = 127, 127
        exact, _ = gemm.expected(problem)
        out = run(problem, config, out_dtype="fp32")
        assert_bytes_equal(out, exact.astype(np.float32), gemm.configs()[config].name)


@pytest.mark.parametrize("name", ["direct_16x32", "direct_64x128", "staged_256x256"])
def test_a_nan_scale_poisons_its_row_or_column_only(name: str) -> None:
    problem = gemm.make(20, 70, 544)
    problem.a_scales[3, 16] = 255  # the last group
    problem.b_scales[[5, 69], [0, 16]] = 255
    out = run(problem, BY_NAME[name], out_dtype="fp32")
    nan = np.zeros(out.shape, bool)
    nan[3], nan[:, [5, 69]] = True, True
    assert (np.isnan(out) == nan).all()


def test_no_k_at_all() -> None:
    """An empty sum is 0, and the bias is still added."""
    problem = gemm.make(5, 40, 0, bias=True)
    for name in ("direct_16x32", "direct_64x128_split4", "staged_64x128", "staged_256x256"):
        out = run(problem, BY_NAME[name], out_dtype="fp32")
        assert (out == problem.bias).all(), name


def test_scale_extremes() -> None:
    """2^-127 and 2^127: products of both ends, underflow to 0 and overflow to infinity."""
    problem = gemm.make(3, 20, 64)
    problem.a[:], problem.b[:] = 0x22, 0x22  # 1.0
    problem.a_scales[:] = np.array([[0, 0], [254, 254], [127, 127]], np.uint8)
    problem.b_scales[:] = np.where(np.arange(20)[:, None] % 2, 254, 0).astype(np.uint8)
    for name in ("direct_16x32", "staged_64x128"):
        out = run(problem, BY_NAME[name], out_dtype="fp32").astype(np.float64)
        want = 64 * np.exp2(np.array([[-254.0, 0.0], [0.0, np.inf], [-127.0, 127.0]]))
        want = np.where(want < 2.0**-149, 0, want)[:, np.arange(20) % 2]
        with np.errstate(over="ignore"):
            assert (out == want.astype(np.float32)).all(), name


def test_the_choice_of_a_configuration(capsys) -> None:
    lines = []
    for m in (1, 17, 40, 100, 1000, 5000):
        for n in (64, 6144, 24576):
            plan = gemm.plan(m, n, 4096)
            lines.append(
                f"{m:5} x {n:5} x 4096: {gemm.configs()[plan.config].name:22}"
                f" {plan.tiles_m * plan.tiles_n:5} tiles x {plan.splits} parts of K"
            )
            if m <= 64:
                assert gemm.configs()[plan.config].tile_m >= m
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_order_of_tiles() -> None:
    """Every tile once; and the 32 workgroups that a die (id % 8) runs at a time, one on each of its
    compute units, need few rows of tiles of either operand."""
    for tiles_m, tiles_n in ((1, 1), (1, 96), (3, 5), (4, 24), (7, 13), (64, 96), (20, 2)):
        count = tiles_m * tiles_n
        tiles = [gemm.tile_of(i, tiles_m, tiles_n) for i in range(count)]
        assert set(tiles) == {(m, n) for m in range(tiles_m) for n in range(tiles_n)}
        if count < 8 * 64:
            continue
        for die in range(8):
            resident = tiles[die : 8 * 32 : 8]
            operands = len({m for m, _ in resident}) + len({n for _, n in resident})
            assert operands <= 4 + 9, f"die {die}: {operands} rows of tiles for 32 tiles"


def test_weights_are_read_once_when_tokens_are_few() -> None:
    """Counted bytes of vector memory: weights once; the little else is tokens, scales, output."""
    for name, waves_n in (("direct_16x32", 1), ("direct_16x64", 2)):
        config = gemm.configs()[BY_NAME[name]]
        m, n, k = 16, 4 * config.tile_n, 2048
        _, (stats,) = gemm.run(gemm.make(m, n, k), BY_NAME[name], out_dtype="bf16")
        weights, tokens, out = n * k // 2, m * k // 2, 2 * m * n
        waves = 4 * waves_n  # along n, in all
        steps = k // 256
        assert stats.vmem_bytes == weights + waves * (tokens + 2 * 256 * steps) + out, name
        assert stats.lds_cycles == stats.lds_least_cycles


def test_counts_of_the_staged_main_loop(capsys) -> None:
    """Two runs that differ by 1024 of K differ by the main loop: matrix instructions take 4 issue
    slots of 4 clocks, everything else 1. LDS without a conflict, memory in whole lines."""
    lines = []
    tiles = (("staged_256x256", 0.80), ("staged_128x128", 0.70), ("staged_64x128", 0.55))
    for name, least in tiles:
        config = gemm.configs()[BY_NAME[name]]
        problems = (gemm.make(config.tile_m, config.tile_n, k) for k in (1024, 2048))
        short, long = (gemm.run(p, BY_NAME[name], out_dtype="bf16")[1][0] for p in problems)
        mfma = 4 * (long.classes["mfma"] - short.classes["mfma"])
        other = long.instructions - short.instructions - mfma // 4
        share = mfma / (mfma + other)
        lines.append(
            f"{name}: {share:.1%} of issue slots are matrix instructions, LDS clocks"
            f" {long.lds_cycles} of {long.lds_least_cycles} least, lines {long.lines} of"
            f" {long.least_lines} least"
        )
        assert share >= least, lines[-1]
        assert long.lds_cycles == long.lds_least_cycles and long.lds_underaligned == 0, lines[-1]
        assert long.lines == long.least_lines, lines[-1]
    with capsys.disabled():
        print("\n" + "\n".join(lines))


# --- the code objects ---------------------------------------------------------------------------

#: Waves per SIMD below 4, and why.
FEWER_WAVES = {
    "gemm_staged 8 4 2 4": (2, "a 128 x 64 product of a wave: its sums alone take 128 registers"),
    "gemm_staged 4 4 2 2": (3, "two workgroups' LDS fill a compute unit: 2 waves each SIMD anyway"),
}


@pytest.fixture(scope="module")
def code() -> list[Kernel]:
    return [kernel for stem in STEMS for kernel in read_kernels(code_objects() / f"{stem}.s")]


def test_registers_and_lds(code: list[Kernel], capsys) -> None:
    lines = [f"{'gfx950 kernel':24} VGPR SGPR    LDS waves/SIMD"]
    for kernel in code:
        meta = kernel.metadata
        for key in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
            assert meta[key] == 0, f"{kernel.name}: {key} {meta[key]}"
        assert not any(m.startswith(("scratch_", "flat_")) for m in kernel.mnemonics), kernel.name
        least, _ = FEWER_WAVES.get(kernel.name, (4, ""))
        assert kernel.waves_per_simd >= least, f"{kernel.name}: {meta['.vgpr_count']} VGPRs"
        lines.append(
            f"{kernel.name:24} {meta['.vgpr_count']:4} {meta['.sgpr_count']:4}"
            f" {meta['.group_segment_fixed_size']:6} {kernel.waves_per_simd}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_loads(code: list[Kernel]) -> None:
    """16 bytes at a time; weights non-temporal where they are read once; staged past registers."""
    for kernel in code:
        loads = [i for i in kernel.instructions if i.startswith("buffer_load")]
        wide = [i for i in loads if i.startswith("buffer_load_dwordx4")]
        if "direct" in kernel.name:
            assert sum(i.endswith(" nt") for i in wide) >= len(wide) / 3
        if "staged" in kernel.name:
            assert loads == wide and all(i.endswith(" lds") for i in loads)


# --- wrong kernels are caught -------------------------------------------------------------------

# kind: {name: (what is replaced, by what, how many of the matches: 0 is all)}
CHANGES = {
    "direct_16x32": {
        "a scale byte: row half of the weights": (r"op_sel:\[1,0,0\]", "op_sel:[0,0,0]", 1),
        "a scale byte: the other half": (r"op_sel_hi:\[1,1,0\]", "op_sel_hi:[0,1,0]", 1),
        "groups past the end of K are read": (
            r"v_bfrev_b32_e32 (v\d+), 1$",
            r"v_mov_b32_e32 \1, 0",
            0,
        ),
        "the mask of the scales of half a step": (r"0xffff\b", "-1", 0),
        "the barrier before the sums of waves": (r"s_barrier", "s_nop 0", 0),
        "a wait for loads": (r"s_waitcnt vmcnt\(\d+\)", "s_waitcnt vmcnt(40)", 0),
    },
    "staged_256x256": {
        "a scale byte": (r"op_sel:\[1,0,0\]", "op_sel:[0,0,0]", 1),
        "a scale byte of tokens": (r"op_sel:\[0,1,0\]", "op_sel:[0,0,0]", 1),
        "a fragment's place in LDS": (r"(ds_read_b128 .*) offset:2048", r"\1 offset:4096", 0),
        "the buffer of the other step": (r"(ds_read_b128 .*) offset:34816", r"\1 offset:2048", 1),
        "the target of a load": (r"offset:0x400 lds", "offset:0x800 lds", 1),
        "the step of a buffer": (r"(s_add_u32 .*), 0x80$", r"\1, 0x100", 0),
        "the swizzle of the loads": (r"(v_bitop3_b32 .*) bitop3:0x6c", r"\1 bitop3:0x5c", 1),
        "the barrier in the loop": (r"s_barrier", "s_nop 0", 0),
        "the wait for loads to LDS": (r"s_waitcnt vmcnt\(0\)", "s_nop 0", 0),
        "the mask of scales past the end of K": (
            r"v_cndmask_b32_e32 (v\d+), 0, v\d+, vcc$",
            r"v_mov_b32_e32 \1, -1",
            1,
        ),
    },
}
# The kernel that adds up a split K; the others are the configuration's own.
CHANGES["direct_16x32_split4"] = {
    "a part that is left out": (
        r"s_cmp_eq_u32 (s\d+), 0\n\ts_waitcnt vmcnt\(1\)",
        r"s_cmp_eq_u32 \1, 1\n\ts_waitcnt vmcnt(1)",
        1,
    ),
    "a wait for the workspace": (r"s_waitcnt vmcnt\(1\)", "s_waitcnt vmcnt(2)", 0),
}
CASES = [(name, change) for name, changes in CHANGES.items() for change in changes]


def one_kernel(name: str) -> tuple[str, str, int, int]:
    """Stem and assembly of a code object, and where in it the kernel begins and ends."""
    config = gemm.configs()[BY_NAME[name]]
    stem, symbol = config.stem, config.symbol
    if config.splits > 1:
        stem, symbol = STEMS[2], "gemm_sum_kernel"
    return stem, *kernels.assembly_of(stem, symbol)


def run_all(name: str) -> None:
    for shape in ((20, 70, 1568), (17, 40, 4160), (5, 33, 160)):
        check(shape, BY_NAME[name], "fp32")


@pytest.mark.parametrize("name", CHANGES)
def test_the_unchanged_kernel_passes(name: str) -> None:
    with kernels.replaced(*one_kernel(name)[:2]):
        run_all(name)


@pytest.mark.parametrize("name, change", CASES)
def test_a_wrong_kernel_is_caught(name: str, change: str, capsys) -> None:
    stem, text, begin, end = one_kernel(name)
    wrong = kernels.changed(text, begin, end, CHANGES[name][change])
    how = kernels.assert_caught(stem, wrong, lambda: run_all(name))
    with capsys.disabled():
        print(f"\n{name}, {change}: {how}")


def test_every_instruction_was_executed(capsys) -> None:
    """Runs last: each mnemonic in each code object has been executed by a test above."""
    for stem in STEMS:
        line = kernels.assert_all_executed(stem, executed[stem])
        with capsys.disabled():
            print(f"\n{line}")
