# SPDX-License-Identifier: MIT
"""Fake kernels of the mixture-of-experts ops; see fake.py for what they may do and may not."""

from __future__ import annotations

import torch
from torch import Tensor

from rotquant_hip.fake import _bytes, _check_devices, _round_up


def max_rows(routes, experts, block_m: int):
    """Rows of a sorting: what the worst routing needs. The twin of moe_max_rows in core/moe.h."""
    active = torch.sym_min(experts, routes)  # not `min`, which would compare and so guard
    return block_m * (active + (routes - active) // block_m)


def _scales(like: Tensor, rows, channels) -> Tensor:
    """Shuffled scales of sorted rows."""
    return _bytes(like, _round_up(rows, 32), _round_up(channels // 32, 8))


def _sorting(topk_ids, topk_weights, num_experts, block_m, expert_mask, num_local_experts):
    _check_devices(topk_ids, topk_weights=topk_weights, expert_mask=expert_mask)
    if topk_ids.dim() != 2:
        raise RuntimeError(f"topk_ids: expected shape [M, topk], got {tuple(topk_ids.shape)}")
    routes = topk_ids.shape[0] * topk_ids.shape[1]
    rows = max_rows(
        routes, num_experts if num_local_experts is None else num_local_experts, block_m
    )

    def made(size, dtype=torch.int32):
        return torch.empty(size, dtype=dtype, device=topk_ids.device)

    return made(rows), made(rows, torch.float32), made(rows // block_m), made(2), made(routes)


@torch.library.register_fake("rotquant_hip::moe_sort")
def _(
    topk_ids,
    topk_weights,
    *,
    num_experts,
    block_m,
    expert_mask=None,
    num_local_experts=None,
):
    return _sorting(topk_ids, topk_weights, num_experts, block_m, expert_mask, num_local_experts)


@torch.library.register_fake("rotquant_hip::moe_sort_zero_")
def _(
    zero,
    topk_ids,
    topk_weights,
    *,
    num_experts,
    block_m,
    expert_mask=None,
    num_local_experts=None,
):
    _check_devices(topk_ids, zero=zero)
    return _sorting(topk_ids, topk_weights, num_experts, block_m, expert_mask, num_local_experts)


@torch.library.register_fake("rotquant_hip::moe_rotate_quant")
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
    _check_devices(x, sorted_ids=sorted_ids, rotation=rotation, prescale=prescale)
    codes = _bytes(x, x.shape[0], x.shape[1] // 2)
    return codes, _scales(x, sorted_ids.shape[0], x.shape[1])


@torch.library.register_fake("rotquant_hip::moe_sort_scales")
def _(scales, sorted_ids, num_valid, *, topk, by_route=False):
    _check_devices(scales, sorted_ids=sorted_ids)
    return _scales(scales, sorted_ids.shape[0], 32 * scales.shape[-1])


@torch.library.register_fake("rotquant_hip::moe_gemm1")
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
    _check_devices(a, w1=w1, w1_scale=w1_scale, sorted_ids=sorted_ids, bias=bias)
    rows, inter = sorted_ids.shape[0], w1.shape[1] // 2
    return _bytes(a, rows, inter // 2), _scales(a, rows, inter)


@torch.library.register_fake("rotquant_hip::moe_gemm2")
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
    _check_devices(a, w2=w2, w2_scale=w2_scale, sorted_ids=sorted_ids, bias=bias)
    return torch.empty((tokens * topk, w2.shape[1]), dtype=out_dtype, device=a.device)


@torch.library.register_fake("rotquant_hip::moe_gemm2_mxfp4")
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
    _check_devices(a, w2=w2, w2_scale=w2_scale, sorted_ids=sorted_ids, bias=bias)
    routes, hidden = tokens * topk, w2.shape[1]
    return _bytes(a, routes, hidden // 2), _bytes(a, routes, hidden // 32)


@torch.library.register_fake("rotquant_hip::moe_gemm2_atomic_")
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
    _check_devices(a, out=out, w2=w2, w2_scale=w2_scale, sorted_ids=sorted_ids, bias=bias)


@torch.library.register_fake("rotquant_hip::moe_reduce")
def _(rows, topk_weights, reverse_sorted, *, scales=None, shared=None, out_dtype=None):
    _check_devices(rows, topk_weights=topk_weights, scales=scales, shared=shared)
    tokens = next(t.shape[0] for t in (topk_weights, shared, rows) if t is not None)
    hidden, dtype = rows.shape[-1], rows.dtype
    if scales is not None:
        hidden, dtype = 2 * hidden, torch.bfloat16
    dtype = out_dtype or (dtype if shared is None else shared.dtype)
    return torch.empty((tokens, hidden), dtype=dtype, device=rows.device)


def _fused_moe(
    x,
    w1,
    w2,
    topk_weights,
    topk_ids,
    *,
    w1_scale,
    w2_scale,
    w1_bias=None,
    w2_bias=None,
    rotation=None,
    prescale=None,
    inter_rotation=None,
    inter_prescale=None,
    expert_mask=None,
    shared=None,
    out_dtype=None,
    **options,
):
    _check_devices(
        x,
        w1=w1,
        w2=w2,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        rotation=rotation,
        prescale=prescale,
        inter_rotation=inter_rotation,
        inter_prescale=inter_prescale,
        expert_mask=expert_mask,
        shared=shared,
    )
    return torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)


torch.library.register_fake("rotquant_hip::fused_moe", _fused_moe)
torch.library.register_fake("rotquant_hip::_fused_moe", _fused_moe)
