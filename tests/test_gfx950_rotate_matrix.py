# SPDX-License-Identifier: MIT
"""Rotation by a matrix: the MFMA kernels' gfx950 machine code, executed with all checks on.

The sums' order is the matrix unit's, so codes and scales are judged by the interval that float32
sums leave around the float64 value (interval.py): outside of it nothing may differ.
"""

from __future__ import annotations

import gfx950_kernels as kernels
import interval
import matrix_kernels
import numpy as np
import pytest
from compare import assert_bytes_equal
from gfx950_asm import LANES
from matrix_kernels import CONFIGS, Config
from strategies import to_float32
from test_gfx950_execution import difficult, executed, note

from rotquant_hip import reference

#: Places where the exact value is too close to a boundary to say: at most this share.
MOST_CHOICES = 0.01

DECODE = [c for c in CONFIGS if c.from_tokens == 0]
BF16 = [c for c in CONFIGS if c.dtype == "bf16"]


def named(configs: list[Config]):
    return pytest.mark.parametrize("config", configs, ids=str)


def dense(size: int, blocks: int = 0, seed: int = 0) -> np.ndarray:
    """Neither symmetric nor orthogonal, of about unit gain."""
    shape = (blocks, size, size) if blocks else (size, size)
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) / np.sqrt(size)).astype(np.float32)


def sylvester(size: int) -> np.ndarray:
    return reference.hadamard(np.eye(size, dtype=np.float32), size)


def unshuffled(scales: np.ndarray, rows: int, groups: int) -> np.ndarray:
    """The real cells; all padding cells must be 0."""
    natural = reference.unshuffle_scales(scales, rows=scales.shape[0], groups=scales.shape[1])
    padding = natural.copy()
    padding[:rows, :groups] = 0
    assert not padding.any(), f"{np.count_nonzero(padding)} padding cells of the scales are not 0"
    return natural[:rows, :groups]


def check(
    config: Config,
    x: np.ndarray,
    matrix: np.ndarray,
    *,
    shuffle: bool = False,
    launch: dict | None = None,
    **options,
) -> float:
    codes, scales, stats = matrix_kernels.rotate_quant(
        config, x, matrix, shuffle=shuffle, **(launch or {}), **options
    )
    note(matrix_kernels.stem(config), stats)
    assert stats.lds_cycles == stats.lds_least_cycles
    values = interval.product(to_float32(x), matrix, options.get("prescale"))
    via_bf16 = options.get("bf16_intermediate", False)
    ends = interval.through_bf16(values) if via_bf16 else values.ends
    if shuffle:
        scales = unshuffled(scales, x.shape[0], x.shape[1] // 32)
    mode = options.get("scale_mode", "round_up")
    what = f"{config} {x.shape} {mode} shuffle {shuffle}"
    return interval.assert_quantised(codes, scales, ends, mode, what)


def check_rotate(config: Config, x: np.ndarray, matrix: np.ndarray, **options) -> None:
    values = interval.product(to_float32(x), matrix, options.get("prescale"))
    rounders = {np.uint16: _to_bf16, np.float16: _to_fp16, np.float32: np.float32}
    for out_dtype, round_to in rounders.items():
        y, stats = matrix_kernels.rotate(config, x, matrix, out_dtype=out_dtype, **options)
        note(matrix_kernels.stem(config), stats)
        assert stats.lds_cycles == stats.lds_least_cycles
        interval.assert_rounded(to_float32(y), values, round_to, f"rotate {config} {x.shape}")


def _to_bf16(values: np.ndarray) -> np.ndarray:
    return reference.bf16_to_float32(reference.float32_to_bf16(values))


def _to_fp16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


def whole_blocks(config: Config, k: int) -> int:
    """The least multiple of 32 and RS from k on."""
    step = max(32, config.size)
    return -(-k // step) * step


@named(CONFIGS)
def test_every_instance_over_shapes_modes_and_layouts(config: Config) -> None:
    """One block, tails in both directions, whole tiles; one matrix and one per block."""
    worst = 0.0
    for index, (rows, k) in enumerate(((1, 32), (3, 96), (33, 288), (17, 640))):
        k = whole_blocks(config, k)
        x = difficult(config.dtype, rows, k, seed=index)
        for number, scale_mode in enumerate(reference.SCALE_MODES):
            matrix = dense(config.size, k // config.size if number % 2 else 0, seed=number)
            for shuffle in (False, True):
                worst = max(worst, check(config, x, matrix, scale_mode=scale_mode, shuffle=shuffle))
    assert worst < MOST_CHOICES


@named(CONFIGS)
def test_rotate(config: Config) -> None:
    for rows, k in ((1, 32), (19, 160), (33, 256)):
        k = whole_blocks(config, k)
        x = difficult(config.dtype, rows, k, seed=rows)
        check_rotate(config, x, dense(config.size, k // config.size))
        prescale = np.random.default_rng(rows).uniform(-2, 2, k).astype(np.float32)
        check_rotate(config, x, dense(config.size), prescale=prescale)


@named([c for c in BF16 if c.size in (16, 64, 256)])
def test_every_number_of_rows(config: Config) -> None:
    k = whole_blocks(config, 96)
    x, matrix = difficult("bf16", 70, k), dense(config.size)
    for rows in (*range(1, 36), 47, 48, 49, 63, 64, 65, 70):
        check(config, x[:rows].copy(), matrix, shuffle=rows % 3 == 0)


@named(DECODE)
def test_prescale_and_bf16_intermediate(config: Config) -> None:
    rng = np.random.default_rng(1)
    x = difficult(config.dtype, 9, 768)
    prescale = rng.uniform(-2, 2, 768).astype(np.float32)
    matrix = dense(config.size, 768 // config.size)
    for options in ({"prescale": prescale}, {"bf16_intermediate": True}):
        for scale_mode in ("round_up", "mse"):
            for shuffle in (False, True):
                check(config, x, matrix, shuffle=shuffle, scale_mode=scale_mode, **options)


@named([c for c in DECODE if c.size in (32, 256)])
def test_row_strides(config: Config) -> None:
    """Also strides that leave rows on any element, which needs the unaligned access mode."""
    for stride in (288, 320, 289, 1000):
        wide = difficult(config.dtype, 21, stride)
        check(config, wide[:, :256], dense(config.size), launch={"unaligned": True})


@named(BF16)
def test_a_clamped_grid_strides_over_the_rest(config: Config) -> None:
    """Fewer workgroups than tiles: several turns with one staging, and several stagings."""
    turn = 16 * config.tiles * config.waves
    x = difficult("bf16", 2 * turn + 5, whole_blocks(config, 640))
    matrix = dense(config.size, x.shape[1] // config.size)
    for shuffle in (False, True):
        check(config, x, matrix, shuffle=shuffle, launch={"max_grid": (1, 1)})
    x = x[: turn + 1, : whole_blocks(config, 32)]
    check_rotate(
        config, np.ascontiguousarray(x), matrix[: x.shape[1] // config.size], max_grid=(1, 1)
    )


@named(BF16)
def test_any_order_of_waves_and_workgroups(config: Config) -> None:
    x = difficult("bf16", 70, whole_blocks(config, 416))
    for seed in range(2):
        launch = {"seed": seed, "max_grid": (1, 1)}
        check(config, x, dense(config.size), shuffle=True, launch=launch)


@named(BF16)
def test_a_bad_value_stays_in_its_block(config: Config) -> None:
    """One NaN or Inf: every group of its block of that token is 255, all else is as without it."""
    rng = np.random.default_rng(5)
    k = whole_blocks(config, 512)
    x = reference.float32_to_bf16(rng.standard_normal((33, k)).astype(np.float32))
    matrix = dense(config.size)
    matrix[:, 0] = 0  # 0 times NaN is no way out
    clean_codes, clean, _ = matrix_kernels.rotate_quant(config, x, matrix)
    for value in (np.nan, np.inf, -np.inf):
        row, channel = rng.integers(33), rng.integers(k)
        changed = x.copy()
        changed[row, channel] = reference.float32_to_bf16(np.float32(value))
        codes, scales, _ = matrix_kernels.rotate_quant(config, changed, matrix)
        block = slice(channel // config.size * config.size, None)
        first = block.start // 32
        groups = slice(first, first + max(1, config.size // 32))
        want, want_codes = clean.copy(), clean_codes.copy()
        want[row, groups] = 255
        want_codes[row, groups.start * 16 : groups.stop * 16] = 0
        assert (scales == want).all() and (codes == want_codes).all(), (value, row, channel)


@named(CONFIGS)
def test_fused_equals_separate(config: Config) -> None:
    """With bf16_intermediate, byte for byte: the sums are the same ones."""
    x, matrix = difficult(config.dtype, 37, whole_blocks(config, 544)), dense(config.size)
    y, _ = matrix_kernels.rotate(config, x, matrix, out_dtype=np.uint16)
    for scale_mode in ("round_up", "mse"):
        options = {"scale_mode": scale_mode, "bf16_intermediate": True}
        fused = matrix_kernels.rotate_quant(config, x, matrix, **options)[:2]
        separate = kernels.rotate_quant(y, 0, scale_mode=scale_mode)[:2]
        for got, want, what in zip(fused, separate, ("codes", "scales"), strict=True):
            assert_bytes_equal(got, want, f"{what} of {config} {scale_mode}")


@named([c for c in BF16 if c.size in (16, 64, 256)])
def test_the_hadamard_as_a_matrix(config: Config) -> None:
    """Exact in bf16 for these RS: the butterfly kernel's bytes, but for the order of the sums."""
    rng = np.random.default_rng(6)
    x = reference.float32_to_bf16(rng.standard_normal((70, 1024)).astype(np.float32))
    matrix = sylvester(config.size) / np.float32(np.sqrt(config.size))
    values = interval.product(to_float32(x), matrix)
    got = matrix_kernels.rotate_quant(config, x, matrix)[:2]
    butterflies = kernels.rotate_quant(x, config.size)[:2]
    for codes, scales in (got, butterflies):
        interval.assert_quantised(codes, scales, values.ends, "round_up", f"Hadamard {config}")
    different = sum(np.count_nonzero(a != b) for a, b in zip(got, butterflies, strict=True))
    assert different <= 1e-4 * (x.size // 2 + x.size // 32)


@named(BF16)
def test_the_hadamard_before_its_factor(config: Config) -> None:
    """Entries +-1 for every RS; times 1/sqrt(RS), within both kernels' float32 sums."""
    rng = np.random.default_rng(7)
    x = reference.float32_to_bf16(rng.standard_normal((5, 768)).astype(np.float32))
    values = interval.product(to_float32(x), sylvester(config.size))
    y, _ = matrix_kernels.rotate(config, x, sylvester(config.size))
    factor = np.float32(1 / np.sqrt(config.size))
    butterflies, _ = kernels.rotate(x, config.size, out_dtype=np.float32)
    error = np.abs(y * factor - butterflies)
    assert (error <= 2 * values.bound * factor + 2.0**-23 * np.abs(butterflies)).all()


#: The kernel that prefill takes, K 4096.
PREFILL = [[c for c in BF16 if c.size == size][-1] for size in reference.ROTATION_SIZES]


@named(PREFILL)
@pytest.mark.parametrize("shuffle", (False, True))
def test_counts(config: Config, shuffle: bool, capsys) -> None:
    """Counted: bytes moved, LDS clocks, and issue of VALU and MFMA against the memory.

    One staging for 512 rows, as at 16384 x 4096 on the whole GPU (8 turns for RS 128).
    """
    rows, k = 512, 4096
    x = difficult("bf16", rows, k)
    matrix = dense(config.size)
    options = {"shuffle": shuffle, "max_grid": (k, 1)}
    _, _, stats = matrix_kernels.rotate_quant(config, x, matrix, **options)
    moved = stats.unique_read_bytes + stats.unique_written_bytes
    least = x.size * (2 + 1 / 2 + 1 / 32) + 2 * matrix.size
    assert moved == pytest.approx(least, rel=0.01)
    assert stats.lds_cycles == stats.lds_least_cycles
    floor = stats.resource_floor(chip="mi355x").us
    assert max(floor, key=floor.get) == "hbm"
    valu = (stats.classes["valu"] + stats.classes["packed"]) * LANES / x.size
    mfma = stats.classes["mfma"] * LANES / x.size
    with capsys.disabled():
        print(
            f"\nrotate_quant by a matrix, {config}, {rows} x {k}, "
            f"{'shuffled' if shuffle else 'natural'} scales: {moved / x.size:.3f} bytes, "
            f"{valu:.2f} VALU and {mfma:.2f} MFMA instructions per channel, LDS clocks "
            f"{stats.lds_cycles} (least {stats.lds_least_cycles}), lines {stats.lines} of "
            f"{stats.least_lines} least; floors in us (a bound, not a timing): "
            + ", ".join(f"{name} {us:.3f}" for name, us in floor.items() if us)
        )


# --- wrong kernels --------------------------------------------------------------------------------

CHANGES = {
    "a read that does not transpose": (r"ds_read_b64_tr_b16", "ds_read_b64", 1),
    "a fragment's second half from the wrong k": (
        r"(ds_read_b64_tr_b16 .* offset:)512",
        r"\g<1>256",
        1,
    ),
    "the lane exchange of the other bit": (r"v_permlane32_swap", "v_permlane16_swap", 1),
    "the barrier between staging and reading": (r"\n\ts_barrier\n", "\n\ts_nop 0\n", 0),
    "the wait for a fragment": (r"s_waitcnt lgkmcnt\(\d\)\n(\tv_mfma)", r"s_nop 0\n\1", 1),
    "a sum that starts from nothing": (r"(v_mfma\S+ \S+ \S+ \S+) 0$", r"\1 1.0", 1),
    "a maximum that drops NaN": (r"v_maximum3_f32", "v_max3_f32", 0),
}


@pytest.fixture(scope="module")
def assembly() -> tuple[str, int, int]:
    """The text, and where in it the kernel for RS 64 begins and ends."""
    symbol = r"26rotate_matrix_quant_kernel\S*ELi64E\S*ELb0E"
    return kernels.assembly_of("rotate_matrix-inst-bf16", symbol)


def run_rs_64() -> None:
    (config,) = (c for c in BF16 if c.size == 64)
    for shuffle in (False, True):
        check(config, difficult("bf16", 70, 1088), dense(64), shuffle=shuffle)


def test_the_unchanged_kernel_passes(assembly) -> None:
    with kernels.replaced("rotate_matrix-inst-bf16", assembly[0]):
        run_rs_64()


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_kernel_is_caught(change: str, assembly, capsys) -> None:
    wrong = kernels.changed(*assembly, CHANGES[change])
    how = kernels.assert_caught("rotate_matrix-inst-bf16", wrong, run_rs_64)
    with capsys.disabled():
        print(f"\n{change}: {how}")


def test_every_instruction_was_executed() -> None:
    """Runs last: each mnemonic in the code objects has been executed by a test above."""
    for dtype in kernels.DTYPES:
        stem = f"rotate_matrix-inst-{dtype}"
        kernels.assert_all_executed(stem, executed[stem])
