# SPDX-License-Identifier: MIT
"""moe_rotate_quant and moe_sort_scales, byte for byte: the codes are rotate_quant's, the scales are
its natural ones, sorted and shuffled by numpy (moe_scales.py). So the three ways from an activation
to what the first GEMM of a MoE layer reads give the same bytes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st
from moe_scales import random_sorting, sorted_scales, sortings
from strategies import (
    dtypes,
    float_arrays,
    prescales,
    rotation_sizes,
    rotations,
    scale_modes,
    to_float32,
)
from tensors import PLACEMENTS, place, poisoned_allocations, runs_cpu_code, to_array, to_tensor
from torch import Tensor

import rotquant_hip as rq
from rotquant_hip import reference as ref
from rotquant_hip import reference_moe
from rotquant_hip.reference_moe import Sorting

ops = torch.ops.rotquant_hip


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensors(sorting: Sorting, device) -> dict[str, Tensor]:
    """The parts that moe_rotate_quant takes."""
    names = ("sorted_ids", "num_valid", "reverse_sorted")
    return {name: to_tensor(getattr(sorting, name), device) for name in names}


def assert_sorted(actual: tuple[Tensor, Tensor], natural: tuple, sorting: Sorting, topk: int):
    """codes and sorted scales against the codes and natural scales of the same tokens."""
    codes, scales = (to_array(t) if isinstance(t, Tensor) else t for t in natural)
    assert_bytes_equal(to_array(actual[0]), codes, "codes")
    assert_bytes_equal(to_array(actual[1]), sorted_scales(scales, sorting, topk), "sorted scales")


def rotate_quant(x: Tensor, sorting: Sorting, topk: int, **options) -> None:
    """Runs the op with poisoned outputs and checks it against numpy, or where that has other bytes,
    a matrix on a GPU, against rotate_quant."""
    with poisoned_allocations():
        actual = ops.moe_rotate_quant(x, **tensors(sorting, x.device), **options)
    if options.get("rotation") is not None and not runs_cpu_code(x.device):
        natural = rq.rotate_quant(x, **options)
    else:
        arrays = {k: to_array(v) if isinstance(v, Tensor) else v for k, v in options.items()}
        values = to_float32(to_array(x))
        if arrays.get("rotation_size") == 0:
            values = rounded_to_bf16(values) if arrays.get("bf16_intermediate") else values
            natural = ref.quant(values, scale_mode=arrays.get("scale_mode", "round_up"))
        else:
            natural = ref.rotate_quant(values, **arrays)
    assert_sorted(actual, natural, sorting, topk)


def rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    return ref.bf16_to_float32(ref.float32_to_bf16(values))


# --- drawn arguments --------------------------------------------------------------------------


@st.composite
def matrices(draw, max_tokens: int = 40, max_elements: int = 6144) -> tuple[int, int, int]:
    """(tokens, K, RS), K no multiple of 256 most of the time, RS 0 among them."""
    size = draw(st.just(0) | rotation_sizes)
    step = max(32, size)
    k = draw(st.integers(1, max(1, 640 // step))) * step
    return draw(st.integers(1, min(max_tokens, max_elements // k))), k, size


@given(data=st.data(), dtype=dtypes, mode=scale_modes, via_bf16=st.booleans())
def test_moe_rotate_quant(device, data, dtype, mode, via_bf16):
    tokens, k, size = data.draw(matrices())
    x = to_tensor(data.draw(float_arrays(dtype, (tokens, k))), device)
    x = place(x, data.draw(st.sampled_from(PLACEMENTS)))
    options = {"rotation_size": size, "scale_mode": mode, "bf16_intermediate": via_bf16}
    if size and data.draw(st.booleans()):
        options["prescale"] = to_tensor(data.draw(prescales(k)), device)
    kind = data.draw(st.sampled_from(("hadamard", "one matrix", "matrix per block")))
    if size and kind != "hadamard":
        blocks = k // size if kind == "matrix per block" else None
        options["rotation"] = to_tensor(data.draw(rotations(size, blocks)), device)
    sorting, topk = data.draw(sortings(len(x)))
    rotate_quant(x, sorting, topk, **options)


# B32: the fused op's bytes are those of the separate ones.
@given(data=st.data(), dtype=dtypes, mode=scale_modes)
def test_b32_three_pipelines_give_the_same_bytes(device, data, dtype, mode):
    tokens, k, size = data.draw(matrices())
    x = to_tensor(data.draw(float_arrays(dtype, (tokens, k))), device)
    sorting, topk = data.draw(sortings(tokens))
    parts = tensors(sorting, device)
    scale_mode = {"scale_mode": mode}

    def sorted_natural(natural: Tensor) -> Tensor:
        return ops.moe_sort_scales(natural, parts["sorted_ids"], parts["num_valid"], topk=topk)

    if size == 0:
        codes, scales = rq.quant(x, **scale_mode)
        fused = ops.moe_rotate_quant(x, **parts, rotation_size=0, **scale_mode)
    else:
        y = rq.rotate(x, rotation_size=size, out_dtype=torch.bfloat16)
        codes, scales = rq.quant(y, **scale_mode)
        options = {"rotation_size": size, "bf16_intermediate": True, **scale_mode}
        fused = ops.moe_rotate_quant(x, **parts, **options)
    assert_sorted(fused, (codes, scales), sorting, topk)
    assert_bytes_equal(to_array(sorted_natural(scales)), to_array(fused[1]), "scales, sorted after")


@given(data=st.data(), by_route=st.booleans(), groups=st.integers(1, 40))
def test_moe_sort_scales(device, data, by_route, groups):
    tokens = data.draw(st.integers(1, 40))
    sorting, topk = data.draw(sortings(tokens))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = tokens * topk if by_route else tokens
    scales = rng.integers(1, 256, (rows, groups)).astype(np.uint8)
    parts = tensors(sorting, device)
    with poisoned_allocations():
        actual = ops.moe_sort_scales(
            to_tensor(scales, device),
            parts["sorted_ids"],
            parts["num_valid"],
            topk=topk,
            by_route=by_route,
        )
    expected = sorted_scales(scales, sorting, topk, by_route=by_route)
    assert_bytes_equal(to_array(actual), expected, f"sorted scales, by route {by_route}")


def test_the_scales_of_every_slot_go_to_its_row(device):
    """by_route: as a byte, what route a cell came from; a slot's row must hold no other slot's."""
    sorting, topk = random_sorting(10, 16, 5, 16), 16
    scales = np.arange(1, 161, dtype=np.uint8)[:, None].repeat(8, axis=1)
    ids, valid = (to_tensor(a, device) for a in (sorting.sorted_ids, sorting.num_valid))
    actual = ops.moe_sort_scales(to_tensor(scales, device), ids, valid, topk=topk, by_route=True)
    rows = ref.unshuffle_scales(to_array(actual), rows=actual.shape[0], groups=8)
    for route, row in enumerate(sorting.reverse_sorted):
        assert (rows[row] == route + 1).all(), (route, row)


# --- shapes ------------------------------------------------------------------------------------


# B03: K that does not fill a tile; B09: 6 and 12 groups. Every rotation that divides K.
@pytest.mark.parametrize("k", [32, 96, 192, 384, 416, 1536])
def test_b03_b09_k_tails(device, k):
    sorting = random_sorting(35, 4, 12, 32, seed=k, dropped=0.1)
    for size in (0, *(s for s in rq.ROTATION_SIZES if k % s == 0)):
        x = to_tensor(random(k, 35, k), device).bfloat16()
        rotate_quant(x, sorting, 4, rotation_size=size)


@pytest.mark.parametrize("block_m", reference_moe.BLOCK_M)
@pytest.mark.parametrize(
    "tokens, topk, experts",
    [(1, 1, 1), (1, 16, 1024), (2, 9, 385), (33, 8, 256), (64, 2, 8), (130, 6, 64)],
)
def test_routings(device, tokens, topk, experts, block_m):
    """One token, one expert, many experts of which most have no tokens, M not below a band."""
    x = to_tensor(random(tokens, tokens, 288), device).half()
    sorting = random_sorting(tokens, topk, experts, block_m, seed=block_m)
    rotate_quant(x, sorting, topk, rotation_size=32)


# B06, B55: cells that nothing wrote are whatever was in memory, 255 (NaN) here.
@pytest.mark.parametrize("kind", ["all dropped", "one route", "one expert", "no local expert"])
def test_b06_b55_padding_is_written(device, kind):
    tokens, topk, experts = 3, 2, 4
    ids = np.full((tokens, topk), -1)
    if kind == "one route":
        ids[1, 1] = 2
    if kind == "one expert":
        ids[...] = 3
    options = {"num_local_experts": 0} if kind == "no local expert" else {}
    weights = np.ones((tokens, topk), np.float32)
    sorting = reference_moe.moe_sort(ids, weights, num_experts=experts, block_m=16, **options)
    assert sorting.sorted_ids.size == (0 if options else 16 * 4 + 16 * (2 // 16))
    x = to_tensor(random(1, tokens, 288), device)
    for size in (0, 32):
        rotate_quant(x, sorting, topk, rotation_size=size)


def test_ids_past_the_last_token_are_padding(device):
    """A slot of padding says nothing: topk by moe_sort, anything else is no route either."""
    sorting = random_sorting(5, 2, 3, 16)
    ids = sorting.sorted_ids.copy()
    padding = (ids & 0xFFFFFF) == 5
    ids[padding] = 0xFFFFFF | 1 << 24
    changed = sorting._replace(sorted_ids=ids)
    rotate_quant(to_tensor(random(1, 5, 96), device), changed, 2, rotation_size=16)


@pytest.mark.parametrize("k", [0, 96])
def test_no_tokens(device, k):
    x = torch.zeros((0, k), dtype=torch.bfloat16, device=device)
    sorting = random_sorting(0, 2, 4, 16)
    codes, scales = ops.moe_rotate_quant(x, **tensors(sorting, device), rotation_size=32)
    assert codes.shape == (0, k // 2) and scales.shape == (0, -(-k // 256) * 8)
    scales = torch.zeros((0, 3), dtype=torch.uint8, device=device)
    ids, valid = (to_tensor(a, device) for a in (sorting.sorted_ids, sorting.num_valid))
    assert ops.moe_sort_scales(scales, ids, valid, topk=2).shape == (0, 8)


# B34: what a bad row holds stays in the rows of its own routes.
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_b34_a_bad_token_marks_its_own_rows_only(device, bad):
    topk, sorting = 3, random_sorting(9, 3, 4, 16)
    x = random(2, 9, 288)
    x[4, 100] = bad
    x[5] = 0
    x[6] = 1e-42
    rotate_quant(to_tensor(x, device), sorting, topk, rotation_size=32)
    _, scales = ops.moe_rotate_quant(
        to_tensor(x, device), **tensors(sorting, device), rotation_size=32
    )
    rows = ref.unshuffle_scales(to_array(scales), rows=scales.shape[0], groups=16)
    marked = np.flatnonzero((rows == 255).any(1))
    assert sorted(sorting.reverse_sorted[4 * topk : 5 * topk]) == marked.tolist()
    assert not rows[sorting.reverse_sorted[5 * topk : 6 * topk]].any()


# B23: element offsets past 2^31. Only the two rows are ever touched.
def test_b23_rows_further_apart_than_32_bits(device):
    if not runs_cpu_code(device):
        pytest.skip("test_gfx950_moe_rotate_quant.py has it for the kernels")
    apart, k = (1 << 31) + 8, 96
    memory = torch.empty(apart + k, dtype=torch.float16)
    x = memory.as_strided((2, k), (apart, 1))
    x.copy_(torch.tensor(random(3, 2, k)))
    rotate_quant(x, random_sorting(2, 3, 5, 16), 3, rotation_size=32)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing(threads):
    x = torch.tensor(random(4, 700, 192))
    sorting = random_sorting(700, 5, 9, 32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rotate_quant(x, sorting, 5, rotation_size=64)
    finally:
        torch.set_num_threads(before)


def test_rotation_size_by_default(device):
    """None is 64, or the matrix's; as rotate_quant."""
    sorting, x = random_sorting(3, 2, 4, 16), to_tensor(random(5, 3, 192), device)
    for options in ({}, {"rotation": to_tensor(np.eye(32, dtype=np.float32), device)}):
        actual = ops.moe_rotate_quant(x, **tensors(sorting, device), **options)
        assert_sorted(actual, rq.rotate_quant(x, **options), sorting, 2)


# --- refusals ----------------------------------------------------------------------------------

ROUTES = random_sorting(4, 2, 3, 16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (2, 2, 96)}, r"x: expected shape \[M, K\], got shape \[2, 2, 96\]"),
        ({"x": (4, 80)}, r"x: expected last dimension divisible by 32"),
        ({"x": (3, 96)}, r"reverse_sorted: expected M \* topk rows for the 3 rows of x"),
        ({"x": (0, 96)}, r"reverse_sorted: expected M \* topk rows for the 0 rows of x"),
        ({"rotation_size": 48}, r"rotation_size: expected 0 \(no rotation\), 16, 32, 64"),
        ({"rotation_size": 64}, r"x: expected last dimension divisible by rotation_size 64"),
        ({"rotation_size": 0, "prescale": torch.ones(96)}, r"prescale: expected None with"),
        ({"rotation_size": 0, "rotation": torch.eye(32)}, r"rotation_size: expected 32, the size"),
        ({"scale_mode": "up"}, r"scale_mode: expected one of"),
        ({"sorted_ids": torch.zeros(24, dtype=torch.int32)}, r"sorted_ids: expected whole blocks"),
        ({"sorted_ids": torch.zeros(64)}, r"sorted_ids: expected dtype int32"),
        ({"num_valid": torch.zeros(1, dtype=torch.int32)}, r"num_valid: expected shape \[2\]"),
        ({"num_valid": torch.zeros(1, 2, dtype=torch.int32)}, r"num_valid: expected shape \[2\]"),
        ({"reverse_sorted": torch.zeros(4 * 17, dtype=torch.int32)}, r"topk 1 to 16"),
        ({"reverse_sorted": torch.zeros(9, dtype=torch.int32)}, r"reverse_sorted: expected M"),
        ({"reverse_sorted": torch.zeros(8).long()}, r"reverse_sorted: expected dtype int32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused_arguments(device, change, message):
    arguments = {"x": (4, 96), "rotation_size": 32, **tensors(ROUTES, device), **change}
    arguments = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    x = torch.zeros(arguments.pop("x"), device=device)
    with pytest.raises(RuntimeError, match=message):
        ops.moe_rotate_quant(x, **arguments)


@pytest.mark.parametrize(
    "shape, options, message",
    [
        ((4, 2, 3), {"topk": 2}, r"scales: expected shape \[M, K / 32\], got"),
        ((5, 3), {"topk": 2, "by_route": True}, r"scales: expected rows divisible by topk 2"),
        ((4, 3), {"topk": 17}, r"topk: expected 1 to 16, got 17"),
        ((4, 3), {"topk": 0}, r"topk: expected 1 to 16, got 0"),
        ((0, 3), {"topk": 2}, r"sorted_ids: expected no rows for no tokens"),
        ((1 << 24, 0), {"topk": 1}, r"tokens: expected 0 to 16777215"),
    ],
)
def test_refused_scales(device, shape, options, message):
    ids, valid = (to_tensor(a, device) for a in (ROUTES.sorted_ids, ROUTES.num_valid))
    scales = torch.zeros(shape, dtype=torch.uint8, device=device)
    with pytest.raises(RuntimeError, match=message):
        ops.moe_sort_scales(scales, ids, valid, **options)
