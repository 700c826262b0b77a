# SPDX-License-Identifier: MIT
"""Small mixtures of experts: their arguments for the ops, and what they compute, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import rotquant_hip as rq

PIPELINES = {
    "inline_atomic": (16,),
    "inline_reduce": (16,),
    "staged_atomic": (16, 32, 64, 128),
    "staged_reduce": (16, 32, 64, 128),
    "staged_fp4_reduce": (32, 128),
}


def activate(gate_and_up: Tensor, activation: str, limit: float | None, alpha: float) -> Tensor:
    g, u = gate_and_up.chunk(2, -1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "swiglu":
        return g * torch.sigmoid(alpha * g) * (u + 1)
    if activation == "silu":
        return torch.nn.functional.silu(g) * u
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.nn.functional.gelu(g, approximate=approximate) * u


@dataclass
class Case:
    """Natural weights, whose values are exact in float32, and a routing."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: tuple[Tensor, Tensor]  # codes [E, 2I, H / 2], scales [E, 2I, H / 32]
    w2: tuple[Tensor, Tensor]
    options: dict[str, Any] = field(default_factory=dict)  # of fused_moe

    @property
    def inter(self) -> int:
        return self.w1[0].shape[1] // 2

    def but(self, **changes: Any) -> Case:
        """With other tensors, or other options."""
        mine = {name: changes.pop(name) for name in ("x", "ids", "weights") if name in changes}
        return replace(self, **mine, options=self.options | changes)

    def arguments(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        mode = self.options.get("gate_mode", "separated")
        w1, w2 = rq.shuffle_weight(self.w1[0], gate_mode=mode), rq.shuffle_weight(self.w2[0])
        scales = {
            "w1_scale": rq.shuffle_scales(self.w1[1], gate_mode=mode),
            "w2_scale": rq.shuffle_scales(self.w2[1]),
        }
        return (self.x, w1, w2, self.weights, self.ids), scales | self.options

    def run(self, pipeline: str | None = None, block_m: int = 32, **more: Any) -> Tensor:
        """One pipeline, or fused_moe."""
        tensors, options = self.arguments()
        if pipeline is None:
            return rq.fused_moe(*tensors, **options, **more)
        options |= more | {"pipeline": pipeline, "block_m": block_m}
        return torch.ops.rotquant_hip._fused_moe(*tensors, **options)

    def expected(self, quantised: bool = True) -> tuple[Tensor, Tensor]:
        """The result in float64, and the sum of its terms' magnitudes.

        quantised: x and the intermediate are, as the pipelines do it; else nothing but the weights.
        """
        o, size = self.options, self.options.get("inter_rotation_size", 0)

        def rounded(t: Tensor, rotation_size: int) -> Tensor:
            if not quantised:
                turned = rq.rotate(t, rotation_size=rotation_size) if rotation_size else t
                return turned.double()
            if rotation_size:
                made = rq.rotate_quant(t, rotation_size=rotation_size)
            else:
                made = rq.quant(t)
            return rq.dequant(*made, dtype=torch.float32).double()

        a = rounded(self.x.float(), o.get("rotation_size", 0))
        w1, w2 = (rq.dequant(*w, dtype=torch.float32).double() for w in (self.w1, self.w2))
        experts, shared = len(w1), o.get("num_shared_experts", 0)
        mask = o.get("expert_mask")
        local = list(range(experts - shared)) if mask is None else mask.nonzero().flatten().tolist()
        slots = [
            ([local.index(e) if e in local else -1 for e in ids.tolist()], weights.double())
            for ids, weights in zip(self.ids.T, self.weights.T, strict=True)
        ]
        always = torch.full((len(a),), o.get("shared_weight", 1.0), dtype=a.dtype, device=a.device)
        slots += [([e] * len(a), always) for e in range(experts - shared, experts)]
        total, magnitude = (torch.zeros_like(a) for _ in range(2))
        for ids, weights in slots:
            expert = torch.tensor(ids, device=a.device)
            weight = (weights * (expert >= 0))[:, None]  # a dropped route has none
            first = torch.einsum("tk,tnk->tn", a, w1[expert])
            if o.get("apply_weight_on_input"):
                first, weight = first * weights[:, None], (weight != 0).double()
            if o.get("w1_bias") is not None:
                first = first + o["w1_bias"][expert]
            between = activate(
                first, o.get("activation", "silu"), o.get("limit"), o.get("alpha", 1.702)
            )
            row = torch.einsum("tk,tnk->tn", rounded(between.float(), size), w2[expert])
            if o.get("w2_bias") is not None:
                row = row + o["w2_bias"][expert]
            total += weight * row
            magnitude += (weight * row).abs()
        if o.get("shared") is not None:
            total, magnitude = total + o["shared"], magnitude + o["shared"].abs()
        return total, magnitude


def case(
    tokens: int = 33,
    hidden: int = 256,
    inter: int = 96,
    experts: int = 8,
    topk: int = 3,
    *,
    routed: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    bias: bool = False,
    **options: Any,
) -> Case:
    """Random weights and tokens. `routed`: the experts that ids name; all of `experts` if None."""
    generator = torch.Generator().manual_seed(tokens + 100 * inter + hidden)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def weight(rows: int, k: int) -> tuple[Tensor, Tensor]:
        codes, scales = rq.quant((randn(experts, rows, k) * k**-0.5).to(device))
        return codes, scales

    scores = torch.rand(tokens, routed or experts, generator=generator)
    weights, ids = scores.topk(topk)
    if bias:
        options["w1_bias"] = randn(experts, 2 * inter).to(device)
        options["w2_bias"] = randn(experts, hidden).to(device)
    return Case(
        randn(tokens, hidden).to(device, dtype),
        ids.to(device, torch.int32),
        (weights / weights.sum(-1, keepdim=True)).to(device),
        weight(2 * inter, hidden),
        weight(hidden, inter),
        options,
    )
