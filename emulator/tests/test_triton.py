# SPDX-License-Identifier: MIT
"""Kernels that PyPI's Triton compiles for gfx950, executed with every check on and compared with
numpy.

This code comes from another compiler front end and knows the hardware's layouts by itself.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gfx950_emulator as emu

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TARGET = GPUTarget("hip", "gfx950", 64)
WARPS = 4


def launch(
    function, signature: dict, constants: dict, grid, args: list, latency=None, **options
) -> emu.Stats:
    """Compiles for gfx950, loads, runs. Triton's own trailing pointer arguments are null."""
    signature = signature | dict.fromkeys(constants, "constexpr")
    built = triton.compile(
        ASTSource(function, signature=signature, constexprs=constants),
        target=TARGET,
        options={"num_warps": WARPS, **options},
    )
    obj = emu.load(built.asm["hsaco"])
    name = built.metadata.name
    info = obj.kernels[name]
    args = args + [None] * (sum(not a.hidden for a in info.args) - len(args))
    assert not obj.unimplemented()
    lds = max(0, built.metadata.shared - info.lds_bytes)
    return obj.run(
        name, grid=grid, block=64 * WARPS, args=args, dynamic_lds=lds, latency=latency, seed=1
    )


@triton.jit
def masked_elementwise(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i < n
    a = tl.load(x + i, mask=mask)
    b = tl.load(y + i, mask=mask)
    tl.store(out + i, tl.where(a > b, a * b, a - b), mask=mask)


@triton.jit
def row_reduce(x, out, n, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    v = tl.load(x + row * n + i, mask=i < n, other=0.0)
    tl.store(out + row * 3, tl.sum(v, 0))
    tl.store(out + row * 3 + 1, tl.max(v, 0))
    tl.store(out + row * 3 + 2, tl.argmin(v, 0).to(tl.float32))


@triton.jit
def transpose(x, out, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], tl.trans(v))


@triton.jit
def matmul(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j, k = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        left = tl.load(a + i * K + k0 + k[None, :])
        acc += tl.dot(left, tl.load(b + (k0 + k[:, None]) * BN + j))
    tl.store(c + i * BN + j, acc)


@triton.jit
def scaled_matmul(
    a, sa, b, sb, c, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    A_FORMAT: tl.constexpr, A_PER_BYTE: tl.constexpr, B_FORMAT: tl.constexpr, B_PER_BYTE: tl.constexpr,
):  # fmt: skip
    i, j = tl.arange(0, BM)[:, None], tl.arange(0, BN)
    ka, kb = tl.arange(0, K // A_PER_BYTE)[None, :], tl.arange(0, K // B_PER_BYTE)[:, None]
    groups = tl.arange(0, K // 32)[None, :]
    left = tl.load(a + i * (K // A_PER_BYTE) + ka)
    right = tl.load(b + j[None, :] * (K // B_PER_BYTE) + kb)
    left_scale = tl.load(sa + i * (K // 32) + groups)
    right_scale = tl.load(sb + j[:, None] * (K // 32) + groups)
    acc = tl.dot_scaled(left, left_scale, A_FORMAT, right, right_scale, B_FORMAT)
    tl.store(c + i * BN + j[None, :], acc)


@triton.jit
def attention(q, k, v, out, length, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Causal, one head; the softmax is summed up block by block."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    channel = tl.arange(0, D)
    query = tl.load(q + rows[:, None] * D + channel[None, :])
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for first in range(0, length, BN):
        columns = first + tl.arange(0, BN)
        key = tl.load(k + columns[None, :] * D + channel[:, None])
        score = tl.dot(query, key) * scale
        score = tl.where(columns[None, :] <= rows[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - higher[:, None])
        shrink = tl.exp2(top - higher)
        value = tl.load(v + columns[:, None] * D + channel[None, :])
        acc = acc * shrink[:, None] + tl.dot(weight.to(tl.float16), value)
        total = total * shrink + tl.sum(weight, 1)
        top = higher
    tl.store(out + rows[:, None] * D + channel[None, :], acc / total[:, None])


@triton.jit
def count_bins(x, out, N: tl.constexpr, BINS: tl.constexpr):
    counts = tl.histogram(tl.load(x + tl.arange(0, N)), BINS)
    tl.store(out + tl.arange(0, BINS), counts)


@triton.jit
def sort_rows(x, out, M: tl.constexpr, N: tl.constexpr, DOWN: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.sort(tl.load(x + at), 1, descending=DOWN))


@triton.jit
def gather_rows(
    x, index, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr
):
    source = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if AXIS == 0:
        at = tl.arange(0, K)[:, None] * N + tl.arange(0, N)[None, :]
    else:
        at = tl.arange(0, M)[:, None] * K + tl.arange(0, K)[None, :]
    tl.store(out + at, tl.gather(source, tl.load(index + at), AXIS))


def test_elementwise() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 255, 1000):
        x, y = rng.standard_normal((2, n)).astype(np.float32)
        out = np.zeros(n, np.float32)
        signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
        launch(
            masked_elementwise,
            signature,
            {"B": 256},
            -(-n // 256),
            [x, y, emu.Uninitialized(out), n],
        )
        assert (out == np.where(x > y, x * y, x - y)).all()


def test_row_reduction() -> None:
    x = np.random.default_rng(1).integers(-500, 500, (5, 900)).astype(np.float32)
    out = np.zeros((5, 3), np.float32)
    signature = {"x": "*fp32", "out": "*fp32", "n": "i32"}
    stats = launch(row_reduce, signature, {"B": 1024}, 5, [x, emu.Uninitialized(out), 900])
    assert (
        (out[:, 0] == x.sum(1)).all()
        and (out[:, 1] == x.max(1)).all()
        and (out[:, 2] == x.argmin(1)).all()
    )
    assert stats.barriers >= 5


@pytest.mark.parametrize("kind", ["fp32", "fp16", "i8"])
def test_transpose(kind: str) -> None:
    dtype = {"fp32": np.float32, "fp16": np.float16, "i8": np.int8}[kind]
    x = np.random.default_rng(2).integers(-100, 100, (64, 128)).astype(dtype)
    out = np.zeros((128, 64), dtype)
    launch(
        transpose,
        {"x": f"*{kind}", "out": f"*{kind}"},
        {"M": 64, "N": 128},
        1,
        [x, emu.Uninitialized(out)],
    )
    assert (out == x.T).all()


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [16, 32])
def test_dot(kind: str, dim: int) -> None:
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[kind]
    rng = np.random.default_rng(3)
    a, b = (
        rng.integers(-16, 17, (64, 256)).astype(dtype),
        rng.integers(-16, 17, (256, 64)).astype(dtype),
    )
    c = np.zeros((64, 64), np.float32)
    signature = {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32", "K": "i32"}
    stats = launch(matmul, signature, {"BM": 64, "BN": 64, "BK": 64}, 1, [a, b, emu.Uninitialized(c), 256],
                   matrix_instr_nonkdim=dim)  # fmt: skip
    assert (c == a.astype(np.float64) @ b.astype(np.float64)).all()
    assert stats.mnemonics[
        f"v_mfma_f32_{dim}x{dim}x{512 // dim}_{'bf16' if kind == 'bf16' else 'f16'}"
    ]


OTHER_DOTS = {
    "fp32": (np.float32, np.float32, "*fp32", "v_mfma_f32_16x16x4_f32"),
    "fp64": (np.float64, np.float64, "*fp64", "v_mfma_f64_16x16x4_f64"),
    "i8": (np.int8, np.int32, "*i32", "v_mfma_i32_16x16x64_i8"),
    "fp8e4nv": (ml_dtypes.float8_e4m3fn, np.float32, "*fp32", None),
    "fp8e5": (ml_dtypes.float8_e5m2, np.float32, "*fp32", None),
}


@triton.jit
def matmul_any(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr):
    i, j, k = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, BK)
    acc = tl.zeros((BM, BN), ACC)
    for k0 in range(0, K, BK):
        left = tl.load(a + i * K + k0 + k[None, :])
        acc += tl.dot(left, tl.load(b + (k0 + k[:, None]) * BN + j), out_dtype=ACC)
    tl.store(c + i * BN + j, acc)


@pytest.mark.parametrize("kind", list(OTHER_DOTS))
def test_other_dots(kind: str) -> None:
    """float32, float64, int8 and FP8 matrix instructions, on small integers."""
    dtype, out_dtype, pointer, mnemonic = OTHER_DOTS[kind]
    rng = np.random.default_rng(4)
    a = rng.integers(-8, 9, (64, 128)).astype(dtype)
    b = rng.integers(-8, 9, (128, 64)).astype(dtype)
    c = np.zeros((64, 64), out_dtype)
    signature = {"a": f"*{kind}", "b": f"*{kind}", "c": pointer, "K": "i32"}
    acc = {"*fp32": tl.float32, "*fp64": tl.float64, "*i32": tl.int32}[pointer]
    constants = {"BM": 64, "BN": 64, "BK": 64, "ACC": acc}
    args = [a, b, emu.Uninitialized(c), 128]
    stats = launch(matmul_any, signature, constants, 1, args, matrix_instr_nonkdim=16)
    assert (c == a.astype(np.float64) @ b.astype(np.float64)).all()
    assert any("mfma" in n for n in stats.mnemonics)
    assert mnemonic is None or stats.mnemonics[mnemonic], stats.mnemonics


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4_values(packed: np.ndarray) -> np.ndarray:
    return FP4[np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)]


FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
POINTER = {"e2m1": "*u8", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}


def random_codes(rng: np.random.Generator, rows: int, k: int, kind: str) -> np.ndarray:
    """Every finite code of the format, as bytes [rows, k or k / 2]."""
    if kind == "e2m1":
        return rng.integers(0, 256, (rows, k // 2)).astype(np.uint8)
    codes = rng.integers(0, 256, (rows, k)).astype(np.uint8)
    codes[~np.isfinite(codes.view(FP8[kind]).astype(np.float32))] = 0
    return codes


def scaled_values(codes: np.ndarray, scales: np.ndarray, kind: str) -> np.ndarray:
    values = fp4_values(codes) if kind == "e2m1" else codes.view(FP8[kind]).astype(np.float64)
    return values * np.exp2(scales.astype(float) - 127).repeat(32, 1)


@pytest.mark.parametrize("a_format", list(POINTER))
@pytest.mark.parametrize("b_format", list(POINTER))
@pytest.mark.parametrize("dim", [16, 32])
def test_dot_scaled(a_format: str, b_format: str, dim: int) -> None:
    """Random codes, a random scale for every block of 32; equals the float64 product to float32
    rounding."""
    rng, K = np.random.default_rng(dim), 256
    a, b = random_codes(rng, 64, K, a_format), random_codes(rng, 64, K, b_format)
    sa, sb = rng.integers(118, 137, (2, 64, K // 32)).astype(np.uint8)
    c = np.zeros((64, 64), np.float32)
    signature = {"a": POINTER[a_format], "sa": "*u8", "b": POINTER[b_format], "sb": "*u8", "c": "*fp32"}  # fmt: skip
    constants = {"K": K, "BM": 64, "BN": 64, "A_FORMAT": a_format, "B_FORMAT": b_format}
    constants |= {"A_PER_BYTE": 1 + (a_format == "e2m1"), "B_PER_BYTE": 1 + (b_format == "e2m1")}
    stats = launch(scaled_matmul, signature, constants, 1, [a, sa, b, sb, emu.Uninitialized(c)],
                   matrix_instr_nonkdim=dim)  # fmt: skip
    left, right = scaled_values(a, sa, a_format), scaled_values(b, sb, b_format)
    # Each block of 32 is rounded and added. One e5m2 product may outweigh all others: then every
    # addition rounds at its size.
    roundings = K // 32 + 1 if "e5m2" in (a_format, b_format) else 4
    bound = np.abs(left) @ np.abs(right).T * roundings * 2.0**-24
    assert (np.abs(c - left @ right.T) <= bound).all()
    assert stats.mnemonics[f"v_mfma_scale_f32_{dim}x{dim}x{2048 // dim}_f8f6f4"]


LATENCIES = ["early", "late", 1]


@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("latency", LATENCIES)
def test_attention(dim: int, latency: str | int) -> None:
    length, width, block = 128, 64, 64
    rng = np.random.default_rng(5)
    q, k, v = rng.standard_normal((3, length, width)).astype(np.float16)
    out = np.zeros((length, width), np.float32)
    scale = float(width**-0.5 / np.log(2))
    signature = dict.fromkeys(("q", "k", "v"), "*fp16") | {"out": "*fp32", "length": "i32", "scale": "fp32"}  # fmt: skip
    stats = launch(attention, signature, {"BM": block, "BN": block, "D": width}, length // block,
                   [q, k, v, emu.Uninitialized(out), length, scale], latency, matrix_instr_nonkdim=dim)  # fmt: skip
    score = q.astype(np.float64) @ k.astype(np.float64).T * scale
    score[np.triu_indices(length, 1)] = -np.inf
    weight = np.exp2(score - score.max(1, keepdims=True))
    weight /= weight.sum(1, keepdims=True)
    # The weights are rounded to float16, everything else is float32.
    bound = weight @ np.abs(v.astype(np.float64)) * 2.0**-10
    assert (np.abs(out - weight @ v.astype(np.float64)) <= bound).all()
    assert any(f"v_mfma_f32_{dim}x{dim}x" in name for name in stats.mnemonics)


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("bins", [16, 256])
def test_histogram(bins: int, latency: str | int) -> None:
    x = np.random.default_rng(6).binomial(bins - 1, 0.3, 2048).astype(np.int32)
    out = np.zeros(bins, np.int32)
    args = [x, emu.Uninitialized(out)]
    launch(count_bins, {"x": "*i32", "out": "*i32"}, {"N": 2048, "BINS": bins}, 1, args, latency)
    assert (out == np.bincount(x, minlength=bins)).all()


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("kind,down", [("i8", False), ("i8", True), ("fp32", False)])
def test_sort(kind: str, down: bool, latency: str | int) -> None:
    dtype = {"i8": np.int8, "fp32": np.float32}[kind]
    x = np.random.default_rng(7).integers(-(1 << 15), 1 << 15, (4, 128)).astype(dtype)
    out = np.zeros_like(x)
    constants = {"M": 4, "N": 128, "DOWN": down}
    args = [x, emu.Uninitialized(out)]
    launch(sort_rows, {"x": f"*{kind}", "out": f"*{kind}"}, constants, 1, args, latency)
    want = np.sort(x, 1)
    assert (out == (want[:, ::-1] if down else want)).all()


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("axis", [0, 1])
def test_gather(axis: int, latency: str | int) -> None:
    """Along both axes, within a wave and across waves."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((64, 32)).astype(np.float32)
    shape = (128, 32) if axis == 0 else (64, 128)
    index = rng.integers(0, x.shape[axis], shape).astype(np.int32)
    out = np.zeros(shape, np.float32)
    constants = {"M": 64, "N": 32, "K": 128, "AXIS": axis}
    signature = {"x": "*fp32", "index": "*i32", "out": "*fp32"}
    launch(gather_rows, signature, constants, 1, [x, index, emu.Uninitialized(out)], latency)
    assert (out == np.take_along_axis(x, index, axis)).all()
