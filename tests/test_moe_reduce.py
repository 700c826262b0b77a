# SPDX-License-Identifier: MIT
"""moe_reduce against numpy, bit for bit on every device: the order of its sums is part of it."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isa import ISA_NAMES, address
from numpy.typing import NDArray
from strategies import seeds
from tensors import (
    TORCH_DTYPES,
    assert_values_equal,
    poisoned_allocations,
    rounded,
    runs_cpu_code,
    to_array,
    to_tensor,
)
from torch import Tensor

from rotquant_hip import reference as ref
from rotquant_hip import reference_moe as ref_moe

OPS = torch.ops.rotquant_hip
NAN = 255
torch_dtypes = st.sampled_from(list(TORCH_DTYPES.values()))


class Problem:
    """Rows [M, topk, H], those of dropped routes full of NaN."""

    def __init__(self, tokens: int, topk: int, hidden: int, dropped: float = 0.3, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.shape = (tokens, topk, hidden)
        self.rows = rng.standard_normal(self.shape).astype(np.float32)
        self.weights = rng.random((tokens, topk)).astype(np.float32)
        self.shared = rng.standard_normal((tokens, hidden)).astype(np.float32)
        routes = tokens * topk
        self.reverse = rng.permutation(routes).astype(np.int32)
        self.reverse[rng.random(routes) < dropped] = -1

    def tensors(self, dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
        """rows [M * topk, H] and reverse_sorted."""
        rows = to_tensor(self.rows, device).to(dtype).flatten(0, 1)
        reverse = to_tensor(self.reverse, device)
        rows[reverse < 0] = torch.nan
        return rows, reverse

    def expected(self, rows: NDArray, weights: bool, shared: NDArray | None) -> NDArray:
        """rows are what the tensor's values are in float32."""
        w = self.weights if weights else None
        return ref_moe.moe_reduce(rows.reshape(self.shape), w, self.reverse, shared)


@given(
    st.integers(0, 20),
    st.integers(1, 16),
    st.integers(1, 40).map(lambda n: 32 * n),
    torch_dtypes,
    torch_dtypes,
    st.booleans(),
    st.booleans(),
    st.sampled_from((0.0, 0.3, 1.0)),
    seeds,
)
def test_reduce(device, tokens, topk, hidden, dtype, out_dtype, weighted, shared, dropped, seed):
    """B35: what lies in the rows of dropped routes does not matter."""
    problem = Problem(tokens, topk, hidden, dropped, seed)
    rows, reverse = problem.tensors(dtype, device)
    weights = to_tensor(problem.weights, device) if weighted else None
    added = to_tensor(problem.shared, device).to(out_dtype) if shared else None
    with poisoned_allocations():
        out = OPS.moe_reduce(
            rows.unflatten(0, (tokens, topk)), weights, reverse, shared=added, out_dtype=out_dtype
        )
    assert out.shape == (tokens, hidden) and out.dtype == out_dtype
    in_float32 = None if added is None else to_array(added.float())
    expected = problem.expected(to_array(rows.float()), weighted, in_float32)
    assert_values_equal(out, expected, f"{problem.shape}")


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 9), torch_dtypes, seeds)
def test_reduce_of_mxfp4(device, tokens, topk, groups, out_dtype, seed):
    problem = Problem(tokens, topk, 32 * groups, seed=seed)
    codes, scales = ref.quant(problem.rows.reshape(tokens * topk, -1))
    dropped = problem.reverse < 0
    codes[dropped], scales[dropped] = NAN, NAN
    out = OPS.moe_reduce(
        to_tensor(codes, device),
        to_tensor(problem.weights, device),
        to_tensor(problem.reverse, device),
        scales=to_tensor(scales, device),
        out_dtype=out_dtype,
    )
    expected = problem.expected(ref.dequant(codes, scales), True, None)
    assert_values_equal(out, expected, f"{problem.shape}")


@pytest.mark.parametrize("tokens", [1, 2, 255, 256, 257])
@pytest.mark.parametrize("hidden", [32, 2880, 7168])
def test_shapes_of_models(device, tokens, hidden):
    if hidden == 7168 and not runs_cpu_code(device):
        tokens = min(tokens, 2)
    problem = Problem(tokens, 8 if hidden > 32 else 9, hidden)
    rows, reverse = problem.tensors(torch.bfloat16, device)
    out = OPS.moe_reduce(rows, to_tensor(problem.weights, device), reverse)
    assert out.dtype == torch.bfloat16
    assert_values_equal(out, problem.expected(to_array(rows.float()), True, None), "out")


def test_one_bad_row_poisons_its_token_only(device):
    problem = Problem(9, 3, 64, dropped=0.0)
    problem.rows[4, 1, 7] = np.nan
    rows, reverse = problem.tensors(torch.float32, device)
    out = OPS.moe_reduce(rows, to_tensor(problem.weights, device), reverse)
    assert out[4, 7].isnan() and out.isnan().sum() == 1


def test_the_product_is_rounded_before_the_sum(device):
    """A fused multiply-add would keep 2^-24, which the product has below its last bit."""
    almost = 1 + 2.0**-12
    square = 1 + 2.0**-11  # almost^2 without its 2^-24, a tie that rounds to even
    rows = torch.tensor([[-square], [almost]], device=device).expand(2, 32).contiguous()
    weights = torch.tensor([[1.0, almost]], device=device)
    reverse = torch.arange(2, dtype=torch.int32, device=device)
    out = OPS.moe_reduce(rows, weights, reverse)
    assert almost * almost - square == 2.0**-24
    np.testing.assert_array_equal(to_array(out), 0)
    expected = ref_moe.moe_reduce(to_array(rows)[None], to_array(weights), to_array(reverse))
    np.testing.assert_array_equal(to_array(out), expected)


def test_the_order_of_the_slots_is_part_of_it(device):
    """2^24 + 1 - 2^24 is 0 in this order and 1 in others."""
    problem = Problem(1, 3, 32, dropped=0.0)
    problem.rows[0] = np.array([2.0**24, 1, -(2.0**24)])[:, None]
    problem.weights[:] = 1
    rows, reverse = problem.tensors(torch.float32, device)
    weights = to_tensor(problem.weights, device)
    assert not OPS.moe_reduce(rows, weights, reverse).any()
    one = torch.ones(1, 32, device=device)
    assert not OPS.moe_reduce(rows, weights, reverse, shared=one).any()


def test_defaults_and_views(device):
    problem = Problem(5, 2, 64)
    rows, reverse = problem.tensors(torch.float16, device)
    weights, shared = to_tensor(problem.weights, device), torch.ones(5, 64, device=device).half()
    expected = OPS.moe_reduce(rows, weights, reverse, shared=shared)
    assert expected.dtype == torch.float16
    wide = torch.zeros(10, 65, dtype=torch.float16, device=device)
    wide[:, 1:] = rows
    out = OPS.moe_reduce(wide[:, 1:], weights.double(), reverse, shared=shared.t().clone().t())
    assert torch.equal(out, expected)
    codes, scales = OPS.quant(torch.randn(10, 64, device=device))
    assert OPS.moe_reduce(codes, weights, reverse, scales=scales).dtype == torch.bfloat16
    as_torch = codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)
    assert torch.equal(
        OPS.moe_reduce(as_torch[0], weights, reverse, scales=as_torch[1]),
        OPS.moe_reduce(codes, weights, reverse, scales=scales),
    )


ROWS, WEIGHTS, REVERSE = torch.zeros(10, 64), torch.zeros(5, 2), torch.zeros(10, dtype=torch.int32)


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("rows", ROWS.double(), "dtype bfloat16, float16 or float32"),
        ("rows", ROWS[:, :40], "H divisible by 32"),
        ("rows", ROWS[0], "shape [M * topk, H] or [M, topk, H]"),
        ("rows", ROWS[:9], "M * topk rows for 5 tokens"),
        # B39: one weight for a token, or the weights of all routes in a row
        ("topk_weights", WEIGHTS.flatten(), "shape [M, topk]"),
        ("topk_weights", WEIGHTS[:, :1], "shape [5, 2]"),
        ("topk_weights", WEIGHTS.int(), "a floating-point dtype"),
        ("reverse_sorted", REVERSE.long(), "dtype int32"),
        ("reverse_sorted", REVERSE[:5], "shape [10]"),
        ("reverse_sorted", REVERSE.view(5, 2), "shape [10]"),
        ("scales", torch.zeros(10, 2), "dtype uint8"),
        ("shared", torch.zeros(5, 32), "shape [5, 64]"),
        ("shared", torch.zeros(5, 64).half(), "dtype Float"),
        ("out_dtype", torch.float64, "dtype bfloat16, float16 or float32"),
    ],
)
def test_errors_name_the_argument(argument, value, expected):
    arguments = {"rows": ROWS, "topk_weights": WEIGHTS, "reverse_sorted": REVERSE}
    if argument == "scales":
        arguments["rows"] = torch.zeros(10, 32, dtype=torch.uint8)
    if argument == "shared":
        arguments["out_dtype"] = torch.float32
    with pytest.raises(RuntimeError, match=f"^{argument}: expected .*{re.escape(expected)}"):
        OPS.moe_reduce(**(arguments | {argument: value}))


def test_tokens_cannot_be_guessed():
    with pytest.raises(RuntimeError, match="rows: expected shape .* neither topk_weights nor"):
        OPS.moe_reduce(ROWS, None, REVERSE)


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("quantised", [False, True])
def test_isa_moe_reduce(isa_libraries, isa, dtype, quantised):
    problem = Problem(20, 3, 96)
    rows = to_array(problem.tensors(TORCH_DTYPES[dtype], "cpu")[0])
    codes, scales = ref.quant(problem.rows.reshape(60, 96))
    out = rounded(np.zeros((20, 96)), TORCH_DTYPES[dtype])
    index = list(TORCH_DTYPES).index(dtype)
    isa_libraries[isa].run_moe_reduce(
        address(None if quantised else rows),
        address(codes),
        address(scales),
        index,
        address(problem.weights),
        address(problem.reverse),
        address(None),
        ctypes.c_int64(20),
        ctypes.c_int64(96),
        3,
        address(out),
        index,
    )
    values = ref.dequant(codes, scales) if quantised else to_array(to_tensor(rows).float())
    assert_values_equal(to_tensor(out), problem.expected(values, True, None), isa)
