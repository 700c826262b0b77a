# SPDX-License-Identifier: MIT
"""The numpy oracle against witnesses of its own: exact fractions, written-out tables, ml_dtypes."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from compare import assert_bytes_equal, assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import (
    dtypes,
    float_arrays,
    mse_ties,
    prescales,
    rotation_sizes,
    rotations,
    scale_modes,
    seeds,
    shapes,
    to_float32,
)

from rotquant_hip import reference as ref

EPS = 2.0**-24  # largest relative error of one float32 rounding
AMAX_MODES = ("round_up", "floor", "even", "ceil")
# Each midpoint of two e2m1 values, the lower, the upper, and the one with the even code.
TIES = [
    (0.25, 0, 0.5, 0),
    (0.75, 0.5, 1, 1),
    (1.25, 1, 1.5, 1),
    (1.75, 1.5, 2, 2),
    (2.5, 2, 3, 2),
    (3.5, 3, 4, 4),
    (5, 4, 6, 4),
]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- the witness: one group at a time, in exact arithmetic --------------------------------------


def exact_code(value: Fraction) -> int:
    """Magnitude bits of the nearest e2m1, as the list of intervals that rounds ties to even."""
    x = abs(value)
    if x <= Fraction(1, 4):
        return 0
    if x < Fraction(3, 4):
        return 1
    if x <= Fraction(5, 4):
        return 2
    if x < Fraction(7, 4):
        return 3
    if x <= Fraction(5, 2):
        return 4
    if x < Fraction(7, 2):
        return 5
    if x <= 5:
        return 6
    return 7


POWERS = [Fraction(2) ** e for e in range(-127, 128)]
FOURS = [4 * power for power in POWERS]
SIXES = [6 * power for power in POWERS]
HALF_UP = [Fraction(7, 2) * power for power in POWERS]  # 1.75 * 2^n and more rounds to 2^(n + 1)


def exact_scale_byte(amax: Fraction, mode: str) -> int:
    match mode:
        case "round_up":
            return bisect_left(SIXES, amax)  # how many are too small
        case "ceil":
            return bisect_left(FOURS, amax)
        case "floor":
            return max(bisect_right(FOURS, amax) - 1, 0)  # the last that is not too big
        case "even":
            return max(bisect_right(HALF_UP, amax) - 1, 0)
    raise AssertionError(mode)


def tree_sum(values: list[np.float32]) -> np.float32:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return np.float32(tree_sum(values[:half]) + tree_sum(values[half:]))


def squared_error(values: list[Fraction], byte: int, unit_byte: int) -> np.float32:
    """Error of quantising with byte's scale, in units of unit_byte's."""
    unit, scale = Fraction(2) ** (unit_byte - 127), Fraction(2) ** (byte - 127)
    squares = []
    for value in values:
        code = Fraction(float(ref.E2M1_VALUES[exact_code(value / scale)]))
        error = np.float32(float((abs(value) - code * scale) / unit))
        squares.append(np.float32(error * error))
    return tree_sum(squares)


def exact_group(group: np.ndarray, k: int, mode: str) -> tuple[list[int], int]:
    """Codes and scale byte of group / 2^k."""
    floats = [float(v) for v in group]
    if not all(math.isfinite(v) for v in floats):
        return [0] * 32, 255
    values = [Fraction(v) / 2**k for v in floats]
    amax = max(abs(v) for v in values)
    if amax == 0:
        return [0] * 32, 0
    byte = exact_scale_byte(amax, "round_up" if mode == "mse" else mode)
    if mode == "mse" and byte >= 1:
        with np.errstate(under="ignore"):
            byte -= bool(squared_error(values, byte - 1, byte) < squared_error(values, byte, byte))
    scale = Fraction(2) ** (byte - 127)
    signs = [8 * (math.copysign(1, v) < 0) for v in floats]
    return [exact_code(v / scale) + sign for v, sign in zip(values, signs, strict=True)], byte


def assert_is_exact_quant(codes, scales, u: np.ndarray, k: int, mode: str) -> None:
    expected = [exact_group(group, k, mode) for group in u.reshape(-1, 32)]
    expected_codes = np.array([codes for codes, _ in expected], np.uint8).reshape(u.shape)
    expected_scales = np.array([byte for _, byte in expected], np.uint8)
    expected_scales = expected_scales.reshape(*u.shape[:-1], u.shape[-1] // 32)
    assert_bytes_equal(scales, expected_scales, f"{mode} scales")
    assert_bytes_equal(ref.unpack_nibbles(codes), expected_codes, f"{mode} codes")


# --- number formats ---------------------------------------------------------------------------


def test_e2m1_values():
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = np.arange(16, dtype=np.uint8)
    assert_bytes_equal(ref.e2m1_decode(codes), f32(*expected), "table")
    theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert_bytes_equal(ref.e2m1_decode(codes), theirs, "ml_dtypes")
    assert_bytes_equal(ref.e2m1_encode(f32(*expected)), codes, "encode")


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("midpoint, lower, upper, even", TIES)
def test_e2m1_midpoints(midpoint, lower, upper, even, sign):
    at = np.float32(midpoint)
    values = f32(np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(9)))
    rounded = ref.e2m1_decode(ref.e2m1_encode(sign * values))
    assert_bytes_equal(rounded, sign * f32(lower, even, upper), "below, at, above")


def test_e2m1_of_every_bfloat16():
    values = ref.bf16_to_float32(np.arange(2**16, dtype=np.uint16))
    values = values[~np.isnan(values)]
    theirs = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert_bytes_equal(ref.e2m1_encode(values), theirs, "codes")


@settings(max_examples=50, deadline=None)
@given(seed=seeds)
def test_e2m1_of_float32(seed):
    rng = np.random.default_rng(seed)
    values = rng.uniform(-7, 7, 2000).astype(np.float32)
    near = rng.choice([tie[0] for tie in TIES], 2000).astype(np.float32).view(np.uint32)
    near = (near + rng.integers(0, 5, 2000).astype(np.uint32) - 2).view(np.float32)
    values = np.concatenate([values, near, -near])
    theirs = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert_bytes_equal(ref.e2m1_encode(values), theirs, "ml_dtypes")
    table = np.array([exact_code(Fraction(float(v))) for v in values], np.uint8)
    assert_bytes_equal(ref.e2m1_encode(values) & 7, table, "table")


def test_e2m1_saturates_and_has_no_nan():
    assert ref.e2m1_encode(f32(np.inf, -np.inf, 3e38, -1e-45, -0.0)).tolist() == [7, 15, 7, 8, 8]
    with pytest.raises(ValueError, match="NaN"):
        ref.e2m1_encode(f32(1, np.nan))


def test_e8m0_values():
    bytes_ = np.arange(256, dtype=np.uint8)
    values = ref.e8m0_decode(bytes_)
    assert values.dtype == np.float32
    assert [Fraction(float(v)) for v in values[:255]] == POWERS
    assert np.isnan(values[255])
    theirs = bytes_.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert_close(values, theirs, "ml_dtypes")


def test_bf16_round_trip():
    bits = np.arange(2**16, dtype=np.uint16)
    values = ref.bf16_to_float32(bits)
    assert_close(values, bits.view(ml_dtypes.bfloat16).astype(np.float32), "ml_dtypes")
    expected = np.where(np.isnan(values), np.uint16(0x7FC0), bits)
    assert_bytes_equal(ref.float32_to_bf16(values), expected, "bits")


@settings(max_examples=50, deadline=None)
@given(seed=seeds)
def test_bf16_rounds_to_nearest_even(seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 4000, np.uint32)
    near_ties = rng.choice(np.array([0x7FFF, 0x8000, 0x8001], np.uint32), 2000)
    bits[::2] = (bits[::2] & 0xFFFF0000) + near_ties
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    bits = values.view(np.uint32).astype(np.uint64)
    by_bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert_bytes_equal(ref.float32_to_bf16(values), by_bits, "bit trick")
    theirs = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert_bytes_equal(ref.float32_to_bf16(values), theirs, "ml_dtypes")


def test_nibbles():
    codes = np.array([[1, 2, 15, 0], [7, 8, 9, 10]], np.uint8)
    packed = np.array([[0x21, 0x0F], [0x87, 0xA9]], np.uint8)
    assert_bytes_equal(ref.pack_nibbles(codes), packed, "low nibble is the even element")
    assert_bytes_equal(ref.unpack_nibbles(packed), codes, "inverse")
    assert ref.unpack_nibbles(packed[:0]).shape == (0, 4)


# --- scales -----------------------------------------------------------------------------------


def edges() -> np.ndarray:
    """Every 4, 6 and 7 times a power of two that float32 holds, and its two neighbours."""
    exact = np.array([m * 2.0**e for m in (4, 6, 7) for e in range(-151, 126)])
    at = exact.astype(np.float32)
    at = at[at == exact]
    ends = f32(np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max)
    return np.concatenate(
        [ends, at, np.nextafter(at, np.float32(0)), np.nextafter(at, np.float32(np.inf))]
    )


def scale_byte_by_bits(amax: np.ndarray, mode: str) -> np.ndarray:
    bias = {"round_up": 0x3FFFFF, "ceil": 0x7FFFFF, "floor": 0, "even": 0x200000}[mode]
    byte = ((amax.view(np.uint32).astype(np.int64) + bias) >> 23) - 2
    return np.where(np.isfinite(amax), np.maximum(byte, 0), 255).astype(np.uint8)


@pytest.mark.parametrize("mode", AMAX_MODES)
def test_scale_byte_at_binade_edges(mode):
    amax = edges()
    amax = amax[amax > 0]
    exact = [exact_scale_byte(Fraction(float(a)), mode) for a in amax]
    assert_bytes_equal(ref.scale_byte(amax, mode), np.array(exact, np.uint8), "exact")
    assert_bytes_equal(ref.scale_byte(amax, mode), scale_byte_by_bits(amax, mode), "bits")


@pytest.mark.parametrize(
    "mode, at_4_below, at_4, at_4_above, at_6, at_6_above, at_7_below, at_7",
    [
        ("round_up", 127, 127, 127, 127, 128, 128, 128),
        ("ceil", 127, 127, 128, 128, 128, 128, 128),
        ("floor", 126, 127, 127, 127, 127, 127, 127),
        ("even", 127, 127, 127, 127, 127, 127, 128),
    ],
)
def test_scale_byte_written_out(
    mode, at_4_below, at_4, at_4_above, at_6, at_6_above, at_7_below, at_7
):
    def neighbours(value):
        return np.nextafter(np.float32(value), f32(0, np.inf))

    below_4, above_4 = neighbours(4)
    amax = f32(below_4, 4, above_4, 6, neighbours(6)[1], neighbours(7)[0], 7)
    expected = [at_4_below, at_4, at_4_above, at_6, at_6_above, at_7_below, at_7]
    assert ref.scale_byte(amax, mode).tolist() == expected


@pytest.mark.parametrize("mode", AMAX_MODES)
def test_scale_byte_of_every_bfloat16(mode):
    amax = ref.bf16_to_float32(np.arange(2**15, dtype=np.uint16))
    assert_bytes_equal(ref.scale_byte(amax, mode), scale_byte_by_bits(amax, mode), mode)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, mode=st.sampled_from(AMAX_MODES))
def test_scale_byte_of_float32(seed, mode):
    amax = np.random.default_rng(seed).integers(0, 2**31, 4000, np.uint32).view(np.float32)
    assert_bytes_equal(ref.scale_byte(amax, mode), scale_byte_by_bits(amax, mode), mode)


@pytest.mark.parametrize("mode", AMAX_MODES)
def test_scale_byte_clamps_and_marks(mode):
    smallest, biggest = np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max
    special = f32(0, -0.0, np.nan, np.inf, smallest, 2.0**-126)
    assert ref.scale_byte(special, mode).tolist() == [0, 0, 255, 255, 0, 0]
    top = {"round_up": 253, "ceil": 253, "floor": 252, "even": 253}[mode]
    assert ref.scale_byte(biggest, mode) == top


def test_scale_byte_rejects_unknown_modes():
    for mode in ("mse", "nearest"):
        with pytest.raises(ValueError, match=f"'{mode}'"):
            ref.scale_byte(f32(1), mode)


# --- quant and dequant ------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.data(), dtype=dtypes, mode=scale_modes)
def test_quant_is_exact(data, dtype, mode):
    x = to_float32(data.draw(float_arrays(dtype, data.draw(shapes(max_elements=512)))))
    codes, scales = ref.quant(x, scale_mode=mode)
    assert_is_exact_quant(codes, scales, x, 0, mode)


@pytest.mark.parametrize("mode", ref.SCALE_MODES)
@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_non_finite_element_marks_its_group_only(mode, special):
    x = random(0, 3, 96)
    clean_codes, clean_scales = ref.quant(x, scale_mode=mode)
    x[1, 40] = special
    codes, scales = ref.quant(x, scale_mode=mode)
    clean_codes[1, 16:32], clean_scales[1, 1] = 0, 255
    assert_bytes_equal(codes, clean_codes, "codes")
    assert_bytes_equal(scales, clean_scales, "scales")
    assert np.isnan(ref.dequant(codes, scales)[1, 32:64]).all()


@pytest.mark.parametrize("mode", ref.SCALE_MODES)
def test_a_zero_group_has_no_signs(mode):
    x = random(0, 64)
    x[:32] = -0.0
    codes, scales = ref.quant(x, scale_mode=mode)
    assert scales[0] == 0 and scales[1] > 0
    assert not codes[:16].any()


def test_a_rounded_zero_keeps_its_sign():
    x = np.zeros(32, np.float32)
    x[:5] = [6, -0.25, 0.25, -0.0, -1e-45]
    codes, scales = ref.quant(x)
    assert scales.tolist() == [127]
    assert ref.unpack_nibbles(codes)[:6].tolist() == [7, 8, 0, 8, 8, 0]


@pytest.mark.parametrize("mode", ref.SCALE_MODES)
@pytest.mark.parametrize("size", [1e-37, 1e-38, 1e-40, 1e-45])
def test_tiny_groups_stay_finite(mode, size):
    x = random(0, 8, 64) * np.float32(size)
    codes, scales = ref.quant(x, scale_mode=mode)
    assert (scales < 8).all()
    y = ref.dequant(codes, scales)
    assert np.isfinite(y).all()
    # At byte 0 the codes are 2^-128 apart near zero; a group may also saturate, in floor and even.
    assert_close(y, x, mode, bound=0.35 * np.abs(x).max(-1, keepdims=True) + 2.0**-129)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=dtypes)
def test_mse_is_never_worse_than_round_up(data, dtype):
    x = to_float32(data.draw(float_arrays(dtype)))

    def errors(mode):
        codes, scales = ref.quant(x, scale_mode=mode)
        y = ref.dequant(codes, scales).astype(np.float64)
        with np.errstate(invalid="ignore"):
            return scales, ((y - x) ** 2).reshape(*scales.shape, 32).sum(-1)

    scales, mse = errors("mse")
    round_up_scales, round_up = errors("round_up")
    finite = round_up_scales != 255
    lower = scales[finite].astype(int) - round_up_scales[finite]
    assert np.isin(lower, [0, -1]).all()
    # Each side's sum of squares is rounded six times on the way; all else is exact.
    assert (mse[finite] <= round_up[finite] * (1 + 2 * 8 * EPS)).all()
    assert (scales[~finite] == 255).all()


def test_mse_takes_the_lower_scale_only_if_strictly_better():
    # Scale 2 rounds 1.5 to 2, scale 1 holds it and merely saturates 6.25 at 6.
    x = np.full(32, 1.5, np.float32)
    x[0] = 6.25
    codes, scales = ref.quant(x, scale_mode="mse")
    assert scales.tolist() == [127] and ref.unpack_nibbles(codes)[:2].tolist() == [7, 3]
    assert ref.quant(x)[1].tolist() == [128]
    # Alone, 6.5 becomes 6 at both scales: a tie.
    x[1:] = 0
    x[0] = 6.5
    codes, scales = ref.quant(x, scale_mode="mse")
    assert scales.tolist() == [128] and ref.unpack_nibbles(codes)[:2].tolist() == [5, 0]
    # Byte 0 has none below it, though half of its scale would hold 0.75 * 2^-127 exactly.
    x = np.full(32, 0.75 * 2.0**-127, np.float32)
    assert ref.quant(x, scale_mode="mse")[1].tolist() == [0]


def test_mse_sums_as_a_tree():
    """Some groups lie so close to a tie that the order of the sum decides."""
    groups = to_float32(mse_ties(np.random.default_rng(0), "fp32", 200))
    _, round_up = ref.quant(groups)
    _, mse = ref.quant(groups, scale_mode="mse")
    expected = [exact_group(group, 0, "mse")[1] for group in groups]
    assert_bytes_equal(mse[:, 0], np.array(expected, np.uint8), "scales")

    t = groups / ref.e8m0_decode(round_up)
    squares = (t - ref.e2m1_decode(ref.e2m1_encode(t))) ** 2
    squares_below = (t - ref.e2m1_decode(ref.e2m1_encode(2 * t)) / 2) ** 2
    one_by_one = np.cumsum(squares_below, -1)[:, -1] < np.cumsum(squares, -1)[:, -1]
    assert np.count_nonzero(one_by_one != (mse < round_up)[:, 0]) > 20


@settings(max_examples=50, deadline=None)
@given(seed=seeds)
def test_dequant_is_exact(seed):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (3, 48)).astype(np.uint8)
    scales = rng.integers(0, 255, (3, 3)).astype(np.uint8)
    y = ref.dequant(codes, scales)
    assert y.dtype == np.float32
    for (row, column), value in np.ndenumerate(y):
        code = codes[row, column // 2] >> 4 * (column % 2) & 15
        scale = int(scales[row, column // 32])
        expected = math.ldexp(float(ref.E2M1_VALUES[code & 7]), scale - 127)
        assert abs(value) == (expected if expected < 2.0**128 else math.inf)
        assert np.signbit(value) == (code >= 8)


def test_quant_of_dequant_is_the_identity():
    scales = np.arange(1, 253, dtype=np.uint8)[:, None]
    codes = ref.pack_nibbles(np.tile(np.arange(16, dtype=np.uint8), (252, 2)))
    assert_bytes_equal(ref.quant(ref.dequant(codes, scales))[0], codes, "codes")
    assert_bytes_equal(ref.quant(ref.dequant(codes, scales))[1], scales, "scales")


# --- rotation ---------------------------------------------------------------------------------


def sylvester(size: int) -> np.ndarray:
    """H[i][j] = (-1)^(number of ones in i & j), float64."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])


def blockwise(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """x.reshape(..., K/RS, RS) @ matrix in float64."""
    rs = matrix.shape[-1]
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], x.shape[-1] // rs, 1, rs)
    return (blocks @ matrix.astype(np.float64)).reshape(x.shape)


def recursive_hadamard(v: list[np.float32]) -> list[np.float32]:
    """The normative order once more: halves first, joined at the largest distance last."""
    if len(v) == 1:
        return v
    half = len(v) // 2
    a, b = recursive_hadamard(v[:half]), recursive_hadamard(v[half:])
    return [x + y for x, y in zip(a, b, strict=True)] + [x - y for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("rs", ref.ROTATION_SIZES)
def test_hadamard_is_exact_on_integers(rs):
    x = np.random.default_rng(rs).integers(-(2**15), 2**15, (3, 2 * rs)).astype(np.float32)
    assert_close(ref.hadamard(x, rs), blockwise(x, sylvester(rs)), "sums below 2^24")


@settings(max_examples=50, deadline=None)
@given(seed=seeds, rs=rotation_sizes, outlier=st.sampled_from([1.0, 1000.0]))
def test_hadamard_bound(seed, rs, outlier):
    x = random(seed, 4, 2 * rs)
    x[..., 5] *= outlier
    # Each of log2(RS) stages rounds once, partial sums are no larger than the sum of magnitudes.
    bound = math.log2(rs) * EPS * 1.001 * blockwise(np.abs(x), np.ones((rs, rs)))
    assert_close(ref.hadamard(x, rs), blockwise(x, sylvester(rs)), f"RS {rs}", bound=bound)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), rs=rotation_sizes)
def test_hadamard_order(data, rs):
    x = to_float32(data.draw(float_arrays("fp32", (2 * rs,))))
    with np.errstate(all="ignore"):
        expected = [*recursive_hadamard([*x[:rs]]), *recursive_hadamard([*x[rs:]])]
    actual = ref.hadamard(x, rs)
    finite = ~np.isnan(actual)
    assert (np.isnan(expected) == ~finite).all()
    assert_bytes_equal(actual[finite], np.array(expected, np.float32)[finite], f"RS {rs}")


@pytest.mark.parametrize("rs", ref.ROTATION_SIZES)
def test_hadamard_rotation_is_orthogonal(rs):
    identity = np.eye(rs, dtype=np.float32)
    matrix = ref.rotate(identity, rotation_size=rs)
    assert_close(np.abs(matrix), np.full((rs, rs), np.float32(1 / math.sqrt(rs))), "entries")
    product = matrix.astype(np.float64) @ matrix.astype(np.float64).T
    assert_close(product, np.eye(rs), "R R^T", bound=0 if rs in (16, 64, 256) else 2.1 * EPS)
    assert_bytes_equal(matrix, matrix.T.copy(), "symmetric")
    x = random(rs, 5, 2 * rs)
    twice = ref.rotate(ref.rotate(x, rotation_size=rs), rotation_size=rs)
    assert_close(twice, x, "its own inverse", bound=40 * EPS * np.abs(x).max() * math.sqrt(rs))


@pytest.mark.parametrize("rs", ref.ROTATION_SIZES)
def test_rotate_is_hadamard_times_a_float32_factor(rs):
    x = random(rs, 2, 512)
    factor = float(np.float32(1 / math.sqrt(rs)))
    # A product of two float32 is exact in float64, so this rounds once.
    expected = (ref.hadamard(x, rs).astype(np.float64) * factor).astype(np.float32)
    assert_bytes_equal(ref.rotate(x, rotation_size=rs), expected, "rotate")
    square = Fraction(factor) ** 2 * rs  # 1 if and only if the root is a power of two
    assert (square == 1) == (rs in (16, 64, 256))
    assert abs(square - 1) <= Fraction(2 * EPS) * 2


def test_rotation_size_is_64_or_the_matrix():
    x = random(0, 2, 128)
    assert_bytes_equal(ref.rotate(x), ref.rotate(x, rotation_size=64), "default")
    assert_bytes_equal(ref.rotate_quant(x)[0], ref.rotate_quant(x, rotation_size=64)[0], "default")
    assert_bytes_equal(ref.rotate(x, np.eye(32)), x, "identity of 32")
    with pytest.raises(ValueError, match="rotation_size: expected 32 as in rotation, got 64"):
        ref.rotate(x, np.eye(32), rotation_size=64)
    with pytest.raises(ValueError, match="rotation_size: expected one of"):
        ref.rotate(x, rotation_size=8)
    with pytest.raises(ValueError, match="x: expected last dimension divisible by 256"):
        ref.rotate(x, rotation_size=256)
    with pytest.raises(ValueError, match="x: expected last dimension divisible by 32"):
        ref.rotate_quant(x[:, :48], rotation_size=16)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), rs=rotation_sizes, seed=seeds, per_block=st.booleans())
def test_matrix_bound(data, rs, seed, per_block):
    x = random(seed, 3, 2 * rs)
    matrix = data.draw(rotations(rs, 2 if per_block else None))
    # RS products and RS sums, each rounded once, of partial sums no larger than the magnitudes'.
    bound = (rs + 1) * EPS * 1.001 * blockwise(np.abs(x), np.abs(matrix))
    assert_close(ref.rotate(x, matrix), blockwise(x, matrix), "float64", bound=bound)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), seed=seeds, per_block=st.booleans())
def test_matrix_order(data, seed, per_block):
    x = random(seed, 64)
    matrix = data.draw(rotations(32, 2 if per_block else None))
    expected = np.zeros(64, np.float32)
    for block in range(2):
        r = matrix[block] if per_block else matrix
        for j in range(32):
            acc = np.float32(0)
            for i in range(32):
                acc = np.float32(acc + np.float32(x[32 * block + i] * r[i, j]))
            expected[32 * block + j] = acc
    assert_bytes_equal(ref.rotate(x, matrix), expected, "one product, one sum at a time")


def test_matrix_is_on_the_right_and_sums_start_from_plus_zero():
    shift = np.roll(np.eye(16), 1, axis=1)  # x @ shift moves channels up by one
    x = np.arange(32, dtype=np.float32)
    expected = np.concatenate([np.roll(x[:16], 1), np.roll(x[16:], 1)])
    assert_bytes_equal(ref.rotate(x, shift), expected, "x @ R in each block")
    zeros = ref.rotate(np.full(16, -0.0, np.float32), np.eye(16))
    assert not np.signbit(zeros).any()


@settings(max_examples=30, deadline=None)
@given(data=st.data(), seed=seeds, bf16=st.booleans(), mode=scale_modes)
def test_prescale_comes_first_and_is_rounded(data, seed, bf16, mode):
    x = random(seed, 2, 128)
    prescale = data.draw(prescales(128))
    scaled = (x.astype(np.float64) * prescale).astype(np.float32)
    assert_bytes_equal(ref.rotate(x, prescale=prescale), ref.rotate(scaled), "rotate")
    with_it = ref.rotate_quant(x, prescale=prescale, scale_mode=mode, bf16_intermediate=bf16)
    before_it = ref.rotate_quant(scaled, scale_mode=mode, bf16_intermediate=bf16)
    for got, expected in zip(with_it, before_it, strict=True):
        assert_bytes_equal(got, expected, "rotate_quant")


# --- rotate_quant -----------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.data(), rs=st.sampled_from([16, 64, 256]), dtype=dtypes, mode=scale_modes)
def test_factor_in_the_exponent_is_exact(data, rs, dtype, mode):
    x = to_float32(data.draw(float_arrays(dtype, data.draw(shapes(rs, max_elements=512)))))
    codes, scales = ref.rotate_quant(x, rotation_size=rs, scale_mode=mode)
    assert_is_exact_quant(codes, scales, ref.hadamard(x, rs), {16: 2, 64: 3, 256: 4}[rs], mode)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, rs=rotation_sizes, mode=scale_modes)
def test_fused_is_separate_in_float32(seed, rs, mode):
    x = random(seed, 3, 512)
    codes, scales = ref.rotate_quant(x, rotation_size=rs, scale_mode=mode)
    expected_codes, expected_scales = ref.quant(ref.rotate(x, rotation_size=rs), scale_mode=mode)
    assert_bytes_equal(codes, expected_codes, "codes")
    assert_bytes_equal(scales, expected_scales, "scales")


def test_factor_in_the_exponent_matters_for_subnormals():
    # u is one bit above 2^-126. u / 8 cannot hold that bit, and without it is a tie: 2^-127 / 4.
    x = np.zeros(64, np.float32)
    x[0] = np.array(0x00800001, np.uint32).view(np.float32)
    fused, _ = ref.rotate_quant(x)
    separate, _ = ref.quant(ref.rotate(x))
    assert ref.unpack_nibbles(fused)[0] == 1 and ref.unpack_nibbles(separate)[0] == 0


@settings(max_examples=50, deadline=None)
@given(data=st.data(), rs=rotation_sizes, mode=scale_modes, matrix=st.booleans())
def test_bf16_intermediate_is_rotate_then_quant(data, rs, mode, matrix):
    x = to_float32(data.draw(float_arrays("bf16", data.draw(shapes(rs)))))
    rotation = data.draw(rotations(rs)) if matrix else None
    how = {"rotation": rotation, "rotation_size": rs}
    y = ref.rotate(x, **how).astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = ref.quant(y, scale_mode=mode)
    actual = ref.rotate_quant(x, **how, scale_mode=mode, bf16_intermediate=True)
    for got, want in zip(actual, expected, strict=True):
        assert_bytes_equal(got, want, "bf16_intermediate")


@pytest.mark.parametrize("shape", [(64,), (0, 64), (1, 64), (2, 0, 3, 64), (2, 3, 4, 192)])
def test_shapes(shape):
    x = random(0, *shape)
    for codes, scales in (ref.quant(x), ref.rotate_quant(x), ref.rotate_quant(x, np.eye(32))):
        assert codes.dtype == scales.dtype == np.uint8
        assert codes.shape == (*shape[:-1], shape[-1] // 2)
        assert scales.shape == (*shape[:-1], shape[-1] // 32)
        assert ref.dequant(codes, scales).shape == shape


@pytest.mark.filterwarnings("error")
def test_overflow_is_silent_and_marked():
    x = np.full((2, 64), 3e38, np.float32)
    x[1] = 1
    codes, scales = ref.rotate_quant(x)
    assert (scales[0] == 255).all() and not codes[0].any()
    assert (scales[1] != 255).all()
