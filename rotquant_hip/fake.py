# SPDX-License-Identifier: MIT
"""Fake kernels: shape, stride and dtype of every op's result, for torch.compile and torch.export.

Only what the shapes depend on; the real kernels check the rest. Except the device: a meta tensor
among the arguments brings the call here, whatever x is. Kept free of data: nothing here may make a
guard out of M.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _round_up(n, unit: int):
    return (n + unit - 1) // unit * unit


def _rows(x: Tensor):
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def _bytes(like: Tensor, *sizes) -> Tensor:
    return torch.empty(sizes, dtype=torch.uint8, device=like.device)


def _check_devices(x: Tensor, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(
                f"{name}: expected device {x.device}, the one of the first argument, "
                f"got {tensor.device}"
            )


def _quantised(x: Tensor, shuffle_scales: bool) -> tuple[Tensor, Tensor]:
    groups = x.shape[-1] // 32
    codes = _bytes(x, *x.shape[:-1], x.shape[-1] // 2)
    if shuffle_scales:
        return codes, _bytes(x, _round_up(_rows(x), 256), _round_up(groups, 8))
    return codes, _bytes(x, *x.shape[:-1], groups)


@torch.library.register_fake("rotquant_hip::quant")
def _(x, *, scale_mode="round_up", shuffle_scales=False):
    return _quantised(x, shuffle_scales)


@torch.library.register_fake("rotquant_hip::rotate")
def _(x, rotation=None, *, rotation_size=None, prescale=None, out_dtype=None):
    _check_devices(x, rotation=rotation, prescale=prescale)
    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)


@torch.library.register_fake("rotquant_hip::rotate_quant")
def _(
    x,
    rotation=None,
    *,
    rotation_size=None,
    prescale=None,
    scale_mode="round_up",
    shuffle_scales=False,
    bf16_intermediate=False,
):
    _check_devices(x, rotation=rotation, prescale=prescale)
    return _quantised(x, shuffle_scales)


@torch.library.register_fake("rotquant_hip::dequant")
def _(codes, scales, *, dtype=torch.bfloat16, shuffled_scales=False):
    _check_devices(codes, scales=scales)
    return torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=dtype, device=codes.device)


@torch.library.register_fake("rotquant_hip::shuffle_scales")
def _(scales, *, gate_mode="separated"):
    groups = _round_up(scales.shape[-1], 8)
    if gate_mode == "interleave":
        return _bytes(scales, *scales.shape[:-1], groups)
    return _bytes(scales, _round_up(_rows(scales), 256), groups)


@torch.library.register_fake("rotquant_hip::unshuffle_scales")
def _(scales, *, rows, groups, gate_mode="separated"):
    stack = scales.shape[:-2] if gate_mode == "interleave" else ()
    return _bytes(scales, *stack, rows, groups)


@torch.library.register_fake("rotquant_hip::shuffle_weight")
def _(weight, *, gate_mode="separated"):
    return _bytes(weight, *weight.shape)


@torch.library.register_fake("rotquant_hip::unshuffle_weight")
def _(weight, *, gate_mode="separated"):
    return _bytes(weight, *weight.shape)


@torch.library.register_fake("rotquant_hip::gemm_a4w4")
def _(a, b, a_scales, b_scales, bias=None, *, n=None, out_dtype=torch.bfloat16, config=-1):
    _check_devices(a, b=b, a_scales=a_scales, b_scales=b_scales, bias=bias)
    columns = b.shape[0] if n is None else n
    return torch.empty((*a.shape[:-1], columns), dtype=out_dtype, device=a.device)
