# SPDX-License-Identifier: MIT
"""The ops of ``torch.ops.rotquant_hip`` with types and documentation.

Shapes: ``M`` is the product of the leading dimensions, ``K`` the last dimension, ``RS`` the
rotation size. ``codes`` and ``scales`` are uint8: two e2m1 codes a byte (element 2i in the low
nibble of byte i) and one e8m0 byte, value 2^(byte - 127), per group of 32 along K. A library that
wants torch's own dtypes takes a view: ``codes.view(torch.float4_e2m1fn_x2)``,
``scales.view(torch.float8_e8m0fnu)``; both are accepted here wherever codes or scales go in.

Every op raises ``RuntimeError`` before anything is written if an argument does not fit; the
message names the argument, what was expected and what came. No op mutates or aliases its
arguments, and all outputs are contiguous.

``rotate`` has exact gradients, ``gemm_a4w4`` one of its bias, ``fake_quant`` a straight-through
one. Any other argument that requires grad is refused where gradients are recorded: codes have none.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

GROUP = 32
ROTATION_SIZES = (16, 32, 64, 128, 256)
SCALE_MODES = ("round_up", "floor", "even", "ceil", "mse")
GATE_MODES = ("separated", "interleave")

ScaleMode = Literal["round_up", "floor", "even", "ceil", "mse"]
GateMode = Literal["separated", "interleave"]

_ops = torch.ops.rotquant_hip


def quant(
    x: Tensor, *, scale_mode: ScaleMode = "round_up", shuffle_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP4: ``rotate_quant`` without the rotation.

    Args:
        x: [..., K], bf16, fp16 or float32, K % 32 == 0. Rows may be strided; leading dimensions
            that do not collapse to one row stride are copied.
        scale_mode: how a group's scale follows from its largest magnitude amax (float32):
            ``round_up`` the smallest power of two >= amax / 6, so that nothing is clipped;
            ``ceil`` the smallest >= amax / 4; ``floor`` 2^(floor(log2 amax) - 2), the rule of the
            OCP MX specification; ``even`` the same after rounding amax to two mantissa bits, half
            up (AMD Quark's rule); ``mse`` round_up's or the one below, whichever has the smaller
            squared error.
        shuffle_scales: write the scales where the GEMM reads them, see ``shuffle_scales()``.

    Returns:
        codes [..., K / 2]; scales [..., K / 32], or shuffled [ceil256(M), ceil8(K / 32)].

    A code is value / scale rounded to nearest, ties to the even code, saturated at 6, its sign
    kept. A group of zeros has byte 0 and codes 0; one with a NaN or Inf has byte 255 (NaN) and
    codes 0, and no other group is affected. Tiny groups clamp at byte 0 (2^-127); subnormals are
    not flushed. The squared error of ``mse`` is float32, in units of round_up's scale, each square
    and sum rounded (no fused multiply-add), summed as a balanced tree, neighbours first; equal
    errors keep round_up's scale.
    """
    return _ops.quant(x, scale_mode=scale_mode, shuffle_scales=shuffle_scales)


def rotate(
    x: Tensor,
    rotation: Tensor | None = None,
    *,
    rotation_size: int | None = None,
    prescale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate blocks of RS channels: ``(x.reshape(M, K / RS, RS) @ R).reshape(x.shape)``.

    Args:
        x: [..., K], bf16, fp16 or float32, K % 32 == 0 and K % RS == 0; strides as in ``quant``.
        rotation: R, [RS, RS] or one per block [K / RS, RS, RS], any floating dtype (rounded once,
            see below), orthogonal or not, symmetric or not. None: the Sylvester Hadamard matrix
            divided by sqrt(RS).
        rotation_size: RS, one of 16, 32, 64, 128, 256. Default: the size of ``rotation``, else 64.
        prescale: [K], multiplied in before the rotation (SmoothQuant scale, random signs).
        out_dtype: dtype of the result; x's by default.

    Returns:
        [..., K] in ``out_dtype``, rounded once from float32, to nearest even.

    Accumulates in float32. Hadamard: butterflies (a + b, a - b) at distances 1, 2, 4, ..., then
    one multiplication by 1/sqrt(RS). The sums come first: one that passes float32's largest value
    is Inf or NaN although the result would be finite. None does while |x * prescale| is at most
    FLT_MAX / RS in a block (5.3e36 for RS 64; any fp16 x without prescale is).

    Matrix on a CPU: R in float32; products and sums rounded to float32 in ascending order of the
    input channel. Matrix on a GPU: R, and x times prescale, are rounded to bf16 first (bf16 x
    without prescale is exact), then multiplied exactly and summed in float32 by the matrix unit.
    Each rounding changes a factor by at most 2^-8 of itself: with |.| taken elementwise,
    ``|y - x @ R| <= 2^-8 * (|x| @ |R|)`` where only R is rounded and twice that where both are,
    plus what float32 sums lose. For an orthogonal R the root mean square of the difference is
    0.17 % of y's (0.24 % for both), against 11.5 % that MXFP4 loses.
    """
    return _ops.rotate(
        x, rotation, rotation_size=rotation_size, prescale=prescale, out_dtype=out_dtype
    )


def rotate_quant(
    x: Tensor,
    rotation: Tensor | None = None,
    *,
    rotation_size: int | None = None,
    prescale: Tensor | None = None,
    scale_mode: ScaleMode = "round_up",
    shuffle_scales: bool = False,
    bf16_intermediate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate and quantise in one pass; arguments and results as in ``rotate`` and ``quant``.

    The rotated float32 value goes straight to the quantiser. For the Hadamard with RS 16, 64 or
    256 the factor 1/sqrt(RS) is a power of two and is taken from the scale exponent instead of
    multiplied. Where a block overflows, see ``rotate``, the groups that it reaches are NaN (byte
    255, codes 0); no other block is affected.

    Args:
        bf16_intermediate: round the rotated value to bf16 first, so that the result equals
            ``quant(rotate(x, ..., out_dtype=torch.bfloat16))`` byte for byte.
    """
    return _ops.rotate_quant(
        x,
        rotation,
        rotation_size=rotation_size,
        prescale=prescale,
        scale_mode=scale_mode,
        shuffle_scales=shuffle_scales,
        bf16_intermediate=bf16_intermediate,
    )


def dequant(
    codes: Tensor,
    scales: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shuffled_scales: bool = False,
) -> Tensor:
    """Values of MXFP4 codes: e2m1(code) * 2^(byte - 127), rounded to ``dtype``.

    Args:
        codes: [..., K / 2].
        scales: [..., K / 32], or with ``shuffled_scales`` [ceil256(M), ceil8(K / 32)].
        dtype: bf16, fp16 or float32.

    Returns:
        [..., K] in ``dtype``: the product rounded to float32, then to ``dtype``, to nearest even.
        Byte 0 is 2^-127 and 255 is NaN; subnormals are kept.
    """
    return _ops.dequant(codes, scales, dtype=dtype, shuffled_scales=shuffled_scales)


def fake_quant(x: Tensor, *, scale_mode: ScaleMode = "round_up") -> Tensor:
    """The values that ``quant`` leaves of x, in its dtype, with the gradient of x itself.

    ``fake_quant(rotate(x, R))`` is what a layer multiplies, and is differentiable in x and R: for
    calibration. A group with a NaN or Inf becomes NaN.

    Args:
        x: [..., K], as in ``quant``.
        scale_mode: as in ``quant``.

    Returns:
        [..., K] in x's dtype.
    """
    return _ops.fake_quant(x, scale_mode=scale_mode)


def shuffle_scales(scales: Tensor, *, gate_mode: GateMode = "separated") -> Tensor:
    """Scales in the order in which the scaled MFMA's lanes read them.

    A tile of 32 rows x 8 groups (K = 256) becomes 256 consecutive bytes; the map is
    ``layouts.scale_offset``. Padding cells are 0, that is 2^-127: with any other value GEMMs that
    read the last partial K step give wrong sums.

    Args:
        scales: [M, G] with G = K / 32, or a stack of experts [E, N, G].
        gate_mode: ``separated`` is the plain map; a stack is shuffled as [E * N, G] and needs
            N % 32 == 0. ``interleave`` is for a fused gate/up weight, rows 0 .. I-1 gate and
            I .. 2I-1 up with I % 16 == 0: 16-row tiles of gate and up alternate.

    Returns:
        separated: [ceil256(rows), ceil8(G)]. interleave: the shape of ``scales`` with ceil8(G).
    """
    return _ops.shuffle_scales(scales, gate_mode=gate_mode)


def unshuffle_scales(
    scales: Tensor, *, rows: int, groups: int, gate_mode: GateMode = "separated"
) -> Tensor:
    """Inverse of ``shuffle_scales``; drops the padding.

    Args:
        scales: what ``shuffle_scales`` returned for [rows, groups] (interleave: or a stack).
        rows: M, or E * N of a separated stack, or 2I.
        groups: G = K / 32.

    Returns:
        [rows, groups], or [E, rows, groups] for an interleaved stack.
    """
    return _ops.unshuffle_scales(scales, rows=rows, groups=groups, gate_mode=gate_mode)


def shuffle_weight(weight: Tensor, *, gate_mode: GateMode = "separated") -> Tensor:
    """Packed weight codes in blocks of 16 rows x 16 bytes, one MFMA operand a lane.

    The map is ``layouts.weight_offset``; experts are shuffled one by one.

    Args:
        weight: [N, K / 2] or [E, N, K / 2], N % 16 == 0, K % 32 == 0 (aiter asks for K % 64 == 0).
        gate_mode: as in ``shuffle_scales``; ``interleave`` needs N % 32 == 0.

    Returns:
        A tensor of the same shape.
    """
    return _ops.shuffle_weight(weight, gate_mode=gate_mode)


def unshuffle_weight(weight: Tensor, *, gate_mode: GateMode = "separated") -> Tensor:
    """Inverse of ``shuffle_weight``."""
    return _ops.unshuffle_weight(weight, gate_mode=gate_mode)


def gemm_a4w4(
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    bias: Tensor | None = None,
    *,
    n: int | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: int = -1,
) -> Tensor:
    """``a @ b.T + bias`` of MXFP4 activations and weights, both as ``quant`` returns them.

    Args:
        a: codes [..., K / 2], K % 32 == 0, any M.
        b: codes [N16, K / 2] in the order of ``shuffle_weight``, N16 % 16 == 0.
        a_scales: [ceil256(M), ceil8(K / 32)], shuffled.
        b_scales: [ceil256(N16), ceil8(K / 32)], shuffled.
        bias: [n], any floating dtype; added in float32.
        n: how many rows of ``b`` are real; the rest, 15 at most, are padding. Default: N16.
        out_dtype: bf16, fp16 or float32.
        config: index into ``gemm_configs()``; -1 picks one by M, N and K. The CPU has no use for
            it beyond the check.

    Returns:
        [..., n] in ``out_dtype``, rounded once, to nearest even.

    Products are exact and scaled by 2^(a_scale + b_scale - 254); sums are float32; the bias is
    added to the whole sum. On a CPU a
    group of 32 products is summed exactly and rounded once, then the groups are added in ascending
    order, so that the result is the same on every machine. On a GPU the matrix unit adds; its
    order depends on the configuration, but the same call gives the same bytes again.

    A scale byte of 255 is NaN and makes its row or column of the result NaN. Padding rows, columns
    and groups of scales and weights can hold anything. Shuffled scales cannot be told from natural
    ones of the same shape, so a mix-up is only noticed where padding makes the shapes differ.
    """
    return _ops.gemm_a4w4(a, b, a_scales, b_scales, bias, n=n, out_dtype=out_dtype, config=config)


def gemm_configs() -> tuple[str, ...]:
    """Names of the tile configurations of ``gemm_a4w4``; ``config`` is an index into them."""
    return tuple(_ops._gemm_configs())
