# SPDX-License-Identifier: MIT
"""moe_gemm1's gfx950 machine code, executed by the emulator with all its checks on.

Every byte of both outputs is held against float64: padding must be 0, what is not in use unwritten,
and a code or scale must be that of some value within the bound of float32 sums. Everything that
does not exist is poisoned.

Bug reports from other implementations: B03 and B06 (K that does not fill a step beside NaN scales),
B09, B10, B11 (intermediate sizes 192, 224, 704 refused or wrong), B15 (overhang in N), B25 (offsets
beyond 4 GiB), B32 (dropped routes), B34 (a NaN spreads to other rows).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

import gfx950_kernels as kernels
import moe_gemm_kernels as moe
import numpy as np
import pytest
from compare import assert_bytes_equal
from gfx950_asm import Kernel, read_kernels
from gfx950_build import code_objects

from rotquant_hip.reference import GATE_MODES, SCALE_MODES
from rotquant_hip.reference_moe import SLOT_SHIFT

CONFIGS = moe.configs()
NAMES = [config.name for config in CONFIGS]
GIVEN = [config.name for config in CONFIGS if config.kind != "inline"]
INLINE = [config.name for config in CONFIGS if config.kind == "inline"]
BY_NAME = dict(zip(NAMES, CONFIGS, strict=True))
STEMS = [f"moe_gemm1-inst-{kind}" for kind in ("inline", "direct", "staged")]

INTER = (32, 96, 192, 224, 352, 576, 704)
HIDDEN = (32, 64, 96, 160, 224, 256, 288, 320, 512, 544, 800, 1056)

#: Mnemonics executed so far; test_every_instruction_was_executed reads it.
executed: dict[str, set[str]] = defaultdict(set)


def run(problem: moe.Problem, name: str, **options) -> moe.Output:
    output = moe.run(problem, name, **options)
    executed[BY_NAME[name].stem] |= set(output.stats.mnemonics)
    return output


def check(problem: moe.Problem, name: str, what: str = "", *, most: float = 0.1) -> moe.Output:
    """`most`: the share of codes that may be either of two. Matrices, whose operands are bf16, and
    long sums have wide intervals, and a value that underflows may be 0 or -0."""
    output = run(problem, name)
    most = max(most, 0.2 if problem.inter_matrix is not None else 0)
    moe.check(problem, output, f"{name} {what}", most_choices=most)
    return output


def assert_same(actual: moe.Output, expected: moe.Output, what: str) -> None:
    assert_bytes_equal(actual.codes, expected.codes, f"{what}: codes")
    assert_bytes_equal(actual.scales, expected.scales, f"{what}: scales")


# --- the table ----------------------------------------------------------------------------------


def test_the_choice_of_a_configuration() -> None:
    """One that fits, from the list that the launcher knows; for most rotations and blocks one is
    there, and where a tile is too narrow for a rotation it is not taken."""
    assert len(set(NAMES)) == len(NAMES)
    for block_m in (16, 32, 64, 128):
        for inside in (False, True):
            for rotation in moe.ROTATIONS:
                for blocks, inter in ((1, 96), (8, 768), (128, 768), (500, 2048)):
                    index = moe.choose(blocks, block_m, inter, inside, rotation)
                    assert (index < 0) == (inside and block_m > 16)
                    if index >= 0:
                        chosen = CONFIGS[index]
                        assert chosen.block_m == block_m and chosen.tile_n // 2 >= rotation
                        assert (chosen.kind == "inline") == inside
    # One token and eight experts: narrow tiles; many blocks: wide ones.
    assert NAMES[moe.choose(8, 16, 768, True, 0)] == "inline_16x64"
    assert NAMES[moe.choose(128, 16, 768, True, 0)] == "inline_16x256"
    assert NAMES[moe.choose(128, 128, 768, False, 0)] == "staged_128x256"


# --- right for every configuration ---------------------------------------------------------------


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("index", range(5))
def test_against_the_oracle(name: str, index: int) -> None:
    """B03 B06 B09 B10 B11 B15. Sizes around every edge, each with another mixture of the rest."""
    i = index * len(GIVEN) + GIVEN.index(name)
    activation = moe.ACTIVATIONS[i % 4]
    limited = activation == "swiglu" or index % 2
    problem = moe.make(
        tokens=(1, 5, 9, 17, 3)[index],
        hidden=HIDDEN[i % len(HIDDEN)],
        inter=INTER[i % len(INTER)],
        topk=1 + i % 3,
        block_m=BY_NAME[name].block_m,
        bias=i % 3 == 0,
        seed=i,
        gate_mode=GATE_MODES[i // 2 % 2],
        apply_weight=i % 5 == 1,
        activation=activation,
        limit=(7.0, 2.5)[i % 2] if limited else math.inf,
        alpha=(1.702, 0.5)[i % 2],
        scale_mode=SCALE_MODES[i % 4],
    )
    check(problem, name, f"{activation}, H {problem.hidden}, I {problem.inter}")


@pytest.mark.parametrize("name", NAMES)
def test_rotation_of_the_intermediate(name: str) -> None:
    """Hadamard, one matrix, a matrix for each block; every size that the tile holds."""
    config = BY_NAME[name]
    sizes = [size for size in moe.ROTATIONS[1:] if size <= config.tile_n // 2]
    for n, size in enumerate(sizes):
        for kind in range(3):
            i = n + kind + NAMES.index(name)
            problem = moe.make(
                tokens=4,
                hidden=32,
                inter=256,
                experts=2,
                block_m=config.block_m,
                bias=config.kind == "inline",  # its x is small here and there
                seed=i,
            )
            if kind == 0:
                problem = replace(problem, inter_size=size, scale_mode=SCALE_MODES[i % 4])
            else:
                problem = moe.with_matrix(problem, size, per_block=kind == 2)
            if i % 2:
                problem = moe.with_prescale(problem)
            if config.kind == "inline":
                problem = moe.with_x(problem)
            check(problem, name, f"RS {size}, {('Hadamard', 'matrix', 'matrices')[kind]}")


@pytest.mark.parametrize("activation", moe.ACTIVATIONS)
def test_activations_over_their_range(activation: str) -> None:
    """Gates from the far tail, where a sigmoid is below the normal range, to beyond any limit."""
    problem = moe.make(tokens=9, hidden=64, inter=96, activation=activation, spread=1, seed=3)
    for exponent in (-60, -12, 0, 2, 4):
        scale = (problem.a_scales.astype(np.int32) + exponent).astype(np.uint8)
        for limit in (math.inf, 7.0):
            scaled = replace(problem, a_scales=scale, limit=limit)
            what = f"{activation} * 2^{exponent}, limit {limit}"
            check(scaled, "direct_16x64", what, most=0.4 if exponent > 2 else 0.1)


# --- x quantised inside --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", INLINE)
def test_quantised_inside(name: str, dtype: str) -> None:
    """The bytes that the codes and scales of rotate_quant give, which moe_rotate_quant's are."""
    for n, size in enumerate((0, 16, 32, 64, 128, 256)):
        i = n + INLINE.index(name)
        hidden = max(size, 32) * (1, 3, 5, 9)[i % 4]
        problem = moe.make(
            hidden=hidden,
            inter=INTER[i % len(INTER)],
            bias=True,  # sizes of x vary wildly
            seed=i,
            scale_mode=SCALE_MODES[i % 4],
            gate_mode=GATE_MODES[i % 2],
        )
        problem = moe.with_x(problem, dtype, size, prescale=bool(size and i % 2))
        what = f"{name} {dtype} RS {size}, H {hidden}"
        output = check(problem, name, what)
        given = run(replace(problem, x=None), name.replace("inline", "direct"))
        assert_same(output, given, what)


def test_quantised_inside_with_everything_else() -> None:
    problem = moe.make(tokens=20, hidden=512, inter=256, topk=3, bias=True, apply_weight=True)
    problem = moe.with_x(replace(problem, limit=2.0), "bf16", 128)
    check(moe.with_matrix(replace(problem, activation="swiglu"), 128), "inline_16x256")
    for activation in moe.ACTIVATIONS:
        rotated = replace(problem, activation=activation, inter_size=64)
        check(rotated, "inline_16x128", f"{activation}, Hadamard of 64")


def test_rows_of_x_may_be_strided() -> None:
    """Any distance between rows, 0 too, and any even address."""
    problem = moe.with_x(moe.make(tokens=5, hidden=320), "bf16", 64)
    wide = np.zeros((5, 333), np.uint16)
    wide[:, :320] = problem.x
    strided = check(replace(problem, x=wide[:, :320]), "inline_16x64")
    assert_same(strided, run(problem, "inline_16x64"), "rows 333 apart")
    one = moe.quantised(replace(problem, x=np.broadcast_to(problem.x[2].copy(), (5, 320))))
    check(one, "inline_16x64", "one row for all tokens")


# --- routes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["inline_16x64", "direct_16x128", "direct_32x256", "staged_64x256"]
)
def test_routings(name: str) -> None:
    """B32: dropped routes. One token, one expert for all, masked experts, none at all."""
    block_m = BY_NAME[name].block_m

    def checked(what: str, topk_ids: list, **options) -> None:
        ids = np.array(topk_ids, np.int32)
        problem = moe.make(tokens=len(ids), topk_ids=ids, block_m=block_m, **options)
        if BY_NAME[name].kind == "inline":
            problem = moe.with_x(problem, "bf16", 32)
        check(problem, name, what)

    checked("one token", [[1, 2]])
    checked("the last expert only", [[2]] * (block_m + 3))
    checked("dropped routes", [[0, -1], [-1, 7], [2, 3], [-1, -1]])
    checked("no route", [[-1, -1], [5, 6]])
    mask = np.array([1, 0, 0, 1, 0, 1], np.int32)
    checked("masked experts", [[0, 1], [1, 2], [5, 3], [4, 0]], expert_mask=mask)


def test_what_does_not_exist_is_not_read() -> None:
    """The block of an expert -1 and ids behind the rows in use: workgroups leave first."""
    problem = moe.make(tokens=3, block_m=16)
    ids, experts = problem.sorting.sorted_ids.copy(), problem.sorting.sorted_expert_ids.copy()
    ids[problem.rows :], experts[problem.rows // 16 :] = -1, 1 << 30
    longer = problem.sorting._replace(
        sorted_ids=np.r_[ids, np.full(64, -1, np.int32)],
        sorted_weights=np.r_[problem.sorting.sorted_weights, np.full(64, np.nan, np.float32)],
        sorted_expert_ids=np.r_[experts, np.full(4, 1 << 30, np.int32)],
    )
    check(replace(problem, sorting=longer), "direct_16x64")


@pytest.mark.parametrize("name", ["inline_16x64", "direct_16x64", "staged_64x128"])
def test_a_bad_token_stays_in_its_rows(name: str) -> None:
    """B34: NaN and Inf give scale bytes of 255 in the token's rows; a limit does not hide them."""
    for limit in (math.inf, 7.0):
        problem = moe.make(tokens=4, hidden=320, topk=3, block_m=BY_NAME[name].block_m, limit=limit)
        if BY_NAME[name].kind == "inline":
            problem = moe.with_x(problem)
            x = problem.x.copy()
            x[1, 77], x[2, 5] = 0x7FC0, 0xFF80
            problem = moe.quantised(replace(problem, x=x))
        else:
            problem.a_scales[1, 9], problem.a_scales[2, 0] = 255, 255
        output = check(problem, name, f"limit {limit}")
        tokens = problem.sorting.sorted_ids[problem.routes] & ((1 << SLOT_SHIFT) - 1)
        bad = (output.natural_scales()[problem.routes, :3] == 255).all(1)
        assert (bad == np.isin(tokens, (1, 2))).all()


def test_a_bad_weight_stays_in_its_group() -> None:
    problem = moe.make(tokens=4, hidden=320, topk=3)
    problem.w1_scale[:, 40, 9] = 255  # a gate of the second group
    problem.w1_scale[:, 96 + 70, 0] = 255  # an up of the third
    output = check(problem, "direct_16x64")
    bad = output.natural_scales()[problem.routes, :3] == 255
    assert (bad == [False, True, True]).all()


@pytest.mark.parametrize("name", ["direct_16x64", "staged_64x128"])
def test_experts_beyond_4_gib(name: str) -> None:
    """B25: 4.4 GB of experts, of which the last one is there."""
    problem = moe.make(
        tokens=1, hidden=45056, inter=96, experts=1, topk=1, block_m=BY_NAME[name].block_m
    )
    problem = replace(problem, first_expert=1023)
    assert problem.first_expert * problem.w1.nbytes > 1 << 32
    check(problem, name, most=0.3)


# --- models ---------------------------------------------------------------------------------------

# hidden, intermediate of one GPU's share, top-k, and what else the model does
MODELS = {
    "Qwen3-30B-A3B": (2048, 768, 8, {"inter_size": 128}),
    "Qwen3-30B-A3B TP2": (2048, 384, 8, {}),
    "Qwen3-30B-A3B TP4": (2048, 192, 8, {"inter_size": 64}),
    "gpt-oss-120b": (
        2880,
        2880,
        4,
        {"activation": "swiglu", "limit": 7.0, "bias": True, "gate_mode": "interleave"},
    ),
    "DeepSeek-R1 TP8": (7168, 256, 9, {}),
    "Kimi-K2.5 TP4": (7168, 512, 9, {}),
    "MiniMax-M2.5": (3072, 384, 8, {}),
    "Qwen3.5-397B": (4096, 256, 10, {}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["inline_16x256", "direct_16x256", "staged_64x256"])
def test_model_shapes(model: str, name: str) -> None:
    """K in full; two experts of the many, and of gpt-oss a slice of the intermediate as wide as
    two tiles and a tail."""
    hidden, inter, topk, options = MODELS[model]
    config = BY_NAME[name]
    inter = min(inter, 288) if hidden == 2880 else inter
    ids = np.full((3, topk), -1, np.int32)  # the other experts are on other GPUs
    ids[:, 1], ids[1, 0] = 1, 0
    problem = moe.make(
        tokens=3, hidden=hidden, inter=inter, experts=2, topk_ids=ids, block_m=config.block_m,
        **options,
    )  # fmt: skip
    if config.kind == "inline":
        problem = moe.with_x(problem, "bf16", 64)
    check(problem, name, model)


# --- the same bytes ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["inline_16x128", "direct_32x128", "staged_128x128"])
def test_the_same_bytes_in_any_order(name: str) -> None:
    """Seeds shuffle the order of workgroups and waves."""
    problem = moe.make(tokens=9, hidden=800, inter=352, block_m=BY_NAME[name].block_m, bias=True)
    if BY_NAME[name].kind == "inline":
        problem = moe.with_x(problem)
    first = run(problem, name)
    for seed in (1, 2):
        assert_same(run(problem, name, seed=seed), first, f"{name}, seed {seed}")


def test_every_configuration_gives_the_same_bytes_where_sums_are_exact() -> None:
    """Scales of one power of two: no float32 sum rounds, whatever its order."""
    first = None
    for name in GIVEN:
        problem = moe.make(tokens=5, hidden=544, spread=0, block_m=BY_NAME[name].block_m)
        output = run(problem, name)
        rows = problem.routes
        found = np.c_[output.codes[rows], output.natural_scales()[rows]]
        first = found if first is None else first
        assert_bytes_equal(found, first, name)


# --- counts ---------------------------------------------------------------------------------------


def test_counts(capsys) -> None:
    """Weights are read once, LDS has no bank conflict, memory is touched in whole lines."""
    lines = []
    for name in NAMES:
        config = BY_NAME[name]
        ids = np.zeros((config.block_m, 1), np.int32)
        problem = moe.make(
            tokens=config.block_m, topk_ids=ids, experts=1, hidden=1024, inter=config.tile_n,
            block_m=config.block_m,
        )  # fmt: skip
        if config.kind == "inline":
            problem = moe.with_x(problem, "bf16", 128)
        counted = moe.counts(problem, name)
        lines.append(
            f"{name:15} mfma {counted['mfma_share']:.1%} of issue slots, LDS clocks"
            f" {counted['lds_conflicts']:.2f} of the least, lines {counted['lines']:.2f}"
        )
        assert counted["lds_conflicts"] == 1.0, lines[-1]
        operands = problem.a.nbytes + problem.a_scales.nbytes
        if config.kind == "inline":
            operands = problem.x.nbytes
        least = counted["weight_bytes"] + operands
        assert counted["unique_read_bytes"] == pytest.approx(least, rel=0.03), lines[-1]
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_counts_of_the_main_loop(capsys) -> None:
    """Two runs that differ by 1024 of K differ by four steps: matrix instructions take 4 issue
    slots of 4 clocks, everything else 1."""
    lines = []
    for name, least in (("staged_128x256", 0.7), ("staged_64x256", 0.55), ("direct_32x256", 0.5)):
        block_m = BY_NAME[name].block_m
        ids = np.zeros((block_m, 1), np.int32)
        short, long = (
            run(moe.make(topk_ids=ids, experts=1, hidden=k, inter=128, block_m=block_m), name).stats
            for k in (1024, 2048)
        )
        mfma = 4 * (long.classes["mfma"] - short.classes["mfma"])
        other = long.instructions - short.instructions - mfma // 4
        rest = 2 * short.instructions - long.instructions  # but for the matrix instructions
        share = mfma / (mfma + other)
        lines.append(
            f"{name}: {share:.1%} of the main loop's issue slots are matrix instructions;"
            f" {rest / short.waves:.0f} instructions of a wave around it"
        )
        assert share >= least, lines[-1]
    with capsys.disabled():
        print("\n" + "\n".join(lines))


# --- the code objects -----------------------------------------------------------------------------

#: Least waves per SIMD by registers, and why not 4.
LEAST_WAVES = {
    "inline": (2, "two groups of x in float32 beside the weights of a step"),
    "direct": (4, ""),
    "staged": (3, "sums of 64 x 64; LDS leaves room for two waves a SIMD"),
}


@pytest.fixture(scope="module")
def code() -> list[Kernel]:
    return [kernel for stem in STEMS for kernel in read_kernels(code_objects() / f"{stem}.s")]


def test_registers_and_lds(code: list[Kernel], capsys) -> None:
    assert len(code) == len(CONFIGS)
    lines = [f"{'gfx950 kernel':30} VGPR SGPR    LDS waves/SIMD"]
    for kernel in code:
        meta = kernel.metadata
        for key in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
            assert meta[key] == 0, f"{kernel.name}: {key} {meta[key]}"
        assert not any(m.startswith(("scratch_", "flat_")) for m in kernel.mnemonics), kernel.name
        least = next(waves for kind, (waves, _) in LEAST_WAVES.items() if kind in kernel.name)
        assert kernel.waves_per_simd >= least, f"{kernel.name}: {meta['.vgpr_count']} VGPRs"
        lines.append(
            f"{kernel.name:30} {meta['.vgpr_count']:4} {meta['.sgpr_count']:4}"
            f" {meta['.group_segment_fixed_size']:6} {kernel.waves_per_simd}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


# --- wrong kernels are caught --------------------------------------------------------------------

# {name: {what: (what is replaced, by what, how many of the matches: 0 is all)}}
CHANGES = {
    "inline_16x64": {
        "the steps of the Hadamard across quarters": (r"v_permlane16_swap", "v_permlane32_swap", 0),
        "the mask of the scales of half a step": (r"0xffff\b", "-1", 0),
        "which token a row has": (r"0xffffff\b", "0xfffffe", 1),
        "the barrier before the sums of waves": (r"s_barrier", "s_nop 0", 1),
        "a wait for loads": (r"s_waitcnt vmcnt\(\d+\)", "s_waitcnt vmcnt(40)", 0),
    },
    "direct_16x64": {
        "a scale byte: row half of the weights": (r"op_sel:\[1,0,0\]", "op_sel:[0,0,0]", 1),
        "groups past the end of K are read": (
            r"v_bfrev_b32_e32 (v\d+), 1$",
            r"v_mov_b32_e32 \1, 0",
            0,
        ),
        "the activation's exponent": (r"0xbfb8aa3b", "0xbf80aa3b", 0),
        "a clamp that drops NaN": (
            r"v_minimum3_f32 (v\d+), (\S+), (\S+), (\S+)$",
            r"v_min3_f32 \1, \2, \3, \4",
            0,
        ),
        "the place of a value in LDS": (r"bitop3:0x6c", "bitop3:0x5c", 0),
        "a store of scales": (r"global_store_byte", "global_store_short", 0),
    },
    "staged_64x128": {
        "a scale byte of tokens": (r"op_sel:\[0,1,0\]", "op_sel:[0,0,0]", 1),
        "a step of the Hadamard": (r"quad_perm:\[1,0,3,2\]", "quad_perm:[0,1,2,3]", 1),
        "which token a row has": (r"0xffffff\b", "0xfffffe", 1),
        "the wait for loads to LDS": (r"s_waitcnt vmcnt\(0\)", "s_waitcnt vmcnt(40)", 0),
        "the last barrier": (r"s_barrier(?![\s\S]*s_barrier)", "s_nop 0", 1),
    },
}
CASES = [(name, change) for name, changes in CHANGES.items() for change in changes]


def one_kernel(name: str) -> tuple[str, str, int, int]:
    """Stem and assembly of a code object, and where in it the kernel begins and ends."""
    config = BY_NAME[name]
    return config.stem, *kernels.assembly_of(config.stem, config.symbol)


def run_all(name: str) -> None:
    config = BY_NAME[name]
    block_m, size = config.block_m, min(64, config.tile_n // 2)
    problems = [
        moe.make(tokens=5, hidden=288, inter=96, block_m=block_m, bias=True, limit=2.0),
        moe.make(
            tokens=5 if block_m == 16 else 40, hidden=2624, inter=64, block_m=block_m,
            apply_weight=True, gate_mode="interleave", inter_size=size,
        ),
        moe.with_matrix(moe.make(tokens=3, hidden=64, inter=64, block_m=block_m), 16),
    ]  # fmt: skip
    if config.kind == "inline":
        problems = [
            moe.with_x(p, "bf16", size) for p, size in zip(problems, (32, 64, 16), strict=True)
        ]
    else:
        problems[0].a_scales[2, 3] = 255
    for problem in problems:
        check(problem, name)


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
