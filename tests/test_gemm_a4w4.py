# SPDX-License-Identifier: MIT
"""gemm_a4w4 against float64, with NaN in all padding; on a CPU bit for bit.

Tests named after a number are the smallest form of a fault that was reported of a comparable
library; it is the number in our list of such reports.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from compare import assert_bytes_equal, assert_close
from hypothesis import given
from hypothesis import strategies as st
from isa import ISA_NAMES, address
from numpy.typing import NDArray
from strategies import seeds
from tensors import (
    TORCH_DTYPES,
    assert_values_equal,
    poisoned_allocations,
    poisoned_scales,
    to_array,
    to_tensor,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rotquant_hip as rq
from rotquant_hip import reference as ref

OPS = torch.ops.rotquant_hip
NAN = 255


# --- problems ---------------------------------------------------------------------------------


@dataclass
class Problem:
    """Codes and natural scales, drawn from all bytes; scales from `low` to `high`."""

    m: int
    n: int
    k: int
    seed: int = 0
    low: int = 110
    high: int = 140

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        rows = -(-self.n // 16) * 16  # those past n hold anything, too

        def draw(rows: int) -> tuple[NDArray, NDArray]:
            codes = rng.integers(0, 256, (rows, self.k // 2), np.uint8)
            return codes, rng.integers(self.low, self.high + 1, (rows, self.k // 32), np.uint8)

        self.a, self.a_scales = draw(self.m)
        self.b, self.b_scales = draw(rows)
        self.b_scales[self.n :] = NAN
        self.bias = rng.standard_normal(self.n).astype(np.float32)

    def arguments(self, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        scales = poisoned_scales(self.a_scales), poisoned_scales(self.b_scales)
        arrays = (self.a, ref.shuffle_weight(self.b), *scales)
        return tuple(to_tensor(array, device) for array in arrays)

    def run(self, device: torch.device | str = "cpu", **options) -> Tensor:
        options = {"n": self.n, "out_dtype": torch.float32} | options
        with poisoned_allocations():
            return rq.gemm_a4w4(*self.arguments(device), **options)

    def operands(self, columns: NDArray | slice = slice(None)) -> tuple[NDArray, ...]:
        b, b_scales = self.b[: self.n][columns], self.b_scales[: self.n][columns]
        return self.a, b, self.a_scales, b_scales


def assert_product(out: Tensor, problem: Problem, columns: NDArray | slice = slice(None)) -> None:
    """Within what float32 sums may lose of float64; on a CPU equal to its own order of sums.

    Every group's sum and every addition of a group rounds by at most 2^-24 of what it adds up to;
    a matrix unit that truncates loses twice that, and adds groups in another order.
    """
    expected, magnitude = ref.gemm_a4w4(*problem.operands(columns))
    bound = (2 * problem.k / 32 + 2) * 2.0**-24 * magnitude
    what = f"M {problem.m}, N {problem.n}, K {problem.k}"
    actual = to_array(out)[:, columns]
    assert_close(actual, expected, what, bound=bound)
    if out.device.type == "cpu":
        by_groups = ref.gemm_a4w4_by_groups(*problem.operands(columns))
        assert_bytes_equal(actual + 0, by_groups + 0, what)  # + 0: the sign of a zero is free


MS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 255, 256, 257, 300)
NS = (1, 2, 15, 16, 17, 31, 33, 64, 96, 127, 128, 129, 250, 258, 300, 512, 576, 1000, 1024, 1025)
KS = (32, 64, 96, 160, 192, 224, 256, 288, 320, 512, 544, 576, 1024, 1056, 1536, 2080, 2112)
# Every value of each at least three times, in combinations without a pattern.
TABLE = [
    (MS[i % len(MS)], NS[i * 7 % len(NS) - i // len(NS)], KS[i * 5 % len(KS)]) for i in range(64)
]


@pytest.mark.parametrize(("m", "n", "k"), TABLE)
def test_table(device, m, n, k):
    problem = Problem(m, n, k, seed=m * n + k)
    assert_product(problem.run(device), problem)


@pytest.mark.parametrize("m", [1, 4, 32])
@pytest.mark.parametrize("n", [6144, 24576])
def test_decode_shapes_of_qwen3_8b(device, m, n):
    problem = Problem(m, n, 4096)
    columns = np.random.default_rng(0).choice(n, 300, replace=False)
    assert_product(problem.run(device), problem, columns)


@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 12),
    seeds,
    st.integers(0, 254),
    st.data(),
)
def test_any_scales(device, m, n, groups, seed, low, data):
    """Also where a group's sum is subnormal or overflows."""
    high = data.draw(st.integers(low, 254))
    problem = Problem(m, n, 32 * groups, seed, low, high)
    out = problem.run(device)
    if device.type == "cpu":
        by_groups = ref.gemm_a4w4_by_groups(*problem.operands())
        assert_values_equal(out + 0, by_groups + 0, "out")
    else:
        assert out.shape == (m, n)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_output_is_rounded_once_after_the_bias(device, dtype, with_bias):
    problem = Problem(33, 50, 288)
    bias = torch.from_numpy(problem.bias).to(device) if with_bias else None
    exact = to_array(problem.run(device)) + (problem.bias if with_bias else 0)
    out = problem.run(device, bias=bias, out_dtype=dtype)
    assert out.dtype == dtype
    assert_values_equal(out + 0, exact + 0, "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_bias_of_any_dtype(device, dtype):
    problem = Problem(3, 20, 64)
    bias = torch.from_numpy(problem.bias).to(device, dtype)
    assert torch.equal(problem.run(device, bias=bias), problem.run(device, bias=bias.float()))


def test_nan_scales_poison_their_row_and_column_only(device):
    problem = Problem(40, 50, 544)
    problem.a_scales[17, 16] = NAN
    problem.b_scales[33, 2] = NAN
    problem.a[17], problem.b[33] = 0, 0  # 0 * NaN is NaN
    out = problem.run(device)
    assert out[17].isnan().all() and out[:, 33].isnan().all()
    assert out.isnan().sum() == 40 + 50 - 1
    assert_product(out, problem)


def test_fp16_overflow_is_inf(device):
    problem = Problem(4, 20, 64, low=150, high=150)
    out = problem.run(device, out_dtype=torch.float16)
    assert out.isinf().any() and not out.isnan().any()


# --- shapes and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3)])
def test_leading_dimensions(device, shape):
    m = int(np.prod(shape))
    problem = Problem(m, 20, 96)
    a, *others = problem.arguments(device)
    out = rq.gemm_a4w4(a.reshape(*shape, 48), *others, n=20, out_dtype=torch.float32)
    assert out.shape == (*shape, 20) and out.is_contiguous()
    assert torch.equal(out.reshape(m, 20), problem.run(device))


def test_empty(device):
    assert Problem(0, 20, 64).run(device).shape == (0, 20)
    assert Problem(3, 0, 64).run(device).shape == (3, 0)
    assert torch.equal(Problem(3, 20, 0).run(device), torch.zeros(3, 20, device=device))
    bias = torch.randn(20, device=device)
    assert torch.equal(Problem(3, 20, 0).run(device, bias=bias), bias.expand(3, 20))


def test_torch_dtypes_and_views(device):
    problem = Problem(5, 32, 256)
    a, b, a_scales, b_scales = problem.arguments(device)
    expected = problem.run(device)
    as_torch = (
        a.view(torch.float4_e2m1fn_x2),
        b.view(torch.float4_e2m1fn_x2),
        a_scales.view(torch.float8_e8m0fnu),
        b_scales.view(torch.float8_e8m0fnu),
    )
    assert torch.equal(rq.gemm_a4w4(*as_torch, out_dtype=torch.float32), expected)

    def unaligned(t: Tensor) -> Tensor:
        memory = t.new_full((t.numel() + 1,), NAN)
        return memory[1:].view(t.shape).copy_(t)

    views = map(unaligned, (a, b, a_scales, b_scales))
    assert torch.equal(rq.gemm_a4w4(*views, out_dtype=torch.float32), expected)
    strided = a.repeat(1, 2)[:, :128]
    args = (strided, b, a_scales, b_scales)
    assert torch.equal(rq.gemm_a4w4(*args, out_dtype=torch.float32), expected)


def test_same_bytes_again_and_on_any_number_of_threads(device):
    problem = Problem(70, 300, 2112)
    first = problem.run(device)
    assert torch.equal(first, problem.run(device))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(first, problem.run(device))
    finally:
        torch.set_num_threads(threads)


def test_arguments_are_left_alone(device):
    problem = Problem(5, 20, 64)
    arguments = problem.arguments(device)
    before = [t.clone() for t in arguments]
    rq.gemm_a4w4(*arguments, n=20)
    assert all(torch.equal(t, old) for t, old in zip(arguments, before, strict=True))


# --- configurations ---------------------------------------------------------------------------


def test_config_names():
    names = rq.gemm_configs()
    assert len(set(names)) == len(names) > 0


@pytest.mark.parametrize("config", range(len(rq.gemm_configs())), ids=rq.gemm_configs())
def test_every_config(device, config):
    problem = Problem(70, 200, 1056)
    assert_product(problem.run(device, config=config), problem)


# --- errors -----------------------------------------------------------------------------------

CODES, WEIGHT = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(32, 32, dtype=torch.uint8)
SCALES = torch.zeros(256, 8, dtype=torch.uint8)
GOOD = {"a": CODES, "b": WEIGHT, "a_scales": SCALES, "b_scales": SCALES}


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("a", CODES.float(), "dtype uint8"),
        ("a", CODES[:, :20], "last dimension K / 2 divisible by 16"),
        ("a", torch.zeros((), dtype=torch.uint8), "last dimension K / 2"),
        ("b", WEIGHT.float(), "dtype uint8"),
        ("b", WEIGHT[:, :16], "shuffled codes of shape [N, 32] with N divisible by 16"),
        ("b", WEIGHT[:20], "N divisible by 16"),
        ("b", WEIGHT[None], "shape [N, 32]"),
        ("a_scales", SCALES[:, :4], "shuffled scales of shape [256, 8]"),
        ("a_scales", SCALES.float(), "dtype uint8"),
        ("b_scales", SCALES[:32], "shuffled scales of shape [256, 8]"),
        ("b_scales", SCALES.flatten(), "shuffled scales of shape [256, 8]"),
        ("bias", torch.zeros(31), "shape [32]"),
        ("bias", torch.zeros(1, 32), "shape [32]"),
        ("bias", torch.zeros(32, dtype=torch.int32), "a floating-point dtype"),
        ("n", 16, "32 rows of b without up to 15 of padding"),
        ("n", 33, "32 rows of b without up to 15 of padding"),
        ("n", -1, "32 rows of b"),
        ("out_dtype", torch.float64, "dtype bfloat16, float16 or float32"),
        ("config", -2, "-1 (chosen by shape) or one of 0 " + rq.gemm_configs()[0]),
        ("config", 10_000, rq.gemm_configs()[-1] + ", got 10000"),
    ],
)
def test_errors_name_the_argument(argument, value, expected):
    with pytest.raises(RuntimeError, match=f"{argument}: expected .*{re.escape(expected)}"):
        rq.gemm_a4w4(**(GOOD | {argument: value}))


def test_meta_among_the_arguments_is_an_error():
    with pytest.raises(RuntimeError, match="b: expected device cpu"):
        rq.gemm_a4w4(**(GOOD | {"b": WEIGHT.to("meta")}))


# --- as torch sees it -------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(with_bias):
    problem = Problem(5, 20, 96)
    bias = torch.from_numpy(problem.bias) if with_bias else None
    kwargs = {"n": 20, "out_dtype": torch.float16}
    torch.library.opcheck(OPS.gemm_a4w4, (*problem.arguments(), bias), kwargs)


# B42: the fake kernel returned the padded width.
@pytest.mark.parametrize(("m", "n"), [(3, 20), (3, 32), (0, 20), (300, 1)])
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
def test_b42_fake(m, n, dtype):
    problem = Problem(m, n, 96)
    real = problem.run(out_dtype=dtype)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in problem.arguments()]
        fake = rq.gemm_a4w4(*fakes, n=n, out_dtype=dtype)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_compiles_once_for_all_token_counts():
    @torch.compile(fullgraph=True, dynamic=True)
    def linear(x: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
        codes, scales = rq.rotate_quant(x, shuffle_scales=True)
        return rq.gemm_a4w4(codes, b, scales, b_scales, n=20, out_dtype=x.dtype) * 2

    _, b, _, b_scales = Problem(1, 20, 128).arguments()
    for m in (3, 5, 300):
        x = torch.randn(m, 128)
        codes, scales = rq.rotate_quant(x, shuffle_scales=True)
        expected = rq.gemm_a4w4(codes, b, scales, b_scales, n=20, out_dtype=torch.float32) * 2
        assert torch.equal(linear(x, b, b_scales), expected)


# --- reported faults --------------------------------------------------------------------------


def test_b01_small_n(device):
    for n in (1, 16, 64, 256, 500):
        problem = Problem(32, n, 256)
        assert_product(problem.run(device), problem)


def test_b02_the_answer_does_not_depend_on_m(device):
    whole = Problem(160, 256, 512)
    out = whole.run(device)
    for m in (1, 2, 31, 128):
        part = Problem(160, 256, 512)
        part.m, part.a, part.a_scales = m, whole.a[:m], whole.a_scales[:m]
        alone = part.run(device)
        if device.type == "cpu":
            assert torch.equal(alone, out[:m])
        assert_product(alone, part)


def test_b03_k_does_not_fill_a_tile(device):
    for k in (192, 96, 32 * 7, 32 * 9):
        problem = Problem(17, 40, k)
        assert_product(problem.run(device), problem)


def test_b04_one_group(device):
    problem = Problem(64, 256, 32)
    assert_product(problem.run(device), problem)


def test_b05_n_is_no_multiple_of_a_tile(device):
    problem = Problem(20, 258, 128)
    out = problem.run(device)
    assert_product(out, problem)
    assert not torch.equal(out[:, 256:], out[:, :2])


def test_b06_whatever_lies_around_the_operands(device):
    """Each operand between two stretches of NaN, with K in the middle of a tile."""
    problem = Problem(19, 35, 96)

    def surrounded(t: Tensor) -> Tensor:
        memory = t.new_full((t.numel() + 2 * 4096,), NAN)
        return memory[4096:-4096].view(t.shape).copy_(t)

    arguments = [surrounded(t) for t in problem.arguments(device)]
    out = rq.gemm_a4w4(*arguments, n=35, out_dtype=torch.float32)
    assert out.isfinite().all()
    assert_product(out, problem)


@pytest.mark.parametrize("m", [*range(1, 32)])
def test_b07_decode_sizes(device, m):
    problem = Problem(m, 512, 512, seed=m)
    assert_product(problem.run(device), problem)


def test_b15_overhang_does_not_reach_the_next_row(device):
    """Two tokens through two layers with 96 channels between them."""
    torch.manual_seed(0)
    first, second = Problem(2, 96, 256, low=118, high=122), Problem(2, 40, 96)
    hidden = first.run(device, out_dtype=torch.bfloat16)
    codes, scales = rq.quant(hidden, shuffle_scales=True)
    _, b, _, b_scales = second.arguments(device)
    both = rq.gemm_a4w4(codes, b, scales, b_scales, n=40)
    for token in range(2):
        codes, scales = rq.quant(hidden[token : token + 1], shuffle_scales=True)
        assert torch.equal(rq.gemm_a4w4(codes, b, scales, b_scales, n=40), both[token : token + 1])


def test_b19_natural_scales_are_refused(device):
    problem = Problem(20, 48, 256)
    a, b, a_scales, b_scales = problem.arguments(device)
    with pytest.raises(RuntimeError, match="a_scales: expected shuffled scales"):
        rq.gemm_a4w4(a, b, to_tensor(problem.a_scales, device), b_scales)
    with pytest.raises(RuntimeError, match="b_scales: expected shuffled scales"):
        rq.gemm_a4w4(a, b, a_scales, to_tensor(problem.b_scales, device))


# --- the instruction sets that this machine would not choose ----------------------------------


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize(
    ("m", "n", "k", "low", "high"),
    [
        (1, 1, 32, 120, 130),
        (7, 100, 544, 120, 130),
        (70, 130, 288, 110, 140),
        (9, 50, 320, 0, 254),
        (9, 50, 320, 0, 70),  # sums are subnormal
        (9, 50, 320, 180, 254),  # sums overflow
        (9, 50, 320, 250, 255),  # some scales are NaN
    ],
)
def test_isa(isa_libraries, isa, m, n, k, low, high):
    problem = Problem(m, n, k, low=low, high=high)
    arguments = [to_array(t) for t in problem.arguments()]
    out = np.full((m, n), np.nan, np.float32)
    addresses = [address(array) for array in (*arguments, out)]
    isa_libraries[isa].run_gemm_a4w4(*addresses, *map(ctypes.c_int64, (m, n, k)))
    expected = ref.gemm_a4w4_by_groups(*problem.operands())
    assert_values_equal(torch.from_numpy(out) + 0, expected + 0, isa)
