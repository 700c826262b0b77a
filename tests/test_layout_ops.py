# SPDX-License-Identifier: MIT
"""Shuffles of scales and weights, and dequant, against the reference and the closed-form maps."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from compare import assert_bytes_equal
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import DTYPES, dtypes, float_arrays, scale_modes, seeds, to_float32
from tensors import (
    TORCH_DTYPES,
    assert_values_equal,
    expected_scales,
    poisoned_allocations,
    to_array,
    to_tensor,
)
from torch import Tensor

import rotquant_hip as rq
from rotquant_hip import layouts
from rotquant_hip import reference as ref

gate_modes = st.sampled_from(rq.GATE_MODES)
BYTE_PLACEMENTS = ("contiguous", "offset", "rows", "columns", "expanded")
byte_placements = st.sampled_from(BYTE_PLACEMENTS)


def random_bytes(seed: int, *shape: int) -> NDArray[np.uint8]:
    """Without 0, which is what padding has."""
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


def place_bytes(x: Tensor, placement: str) -> Tensor:
    """x laid out differently in memory; "expanded" repeats the first slice and changes values."""
    match placement:
        case "contiguous":
            return x.clone()
        case "offset":
            view = x.new_full((x.numel() + 1,), 77)[1:].view(x.shape)
        case "rows":
            view = x.new_full((*x.shape[:-1], x.shape[-1] + 3), 77)[..., 1:-2]
        case "columns":
            view = x.new_full((*x.shape[:-2], x.shape[-1], x.shape[-2]), 77).mT
        case "expanded":
            return x[:1].expand(x.shape) if x.shape[0] else x
        case _:
            raise ValueError(f"placement: expected one of {BYTE_PLACEMENTS}, got {placement!r}")
    return view.copy_(x)


@st.composite
def stacks(draw, step: int, most: int) -> tuple[int, ...]:
    """() for one tensor or (experts,), and rows in steps; 0 is possible for both."""
    leading = draw(st.sampled_from(((), (0,), (1,), (3,))))
    return (*leading, step * draw(st.integers(0, most // step)))


# --- scales -----------------------------------------------------------------------------------


@given(data=st.data(), gate_mode=gate_modes, placement=byte_placements)
def test_shuffle_scales(device, data, gate_mode, placement):
    one = data.draw(st.booleans()) and gate_mode == "separated"
    rows = (data.draw(st.integers(0, 600)),) if one else data.draw(stacks(32, 320))
    array = random_bytes(data.draw(seeds), *rows, data.draw(st.integers(0, 40)))
    scales = place_bytes(to_tensor(array, device), placement)
    array = to_array(scales)
    with poisoned_allocations():
        shuffled = rq.shuffle_scales(scales, gate_mode=gate_mode)
    expected = ref.shuffle_scales(array, gate_mode=gate_mode)
    assert_bytes_equal(to_array(shuffled), expected, "shuffled, padding 0")

    *leading, groups = array.shape
    options = {"groups": groups, "gate_mode": gate_mode}
    options["rows"] = leading[-1] if gate_mode == "interleave" else prod(leading)
    with poisoned_allocations():
        back = rq.unshuffle_scales(shuffled, **options)
    natural = array if gate_mode == "interleave" else array.reshape(prod(leading), groups)
    assert_bytes_equal(to_array(back), natural, "unshuffled")
    strided = place_bytes(shuffled, "columns")
    assert_bytes_equal(to_array(rq.unshuffle_scales(strided, **options)), natural, "strided")


@given(data=st.data(), rows=st.integers(1, 600), groups=st.integers(1, 40), seed=seeds)
def test_scale_offsets(device, data, rows, groups, seed):
    """At one drawn index; the bytes of the whole map are compared above."""
    natural = random_bytes(seed, rows, groups)
    shuffled = to_array(rq.shuffle_scales(to_tensor(natural, device)))
    assert shuffled.shape == (layouts.padded_rows(rows), layouts.padded_groups(groups))
    row, group = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, groups - 1))
    offset = layouts.scale_offset(row, group, groups)
    assert shuffled.flat[offset] == natural[row, group]
    assert layouts.scale_coord(offset, groups) == (row, group)
    # And a byte of the result, which may be padding, from its coordinates.
    offset = data.draw(st.integers(0, shuffled.size - 1))
    row, group = layouts.scale_coord(offset, groups)
    real = row < rows and group < groups
    assert shuffled.flat[offset] == (natural[row, group] if real else 0)


@given(data=st.data(), experts=st.integers(1, 3), tiles=st.integers(1, 5), seed=seeds)
def test_interleaved_scale_offsets(device, data, experts, tiles, seed):
    inter, groups = 16 * tiles, data.draw(st.integers(1, 20))
    natural = random_bytes(seed, experts, 2 * inter, groups)
    shuffled = rq.shuffle_scales(to_tensor(natural, device), gate_mode="interleave")
    assert shuffled.shape == (experts, 2 * inter, layouts.padded_groups(groups))
    expert, row = data.draw(st.integers(0, experts - 1)), data.draw(st.integers(0, 2 * inter - 1))
    group = data.draw(st.integers(0, groups - 1))
    offset = layouts.interleaved_scale_offset(row, group, groups, inter)
    assert to_array(shuffled)[expert].flat[offset] == natural[expert, row, group]


def test_experts_are_shuffled_as_one_tall_tensor(device):
    stack = to_tensor(random_bytes(0, 5, 96, 11), device)
    tall = rq.shuffle_scales(stack.reshape(480, 11))
    assert_bytes_equal(to_array(rq.shuffle_scales(stack)), to_array(tall), "stack")


# --- weights ----------------------------------------------------------------------------------


@given(data=st.data(), gate_mode=gate_modes, placement=byte_placements, seed=seeds)
def test_shuffle_weight(device, data, gate_mode, placement, seed):
    step = 32 if gate_mode == "interleave" else 16
    rows, row_bytes = data.draw(stacks(step, 160)), 16 * data.draw(st.integers(0, 9))
    weight = place_bytes(to_tensor(random_bytes(seed, *rows, row_bytes), device), placement)
    array = to_array(weight)
    with poisoned_allocations():
        shuffled = rq.shuffle_weight(weight, gate_mode=gate_mode)
        back = rq.unshuffle_weight(place_bytes(shuffled, placement), gate_mode=gate_mode)
    expected = ref.shuffle_weight(array, gate_mode=gate_mode)
    assert_bytes_equal(to_array(shuffled), expected, "shuffled")
    if placement != "expanded":
        assert_bytes_equal(to_array(back), array, "unshuffled")


@given(data=st.data(), experts=st.integers(1, 3), tiles=st.integers(1, 4), seed=seeds)
def test_weight_offsets(device, data, experts, tiles, seed):
    rows, row_bytes = 32 * tiles, 16 * data.draw(st.integers(1, 9))
    natural = random_bytes(seed, experts, rows, row_bytes)
    weight = to_tensor(natural, device)
    expert, row = data.draw(st.integers(0, experts - 1)), data.draw(st.integers(0, rows - 1))
    byte = data.draw(st.integers(0, row_bytes - 1))
    shuffled = to_array(rq.shuffle_weight(weight))[expert]
    offset = layouts.weight_offset(row, byte, row_bytes)
    assert shuffled.flat[offset] == natural[expert, row, byte]
    shuffled = to_array(rq.shuffle_weight(weight, gate_mode="interleave"))[expert]
    offset = layouts.interleaved_weight_offset(row, byte, row_bytes, rows // 2)
    assert shuffled.flat[offset] == natural[expert, row, byte]


# Work is cut for the threads from 2^15 bytes on.
@pytest.mark.parametrize("gate_mode", rq.GATE_MODES)
def test_large_tensors_on_any_number_of_threads(gate_mode):
    scales, weight = random_bytes(1, 3, 1504, 33), random_bytes(2, 3, 544, 272)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            actual = rq.shuffle_scales(to_tensor(scales), gate_mode=gate_mode)
            expected = ref.shuffle_scales(scales, gate_mode=gate_mode)
            assert_bytes_equal(to_array(actual), expected, "scales")
            actual = rq.shuffle_weight(to_tensor(weight), gate_mode=gate_mode)
            expected = ref.shuffle_weight(weight, gate_mode=gate_mode)
            assert_bytes_equal(to_array(actual), expected, "weight")
    finally:
        torch.set_num_threads(before)


# --- torch's own dtypes for codes and scales --------------------------------------------------


def test_views_as_torch_dtypes_are_accepted(device):
    codes = to_tensor(random_bytes(0, 3, 32, 64), device)
    scales = to_tensor(random_bytes(1, 3, 32, 4), device)
    typed_codes = codes.view(torch.float4_e2m1fn_x2)
    typed_scales = scales.view(torch.float8_e8m0fnu)
    pairs = {
        "dequant": (rq.dequant(typed_codes, typed_scales), rq.dequant(codes, scales)),
        "strided": (
            rq.dequant(typed_codes[:, ::2], typed_scales[:, ::2]),
            rq.dequant(codes[:, ::2], scales[:, ::2]),
        ),
    }
    for mode in rq.GATE_MODES:
        shuffled = rq.shuffle_scales(scales, gate_mode=mode)
        pairs[f"shuffle_scales {mode}"] = (
            rq.shuffle_scales(typed_scales, gate_mode=mode),
            shuffled,
        )
        rows = 96 if mode == "separated" else 32
        pairs[f"unshuffle_scales {mode}"] = tuple(
            rq.unshuffle_scales(s, rows=rows, groups=4, gate_mode=mode)
            for s in (shuffled.view(torch.float8_e8m0fnu), shuffled)
        )
        for name in ("shuffle_weight", "unshuffle_weight"):
            op = getattr(rq, name)
            pairs[f"{name} {mode}"] = op(typed_codes, gate_mode=mode), op(codes, gate_mode=mode)
    for name, (typed, plain) in pairs.items():
        assert typed.dtype == plain.dtype, name  # results are uint8 again
        assert torch.equal(typed.view(torch.uint8), plain.view(torch.uint8)), name


# --- dequant ----------------------------------------------------------------------------------


# B28: byte 0 was decoded as 0 or wrapped the exponent, and bf16 0.5 became -inf.
@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_b28_every_code_at_every_scale(device, out, shuffled):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))  # every pair of codes ...
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 16, axis=1)  # at every scale
    given_scales = to_tensor(expected_scales(scales, shuffled), device)
    y = rq.dequant(
        to_tensor(codes, device), given_scales, dtype=TORCH_DTYPES[out], shuffled_scales=shuffled
    )
    assert_values_equal(y, ref.dequant(codes, scales), "dequant")


# B28: the ends, written out.
def test_b28_ends_of_the_scale(device):
    codes = torch.zeros(3, 16, dtype=torch.uint8, device=device)
    codes[:, 0], codes[:, 1] = 0x91, 0xF7  # 0.5, -0.5, 6, -6
    scales = torch.tensor([[0], [254], [255]], dtype=torch.uint8, device=device)
    values = rq.dequant(codes, scales, dtype=torch.float32)[:, :4].tolist()
    assert values[0] == [2.0**-128, -(2.0**-128), 6 * 2.0**-127, -6 * 2.0**-127]
    assert values[1] == [2.0**126, -(2.0**126), np.inf, -np.inf]  # 6 * 2^127 is no float32
    assert np.isnan(values[2]).all()
    bf16 = rq.dequant(codes, scales)
    assert bf16.dtype == torch.bfloat16
    assert bf16[0, :4].tolist() == values[0]
    fp16 = rq.dequant(codes, scales, dtype=torch.float16)
    assert fp16[:2, :4].tolist() == [[0, 0, 0, 0], [np.inf, -np.inf, np.inf, -np.inf]]
    assert torch.signbit(fp16[0, :4]).tolist() == [False, True, False, True]


@given(data=st.data(), out=dtypes, shuffled=st.booleans(), seed=seeds)
def test_dequant(device, data, out, shuffled, seed):
    leading = data.draw(st.lists(st.integers(0, 9), max_size=3))
    groups = data.draw(st.integers(0 if not shuffled else 1, 12))
    placement = data.draw(st.sampled_from(("contiguous", "offset", "rows")))
    codes = random_bytes(seed, *leading, 16 * groups)
    scales = random_bytes(seed + 1, *leading, groups)
    actual = rq.dequant(
        place_bytes(to_tensor(codes, device), placement),
        place_bytes(to_tensor(expected_scales(scales, shuffled), device), placement),
        dtype=TORCH_DTYPES[out],
        shuffled_scales=shuffled,
    )
    assert_values_equal(actual, ref.dequant(codes, scales), "dequant")


@given(data=st.data(), dtype=dtypes, mode=scale_modes, shuffled=st.booleans())
def test_what_is_quantised_stays(device, data, dtype, mode, shuffled):
    """Dequantised values are quantised without loss: the same values, if not the same bytes.

    The scale can halve: an amax of 3.2 at scale 1 becomes 3, which is 6 at scale 1/2.
    """
    x = data.draw(float_arrays(dtype))
    assume(np.abs(np.nan_to_num(to_float32(x), posinf=0, neginf=0)).max(initial=0) < 2**125)
    options = {"dtype": torch.float32, "shuffled_scales": shuffled}
    quantise = {"scale_mode": mode, "shuffle_scales": shuffled}
    once = rq.dequant(*rq.quant(to_tensor(x, device), **quantise), **options)
    finite = torch.where(once.isnan(), 0, once)
    twice = rq.dequant(*rq.quant(once, **quantise), **options)
    assert torch.equal(once.isnan(), twice.isnan())
    assert torch.equal(torch.where(twice.isnan(), 0, twice), finite)
