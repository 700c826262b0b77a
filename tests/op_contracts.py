# SPDX-License-Identifier: MIT
"""What each public op takes, written a second time: as predicates over its arguments.

A contract has the parameters of its op and raises Refused where the documentation says error. It
looks at dtypes, shapes and options, and at values only where the documentation does.
"""

from __future__ import annotations

from math import isfinite, prod

import torch
from torch import Tensor

from rotquant_hip import (
    MoeSorting,
    dispatch,
    gemm_configs,
    moe_gemm1_configs,
    moe_gemm2_configs,
)
from rotquant_hip.reference import GROUP, ROTATION_SIZES, SCALE_MODES
from rotquant_hip.reference_moe import ACTIVATIONS, BLOCK_M, MAX_EXPERTS, MAX_TOPK

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BYTES = (torch.uint8, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)


class Refused(Exception):
    """The call is an error."""


def need(condition: object) -> None:
    if not condition:
        raise Refused


def up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def floating(t: Tensor) -> bool:
    return t.is_floating_point() and t.dtype != torch.float4_e2m1fn_x2


def one_device(*tensors: Tensor | None) -> None:
    need(len({t.device for t in tensors if t is not None}) <= 1)


def activation(x: Tensor) -> int:
    """K of [..., K]."""
    need(x.dtype in FLOATS and x.dim() >= 1 and x.shape[-1] % GROUP == 0)
    return x.shape[-1]


def rotated(x, k, rotation, size, prescale, *, or_none=False, largest=256) -> int:
    """RS; 0 without a rotation."""
    one_device(x, rotation, prescale)
    if rotation is not None:
        need(floating(rotation) and rotation.dim() in (2, 3))
        need(rotation.shape[-1] == rotation.shape[-2])
        need(size is None or size == rotation.shape[-1])
        size = rotation.shape[-1]
    elif size is None:
        size = 64
    elif size == 0 and or_none:
        need(prescale is None)
        return 0
    need(size in ROTATION_SIZES and size <= largest and k % size == 0)
    need(rotation is None or rotation.dim() == 2 or rotation.shape[0] == k // size)
    if prescale is not None:
        need(floating(prescale) and prescale.shape == (k,))
    return size


def quant(x, *, scale_mode="round_up", shuffle_scales=False):
    activation(x)
    need(scale_mode in SCALE_MODES)


def rotate(x, rotation=None, *, rotation_size=None, prescale=None, out_dtype=None):
    rotated(x, activation(x), rotation, rotation_size, prescale)
    need(out_dtype is None or out_dtype in FLOATS)


def rotate_quant(
    x,
    rotation=None,
    *,
    rotation_size=None,
    prescale=None,
    scale_mode="round_up",
    shuffle_scales=False,
    bf16_intermediate=False,
):
    rotated(x, activation(x), rotation, rotation_size, prescale)
    need(scale_mode in SCALE_MODES)


def dequant(codes, scales, *, dtype=torch.bfloat16, shuffled_scales=False):
    one_device(codes, scales)
    need(codes.dtype in BYTES and scales.dtype in BYTES and dtype in FLOATS)
    need(codes.dim() >= 1 and codes.shape[-1] % 16 == 0)
    *leading, groups = *codes.shape[:-1], codes.shape[-1] // 16
    shuffled = (up(prod(leading), 256), up(groups, 8))
    need(scales.shape == (shuffled if shuffled_scales else (*leading, groups)))


def gated(gate_mode, rows) -> bool:
    need(gate_mode in ("separated", "interleave"))
    need(gate_mode == "separated" or rows % 32 == 0)
    return gate_mode == "interleave"


def shuffle_scales(scales, *, gate_mode="separated"):
    need(scales.dtype in BYTES and scales.dim() in (2, 3))
    if not gated(gate_mode, scales.shape[-2]):
        need(scales.dim() == 2 or scales.shape[1] % 32 == 0)


def unshuffle_scales(scales, *, rows, groups, gate_mode="separated"):
    need(scales.dtype in BYTES and rows >= 0 and groups >= 0)
    if gated(gate_mode, rows):
        need(scales.dim() in (2, 3) and scales.shape[-2:] == (rows, up(groups, 8)))
    else:
        need(scales.shape == (up(rows, 256), up(groups, 8)))


def shuffle_weight(weight, *, gate_mode="separated"):
    need(weight.dtype in BYTES and weight.dim() in (2, 3))
    need(weight.shape[-2] % 16 == 0 and weight.shape[-1] % 16 == 0)
    gated(gate_mode, weight.shape[-2])


unshuffle_weight = shuffle_weight


def gemm_a4w4(a, b, a_scales, b_scales, bias=None, *, n=None, out_dtype=torch.bfloat16, config=-1):
    one_device(a, b, a_scales, b_scales, bias)
    need(all(t.dtype in BYTES for t in (a, b, a_scales, b_scales)) and out_dtype in FLOATS)
    need(a.dim() >= 1 and a.shape[-1] % 16 == 0)
    need(b.dim() == 2 and b.shape[1] == a.shape[-1] and b.shape[0] % 16 == 0)
    n = b.shape[0] if n is None else n
    need(n >= 0 and up(n, 16) == b.shape[0])
    groups = up(a.shape[-1] // 16, 8)
    need(a_scales.shape == (up(prod(a.shape[:-1]), 256), groups))
    need(b_scales.shape == (up(b.shape[0], 256), groups))
    need(bias is None or (floating(bias) and bias.shape == (n,)))
    need(-1 <= config < len(gemm_configs()))


# --- mixture of experts ---------------------------------------------------------------------------


def routes(topk_ids, topk_weights) -> tuple[int, int]:
    one_device(topk_ids, topk_weights)
    need(topk_ids.dtype in (torch.int32, torch.int64) and topk_ids.dim() == 2)
    need(floating(topk_weights) and topk_weights.shape == topk_ids.shape)
    tokens, topk = topk_ids.shape
    need(topk <= MAX_TOPK and tokens < 1 << 24)
    return tokens, topk


def ownership(topk_ids, mask, map_, experts, local=None) -> None:
    """expert_mask and expert_map of `experts`, of which `local` are here; None: any number."""
    one_device(topk_ids, mask, map_)
    need(mask is None or map_ is None)
    if mask is not None:
        whole = not (floating(mask) or mask.is_complex())
        need(whole and mask.shape == (experts,))
        if mask.device.type != "meta":
            need(((mask == 0) | (mask == 1)).all() and local in (None, mask.sum()))
        need(local is None or experts >= local)
    if map_ is not None:
        need(map_.dtype in (torch.int32, torch.int64) and map_.shape == (experts,))


def moe_sort(
    topk_ids,
    topk_weights,
    *,
    num_experts,
    block_m,
    expert_mask=None,
    expert_map=None,
    num_local_experts=None,
):
    routes(topk_ids, topk_weights)
    need(1 <= num_experts <= MAX_EXPERTS and block_m in BLOCK_M)
    local = num_experts if num_local_experts is None else num_local_experts
    need(0 <= local <= num_experts)
    ownership(topk_ids, expert_mask, expert_map, num_experts)


def moe_sort_zero_(zero, topk_ids, topk_weights, **options):
    one_device(zero, topk_ids)
    need(zero.is_contiguous())
    moe_sort(topk_ids, topk_weights, **options)


def sorting_of(x: Tensor, s: MoeSorting, tokens: int, topk: int, *others: str) -> int:
    """max_rows of a sorting of so many tokens. An op looks at what it reads only."""
    read = [getattr(s, name) for name in ("sorted_ids", "num_valid", *others)]
    one_device(x, *read)
    need(all(t.dim() == 1 for t in read))
    weights = [t is s.sorted_weights for t in read]
    need(all((t.dtype == torch.float32) == w for t, w in zip(read, weights, strict=True)))
    need(all(w or t.dtype == torch.int32 for t, w in zip(read, weights, strict=True)))
    rows = s.sorted_ids.shape[0]
    need(rows % 16 == 0 and (tokens or not rows) and s.num_valid.shape == (2,))
    need("sorted_weights" not in others or s.sorted_weights.shape == (rows,))
    need(1 <= topk <= MAX_TOPK and 0 <= tokens < 1 << 24)
    return rows


def block_of(s: MoeSorting) -> int:
    """block_m as the GEMMs see it, which do not look at the number of that name."""
    rows, blocks = s.sorted_ids.shape[0], s.sorted_expert_ids.shape[0]
    need(rows == 0 or (blocks and rows % blocks == 0 and rows // blocks in BLOCK_M))
    need(rows or not blocks)
    return rows // blocks if blocks else 0


def configured(config: int, names: tuple[str, ...], block_m: int, **kind: object) -> None:
    """`config` is -1 or one of these, and for such a block if there is any."""
    need(-1 <= config < len(names))
    if config >= 0 and block_m:
        stage, rows, columns = dispatch._tile(names[config])
        need(rows == block_m)
        need((stage == "inline") == kind.get("inline", False))
        need(columns // 2 >= kind.get("rotation", 0))


def moe_rotate_quant(
    x,
    sorting,
    rotation=None,
    *,
    rotation_size=None,
    prescale=None,
    scale_mode="round_up",
    bf16_intermediate=False,
):
    need(x.dim() == 2)
    rotated(x, activation(x), rotation, rotation_size, prescale, or_none=True)
    need(scale_mode in SCALE_MODES and sorting.reverse_sorted.dim() == 1)
    tokens, routes = x.shape[0], sorting.reverse_sorted.numel()
    need(routes == 0 or (tokens and routes % tokens == 0))
    sorting_of(x, sorting, tokens, routes // tokens if tokens else 1, "reverse_sorted")


def moe_sort_scales(scales, sorting, *, by_route=False):
    need(scales.dtype in BYTES and scales.dim() == 2)
    need(1 <= sorting.topk <= MAX_TOPK)
    need(not by_route or scales.shape[0] % sorting.topk == 0)
    tokens = scales.shape[0] // (sorting.topk if by_route else 1)
    sorting_of(scales, sorting, tokens, sorting.topk)


def experts_of(a, w, scales, bias, rows_unit, k) -> tuple[int, int]:
    """E and N of codes [E, N, K / 2] with their scales and bias."""
    one_device(a, w, scales, bias)
    need(w.dtype in BYTES and scales.dtype in BYTES and w.dim() == 3)
    experts, rows, row_bytes = w.shape
    need(row_bytes == k // 2 and rows > 0 and rows % rows_unit == 0)
    need(experts <= MAX_EXPERTS and scales.dim() >= 2)
    held = prod(scales.shape[:-1])
    need(held in (experts * rows, up(experts * rows, 256)))
    need(scales.shape[-1] == up(k // GROUP, 8))
    if bias is not None:
        need(floating(bias) and bias.shape == (experts, rows))
    return experts, rows


def gate(name, limit, alpha) -> None:
    need(name in ACTIVATIONS)
    need(name != "swiglu" or limit is not None)
    need(limit is None or limit > 0)
    need(isfinite(alpha))


def between_gemms(x, inter, rotation, size, prescale, scale_mode) -> int:
    need(scale_mode in SCALE_MODES and scale_mode != "mse")
    size = None if rotation is not None and size == 0 else size
    return rotated(x, inter, rotation, size, prescale, or_none=True, largest=128)


def moe_gemm1(
    a,
    w1,
    w1_scale,
    sorting,
    *,
    a_scales=None,
    bias=None,
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
    need(a.dim() == 2)
    read = ("sorted_weights", "sorted_expert_ids")
    rows = sorting_of(a, sorting, a.shape[0], sorting.topk, *read)
    if a_scales is None:
        need(a.dtype in (torch.bfloat16, torch.float16))
        k = a.shape[1]
        size = None if rotation is not None and rotation_size == 0 else rotation_size
        rotated(a, k, rotation, size, prescale, or_none=True)
        need(rows == 0 or block_of(sorting) == 16)
    else:
        need(a.dtype in BYTES and a_scales.dtype in BYTES)
        one_device(a, a_scales)
        k = 2 * a.shape[1]
        need(a_scales.shape == (up(rows, 32), up(k // GROUP, 8)))
        need(rotation is None and rotation_size == 0 and prescale is None)
    need(k > 0 and k % GROUP == 0)
    _, n = experts_of(a, w1, w1_scale, bias, 2 * GROUP, k)
    need(gate_mode in ("separated", "interleave"))
    gate(activation, limit, alpha)
    between = between_gemms(
        a, n // 2, inter_rotation, inter_rotation_size, inter_prescale, scale_mode
    )
    inline = {"inline": a_scales is None, "rotation": between}
    configured(config, moe_gemm1_configs(), block_of(sorting), **inline)


def moe_gemm2(
    a, a_scales, w2, w2_scale, sorting, *, tokens, bias=None, out_dtype=torch.bfloat16, config=-1
):
    need(tokens >= 0 and out_dtype in FLOATS)
    rows = sorting_of(a, sorting, tokens, sorting.topk, "sorted_expert_ids")
    need(a.dtype in BYTES and a.dim() == 2 and a.shape[0] == rows)
    k = 2 * a.shape[1]
    need(k > 0 and k % GROUP == 0)
    one_device(a, a_scales)
    need(a_scales.dtype in BYTES and a_scales.shape == (up(rows, 32), up(k // GROUP, 8)))
    experts_of(a, w2, w2_scale, bias, GROUP, k)
    configured(config, moe_gemm2_configs(), block_of(sorting))


moe_gemm2_mxfp4 = moe_gemm2


def moe_gemm2_atomic_(
    out, a, a_scales, w2, w2_scale, sorting, *, apply_weight=True, bias=None, config=-1
):
    one_device(out, a)
    if apply_weight:
        sorting_of(a, sorting, out.shape[0], sorting.topk, "sorted_weights")
    need(out.dim() == 2 and out.dtype in FLOATS and out.is_contiguous())
    need(out.is_meta or out.data_ptr() % 4 == 0)
    need(w2.dim() == 3 and out.shape[1] == w2.shape[1])
    moe_gemm2(a, a_scales, w2, w2_scale, sorting, tokens=out.shape[0], bias=bias, config=config)


def moe_reduce(rows, topk_weights, sorting, *, scales=None, shared=None, out_dtype=None):
    one_device(rows, topk_weights, sorting.reverse_sorted, scales, shared)
    need(rows.dim() == 2 and 1 <= sorting.topk <= MAX_TOPK and rows.shape[0] % sorting.topk == 0)
    routes, hidden = rows.shape[0], rows.shape[1] * (1 if scales is None else 2)
    tokens = routes // sorting.topk
    need(hidden > 0 and hidden % GROUP == 0)
    need(sorting.reverse_sorted.dtype == torch.int32 and sorting.reverse_sorted.shape == (routes,))
    if scales is None:
        need(rows.dtype in FLOATS)
    else:
        need(rows.dtype in BYTES and scales.dtype in BYTES)
        need(scales.dim() >= 2 and prod(scales.shape[:-1]) == routes)
        need(scales.shape[-1] == hidden // GROUP)
    if topk_weights is not None:
        need(floating(topk_weights) and topk_weights.shape == (tokens, sorting.topk))
    default = torch.bfloat16 if scales is not None else rows.dtype
    dtype = out_dtype or (default if shared is None else shared.dtype)
    need(dtype in FLOATS)
    need(shared is None or (shared.dtype == dtype and shared.shape == (tokens, hidden)))


def fused_moe(
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
    activation="silu",
    limit=None,
    alpha=1.702,
    gate_mode="separated",
    rotation=None,
    rotation_size=0,
    prescale=None,
    inter_rotation=None,
    inter_rotation_size=0,
    inter_prescale=None,
    scale_mode="round_up",
    expert_mask=None,
    expert_map=None,
    apply_weight_on_input=False,
    num_shared_experts=0,
    shared_weight=1.0,
    shared=None,
    deterministic=False,
    fp4_intermediate=False,
    out_dtype=None,
):
    tokens, topk = routes(topk_ids, topk_weights)
    need(x.dtype in FLOATS and x.dim() == 2 and x.shape[0] == tokens and x.shape[1] > 0)
    hidden = x.shape[1]
    need(hidden % GROUP == 0 and topk + num_shared_experts <= MAX_TOPK)
    one_device(x, topk_ids, shared)
    experts, rows = experts_of(x, w1, w1_scale, w1_bias, 2 * GROUP, hidden)
    need(experts_of(x, w2, w2_scale, w2_bias, GROUP, rows // 2) == (experts, hidden))
    need(gate_mode in ("separated", "interleave"))
    gate(activation, limit, alpha)
    size = None if rotation is not None and rotation_size == 0 else rotation_size
    rotated(x, hidden, rotation, size, prescale, or_none=True)
    between_gemms(x, rows // 2, inter_rotation, inter_rotation_size, inter_prescale, scale_mode)
    need(0 <= num_shared_experts <= experts and isfinite(shared_weight))
    everywhere = next((t.numel() for t in (expert_mask, expert_map) if t is not None), None)
    routed = experts - num_shared_experts
    ownership(topk_ids, expert_mask, expert_map, everywhere, routed)
    need(everywhere is None or 1 <= everywhere <= MAX_EXPERTS - num_shared_experts)
    if shared is not None:
        need(floating(shared) and shared.shape == x.shape)
    need(out_dtype is None or out_dtype in FLOATS)
