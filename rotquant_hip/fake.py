# SPDX-License-Identifier: MIT
"""Fake kernels: shape, stride and dtype of every op's result, for torch.compile and torch.export.

A fake refuses what the op refuses, in the same words, wherever every size is a number: the CPU op
itself checks meta tensors of those sizes, and runs nothing. Symbolic sizes are not looked at, so
that nothing here makes a guard out of M. Kept free of data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def register_fake(name: str, checked_by: Callable[..., None] | None = None) -> Callable:
    """Decorates the shape law of an op. ``checked_by`` takes its arguments and raises."""

    def register(shape_law: Callable) -> Callable:
        op = getattr(torch.ops.rotquant_hip, name).default
        names = [argument.name for argument in op._schema.arguments]

        def fake(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            _check_devices(arguments)
            if all(type(size) is int for size in _sizes(arguments)):
                # NOTE: below FakeTensorMode, where a meta tensor is just that.
                with torch._C._DisableTorchDispatch():
                    on_meta = {key: _on_meta(value) for key, value in arguments.items()}
                    if checked_by is None:
                        check(op, on_meta)
                    else:
                        checked_by(**on_meta)
            return shape_law(*args, **kwargs)

        torch.library.register_fake(f"rotquant_hip::{name}", fake)
        return shape_law

    return register


def check(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> None:
    """Raises what the op raises on a CPU; the arguments' tensors are on meta."""
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    args = [arguments[name] for name in positional if name in arguments]
    rest = {name: value for name, value in arguments.items() if name not in positional}
    op.redispatch(_CPU, *args, **rest)


def _sizes(arguments: dict[str, Any]) -> Iterator[object]:
    for value in arguments.values():
        if isinstance(value, Tensor):
            yield from value.shape
            yield from value.stride()
        elif isinstance(value, torch.SymInt | torch.SymFloat):
            yield value


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _check_devices(arguments: dict[str, Any]) -> None:
    # A meta tensor among the arguments brings the call here, whatever the first one is.
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise RuntimeError(
                f"{name}: expected device {first.device}, the one of the first argument, "
                f"got {tensor.device}"
            )


def _round_up(n, unit: int):
    return (n + unit - 1) // unit * unit


def _rows(x: Tensor):
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def _bytes(like: Tensor, *sizes) -> Tensor:
    return torch.empty(sizes, dtype=torch.uint8, device=like.device)


def _quantised(x: Tensor, shuffle_scales: bool) -> tuple[Tensor, Tensor]:
    groups = x.shape[-1] // 32
    codes = _bytes(x, *x.shape[:-1], x.shape[-1] // 2)
    if shuffle_scales:
        return codes, _bytes(x, _round_up(_rows(x), 256), _round_up(groups, 8))
    return codes, _bytes(x, *x.shape[:-1], groups)


@register_fake("quant")
def _(x, *, scale_mode="round_up", shuffle_scales=False):
    return _quantised(x, shuffle_scales)


@register_fake("rotate")
def _(x, rotation=None, *, rotation_size=None, prescale=None, out_dtype=None):
    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)


@register_fake("rotate_quant")
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
    return _quantised(x, shuffle_scales)


@register_fake("dequant")
def _(codes, scales, *, dtype=torch.bfloat16, shuffled_scales=False):
    return torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=dtype, device=codes.device)


@register_fake("shuffle_scales")
def _(scales, *, gate_mode="separated"):
    groups = _round_up(scales.shape[-1], 8)
    if gate_mode == "interleave":
        return _bytes(scales, *scales.shape[:-1], groups)
    return _bytes(scales, _round_up(_rows(scales), 256), groups)


@register_fake("unshuffle_scales")
def _(scales, *, rows, groups, gate_mode="separated"):
    stack = scales.shape[:-2] if gate_mode == "interleave" else ()
    return _bytes(scales, *stack, rows, groups)


@register_fake("shuffle_weight")
def _(weight, *, gate_mode="separated"):
    return _bytes(weight, *weight.shape)


@register_fake("unshuffle_weight")
def _(weight, *, gate_mode="separated"):
    return _bytes(weight, *weight.shape)


@register_fake("gemm_a4w4")
def _(a, b, a_scales, b_scales, bias=None, *, n=None, out_dtype=torch.bfloat16, config=-1):
    columns = b.shape[0] if n is None else n
    return torch.empty((*a.shape[:-1], columns), dtype=out_dtype, device=a.device)
