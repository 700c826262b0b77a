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


def launch(function, signature: dict, constants: dict, grid, args: list, **options) -> emu.Stats:
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
    return obj.run(name, grid=grid, block=64 * WARPS, args=args, dynamic_lds=lds)


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
    a, sa, b, sb, c, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, A_FORMAT: tl.constexpr, A_PER_BYTE: tl.constexpr
):  # fmt: skip
    i, j = tl.arange(0, BM)[:, None], tl.arange(0, BN)
    ka, kb = tl.arange(0, K // A_PER_BYTE)[None, :], tl.arange(0, K // 2)[:, None]
    groups = tl.arange(0, K // 32)[None, :]
    left = tl.load(a + i * (K // A_PER_BYTE) + ka)
    right = tl.load(b + j[None, :] * (K // 2) + kb)
    left_scale = tl.load(sa + i * (K // 32) + groups)
    right_scale = tl.load(sb + j[:, None] * (K // 32) + groups)
    acc = tl.dot_scaled(left, left_scale, A_FORMAT, right, right_scale, "e2m1")
    tl.store(c + i * BN + j[None, :], acc)


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


@pytest.mark.parametrize("a_format", ["e2m1", "e4m3"])
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("seed", [0, 1])
def test_dot_scaled(a_format: str, dim: int, seed: int) -> None:
    """Random codes, a random scale for every block of 32; equals the float64 product to float32
    rounding."""
    rng, K = np.random.default_rng(seed), 256
    per_byte = 2 if a_format == "e2m1" else 1
    a = rng.integers(0, 256, (64, K // per_byte)).astype(np.uint8)
    if a_format == "e4m3":
        a[a & 127 == 127] = 0  # NaN
    b = rng.integers(0, 256, (64, K // 2)).astype(np.uint8)
    sa, sb = rng.integers(118, 137, (2, 64, K // 32)).astype(np.uint8)
    c = np.zeros((64, 64), np.float32)
    signature = {
        "a": "*u8" if a_format == "e2m1" else "*fp8e4nv",
        "sa": "*u8",
        "b": "*u8",
        "sb": "*u8",
        "c": "*fp32",
    }
    constants = {"K": K, "BM": 64, "BN": 64, "A_FORMAT": a_format, "A_PER_BYTE": per_byte}
    stats = launch(scaled_matmul, signature, constants, 1, [a, sa, b, sb, emu.Uninitialized(c)],
                   matrix_instr_nonkdim=dim)  # fmt: skip
    left = (
        fp4_values(a) if a_format == "e2m1" else a.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    )
    left = left * np.exp2(sa.astype(float) - 127).repeat(32, 1)
    right = fp4_values(b) * np.exp2(sb.astype(float) - 127).repeat(32, 1)
    bound = np.abs(left) @ np.abs(right).T * 2.0**-22
    assert (np.abs(c - left @ right.T) <= bound).all()
    assert stats.mnemonics[f"v_mfma_scale_f32_{dim}x{dim}x{2048 // dim}_f8f6f4"]
