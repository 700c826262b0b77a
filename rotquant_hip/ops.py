# SPDX-License-Identifier: MIT
"""The ops of ``torch.ops.rotquant_hip`` with types and documentation.

Shapes: ``M`` is the product of the leading dimensions, ``K`` the last dimension, ``RS`` the
rotation size. ``codes`` and ``scales`` are uint8: two e2m1 codes a byte (element 2i in the low
nibble of byte i) and one e8m0 byte, value 2^(byte - 127), per group of 32 along K. A library that
wants torch's own dtypes takes a view: ``codes.view(torch.float4_e2m1fn_x2)``,
``scales.view(torch.float8_e8m0fnu)``; both are accepted here wherever codes or scales go in.

Every op raises ``RuntimeError`` before anything is written if an argument does not fit; the
message names the argument, what was expected and what came. No op mutates or aliases its
arguments, none has a gradient, and all outputs are contiguous.
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
    codes 0, and no other group is affected. Tiny groups clamp at byte 0 (2^-127).
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
        rotation: R, [RS, RS] or one per block [K / RS, RS, RS], any floating dtype (rounded to
            float32 once), orthogonal or not, symmetric or not. None: the Sylvester Hadamard matrix
            divided by sqrt(RS).
        rotation_size: RS, one of 16, 32, 64, 128, 256. Default: the size of ``rotation``, else 64.
        prescale: [K], multiplied in before the rotation (SmoothQuant scale, random signs).
        out_dtype: dtype of the result; x's by default.

    Returns:
        [..., K] in ``out_dtype``, rounded once from float32, to nearest even.

    Accumulates in float32. Hadamard: butterflies (a + b, a - b) at distances 1, 2, 4, ..., then
    one multiplication by 1/sqrt(RS). Matrix: products and sums rounded to float32 in ascending
    order of the input channel on a CPU; on a GPU a float32 matrix product.
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
    multiplied.

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
        [..., K] in ``dtype``. Byte 0 is 2^-127 and 255 is NaN.
    """
    return _ops.dequant(codes, scales, dtype=dtype, shuffled_scales=shuffled_scales)


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
