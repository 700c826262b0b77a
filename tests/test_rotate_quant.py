# SPDX-License-Identifier: MIT
"""quant, rotate and rotate_quant against the numpy reference, byte for byte.

NOTE: on a GPU a rotation by a matrix multiplies bf16 operands on MFMA, so that its bytes are not
numpy's; the tests of it here are for the CPU's code, tests/test_mfma.py judges both.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st
from isa import ISA_NAMES, address
from numpy.typing import NDArray
from strategies import (
    DTYPES,
    dtypes,
    float_arrays,
    mse_ties,
    prescales,
    rotation_sizes,
    rotations,
    scale_modes,
    shapes,
    to_float32,
)
from tensors import (
    PLACEMENTS,
    TORCH_DTYPES,
    assert_values_equal,
    expected_scales,
    place,
    poisoned_allocations,
    rounded,
    runs_cpu_code,
    to_array,
    to_tensor,
)
from torch import Tensor

import rotquant_hip as rq
from rotquant_hip import reference as ref

ROOT = Path(__file__).resolve().parents[1]
EXACT_SIZES = (16, 64, 256)  # 1 / sqrt(RS) is a power of two

placements = st.sampled_from(PLACEMENTS)


def random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_quantised(actual: tuple[Tensor, Tensor], expected: tuple, shuffled: bool, what: str):
    codes, scales = expected
    assert_bytes_equal(to_array(actual[0]), codes, f"codes of {what}")
    assert_bytes_equal(to_array(actual[1]), expected_scales(scales, shuffled), f"scales of {what}")


# --- drawn arguments --------------------------------------------------------------------------


@dataclass
class Rotated:
    """The arguments of rotate and rotate_quant, for the ops and for the reference."""

    x: Tensor
    tensors: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)

    @property
    def x_array(self) -> NDArray[np.float32]:
        return to_float32(to_array(self.x))


@st.composite
def rotated(draw, device: torch.device) -> Rotated:
    size = draw(rotation_sizes)
    array = draw(float_arrays(draw(dtypes), draw(shapes(size))))
    drawn = Rotated(place(to_tensor(array, device), draw(placements)))
    k = array.shape[-1]
    # Factors of any floating dtype are taken; they are rounded to float32 once.
    factor_dtype = draw(st.sampled_from((np.float32, np.float64, np.float16)))

    def add(name: str, values: NDArray) -> None:
        drawn.arrays[name] = values.astype(factor_dtype)
        drawn.tensors[name] = to_tensor(drawn.arrays[name], device)

    if draw(st.booleans()):
        add("prescale", draw(prescales(k)))
    kind = draw(st.sampled_from(("hadamard", "one matrix", "matrix per block")))
    if kind != "hadamard" and runs_cpu_code(device):
        blocks = k // size if kind == "matrix per block" else None
        add("rotation", draw(rotations(size, blocks)))
    # The size can be left out where a matrix has it or where it is 64.
    if draw(st.booleans()) or not ("rotation" in drawn.arrays or size == 64):
        drawn.tensors["rotation_size"] = drawn.arrays["rotation_size"] = size
    return drawn


# --- drawn shapes, strides, dtypes and values -------------------------------------------------


@given(data=st.data(), dtype=dtypes, mode=scale_modes, shuffled=st.booleans())
def test_quant(device, data, dtype, mode, shuffled):
    x = to_tensor(data.draw(float_arrays(dtype)), device)
    x = place(x, data.draw(placements))
    actual = rq.quant(x, scale_mode=mode, shuffle_scales=shuffled)
    expected = ref.quant(to_float32(to_array(x)), scale_mode=mode)
    assert_quantised(actual, expected, shuffled, "quant")


@given(data=st.data(), out=st.sampled_from((None, *DTYPES)))
def test_rotate(device, data, out):
    drawn = data.draw(rotated(device))
    out_dtype = None if out is None else TORCH_DTYPES[out]
    y = rq.rotate(drawn.x, **drawn.tensors, out_dtype=out_dtype)
    assert y.dtype == (out_dtype or drawn.x.dtype)
    assert_values_equal(y, ref.rotate(drawn.x_array, **drawn.arrays), "rotate")


@given(data=st.data(), mode=scale_modes, shuffled=st.booleans(), via_bf16=st.booleans())
def test_rotate_quant(device, data, mode, shuffled, via_bf16):
    drawn = data.draw(rotated(device))
    options = {"scale_mode": mode, "bf16_intermediate": via_bf16}
    actual = rq.rotate_quant(drawn.x, **drawn.tensors, **options, shuffle_scales=shuffled)
    expected = ref.rotate_quant(drawn.x_array, **drawn.arrays, **options)
    assert_quantised(actual, expected, shuffled, "rotate_quant")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_placement(device, dtype, placement):
    array = rounded(random(5, 2, 3, 4, 96), TORCH_DTYPES[dtype])
    x = place(to_tensor(array, device), placement)
    values = to_float32(to_array(x))
    assert_quantised(rq.quant(x), ref.quant(values), False, "quant")
    actual = rq.rotate(x, rotation_size=32)
    assert_values_equal(actual, ref.rotate(values, rotation_size=32), "rotate")
    actual = rq.rotate_quant(x, rotation_size=16, shuffle_scales=True)
    assert_quantised(actual, ref.rotate_quant(values, rotation_size=16), True, "rotate_quant")


# B32: the fused rounding was not that of the separate quantiser.
@given(data=st.data(), mode=scale_modes, shuffled=st.booleans())
def test_b32_fused_through_bf16_is_rotate_then_quant(device, data, mode, shuffled):
    drawn = data.draw(rotated(device))
    options = {"scale_mode": mode, "shuffle_scales": shuffled}
    fused = rq.rotate_quant(drawn.x, **drawn.tensors, **options, bf16_intermediate=True)
    y = rq.rotate(drawn.x, **drawn.tensors, out_dtype=torch.bfloat16)
    for name, one, other in zip(("codes", "scales"), fused, rq.quant(y, **options), strict=True):
        assert_bytes_equal(to_array(one), to_array(other), name)


# Without the detour it is the same with a float32 intermediate, unless that is subnormal.
@pytest.mark.parametrize("mode", rq.SCALE_MODES)
@pytest.mark.parametrize("size", rq.ROTATION_SIZES)
def test_fused_is_rotate_then_quant_in_float32(device, size, mode):
    x = to_tensor(random(size, 9, 1536), device)
    fused = rq.rotate_quant(x, rotation_size=size, scale_mode=mode)
    y = rq.rotate(x, rotation_size=size)
    for name, one, other in zip(
        ("codes", "scales"), fused, rq.quant(y, scale_mode=mode), strict=True
    ):
        assert_bytes_equal(to_array(one), to_array(other), name)


@given(data=st.data(), mode=scale_modes)
def test_fused_shuffled_scales_are_natural_scales_shuffled(device, data, mode):
    drawn = data.draw(rotated(device))
    fused = partial(rq.rotate_quant, drawn.x, **drawn.tensors, scale_mode=mode)
    codes, scales = fused(shuffle_scales=False)
    codes_too, shuffled = fused(shuffle_scales=True)
    assert_bytes_equal(to_array(codes_too), to_array(codes), "codes")
    again = rq.shuffle_scales(scales.reshape(prod(scales.shape[:-1]), scales.shape[-1]))
    assert_bytes_equal(to_array(shuffled), to_array(again), "all cells, padding too")


# Work is cut for the threads from about 2^15 elements on, which no drawn array has.
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_number_of_threads_changes_nothing(threads):
    x = random(0, 1500, 192)
    expected_y = ref.rotate(x, rotation_size=16)
    expected = ref.rotate_quant(x, rotation_size=64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensor = to_tensor(x)
        assert_values_equal(rq.rotate(tensor, rotation_size=16), expected_y, "rotate")
        for shuffled in (False, True):
            actual = rq.rotate_quant(tensor, rotation_size=64, shuffle_scales=shuffled)
            assert_quantised(actual, expected, shuffled, "rotate_quant")
        values = rq.dequant(*rq.quant(tensor), dtype=torch.float32)
    finally:
        torch.set_num_threads(before)
    assert_values_equal(values, ref.dequant(*ref.quant(x)), "dequant")


# --- every value ------------------------------------------------------------------------------


def all_patterns(dtype: str, arrangement: str) -> NDArray:
    """Every pattern of a 16-bit type, in rows of 256."""
    bits = np.arange(65536, dtype=np.uint16)
    array = bits if dtype == "bf16" else bits.view(np.float16)
    match arrangement:
        case "in order":  # a group spans one binade, so all of its codes are used
            return array.reshape(-1, 256)
        case "mixed":
            array = np.random.default_rng(0).permutation(array)
            return array.reshape(-1, 256)
        case "finite mixed":
            array = np.random.default_rng(1).permutation(array[np.isfinite(to_float32(array))])
            return array[: array.size // 256 * 256].reshape(-1, 256)
        case "beside 6":  # the first of each group is 6, so that |x| <= 6 is in units of 1
            padded = np.zeros(2128 * 31, array.dtype)
            padded[: array.size] = array
            six = rounded(np.full((2128, 1), 6), TORCH_DTYPES[dtype])
            return np.hstack([six, padded.reshape(2128, 31)]).reshape(-1, 256)
    raise AssertionError(arrangement)


ARRANGEMENTS = ("in order", "mixed", "finite mixed", "beside 6")
every_pattern = pytest.mark.parametrize(
    ("dtype", "arrangement"), [(d, a) for d in ("bf16", "fp16") for a in ARRANGEMENTS]
)


def test_the_arrangements_have_every_pattern():
    for dtype in ("bf16", "fp16"):
        finite = 65536 - 2 * (128 if dtype == "bf16" else 1024)
        for arrangement in ARRANGEMENTS:
            patterns = np.unique(all_patterns(dtype, arrangement).view(np.uint16)).size
            # "finite mixed" leaves out less than a row.
            assert patterns > finite - 256 if arrangement == "finite mixed" else patterns == 65536


@every_pattern
@pytest.mark.parametrize("mode", rq.SCALE_MODES)
def test_quant_of_every_pattern(device, dtype, arrangement, mode):
    array = all_patterns(dtype, arrangement)
    actual = rq.quant(to_tensor(array, device), scale_mode=mode)
    assert_quantised(actual, ref.quant(to_float32(array), scale_mode=mode), False, "quant")


@every_pattern
@pytest.mark.parametrize("size", rq.ROTATION_SIZES)
def test_rotation_of_every_pattern(device, dtype, arrangement, size):
    array = all_patterns(dtype, arrangement)
    x, values = to_tensor(array, device), to_float32(array)
    y = ref.rotate(values, rotation_size=size)
    for out_dtype in TORCH_DTYPES.values():
        actual = rq.rotate(x, rotation_size=size, out_dtype=out_dtype)
        assert_values_equal(actual, y, f"rotate to {out_dtype}")
    for mode in rq.SCALE_MODES:
        for via_bf16 in (False, True):
            options = {"rotation_size": size, "scale_mode": mode, "bf16_intermediate": via_bf16}
            expected = ref.rotate_quant(values, **options)
            assert_quantised(rq.rotate_quant(x, **options), expected, False, f"{options}")


@pytest.mark.parametrize("out", ["bf16", "fp16"])
def test_rounding_to_every_pattern(out):
    """float32 to 16 bits at, and one step beside, every value and every tie between two."""
    finite = all_patterns(out, "in order").ravel()
    finite = to_float32(finite[np.isfinite(to_float32(finite))])
    # Patterns that follow each other, so these are all the ties; the last one is before overflow.
    with np.errstate(over="ignore"):
        after = np.append(finite[1:], np.float32(65536 if out == "fp16" else np.inf))
    ties = np.where(np.isfinite(after), (finite.astype(np.float64) + after) / 2, finite)
    values = np.concatenate([finite, ties.astype(np.float32), random(3, 1000) * 1e-7])
    values = np.concatenate([values, np.nextafter(values, 0), np.nextafter(values, np.inf)])
    values = values[np.isfinite(values)]
    values = np.append(values, np.zeros(-values.size % 32, np.float32)).reshape(-1, 32)
    # The identity passes every finite number through and turns -0 into 0.
    identity = np.eye(16, dtype=np.float32)
    expected = ref.rotate(values, identity)
    assert np.array_equal(expected, values)
    actual = rq.rotate(to_tensor(values), to_tensor(identity), out_dtype=TORCH_DTYPES[out])
    assert_values_equal(actual, expected, out)


# --- midpoints and edges ----------------------------------------------------------------------

# Each midpoint of two e2m1 values with the codes below it, of it (the even one) and above it.
MIDPOINTS = (
    (0.25, 0, 0, 1),
    (0.75, 1, 2, 2),
    (1.25, 2, 2, 3),
    (1.75, 3, 4, 4),
    (2.5, 4, 4, 5),
    (3.5, 5, 6, 6),
    (5.0, 6, 6, 7),
)
# Exponents e for which 6 * 2^e is finite and 0.25 * 2^e has neighbours on both sides.
SCALE_EXPONENTS = {"bf16": (-126, 126), "fp16": (-14, 14), "fp32": (-126, 126)}


def midpoint_groups(dtype: str) -> tuple[NDArray, NDArray[np.uint8], NDArray[np.uint8]]:
    """x [n, 64], one row for each scale exponent, with its codes [n, 64] and scale bytes [n, 2].

    A row has a group of positive numbers and one of negative ones: 6, so that the scale is 2^e,
    then the midpoints with one step down and one step up, then zeros.
    """
    exponents = np.arange(*SCALE_EXPONENTS[dtype])
    exact = np.zeros((exponents.size, 2, 32))
    steps = np.zeros(32, np.int32)
    codes = np.zeros((exponents.size, 2, 32), np.uint8)
    exact[..., 0], codes[..., 0] = 6, 7
    for index, (value, *around) in enumerate(MIDPOINTS):
        places = slice(1 + 3 * index, 4 + 3 * index)
        exact[..., places], codes[..., places] = value, around
        steps[places] = -1, 0, 1
    x = rounded(exact * np.exp2(exponents)[:, None, None], TORCH_DTYPES[dtype])
    bits = x.view(f"u{x.itemsize}") + steps.astype(f"u{x.itemsize}")  # -1 wraps around
    bits[:, 1] |= bits.dtype.type(1 << (8 * x.itemsize - 1))
    codes[:, 1] |= 8
    scales = np.repeat(exponents[:, None] + 127, 2, axis=1).astype(np.uint8)
    return bits.view(x.dtype).reshape(-1, 64), codes.reshape(-1, 64), scales


# B32: ties to even. (ceil would double the scale.)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["round_up", "floor", "even", "mse"])
def test_b32_midpoints_of_every_scale(device, dtype, mode):
    x, codes, scales = midpoint_groups(dtype)
    actual = rq.quant(to_tensor(x, device), scale_mode=mode)
    assert_quantised(actual, (ref.pack_nibbles(codes), scales), False, f"midpoints, {mode}")


# B32: and so in the fused op.
@pytest.mark.parametrize("size", EXACT_SIZES)
def test_b32_midpoints_after_the_rotation(device, size):
    """The transform of exact midpoints is exact in float32, and its own inverse."""
    x, codes, scales = midpoint_groups("bf16")
    moderate = np.abs(scales[:, 0].astype(int) - 127) < 60
    targets = np.tile(to_float32(x[moderate]), (1, size // 16))  # 64 channels in 64 .. 1024
    rows = ref.hadamard(targets, size) / np.float32(np.sqrt(size))
    assert np.array_equal(ref.rotate(rows, rotation_size=size), targets)
    codes = np.tile(codes[moderate], size // 16)
    codes[targets == 0] = 0  # of either sign: no sum is -0
    expected = ref.pack_nibbles(codes), np.tile(scales[moderate], size // 16)
    for via_bf16 in (False, True):
        options = {"rotation_size": size, "bf16_intermediate": via_bf16}
        actual = rq.rotate_quant(to_tensor(rows, device), **options)
        assert_quantised(actual, expected, False, f"rotated midpoints, {options}")


@pytest.mark.parametrize("mode", rq.SCALE_MODES)
def test_amax_at_every_edge(device, mode):
    """amax where a mode's scale changes (4, 6 or 7 times a power of two), and one step beside."""
    edges = np.multiply.outer(np.exp2(np.arange(-149, 127)), [1, 1.5, 1.75]).ravel()
    edges = np.unique(edges.astype(np.float32))
    edges = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, np.float32(3e38))])
    largest = np.finfo(np.float32).max
    edges = np.concatenate([edges, [largest, np.nextafter(largest, 0)]]).astype(np.float32)
    x = random(1, edges.size, 32).clip(-3, 3) / 4  # below 1: the edge stays the largest
    x = x * edges[:, None]
    x[np.arange(edges.size), np.arange(edges.size) % 32] = edges
    actual = rq.quant(to_tensor(x, device), scale_mode=mode)
    assert_quantised(actual, ref.quant(x, scale_mode=mode), False, f"edges, {mode}")
    # A single channel spreads over its block at 1 / sqrt(RS) of its size.
    for size in rq.ROTATION_SIZES:
        impulses = np.zeros((edges.size, max(size, 32)), np.float32)
        impulses[:, 5] = edges
        options = {"rotation_size": size, "scale_mode": mode}
        actual = rq.rotate_quant(to_tensor(impulses, device), **options)
        expected = ref.rotate_quant(impulses, **options)
        assert_quantised(actual, expected, False, f"rotated edges, {options}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_mse_where_the_order_of_the_sum_decides(device, dtype):
    x = mse_ties(np.random.default_rng(0), dtype, 4096)
    expected = ref.quant(to_float32(x), scale_mode="mse")
    assert set(np.unique(expected[1])) == {126, 127}
    actual = rq.quant(to_tensor(x, device), scale_mode="mse")
    assert_quantised(actual, expected, False, "close calls")


# --- groups that are special, and their neighbours --------------------------------------------


@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, *rq.ROTATION_SIZES])
def test_a_bad_element_marks_its_block_only(device, size, dtype, special):
    clean = rounded(random(2, 4, 512), TORCH_DTYPES[dtype])
    bad = clean.copy()
    bad[1, 100] = rounded(special, TORCH_DTYPES[dtype])
    block = max(size, 1)
    first, last = 100 // block * block // 32, (100 // block * block + block - 1) // 32
    assert (first, last) == {0: (3, 3), 16: (3, 3), 32: (3, 3), 64: (2, 3), 128: (0, 3)}.get(
        size, (0, 7)
    )
    for mode in rq.SCALE_MODES:
        op = partial(rq.rotate_quant, rotation_size=size) if size else rq.quant
        codes, scales = map(to_array, op(to_tensor(clean, device), scale_mode=mode))
        assert (scales < 255).all()
        scales[1, first : last + 1] = 255
        codes[1, 16 * first : 16 * (last + 1)] = 0
        actual = op(to_tensor(bad, device), scale_mode=mode)
        assert_quantised(actual, (codes, scales), False, f"{special}, {mode}")


@pytest.mark.parametrize("mode", rq.SCALE_MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_groups_have_byte_0_and_no_signs(device, dtype, mode):
    x = rounded(random(4, 3, 128), TORCH_DTYPES[dtype])
    x[1, 32:64] = rounded(-0.0, TORCH_DTYPES[dtype])
    codes, scales = rq.quant(to_tensor(x, device), scale_mode=mode)
    assert scales[1, 1] == 0 and not codes[1, 16:32].any()
    assert_quantised(
        (codes, scales), ref.quant(to_float32(x), scale_mode=mode), False, "zero group"
    )


# --- every row and every padding cell is written ----------------------------------------------


# B08: rows past the last whole tile were never written. The inputs are finite, so that no expected
# scale is 255, which is what the poison reads as.
@pytest.mark.parametrize("rows", [1, 2, 31, 33, 95, 97, 127, 128, 129, 255, 257, 1024])
@pytest.mark.parametrize("k", [32, 96, 256, 288, 1056])
def test_b08_every_row_and_padding_cell_is_written(device, rows, k):
    x = random(rows + k, rows, k)
    tensor = to_tensor(x, device)
    size = 32
    quantised, rotated_too = ref.quant(x), ref.rotate_quant(x, rotation_size=size)
    y = ref.rotate(x, rotation_size=size)
    with poisoned_allocations():
        for shuffled in (False, True):
            actual = rq.quant(tensor, shuffle_scales=shuffled)
            assert_quantised(actual, quantised, shuffled, "quant")
            actual = rq.rotate_quant(tensor, rotation_size=size, shuffle_scales=shuffled)
            assert_quantised(actual, rotated_too, shuffled, "rotate_quant")
            values = rq.dequant(*actual, dtype=torch.float32, shuffled_scales=shuffled)
            assert_values_equal(values, ref.dequant(*rotated_too), "dequant")
        for dtype in TORCH_DTYPES.values():
            actual = rq.rotate(tensor, rotation_size=size, out_dtype=dtype)
            assert_values_equal(actual, y, f"rotate to {dtype}")


# --- the instruction sets that this machine would not choose ----------------------------------


@pytest.mark.parametrize("isa", ISA_NAMES)
@given(data=st.data(), dtype=dtypes, out=dtypes, size=rotation_sizes)
def test_isa_rotate(isa_libraries, isa, data, dtype, out, size):
    x = data.draw(float_arrays(dtype, data.draw(shapes(size))))
    prescale = data.draw(st.none() | prescales(x.shape[-1]))
    matrix = data.draw(st.none() | rotations(size))
    y = rounded(np.zeros(x.shape), TORCH_DTYPES[out])
    rows, k = x.size // x.shape[-1], x.shape[-1]
    isa_libraries[isa].run_rotate(
        address(x),
        DTYPES.index(dtype),
        ctypes.c_int64(rows),
        ctypes.c_int64(k),
        size,
        address(matrix),
        address(prescale),
        address(y),
        DTYPES.index(out),
    )
    expected = ref.rotate(to_float32(x), matrix, rotation_size=size, prescale=prescale)
    assert_values_equal(to_tensor(y), expected, isa)


def assert_isa_rotate_quant(library, x, size, mode, via_bf16, matrix=None, prescale=None) -> None:
    *leading, k = x.shape
    codes, scales = np.zeros((*leading, k // 2), np.uint8), np.zeros((*leading, k // 32), np.uint8)
    library.run_rotate_quant(
        address(x),
        {np.uint16: 0, np.float16: 1, np.float32: 2}[x.dtype.type],
        ctypes.c_int64(x.size // k),
        ctypes.c_int64(k),
        size,
        address(matrix),
        address(prescale),
        rq.SCALE_MODES.index(mode),
        via_bf16,
        False,
        address(codes),
        address(scales),
    )
    values = to_float32(x)
    expected = ref.quant(values, scale_mode=mode)
    if size:
        options = {"rotation_size": size, "scale_mode": mode, "bf16_intermediate": via_bf16}
        expected = ref.rotate_quant(values, matrix, prescale=prescale, **options)
    assert_bytes_equal(codes, expected[0], f"codes, RS {size}, {mode}, {via_bf16}")
    assert_bytes_equal(scales, expected[1], f"scales, RS {size}, {mode}, {via_bf16}")


@pytest.mark.parametrize("isa", ISA_NAMES)
@given(data=st.data(), dtype=dtypes, size=st.sampled_from((0, *rq.ROTATION_SIZES)))
def test_isa_rotate_quant(isa_libraries, isa, data, dtype, size):
    x = data.draw(float_arrays(dtype, data.draw(shapes(max(size, 32)))))
    matrix = data.draw(st.none() | rotations(size)) if size else None
    prescale = data.draw(st.none() | prescales(x.shape[-1])) if size else None
    via_bf16 = size > 0 and data.draw(st.booleans())
    mode = data.draw(scale_modes)
    assert_isa_rotate_quant(isa_libraries[isa], x, size, mode, via_bf16, matrix, prescale)


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_isa_rotate_quant_of_every_pattern(isa_libraries, isa, dtype):
    for arrangement in ("finite mixed", "beside 6"):
        x = all_patterns(dtype, arrangement)
        for mode in rq.SCALE_MODES:
            assert_isa_rotate_quant(isa_libraries[isa], x, 0, mode, False)
        for size in rq.ROTATION_SIZES:
            for via_bf16 in (False, True):
                assert_isa_rotate_quant(isa_libraries[isa], x, size, "round_up", via_bf16)


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("out", DTYPES)
def test_isa_dequant(isa_libraries, isa, out):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))  # every pair of codes ...
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)  # at every scale
    y = rounded(np.zeros((256, 512)), TORCH_DTYPES[out])
    isa_libraries[isa].run_dequant(
        address(codes),
        address(scales),
        False,
        ctypes.c_int64(256),
        ctypes.c_int64(512),
        address(y),
        DTYPES.index(out),
    )
    assert_values_equal(to_tensor(y), ref.dequant(codes, scales), isa)


@pytest.mark.parametrize("past", [False, True], ids=["at the bound", "past it"])
@pytest.mark.parametrize("size", ref.ROTATION_SIZES)
def test_hadamard_overflows_past_its_bound(device, size, past):
    """From FLT_MAX / RS on, sums can overflow: groups that they reach are NaN, and no others."""
    bound = np.float32(np.finfo(np.float32).max) / np.float32(size)
    row = np.sign(
        ref.hadamard(np.eye(size, dtype=np.float32)[size - 1], size)
    )  # sums in one column
    x = np.ones((3, 2, max(size, 32)), np.float32)
    x[1, 0, :size] = row * (np.nextafter(bound, np.float32(np.inf)) if past else bound)
    x = x.reshape(3, -1)
    tensor = to_tensor(x, device)
    for via_bf16 in (False, True):
        options = {"rotation_size": size, "bf16_intermediate": via_bf16}
        codes, scales = map(to_array, rq.rotate_quant(tensor, **options))
        expected_codes, expected = ref.rotate_quant(x, **options)
        np.testing.assert_array_equal(codes, expected_codes)
        np.testing.assert_array_equal(scales, expected)
        bad = np.zeros(scales.shape, bool)
        bad[1, (size - 1) // 32] = past
        np.testing.assert_array_equal(scales == 255, bad)
        assert not codes.reshape(*scales.shape, 16)[bad].any()
    rotated = rq.rotate(tensor, rotation_size=size)
    assert_values_equal(rotated, ref.rotate(x, rotation_size=size), "rotate")
    assert rotated.isinf().any(-1).tolist() == [False, past, False]


def test_hadamard_overflow_of_a_finite_result(device):
    """The exact results are finite, but their sums before the factor are not."""
    x = np.zeros((1, 64), np.float32)
    x[0, :4] = 3.3e38
    codes, scales = map(to_array, rq.rotate_quant(to_tensor(x, device)))
    np.testing.assert_array_equal(scales, 255)
    np.testing.assert_array_equal(codes, 0)
    for got, expected in zip((codes, scales), ref.rotate_quant(x), strict=True):
        np.testing.assert_array_equal(got, expected)
