# SPDX-License-Identifier: MIT
"""moe_gemm1 and moe_gemm2 against float64, with NaN in all padding; on a CPU gemm2 bit for bit.

Tests named after a number are the smallest form of a fault that was reported of a comparable
library; it is the number in our list of such reports.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch
from compare import assert_bytes_equal, assert_close
from hypothesis import given
from hypothesis import strategies as st
from interval import Values, assert_quantised
from isa import ISA_NAMES, address
from moe_problem import NAN, ODD_INTERS, OPS, Problem
from numpy.typing import NDArray
from strategies import seeds
from tensors import TORCH_DTYPES, assert_values_equal, rounded, runs_cpu_code, to_array, to_tensor
from torch import Tensor

import rotquant_hip as rq
from rotquant_hip import reference as ref
from rotquant_hip import reference_moe as ref_moe

ACTIVATIONS = ref_moe.ACTIVATIONS
LIMITS = {"silu": None, "swiglu": 7.0, "gelu": None, "gelu_tanh": 2.0}
block_ms = st.sampled_from(ref_moe.BLOCK_M)
inters = st.integers(1, 5).map(lambda n: 32 * n) | st.sampled_from(ODD_INTERS)


@st.composite
def problems(draw) -> Problem:
    experts = draw(st.integers(1, 6))
    return Problem(
        tokens=draw(st.integers(0, 40)),
        topk=draw(st.integers(1, 4)),
        experts=experts,
        hidden=32 * draw(st.integers(1, 10)),
        inter=draw(inters),
        block_m=draw(block_ms),
        dropped=draw(st.sampled_from((0.0, 0.3, 1.0))),
        seed=draw(seeds),
        poison=draw(st.sampled_from((0x7F, 0xFF))),
    )


def assert_gemm1(
    result: tuple[NDArray, NDArray], values: Values, what: str, scale_mode: str = "round_up"
) -> None:
    assert_quantised(*result, values.ends, scale_mode, what)


def rotated(
    values: Values, size: int, matrix: NDArray | None, prescale: NDArray | None, rounds: bool
) -> Values:
    """Values after gemm1's rotation; `rounds`: a matrix unit rounds both factors to bf16."""
    rows, inter = values.exact.shape
    exact, bound = values.exact, values.bound
    if prescale is not None:
        exact, bound = exact * prescale, bound * np.abs(prescale) + 2.0**-23 * np.abs(exact)
    if matrix is None:
        matrix = ref.hadamard(np.eye(size, dtype=np.float32), size) / np.sqrt(size)
    elif rounds:
        matrix = ref.bf16_to_float32(ref.float32_to_bf16(matrix))
        bound = bound + 2.0**-8 * np.abs(exact)
    r = np.broadcast_to(matrix.astype(np.float64), (inter // size, size, size))
    blocks = (rows, inter // size, size)
    exact, bound = (
        np.einsum("mbi,bij->mbj", x.reshape(blocks), y).reshape(rows, inter)
        for x, y in ((exact, r), (bound + 2.0**-24 * (size + 2) * np.abs(exact), np.abs(r)))
    )
    return Values(exact, bound)


# --- gemm1 ------------------------------------------------------------------------------------


@given(
    problems(), st.sampled_from(ACTIVATIONS), st.booleans(), st.booleans(), st.booleans(), st.data()
)
def test_gemm1(device, problem, activation, with_bias, apply_weight, with_limit, data):
    """Any shape, activation and gate mode. B06, B09, B10, B11, B55 are among them."""
    limit = 1.5 if with_limit else LIMITS[activation]
    options = {"activation": activation, "limit": limit, "apply_weight": apply_weight}
    mode = data.draw(st.sampled_from(rq.GATE_MODES))
    scale_mode = data.draw(st.sampled_from(("round_up", "floor", "even", "ceil")))
    bias = problem.bias1 if with_bias else None
    bias_tensor = None if bias is None else to_tensor(bias, device)
    extra = options | {"bias": bias_tensor, "scale_mode": scale_mode}
    result = problem.gemm1(device, mode, **extra)
    assert_gemm1(result, problem.activated(bias=bias, **options), f"{problem}", scale_mode)
    if mode == "interleave":
        separated = problem.gemm1(device, "separated", **extra)
        assert_bytes_equal(result[0], separated[0], "codes of the gate modes")
        assert_bytes_equal(result[1], separated[1], "scales of the gate modes")


@pytest.mark.parametrize("inter", ODD_INTERS)
def test_b10_b11_odd_shards(device, inter):
    problem = Problem(9, 2, 3, 96, inter, seed=inter)
    assert_gemm1(problem.gemm1(device), problem.activated(), f"I {inter}")


@pytest.mark.parametrize("hidden", [32, 96, 192, 32 * 7, 32 * 9, 32 * 12])
def test_b03_b09_k_tails(device, hidden):
    problem = Problem(9, 2, 3, hidden, 64, seed=hidden)
    assert_gemm1(problem.gemm1(device), problem.activated(), f"H {hidden}")


@pytest.mark.parametrize("tokens", range(1, 41))
def test_b07_every_number_of_tokens(device, tokens):
    problem = Problem(tokens, 2, 3, 96, 64, seed=tokens)
    assert_gemm1(problem.gemm1(device), problem.activated(), f"M {tokens}")


@pytest.mark.parametrize("block_m", ref_moe.BLOCK_M)
def test_block_m_changes_nothing_but_the_padding(device, block_m):
    """Also the blocks of an expert that has more than one."""
    problem = Problem(150, 1, 2, 96, 64, block_m)
    codes, scales = problem.gemm1(device)
    assert_gemm1((codes, scales), problem.activated(), f"block_m {block_m}")
    if runs_cpu_code(device):
        narrow = Problem(150, 1, 2, 96, 64, 16)
        expected_codes, expected_scales = narrow.gemm1(device)
        assert_bytes_equal(codes[problem.rows], expected_codes[narrow.rows], "codes")
        assert_bytes_equal(scales[problem.rows], expected_scales[narrow.rows], "scales")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_b21_the_limit_is_honoured(device, activation):
    """Where gate and up lie beyond it, and the up side on both ends."""
    problem = Problem(8, 1, 1, 32, 64)
    problem.w1_scale[:] = 127
    limit = 3.0
    result = problem.gemm1(device, activation=activation, limit=limit)
    values = problem.activated(activation, limit)
    assert_gemm1(result, values, activation)
    largest = limit * (limit + (activation == "swiglu"))
    assert np.abs(ref.dequant(*result)).max() <= largest * 1.2
    assert np.abs(problem.activated(activation).exact).max() > 4 * largest


def test_swiglu_is_gpt_oss(device):
    """alpha is an argument; 1 with a far limit is silu(g) (u + 1)."""
    problem = Problem(8, 2, 3, 96, 64)
    for alpha in (1.702, 1.0):
        result = problem.gemm1(device, activation="swiglu", limit=7.0, alpha=alpha)
        assert_gemm1(result, problem.activated("swiglu", 7.0, alpha), f"alpha {alpha}")


def test_a_wrong_gate_mode_is_seen(device):
    """The two orders are told apart by no shape; what they give is not the same."""
    problem = Problem(8, 2, 3, 96, 64)
    right = problem.gemm1(device, "interleave")
    arguments = problem.gemm1_arguments(device, "interleave") | {"gate_mode": "separated"}
    wrong = to_array(OPS.moe_gemm1(**arguments)[0])
    assert (wrong[problem.rows] != right[0][problem.rows]).mean() > 0.5


# --- the rotation of the intermediate ---------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["hadamard", "matrix", "matrices"])
@pytest.mark.parametrize("with_prescale", [False, True])
def test_intermediate_rotation(device, size, kind, with_prescale):
    problem = Problem(9, 2, 3, 96, 384, seed=size)
    rng = np.random.default_rng(size)
    blocks = {"hadamard": None, "matrix": (), "matrices": (384 // size,)}[kind]
    matrix = None
    if blocks is not None:
        matrix = (rng.standard_normal((*blocks, size, size)) / np.sqrt(size)).astype(np.float32)
    prescale = np.exp2(rng.standard_normal(384)).astype(np.float32) if with_prescale else None
    result = problem.gemm1(
        device,
        inter_rotation=None if matrix is None else to_tensor(matrix, device),
        inter_rotation_size=size if matrix is None else 0,
        inter_prescale=None if prescale is None else to_tensor(prescale, device),
    )
    rounds = matrix is not None and not runs_cpu_code(device)
    values = rotated(problem.activated(), size, matrix, prescale, rounds)
    assert_gemm1(result, values, f"{kind} {size}")


def midpoints_of_quantisation() -> tuple[Problem, NDArray]:
    """A problem whose activated values are exact, many halfway between two codes; these values.

    gelu(16) is 16, so that every value is 16 times up. up = x + y / 2 of two weights x, y.
    """
    problem = Problem(tokens=20, topk=1, experts=1, hidden=64, inter=96)
    problem.a[:], problem.a_scales[:] = 0, 127
    problem.a[:, 0] = 0x12  # the values 1 and 1/2 in channels 0 and 1
    problem.a[:, 16] = 0x02  # 1 in channel 32
    pairs = {0.25: 0x10, 0.75: 0x11, 1.25: 0x12, 1.75: 0x13, 2.5: 0x24, 3.5: 0x25, 5.0: 0x46}
    pairs |= {-value: byte | 0x88 for value, byte in pairs.items()}
    rng = np.random.default_rng(0)
    up = rng.choice(list(pairs), 96)
    problem.w1[:], problem.w1_scale[:] = 0, 127
    problem.w1[0, :96, 16] = 0x04  # 2, with the scale of 8: gate is 16
    problem.w1_scale[0, :96, 1] = 130
    problem.w1[0, 96:, 0] = [pairs[value] for value in up]
    up[::32], problem.w1[0, 96::32, 0] = 6.0, 0x07  # makes ties ties
    problem.w1_scale[0, 96:, 0] = rng.integers(122, 132, 96).reshape(3, 32)[:, :1].repeat(32)
    values = up * np.ldexp(16.0, problem.w1_scale[0, 96:, 0].astype(int) - 127)
    return problem, np.tile(values.astype(np.float32), (20, 1))


def test_b32_requantised_as_quant_does(device):
    problem, values = midpoints_of_quantisation()
    codes, scales = problem.gemm1(device, activation="gelu")
    expected = rq.quant(torch.from_numpy(values).to(device))
    assert_bytes_equal(codes[problem.rows], to_array(expected[0]), "codes")
    assert_bytes_equal(scales[problem.rows], to_array(expected[1]), "scales")


# --- x quantised inside -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("size", "with_prescale"), [(0, False), (16, True), (32, False), (64, True), (128, False)]
)
def test_inside_is_rotate_quant_first(device, dtype, size, with_prescale):
    problem = Problem(20, 2, 3, 384, 64)
    x = torch.randn(20, 2 * 384, device=device).to(dtype)[:, 65:449]  # strided
    prescale = torch.rand(384, device=device) + 0.5 if with_prescale else None
    if size:
        codes, scales = rq.rotate_quant(x, rotation_size=size, prescale=prescale)
    else:
        codes, scales = rq.quant(x)
    problem.a, problem.a_scales = to_array(codes), to_array(scales)
    result = problem.gemm1(device, a=x, a_scales=None, rotation_size=size, prescale=prescale)
    assert_gemm1(result, problem.activated(), f"{dtype}, RS {size}")
    if runs_cpu_code(device):
        separate = problem.gemm1(device)
        assert_bytes_equal(result[0], separate[0], "codes")
        assert_bytes_equal(result[1], separate[1], "scales")


def test_inside_with_a_matrix(device):
    problem = Problem(5, 2, 3, 128, 64)
    x, matrix = torch.randn(5, 128, device=device).bfloat16(), torch.randn(32, 32, device=device)
    if not runs_cpu_code(device):
        with pytest.raises(RuntimeError, match="rotation: expected None on a GPU"):
            problem.gemm1(device, a=x, a_scales=None, rotation=matrix)
        return
    codes, scales = rq.rotate_quant(x, matrix)
    problem.a, problem.a_scales = to_array(codes), to_array(scales)
    result = problem.gemm1(device, a=x, a_scales=None, rotation=matrix)
    assert_bytes_equal(result[0], problem.gemm1(device)[0], "codes")


# --- routes, rows that are not finite, no tokens ----------------------------------------------


def test_b34_not_finite_rows_stay_alone(device):
    problem = Problem(9, 2, 3, 96, 64)
    problem.a_scales[4, 1] = NAN
    problem.a[4] = 0x22
    codes, scales = problem.gemm1(device)
    assert_gemm1((codes, scales), problem.activated(), "one token of NaN")
    bad = [route.row for route in problem.routes if route.token == 4]
    assert (scales[bad] == NAN).all() and not codes[bad].any()
    assert (np.delete(scales, bad, 0) != NAN).all()
    x = torch.randn(9, 96, device=device).bfloat16()
    x[4, 7] = torch.inf
    codes, scales = problem.gemm1(device, a=x, a_scales=None)
    assert (scales[bad] == NAN).all() and (np.delete(scales, bad, 0) != NAN).all()


def test_b35_routes_of_other_ranks(device):
    """One token has none of its experts here, one has one of two."""
    problem = Problem(6, 2, 4, 64, 96)
    problem.ids[2], problem.ids[4, 1] = -1, 99
    problem.sort()
    problem.__dict__ |= {"h": problem.h[: len(problem.sorting.sorted_ids)]}
    problem.h_scales = problem.h_scales[: len(problem.sorting.sorted_ids)]
    assert_gemm1(problem.gemm1(device), problem.activated(), "gemm1")
    out = torch.zeros(6, 64, device=device)
    problem.add_gemm2(out)
    assert not out[2].any() and out[4].any()
    assert_rows(problem.gemm2(device, out_dtype=torch.float32), problem, False, "gemm2")


@pytest.mark.parametrize("block_m", ref_moe.BLOCK_M)
def test_b36_no_tokens(device, block_m):
    problem = Problem(0, 2, 3, 64, 96, block_m)
    codes, scales = problem.gemm1(device)
    assert codes.shape == (0, 48) and scales.shape == (0, 3)
    assert problem.gemm2(device).shape == (0, 64)
    codes, scales = problem.gemm2(device, OPS.moe_gemm2_mxfp4)
    assert codes.shape == (0, 32) and scales.shape == (0, 2)
    problem.add_gemm2(torch.zeros(0, 64, device=device))


def test_no_route_at_all(device):
    problem = Problem(5, 2, 3, 64, 96, dropped=1.0)
    assert problem.gemm1(device)[0].shape == (0, 48)
    out = torch.ones(5, 64, device=device)
    problem.add_gemm2(out)
    assert (out == 1).all()


# --- gemm2 ------------------------------------------------------------------------------------


def assert_rows(out: Tensor, problem: Problem, bias: bool, what: str) -> None:
    """Rows of float32 [M * topk, H]: those of routes right, all others not written."""
    array = to_array(out)
    routes = [route.token * problem.topk + route.slot for route in problem.routes]
    others = np.delete(array, routes, axis=0)  # as they were allocated
    assert np.isnan(others).all(), f"{what}: rows of dropped routes were written"
    values = problem.products(bias)
    assert_close(array[routes], values.exact, what, bound=values.bound)
    if runs_cpu_code(out.device):
        assert_bytes_equal(array[routes] + 0, problem.cpu_products(bias) + 0, what)


@given(problems(), st.booleans())
def test_gemm2_rows(device, problem, with_bias):
    bias = to_tensor(problem.bias2, device) if with_bias else None
    out = problem.gemm2(device, bias=bias, out_dtype=torch.float32)
    assert_rows(out, problem, with_bias, f"{problem}")


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_gemm2_rows_are_rounded_once(device, dtype):
    problem = Problem(9, 2, 3, 64, 352)
    bias = to_tensor(problem.bias2, device)
    exact = problem.gemm2(device, bias=bias, out_dtype=torch.float32)
    out = problem.gemm2(device, bias=bias, out_dtype=dtype)
    assert out.dtype == dtype
    assert_values_equal(out + 0, to_array(exact) + 0, "out")


@pytest.mark.parametrize("inter", ODD_INTERS)
def test_b15_overhang_is_not_read(device, inter):
    """gemm2 of what gemm1 wrote, whose rows follow each other without a gap."""
    problem = Problem(7, 2, 3, 96, inter, seed=inter)
    arguments = problem.gemm1_arguments(device)
    codes, scales = OPS.moe_gemm1(**arguments)
    natural = ref.unshuffle_scales(to_array(scales), rows=problem.used, groups=inter // 32)
    problem.h[: problem.used], problem.h_scales[: problem.used] = (
        to_array(codes)[: problem.used],
        natural,
    )
    out = problem.gemm2(device, a=codes, a_scales=scales, out_dtype=torch.float32)
    assert_rows(out, problem, False, f"I {inter}")


@given(problems(), st.booleans())
def test_gemm2_mxfp4(device, problem, with_bias):
    bias = to_tensor(problem.bias2, device) if with_bias else None
    codes, scales = map(to_array, problem.gemm2(device, OPS.moe_gemm2_mxfp4, bias=bias))
    routes = [route.token * problem.topk + route.slot for route in problem.routes]
    assert (np.delete(codes, routes, axis=0) == NAN).all()
    assert (np.delete(scales, routes, axis=0) == NAN).all()
    exact, bound = vars(problem.products(with_bias)).values()
    values = Values(exact, bound + 2.0**-149)
    assert_quantised(codes[routes], scales[routes], values.ends, "round_up", f"{problem}")
    if runs_cpu_code(device):
        expected = ref.quant(problem.cpu_products(with_bias))
        assert_bytes_equal(codes[routes], expected[0], "codes")
        assert_bytes_equal(scales[routes], expected[1], "scales")


@given(problems(), st.sampled_from(list(TORCH_DTYPES.values())), st.booleans(), seeds)
def test_gemm2_atomic(device, problem, dtype, weighted, seed):
    """On a CPU the terms of a token are added in the order of the sorted rows."""
    start = np.random.default_rng(seed).standard_normal((problem.tokens, problem.hidden))
    out = to_tensor(start.astype(np.float32), device).to(dtype)
    float32 = to_array(out.float()).copy()
    weights = to_tensor(problem.sorting.sorted_weights, device) if weighted else None
    bias = to_tensor(problem.bias2, device)
    problem.add_gemm2(out, sorted_weights=weights, bias=bias)

    weight = problem.weights if weighted else np.ones(len(problem.routes), np.float32)
    if runs_cpu_code(device):
        terms = to_array(to_tensor(weight[:, None] * problem.cpu_products(True)).to(dtype).float())
        for route, term in zip(problem.routes, terms, strict=True):
            total = torch.from_numpy(float32[route.token] + term)
            float32[route.token] = to_array(total.to(dtype).float())
        assert_values_equal(out + 0, float32 + 0, f"{problem}")
        return
    values = problem.products(True)
    exact, bound = float32.astype(np.float64), np.zeros(float32.shape)
    largest = np.abs(exact)
    for i, route in enumerate(problem.routes):
        exact[route.token] += weight[i] * values.exact[i]
        largest[route.token] += np.abs(weight[i] * values.exact[i])
        bound[route.token] += weight[i] * values.bound[i]
    bound += (problem.topk + 2) * torch.finfo(dtype).eps * largest
    assert_close(to_array(out.float()), exact, f"{problem}", bound=bound)


def test_same_bytes_again_and_on_any_number_of_threads(device):
    problem = Problem(70, 2, 3, 288, 192)
    first = problem.gemm1(device), problem.gemm2(device)
    out = torch.zeros(70, 288, device=device)
    problem.add_gemm2(out)
    threads = torch.get_num_threads()
    for count in (threads, 1):
        try:
            torch.set_num_threads(count)
            again = problem.gemm1(device), problem.gemm2(device)
            added = torch.zeros_like(out)
            problem.add_gemm2(added)
        finally:
            torch.set_num_threads(threads)
        assert_bytes_equal(again[0][0], first[0][0], "codes")
        assert_bytes_equal(again[0][1], first[0][1], "scales")
        assert torch.equal(again[1], first[1])
        assert not runs_cpu_code(device) or torch.equal(added, out)


def test_arguments_are_left_alone_and_may_be_views(device):
    problem = Problem(5, 2, 3, 96, 64)
    arguments = problem.gemm1_arguments(device)
    expected = OPS.moe_gemm1(**arguments)

    def unaligned(t: Tensor) -> Tensor:
        memory = t.new_full((t.numel() + 1,), 77)
        return memory[1:].view(t.shape).copy_(t)

    views = {k: unaligned(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    before = {k: v.clone() for k, v in views.items() if isinstance(v, Tensor)}
    codes, scales = OPS.moe_gemm1(**views)
    assert torch.equal(codes[: problem.used], expected[0][: problem.used])
    natural = [ref.unshuffle_scales(to_array(t), rows=problem.used, groups=2)
               for t in (scales, expected[1])]  # fmt: skip
    assert_bytes_equal(*natural, "scales")
    assert all(torch.equal(views[k], old) for k, old in before.items())
    as_torch = {
        "a": arguments["a"].view(torch.float4_e2m1fn_x2),
        "w1": arguments["w1"].view(torch.float4_e2m1fn_x2),
        "w1_scale": arguments["w1_scale"].view(torch.float8_e8m0fnu),
        "a_scales": arguments["a_scales"].view(torch.float8_e8m0fnu),
    }
    codes, _ = OPS.moe_gemm1(**(arguments | as_torch))
    assert torch.equal(codes[: problem.used], expected[0][: problem.used])


# --- configurations ---------------------------------------------------------------------------

GEMM1_CONFIGS, GEMM2_CONFIGS = OPS._moe_gemm1_configs(), OPS._moe_gemm2_configs()


@pytest.mark.parametrize("config", range(len(GEMM1_CONFIGS)), ids=GEMM1_CONFIGS)
def test_gemm1_every_config(device, config):
    block_m = int(re.search(r"_(\d+)x", GEMM1_CONFIGS[config])[1])
    problem = Problem(20, 2, 3, 352, 192, block_m)
    options = {}
    if GEMM1_CONFIGS[config].startswith("inline"):
        x = torch.randn(20, 352, device=device).bfloat16()
        problem.a, problem.a_scales = map(to_array, rq.quant(x))
        options = {"a": x, "a_scales": None}
    result = problem.gemm1(device, config=config, **options)
    assert_gemm1(result, problem.activated(), GEMM1_CONFIGS[config])


@pytest.mark.parametrize("config", range(len(GEMM2_CONFIGS)), ids=GEMM2_CONFIGS)
def test_gemm2_every_config(device, config):
    block_m = int(re.search(r"_(\d+)x", GEMM2_CONFIGS[config])[1])
    problem = Problem(20, 2, 3, 352, 192, block_m)
    out = problem.gemm2(device, config=config, out_dtype=torch.float32)
    assert_rows(out, problem, False, GEMM2_CONFIGS[config])


# --- errors -----------------------------------------------------------------------------------

SMALL = Problem(5, 2, 3, 96, 64)
X = torch.zeros(5, 96, dtype=torch.bfloat16)
BYTES = torch.zeros(5, 48, dtype=torch.uint8)
MATRIX = torch.eye(32)


@pytest.mark.parametrize(
    ("argument", "value", "expected", "options"),
    [
        ("a", BYTES.float(), "dtype bfloat16 or float16, or codes", {"a_scales": None}),
        ("a", BYTES.float(), "dtype uint8", {}),
        ("a", BYTES[:, :40], "last dimension H / 2 divisible by 16", {}),
        ("a", BYTES[None], "shape [M, H / 2] (codes) or [M, H]", {}),
        ("a", X[:, :48], "last dimension divisible by 32", {"a_scales": None}),
        ("w1", SMALL.w1[:, :, :32], "shuffled codes of shape [E, N, 48]", {}),
        ("w1", SMALL.w1[:, :96], "N divisible by 64", {}),
        ("w1", SMALL.w1[0], "shape [E, N, 48]", {}),
        # B19: natural scales, which differ from shuffled ones where there is padding
        ("w1_scale", SMALL.w1_scale, "what shuffle_scales returns for [3, 128, 3]", {}),
        ("w1_scale", ref.shuffle_scales(SMALL.w1_scale)[:128], "384 or 512 rows of 8", {}),
        ("a_scales", SMALL.a_scales, "sorted, shuffled scales of shape [64, 8]", {}),
        ("a_scales", ref.shuffle_scales(SMALL.a_scales), "shape [64, 8]", {}),
        ("sorted_ids", SMALL.sorting.sorted_ids.astype(np.int64), "dtype int32", {}),
        ("sorted_ids", SMALL.sorting.sorted_ids[:, None], "shape [max_rows]", {}),
        ("sorted_weights", SMALL.sorting.sorted_weights[:3], "shape [48]", {}),
        ("sorted_weights", SMALL.sorting.sorted_weights.astype(np.float64), "float32", {}),
        # B39: ids, weights or experts of another routing
        ("sorted_expert_ids", SMALL.sorting.sorted_expert_ids[:1], "16, 32, 64 or 128", {}),
        ("num_valid", SMALL.sorting.num_valid[:1], "shape [2]", {}),
        ("topk", 0, "1 to 16", {}),
        ("topk", 17, "1 to 16", {}),
        ("bias", SMALL.bias1[:2], "shape [3, 128]", {}),
        ("bias", SMALL.bias1.astype(np.int32), "a floating-point dtype", {}),
        ("activation", "relu", "one of 'silu', 'swiglu', 'gelu', 'gelu_tanh'", {}),
        ("limit", None, "a number for activation 'swiglu' (gpt-oss", {"activation": "swiglu"}),
        ("limit", -1.0, "a positive number", {}),
        ("gate_mode", "mixed", "'separated' or 'interleave'", {}),
        ("scale_mode", "mse", "'round_up', 'floor', 'even' or 'ceil'", {}),
        ("scale_mode", "best", "'round_up'", {}),
        ("rotation", MATRIX, "None: the codes in `a` are rotated already", {}),
        ("rotation_size", 64, "0: the codes in `a` are rotated already", {}),
        (
            "rotation_size",
            48,
            "0 (no rotation), 16, 32, 64, 128 or 256",
            {"a": X, "a_scales": None},
        ),
        ("rotation_size", 64, "a divisor of the 96", {"a": X, "a_scales": None}),
        ("prescale", torch.ones(96), "None without a rotation", {}),
        ("inter_rotation_size", 256, "0 (no rotation), 16, 32, 64 or 128, got", {}),
        ("inter_rotation_size", 128, "a divisor of the 64 channels", {}),
        ("inter_rotation_size", 16, "32, the size of", {"inter_rotation": MATRIX}),
        ("inter_rotation", MATRIX[:16], "shape [RS, RS]", {}),
        ("inter_rotation", torch.eye(16).expand(3, 16, 16), "one matrix, or 4", {}),
        ("inter_rotation", MATRIX.int(), "a floating-point dtype", {}),
        ("inter_prescale", torch.ones(64), "None without a rotation", {}),
        ("inter_prescale", torch.ones(32), "shape [64]", {"inter_rotation_size": 32}),
        ("config", -2, "-1 (chosen) or what fits block_m 16, codes", {}),
        ("config", GEMM1_CONFIGS.index("inline_16x256"), " direct_16x256", {}),
        ("config", 99, " direct_16x64, got 99", {}),
        (
            "config",
            GEMM1_CONFIGS.index("direct_16x64"),
            "inter_rotation_size 64: 3 direct_16x256, 4 direct_16x128, got 5 direct_16x64",
            {"inter_rotation_size": 64},
        ),
    ],
)
def test_gemm1_errors_name_the_argument(argument, value, expected, options):
    value = to_tensor(value) if isinstance(value, np.ndarray) else value
    arguments = SMALL.gemm1_arguments() | options | {argument: value}
    with pytest.raises(RuntimeError, match=re.escape(expected)) as raised:
        OPS.moe_gemm1(**arguments)
    assert str(raised.value).startswith(f"{argument}: expected ")


def test_only_blocks_of_16_are_quantised_inside():
    problem = Problem(5, 2, 3, 96, 64, block_m=64)
    with pytest.raises(RuntimeError, match="a: expected codes and a_scales: blocks of 64"):
        problem.gemm1(a=X, a_scales=None)


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("a", SMALL.h.astype(np.float32), "dtype uint8"),
        ("a", SMALL.h[:5], "shape [48, I / 2]"),
        ("a", SMALL.h[:, :8], "I / 2 divisible by 16"),
        ("a_scales", SMALL.h_scales, "sorted, shuffled scales of shape [64, 8]"),
        ("w2", SMALL.w2[:, :90], "N divisible by 32"),
        ("w2", SMALL.w2[:, :, :16], "shape [E, N, 32]"),
        ("w2_scale", SMALL.w2_scale, "what shuffle_scales returns for [3, 96, 2]"),
        ("bias", SMALL.bias2[:, :64], "shape [3, 96]"),
        ("tokens", -1, "0 to 16777215"),
        ("tokens", 1 << 24, "0 to 16777215"),
        ("out_dtype", torch.float64, "dtype bfloat16, float16 or float32"),
        ("config", len(GEMM2_CONFIGS), " direct_16x256"),
        ("config", GEMM2_CONFIGS.index("direct_32x256"), " direct_32x256"),
    ],
)
def test_gemm2_errors_name_the_argument(argument, value, expected):
    value = to_tensor(value) if isinstance(value, np.ndarray) else value
    with pytest.raises(RuntimeError, match=f"^{argument}: expected .*{re.escape(expected)}"):
        SMALL.gemm2(**{argument: value})


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (torch.zeros(5, 64), "shape [tokens, 96]"),
        (torch.zeros(5, 96, 1), "shape [tokens, H]"),
        (torch.zeros(5, 96, dtype=torch.float64), "dtype bfloat16, float16 or float32"),
        (torch.zeros(96, 5).t(), "contiguous memory"),
        (torch.zeros(481, dtype=torch.bfloat16)[1:].view(5, 96), "aligned to 4 bytes"),
    ],
)
def test_atomic_out_is_checked(out, expected):
    with pytest.raises(RuntimeError, match=f"^out: expected .*{re.escape(expected)}"):
        SMALL.add_gemm2(out)
    assert not out.any()


# --- offsets beyond 32 bits -------------------------------------------------------------------
# Large in address space only: what is not touched takes no memory.


@pytest.fixture
def cpu_code(device) -> None:
    if not runs_cpu_code(device):
        pytest.skip("gigabytes of address space")


@pytest.mark.usefixtures("cpu_code")
def test_b22_rows_beyond_4_gib():
    """56 thousand tokens, top-k 8, hidden 7168: the last row begins past 2^31 elements."""
    problem = Problem(1, 8, 8, 7168, 32)
    expected = problem.gemm2()
    tokens = 56_000
    last = problem.sorting.sorted_ids + (tokens - 1)  # moves the padding's token as well
    arguments = problem.gemm2_arguments() | {"tokens": tokens, "sorted_ids": to_tensor(last)}
    out = OPS.moe_gemm2(**arguments)
    assert out.numel() > 2**31
    assert torch.equal(out[-8:], expected)


@pytest.mark.usefixtures("cpu_code")
def test_b23_tokens_beyond_4_gib():
    problem = Problem(1, 1, 1, 8192, 32)
    expected = problem.gemm1()
    tokens = 1_100_000
    a = torch.empty(tokens, 4096, dtype=torch.uint8)
    assert a.nbytes > 2**32
    a[-1] = to_tensor(problem.a[0])
    ids = np.full(16, 1 << 24 | tokens, np.int32)
    ids[0] = tokens - 1
    far = {"a": a, "sorted_ids": to_tensor(ids)}
    codes, _ = OPS.moe_gemm1(**(problem.gemm1_arguments() | far))
    assert_bytes_equal(to_array(codes)[0], expected[0][0], "codes")


@pytest.mark.usefixtures("cpu_code")
def test_b25_experts_beyond_4_gib():
    problem = Problem(1, 1, 1, 4096, 2048)
    expected = problem.gemm2()
    arguments = problem.gemm2_arguments()
    experts = 1024
    w2 = torch.empty(experts, 4096, 1024, dtype=torch.uint8)
    w2_scale = torch.empty(experts * 4096, 64, dtype=torch.uint8)
    assert w2.nbytes == 2**32
    w2[-1], w2_scale[-4096:] = arguments["w2"][0], arguments["w2_scale"]
    experts_of = to_tensor(np.array([experts - 1], np.int32))
    far = {"w2": w2, "w2_scale": w2_scale, "sorted_expert_ids": experts_of, "tokens": 1}
    assert torch.equal(OPS.moe_gemm2(**(arguments | far)), expected)


# --- the instruction sets that this machine would not choose ----------------------------------


def sorting_arguments(problem: Problem) -> list:
    s = problem.sorting
    arrays = (s.sorted_ids, s.sorted_weights, s.sorted_expert_ids, s.num_valid)
    sizes = (ctypes.c_int64(len(s.sorted_ids)), ctypes.c_int64(problem.tokens))
    return [*map(address, arrays), *sizes, problem.topk, problem.block_m]


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_isa_activate(isa_libraries, isa, activation):
    """Within 2^-22 of gate * up of float64, and the same bytes everywhere.

    And of the result where it is small; but an exponential cannot be better than its argument.
    """
    rng = np.random.default_rng(0)
    gate = np.concatenate([np.linspace(-12, 12, 200_001), *np.outer((1, -1), np.logspace(-30, 3))])
    gate = gate[: len(gate) // 16 * 16].astype(np.float32)
    up = rng.standard_normal(len(gate)).astype(np.float32)
    outs = {}
    for name in {isa, "baseline"}:
        outs[name] = np.zeros_like(gate)
        isa_libraries[name].run_activate(
            ACTIVATIONS.index(activation),
            ctypes.c_float(np.inf),
            *map(address, (gate, up, outs[name])),
            ctypes.c_int64(len(gate)),
        )
    assert_bytes_equal(outs[isa], outs["baseline"], f"{activation} on {isa}")
    g, u = gate.astype(np.float64), up.astype(np.float64)
    expected = ref_moe.activate(g, u, activation)
    factor = np.abs(u + 1 if activation == "swiglu" else u)
    relative = 2.0**-23 * (8 + g**2 + np.abs(g) ** 3 / 8) * np.abs(expected) + 2.0**-120
    bound = np.minimum(2.0**-22 * np.abs(g) * factor, relative)
    assert_close(outs[isa], expected, activation, bound=bound)


ISA_PROBLEMS = [
    Problem(7, 2, 3, 96, 224),
    Problem(70, 2, 3, 288, 96, block_m=32),
    Problem(150, 1, 2, 64, 64, block_m=128, dropped=0.2),
]


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("problem", ISA_PROBLEMS, ids=str)
@pytest.mark.parametrize("scale", [0, 8])  # the second takes the activations to their ends
def test_isa_moe_gemm1(isa_libraries, isa, activation, problem, scale):
    w1_scale = to_tensor(ref.shuffle_scales(problem.w1_scale + np.uint8(scale)))
    arguments = problem.gemm1_arguments() | {"w1_scale": w1_scale}
    bias = to_tensor(problem.bias1)
    limit = 1e3
    expected = OPS.moe_gemm1(
        **arguments, bias=bias, activation=activation, limit=limit, inter_rotation_size=32
    )
    codes, scales = (np.zeros(t.shape, np.uint8) for t in expected)
    names = ("a", "a_scales", "w1", "w1_scale")
    kept = [to_array(arguments[name]) for name in names] + [problem.bias1]
    isa_libraries[isa].run_moe_gemm1(
        *sorting_arguments(problem),
        *map(address, kept),
        ctypes.c_int64(problem.hidden),
        ctypes.c_int64(problem.inter),
        problem.experts,
        ACTIVATIONS.index(activation),
        ctypes.c_float(limit),
        32,
        address(codes),
        address(scales),
    )
    used = problem.used
    assert_bytes_equal(codes[:used], to_array(expected[0])[:used], isa)
    groups = problem.inter // 32
    natural = [
        ref.unshuffle_scales(s, rows=used, groups=groups) for s in (scales, to_array(expected[1]))
    ]
    assert_bytes_equal(*natural, isa)


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("finish", ["atomic", "rows", "mxfp4"])
@pytest.mark.parametrize("problem", ISA_PROBLEMS, ids=str)
def test_isa_moe_gemm2(isa_libraries, isa, finish, problem):
    arguments = problem.gemm2_arguments()
    rows = problem.tokens * problem.topk
    out = np.zeros((rows, problem.hidden), np.uint16)
    codes = np.zeros((rows, problem.hidden // 2), np.uint8)
    scales = np.zeros((rows, problem.hidden // 32), np.uint8)
    names = ("a", "a_scales", "w2", "w2_scale")
    kept = [to_array(arguments[name]) for name in names] + [problem.bias2]
    isa_libraries[isa].run_moe_gemm2(
        *sorting_arguments(problem),
        *map(address, kept),
        ctypes.c_int64(problem.inter),
        ctypes.c_int64(problem.hidden),
        problem.experts,
        ("atomic", "rows", "mxfp4").index(finish),
        address(out),
        0,  # bf16
        address(codes),
        address(scales),
    )
    bias = to_tensor(problem.bias2)
    routes = [route.token * problem.topk + route.slot for route in problem.routes]
    if finish == "atomic":
        expected = torch.zeros(problem.tokens, problem.hidden, dtype=torch.bfloat16)
        weights = to_tensor(problem.sorting.sorted_weights)
        problem.add_gemm2(expected, bias=bias, sorted_weights=weights)
        assert_bytes_equal(out[: problem.tokens], to_array(expected), isa)
    elif finish == "rows":
        expected = rounded(problem.cpu_products(True), torch.bfloat16)
        assert_bytes_equal(out[routes], expected, isa)
    else:
        expected = ref.quant(problem.cpu_products(True))
        assert_bytes_equal(codes[routes], expected[0], isa)
        assert_bytes_equal(scales[routes], expected[1], isa)
