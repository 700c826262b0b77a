# SPDX-License-Identifier: MIT
"""Fake kernels of the mixture-of-experts ops; see fake.py for what they may do and may not."""

from __future__ import annotations

import torch
from torch import Tensor

from rotquant_hip.fake import _bytes, _round_up, check, register_fake


def max_rows(routes, experts, block_m: int):
    """Rows of a sorting: what the worst routing needs. The twin of moe_max_rows in core/moe.h."""
    active = torch.sym_min(experts, routes)  # not `min`, which would compare and so guard
    return block_m * (active + (routes - active) // block_m)


def _scales(like: Tensor, rows, channels) -> Tensor:
    """Shuffled scales of sorted rows."""
    return _bytes(like, _round_up(rows, 32), _round_up(channels // 32, 8))


def _sorting(topk_ids, num_experts, block_m, num_local_experts):
    routes = topk_ids.shape[0] * topk_ids.shape[1]
    rows = max_rows(
        routes, num_experts if num_local_experts is None else num_local_experts, block_m
    )

    def made(size, dtype=torch.int32):
        return torch.empty(size, dtype=dtype, device=topk_ids.device)

    return made(rows), made(rows, torch.float32), made(rows // block_m), made(2), made(routes)


@register_fake("moe_sort")
def _(
    topk_ids,
    topk_weights,
    *,
    num_experts,
    block_m,
    expert_mask=None,
    expert_map=None,
    num_local_experts=None,
):
    return _sorting(topk_ids, num_experts, block_m, num_local_experts)


@register_fake("moe_sort_zero_")
def _(
    zero,
    topk_ids,
    topk_weights,
    *,
    num_experts,
    block_m,
    expert_mask=None,
    expert_map=None,
    num_local_experts=None,
):
    return _sorting(topk_ids, num_experts, block_m, num_local_experts)


@register_fake("moe_rotate_quant")
def _(
    x,
    sorted_ids,
    num_valid,
    reverse_sorted,
    rotation=None,
    *,
    rotation_size=None,
    prescale=None,
    scale_mode="round_up",
    bf16_intermediate=False,
):
    codes = _bytes(x, x.shape[0], x.shape[1] // 2)
    return codes, _scales(x, sorted_ids.shape[0], x.shape[1])


@register_fake("moe_sort_scales")
def _(scales, sorted_ids, num_valid, *, topk, by_route=False):
    return _scales(scales, sorted_ids.shape[0], 32 * scales.shape[-1])


@register_fake("moe_gemm1")
def _(
    a,
    w1,
    w1_scale,
    sorted_ids,
    sorted_weights,
    sorted_expert_ids,
    num_valid,
    *,
    a_scales=None,
    bias=None,
    topk,
    activation="silu",
    limit=None,
    alpha=1.702,
    gate_mode="separated",
    apply_weight=False,
    rotation=None,
    rotation_size=0,
    prescale=None,
    inter_rotation=None,
    inter_rotation_size=0,
    inter_prescale=None,
    scale_mode="round_up",
    config=-1,
):
    rows, inter = sorted_ids.shape[0], w1.shape[1] // 2
    return _bytes(a, rows, inter // 2), _scales(a, rows, inter)


@register_fake("moe_gemm2")
def _(
    a,
    a_scales,
    w2,
    w2_scale,
    sorted_ids,
    sorted_expert_ids,
    num_valid,
    *,
    tokens,
    topk,
    bias=None,
    out_dtype=torch.bfloat16,
    config=-1,
):
    return torch.empty((tokens * topk, w2.shape[1]), dtype=out_dtype, device=a.device)


@register_fake("moe_gemm2_mxfp4")
def _(
    a,
    a_scales,
    w2,
    w2_scale,
    sorted_ids,
    sorted_expert_ids,
    num_valid,
    *,
    tokens,
    topk,
    bias=None,
    config=-1,
):
    routes, hidden = tokens * topk, w2.shape[1]
    return _bytes(a, routes, hidden // 2), _bytes(a, routes, hidden // 32)


@register_fake("moe_gemm2_atomic_")
def _(
    out,
    a,
    a_scales,
    w2,
    w2_scale,
    sorted_ids,
    sorted_weights,
    sorted_expert_ids,
    num_valid,
    *,
    topk,
    bias=None,
    config=-1,
):
    return None


@register_fake("moe_reduce")
def _(rows, topk_weights, reverse_sorted, *, scales=None, shared=None, out_dtype=None):
    tokens = next(t.shape[0] for t in (topk_weights, shared, rows) if t is not None)
    hidden, dtype = rows.shape[-1], rows.dtype
    if scales is not None:
        hidden, dtype = 2 * hidden, torch.bfloat16
    dtype = out_dtype or (dtype if shared is None else shared.dtype)
    return torch.empty((tokens, hidden), dtype=dtype, device=rows.device)


def _check_fused_moe(**arguments):
    """By a pipeline that takes every call; which one it will be is not known before it runs."""
    chosen = {"pipeline": "staged_reduce", "block_m": 32, "gemm1_config": -1, "gemm2_config": -1}
    for name in ("deterministic", "fp4_intermediate"):
        arguments.pop(name, None)
    check(torch.ops.rotquant_hip._fused_moe.default, chosen | arguments)


@register_fake("fused_moe", checked_by=_check_fused_moe)
@register_fake("_fused_moe")
def _(x, w1, w2, topk_weights, topk_ids, *, out_dtype=None, **options):
    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
