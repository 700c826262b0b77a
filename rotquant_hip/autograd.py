# SPDX-License-Identifier: MIT
"""Gradients: exact where an op is a sum of products, straight-through past the quantisers.

"Straight-through" takes the quantisers of x and of the intermediate for the identity: the gradient
is that of the same formula with the dequantised weights, evaluated at the unquantised x, in
float32. csrc/ops/autograd.h lists what has a gradient; all else that requires grad is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from rotquant_hip._weights import round_up
from rotquant_hip.ops import (
    GROUP,
    dequant,
    gemm_a4w4,
    quant,
    rotate,
    rotate_quant,
    unshuffle_scales,
    unshuffle_weight,
)

if TYPE_CHECKING:
    from rotquant_hip.modules import RotQuantLinear

Gradients = dict[str, Tensor]

_library = torch.library.Library("rotquant_hip", "FRAGMENT")


def _gradient_of(op: str, key: str = "CompositeImplicitAutograd") -> Callable[[Callable], Callable]:
    """Makes a formula(grad, needs, *arguments of the op) the kernel of ``_<op>_backward``."""

    def register(formula: Callable[..., Gradients]) -> Callable[..., Gradients]:
        def kernel(grad: Tensor, needs: list[str], *args: Any, **options: Any) -> list[Tensor]:
            gradients = formula(grad, needs, *args, **options)
            return [gradients[name] for name in needs]

        _library.impl(f"_{op.removeprefix('_')}_backward", kernel, key)
        return formula

    return register


def _implements(op: str) -> Callable[[Callable], Callable]:
    """Makes a function the op's kernel on every device."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        _library.impl(op, function, "CompositeExplicitAutograd")
        return function

    return register


# --- ops ------------------------------------------------------------------------------------------


def _rotated(x: Tensor, rotation: Tensor | None, size: int | None, prescale: Tensor | None):
    """x of any dtype, rotated, in float32. Size 0: not rotated."""
    if rotation is None and size == 0:
        return x.float() if prescale is None else x.float() * prescale.float()
    size = size if rotation is None else rotation.shape[-1]
    return rotate(x, rotation, rotation_size=size, prescale=prescale, out_dtype=torch.float32)


def _rotation_gradients(
    grad: Tensor,
    needs: Sequence[str],
    x: Tensor,
    rotation: Tensor | None,
    size: int | None,
    prescale: Tensor | None,
) -> Gradients:
    """Those of ``_rotated`` that are needed, in the dtypes of the arguments; grad [..., K]."""
    gradients = {}
    if "x" in needs or "prescale" in needs:
        inverse = None if rotation is None else rotation.mT  # the Hadamard matrix is symmetric
        back = _rotated(grad, inverse, size, None)
        gradients["x"] = (back if prescale is None else back * prescale.float()).to(x.dtype)
    if "prescale" in needs:
        gradients["prescale"] = (back * x.float()).sum_to_size(prescale.shape).to(prescale.dtype)
    if "rotation" in needs:
        scaled = x.float() if prescale is None else x.float() * prescale.float()
        size = rotation.shape[-1]
        blocks = (x.shape[-1] // size, size)
        left, right = scaled.unflatten(-1, blocks), grad.float().unflatten(-1, blocks)
        each = torch.einsum("...bi,...bj->bij", left, right)
        gradients["rotation"] = each.sum_to_size(rotation.shape).to(rotation.dtype)
    return gradients


@_gradient_of("rotate")
def _(grad, needs, x, rotation=None, *, rotation_size=None, prescale=None, out_dtype=None):
    return _rotation_gradients(grad, needs, x, rotation, rotation_size, prescale)


@_gradient_of("gemm_a4w4")
def _(grad, needs, a, b, a_scales, b_scales, bias, **options):
    return {"bias": grad.float().sum_to_size(bias.shape).to(bias.dtype)}


@_gradient_of("moe_gemm2")
def _(grad, needs, a, a_scales, w2, w2_scale, sorted_ids, sorted_expert_ids, num_valid, **options):
    tokens, topk, bias = options["tokens"], options["topk"], options["bias"]
    token, slot = sorted_ids & 0xFFFFFF, sorted_ids >> 24
    row = torch.arange(sorted_ids.shape[0], device=grad.device)
    block_m = sorted_ids.shape[0] // torch.sym_max(sorted_expert_ids.shape[0], 1)
    expert = sorted_expert_ids[row // torch.sym_max(block_m, 1)]
    kept = (row < num_valid[0]) & (token < tokens) & (slot < topk) & (expert >= 0)
    rows = grad.float()[torch.where(kept, token * topk + slot, 0)]
    rows = rows.masked_fill(~kept[:, None], 0)  # rows of dropped routes can hold anything
    sums = torch.zeros(bias.shape, device=grad.device)
    return {"bias": sums.index_add(0, torch.where(kept, expert, 0), rows).to(bias.dtype)}


@_gradient_of("moe_reduce")
def _(grad, needs, rows, topk_weights, reverse_sorted, *, scales=None, shared=None, out_dtype=None):
    tokens, hidden = grad.shape
    topk = rows.shape[1] if rows.dim() == 3 else rows.shape[0] // torch.sym_max(tokens, 1)
    dropped = (reverse_sorted < 0).view(tokens, topk)
    gradients = {}
    if "rows" in needs:
        each = grad.float()[:, None]
        each = each.expand(-1, topk, -1) if topk_weights is None else each * topk_weights[..., None]
        gradients["rows"] = each.masked_fill(dropped[..., None], 0).to(rows.dtype).view(rows.shape)
    if "topk_weights" in needs:
        values = rows
        if scales is not None:
            values = dequant(rows.flatten(0, -2), scales.flatten(0, -2), dtype=torch.float32)
        # Not a product with 0: rows of dropped routes can hold anything.
        values = values.float().view(tokens, topk, hidden).masked_fill(dropped[..., None], 0)
        sums = (values * grad.float()[:, None]).sum(-1)
        gradients["topk_weights"] = sums.to(topk_weights.dtype)
    if "shared" in needs:
        gradients["shared"] = grad.to(shared.dtype)
    return gradients


@_implements("fake_quant")
def _(x, *, scale_mode="round_up"):
    return dequant(*quant(x, scale_mode=scale_mode), dtype=x.dtype)


@torch.library.register_fake("rotquant_hip::fake_quant")
def _(x, *, scale_mode="round_up"):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_gradient_of("fake_quant")
def _(grad, needs, x, *, scale_mode="round_up"):
    return {"x": grad}


# --- mixture of experts ---------------------------------------------------------------------------


def _local_experts(
    topk_ids: Tensor,
    experts: int,
    expert_mask: Tensor | None,
    expert_map: Tensor | None,
    num_shared_experts: int,
) -> Tensor:
    """The local expert of every route, -1 where it is dropped; shared experts' routes come last."""
    routed, local = experts - num_shared_experts, topk_ids.long()
    if expert_mask is not None:
        here = expert_mask.ne(0)
        expert_map = torch.where(here, here.cumsum(0) - 1, -1)
    if expert_map is not None:
        inside = (local >= 0) & (local < len(expert_map))
        local = torch.where(inside, expert_map[torch.where(inside, local, 0)].long(), -1)
    local = torch.where((local >= 0) & (local < routed), local, -1)
    shared = torch.arange(routed, experts, device=local.device).expand(len(local), -1)
    return torch.cat((local, shared), 1)


def _natural_scales(scales: Tensor, experts: int, rows: int, k: int, gate_mode: str) -> Tensor:
    """[E, rows, K / 32] of shuffled scales, in either of the shapes that fused_moe takes."""
    lines = scales.view(torch.uint8).reshape(-1, scales.shape[-1])
    total, sizes = experts * rows, {"groups": k // GROUP, "gate_mode": gate_mode}
    if gate_mode == "interleave":
        return unshuffle_scales(lines[:total].view(experts, rows, -1), rows=rows, **sizes)
    lines = functional.pad(lines, (0, 0, 0, round_up(total, 256) - len(lines)))
    return unshuffle_scales(lines, rows=total, **sizes).view(experts, rows, -1)


def _activate(
    gate_and_up: Tensor, activation: str, limit: float | None, alpha: float
) -> tuple[Tensor, Tensor]:
    """The activated values [..., I], and their derivatives by gate and by up, [..., 2I]."""
    gate, up = gate_and_up.chunk(2, -1)
    if limit is not None:
        clipped = torch.cat((gate > limit, up.abs() > limit), -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation.startswith("gelu"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        opened = functional.gelu(gate, approximate=approximate)
        slope = torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate=approximate)
    else:
        alpha = alpha if activation == "swiglu" else 1.0
        share = torch.sigmoid(alpha * gate)
        opened, slope = gate * share, share * (1 + alpha * gate * (1 - share))
    if activation == "swiglu":
        up = up + 1
    slopes = torch.cat((up * slope, opened), -1)
    return opened * up, slopes if limit is None else slopes.masked_fill(clipped, 0)


@_gradient_of("fused_moe", "CompositeExplicitAutograd")
def _(
    grad,
    needs,
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
    """Expert by expert, so that one expert's weights and rows are all that is there in float32.

    NOTE: reads back how many routes an expert has, so that it cannot be captured in a graph.
    """
    experts, inter, hidden = w1.shape[0], w1.shape[1] // 2, x.shape[1]
    local = _local_experts(topk_ids, experts, expert_mask, expert_map, num_shared_experts)
    topk = local.shape[1]
    weights = functional.pad(topk_weights.float(), (0, num_shared_experts), value=shared_weight)
    ordered, order = local.flatten().sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=x.device)).tolist()
    w1_scale = _natural_scales(w1_scale, experts, 2 * inter, hidden, gate_mode)
    w2_scale = _natural_scales(w2_scale, experts, hidden, inter, "separated")

    def added(*arguments: Tensor | None) -> list[Tensor | None]:
        return [None if t is None else torch.zeros_like(t, dtype=torch.float32) for t in arguments]

    h, grad = _rotated(x, rotation, rotation_size, prescale), grad.float()
    d_h, d_weights, d_b1, d_b2 = added(h, weights.flatten(), w1_bias, w2_bias)
    between_needs = [name.removeprefix("inter_") for name in needs if name.startswith("inter_")]
    d_inter_rotation, d_inter_prescale = added(inter_rotation, inter_prescale)
    d_inter = {"rotation": d_inter_rotation, "prescale": d_inter_prescale}

    for expert in range(experts):
        begin, end = bounds[expert : expert + 2]
        if begin == end:
            continue
        routes = order[begin:end]
        tokens, weight = routes // topk, weights.flatten()[routes, None]
        codes = unshuffle_weight(w1[expert], gate_mode=gate_mode)
        first = dequant(codes, w1_scale[expert], dtype=torch.float32)
        second = dequant(unshuffle_weight(w2[expert]), w2_scale[expert], dtype=torch.float32)

        product = h[tokens] @ first.T
        gate_and_up = product * weight if apply_weight_on_input else product
        if w1_bias is not None:
            gate_and_up = gate_and_up + w1_bias[expert].float()
        activated, slopes = _activate(gate_and_up, activation, limit, alpha)

        d_row = grad[tokens]
        d_between = d_row @ second
        if not apply_weight_on_input:
            if "topk_weights" in needs:
                between = _rotated(activated, inter_rotation, inter_rotation_size, inter_prescale)
                d_weights[routes] = (d_between * between).sum(-1)
                if w2_bias is not None:
                    d_weights[routes] += d_row @ w2_bias[expert].float()
            d_row, d_between = d_row * weight, d_between * weight
        if w2_bias is not None:
            d_b2[expert] = d_row.sum(0)
        d = _rotation_gradients(
            d_between,
            ["x", *between_needs],
            activated,
            inter_rotation,
            inter_rotation_size,
            inter_prescale,
        )
        for name in between_needs:
            d_inter[name] += d[name]
        d_first = d["x"].repeat(1, 2) * slopes
        if w1_bias is not None:
            d_b1[expert] = d_first.sum(0)
        if apply_weight_on_input:
            d_weights[routes] = (d_first * product).sum(-1)
            d_first = d_first * weight
        d_h.index_add_(0, tokens, d_first @ first)

    gradients = _rotation_gradients(d_h, needs, x, rotation, rotation_size, prescale)
    arguments = {
        "topk_weights": (
            d_weights.view(-1, topk)[:, : topk_weights.shape[1]].contiguous(),
            topk_weights,
        ),
        "w1_bias": (d_b1, w1_bias),
        "w2_bias": (d_b2, w2_bias),
        "inter_rotation": (d_inter_rotation, inter_rotation),
        "inter_prescale": (d_inter_prescale, inter_prescale),
        "shared": (grad, shared),
    }
    for name, (gradient, argument) in arguments.items():
        if name in needs:
            gradients[name] = gradient.to(argument.dtype, copy=name == "shared")
    return gradients


@torch.library.register_fake("rotquant_hip::_fused_moe_backward")
def _(grad, needs, x, w1, w2, topk_weights, topk_ids, **options):
    arguments = {"x": x, "topk_weights": topk_weights, **options}
    return [arguments[n].new_empty(arguments[n].shape) for n in needs]


# --- layers ---------------------------------------------------------------------------------------


def needed(layer: RotQuantLinear, x: Tensor) -> bool:
    """Whether autograd records what is made of x, of the layer's rotation or of its prescale."""
    if not torch.is_grad_enabled():
        return False
    recipe = layer.recipe  # tells what there is faster than the buffers do
    return (
        x.requires_grad
        or (recipe.prescaled and layer.prescale.requires_grad)
        or (recipe.rotation.startswith("matri") and layer.rotation.requires_grad)
    )


@_implements("_linear_a4w4")
def _(
    x,
    weight_codes,
    weight_scales,
    bias=None,
    rotation=None,
    *,
    rotation_size,
    prescale=None,
    scale_mode="round_up",
    n,
):
    options = {"scale_mode": scale_mode, "shuffle_scales": True}
    if rotation is None and rotation_size == 0:
        codes, scales = quant(x if prescale is None else x * prescale, **options)
    else:
        codes, scales = rotate_quant(
            x, rotation, rotation_size=rotation_size, prescale=prescale, **options
        )
    return gemm_a4w4(codes, weight_codes, scales, weight_scales, bias, n=n, out_dtype=x.dtype)


@torch.library.register_fake("rotquant_hip::_linear_a4w4")
def _(x, weight_codes, weight_scales, bias=None, rotation=None, *, n, **options):
    return torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)


@_gradient_of("_linear_a4w4")
def _(
    grad,
    needs,
    x,
    weight_codes,
    weight_scales,
    bias=None,
    rotation=None,
    *,
    rotation_size,
    prescale=None,
    scale_mode="round_up",
    n,
):
    grad = grad.float()
    sizes = {"rows": weight_codes.shape[0], "groups": x.shape[-1] // GROUP}
    natural = unshuffle_weight(weight_codes), unshuffle_scales(weight_scales, **sizes)
    weight = dequant(*natural, dtype=torch.float32)[:n]
    gradients = _rotation_gradients(grad @ weight, needs, x, rotation, rotation_size, prescale)
    if "bias" in needs:
        gradients["bias"] = grad.sum_to_size(bias.shape).to(bias.dtype)
    return gradients


def linear(layer: RotQuantLinear, x: Tensor) -> Tensor:
    """``layer(x)`` with a straight-through gradient."""
    return torch.ops.rotquant_hip._linear_a4w4(
        x,
        layer.weight_codes,
        layer.weight_scales,
        layer.bias,
        layer.rotation,
        rotation_size=layer.recipe.rotation_size,
        prescale=layer.prescale,
        scale_mode=layer.recipe.scale_mode,
        n=layer.out_features,
    )
