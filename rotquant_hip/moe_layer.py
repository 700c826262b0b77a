# SPDX-License-Identifier: MIT
"""A mixture-of-experts layer in MXFP4, with rotated inputs and intermediates."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rotquant_hip._weights import (
    ROTATION_KINDS,
    PackedModule,
    RotationKind,
    bias_of,
    check_count,
    check_one_of,
    check_orthogonal,
    check_real,
    check_tensor,
    codes_of,
    placed,
    prescale_of,
    quantise_weight,
    rotation_of,
    round_up,
    scales_of,
    weight_of,
)
from rotquant_hip.dispatch import ACTIVATIONS
from rotquant_hip.moe import Activation, fused_moe
from rotquant_hip.ops import (
    GATE_MODES,
    GROUP,
    ROTATION_SIZES,
    SCALE_MODES,
    GateMode,
    ScaleMode,
    shuffle_scales,
    shuffle_weight,
)

GateRows = Literal["separated", "alternating"]
GATE_ROWS = ("separated", "alternating")
MOE_SCALE_MODES = ("round_up", "floor", "even", "ceil")

_MAX_EXPERTS = 1024  # of the ops
_Rotation = Tensor | Literal["hadamard", "none"] | None


class _Rotated(NamedTuple):
    """A rotation argument, understood."""

    kind: RotationKind
    size: int  # 0 without rotation
    matrix: Tensor | None
    prescale: Tensor | None

    @classmethod
    def of(
        cls,
        rotation: _Rotation,
        size: int,
        prescale: Tensor | None,
        name: str,
        prescale_name: str,
        channels: int,
        device: torch.device,
        quantised: bool = False,
    ) -> _Rotated:
        """Checked; `quantised`: the weights are, so that nothing will be divided by prescale."""
        scale = prescale_of(prescale, prescale_name, channels, device, divided=not quantised)
        return cls(*rotation_of(rotation, name, size, channels, device), scale)


class RotQuantMoE(PackedModule):
    """``fused_moe`` with its weights: x is rotated, and so may be what lies between the GEMMs.

    Rotations are orthogonal and folded into the weights, w1 along the hidden size and w2 along the
    inner one, so that nothing changes but what MXFP4 loses. Make a layer with ``from_weights`` or
    ``from_quantized``; the constructor makes an empty one (all zeros) for ``load_state_dict``.

    Args:
        num_experts: E, in this layer, shared ones (the last) among them.
        hidden: H, a multiple of 32.
        inter: I, a multiple of 32: any width that a shard has.
        bias: whether there are w1_bias and w2_bias.
        activation: "silu", "swiglu", "gelu" or "gelu_tanh"; see ``moe_gemm1``, also for
        limit: of gate and up, and
        alpha: of swiglu.
        rotation: of x: "none", "hadamard", "matrix" or "matrices", see ``RotQuantLinear``.
        rotation_size: one of 16, 32, 64, 128, 256 that divides H.
        prescale: whether x is multiplied by a factor per channel before it is rotated.
        inter_rotation: of the intermediate, likewise, with
        inter_rotation_size: up to 128 and a divisor of I, and
        inter_prescale.
        scale_mode: of x and of the intermediate; not "mse".
        gate_mode: how w1 is stored, see ``shuffle_weight``.
        num_shared_experts: that every token goes to besides its own.
        shared_weight: of those routes.
        apply_weight_on_input: see ``fused_moe``.
        all_experts: routed experts of all ranks, which makes room for an ``expert_mask``, or with
        expert_map: for an ``expert_map``.
        deterministic: see ``fused_moe``.
        fp4_intermediate: see ``fused_moe``.
        device: where the buffers are; "meta" works.

    Buffers, all saved; none changes its dtype in ``.to(dtype)`` or ``.half()``:
        w1: uint8 [E, 2I, H / 2] and w2: uint8 [E, H, I / 2], shuffled.
        w1_scale, w2_scale: uint8, shuffled.
        w1_bias: float32 [E, 2I], gate rows first, and w2_bias: float32 [E, H], or None.
        rotation, inter_rotation: bf16 matrices, or None.
        prescale, inter_prescale: float32, or None.
        expert_mask, expert_map: int32 [all_experts], one of them or none.
    """

    _old_format_key = "moe_format"

    w1: Tensor
    w1_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    w1_bias: Tensor | None
    w2_bias: Tensor | None
    rotation: Tensor | None
    prescale: Tensor | None
    inter_rotation: Tensor | None
    inter_prescale: Tensor | None
    expert_mask: Tensor | None
    expert_map: Tensor | None

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        inter: int,
        bias: bool = False,
        *,
        activation: Activation = "silu",
        limit: float | None = None,
        alpha: float = 1.702,
        rotation: RotationKind = "hadamard",
        rotation_size: int = 64,
        prescale: bool = False,
        inter_rotation: RotationKind = "none",
        inter_rotation_size: int = 64,
        inter_prescale: bool = False,
        scale_mode: ScaleMode = "round_up",
        gate_mode: GateMode = "separated",
        num_shared_experts: int = 0,
        shared_weight: float = 1.0,
        apply_weight_on_input: bool = False,
        all_experts: int | None = None,
        expert_map: bool = False,
        deterministic: bool = False,
        fp4_intermediate: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_one_of(activation, "activation", ACTIVATIONS)
        check_one_of(scale_mode, "scale_mode", MOE_SCALE_MODES)
        check_one_of(gate_mode, "gate_mode", GATE_MODES)
        if activation == "swiglu" and limit is None:
            raise ValueError("limit: expected a number for swiglu (gpt-oss has 7.0), got None")
        if limit is not None:
            check_real(limit, "limit", positive=True)
        check_real(alpha, "alpha")
        check_real(shared_weight, "shared_weight")
        check_count(num_experts, "num_experts", 1, _MAX_EXPERTS)
        check_count(num_shared_experts, "num_shared_experts", 0, num_experts)
        # B11: said when the layer is made, not when it first runs.
        check_count(hidden, "hidden", GROUP, unit=GROUP)
        check_count(inter, "inter", GROUP, unit=GROUP)
        if all_experts is not None:
            least = max(1, num_experts - num_shared_experts)
            check_count(all_experts, "all_experts", least, _MAX_EXPERTS)
        self.num_experts, self.hidden, self.inter = num_experts, hidden, inter
        self.activation, self.limit, self.alpha = activation, limit, alpha
        for name, kind, scaled in (
            ("prescale", rotation, prescale),
            ("inter_prescale", inter_rotation, inter_prescale),
        ):
            if scaled and kind == "none":
                raise ValueError(f"{name}: expected none without a rotation, got one")
        self.rotation_kind = rotation
        self.rotation_size = _checked_size("rotation", rotation, rotation_size, hidden, 256)
        self.inter_rotation_kind = inter_rotation
        self.inter_rotation_size = _checked_size(
            "inter_rotation", inter_rotation, inter_rotation_size, inter, 128
        )
        self.scale_mode, self.gate_mode = scale_mode, gate_mode
        self.num_shared_experts, self.shared_weight = num_shared_experts, shared_weight
        self.apply_weight_on_input = apply_weight_on_input
        self.deterministic, self.fp4_intermediate = deterministic, fp4_intermediate

        def buffer(name: str, present: bool, dtype: torch.dtype, *shape: int) -> None:
            self._register(name, present, dtype, *shape, device=device)

        def matrices(name: str, kind: RotationKind, size: int, channels: int) -> None:
            blocks = (channels // size,) if kind == "matrices" else ()
            buffer(name, kind.startswith("matri"), torch.bfloat16, *blocks, size, size)

        for name, rows, k in (("w1", 2 * inter, hidden), ("w2", hidden, inter)):
            groups = round_up(k // GROUP, 8)
            buffer(name, True, torch.uint8, num_experts, rows, k // 2)
            interleaved = name == "w1" and gate_mode == "interleave"
            lines = (num_experts, rows) if interleaved else (round_up(num_experts * rows, 256),)
            buffer(f"{name}_scale", True, torch.uint8, *lines, groups)
            buffer(f"{name}_bias", bias, torch.float32, num_experts, rows)
        matrices("rotation", rotation, self.rotation_size, hidden)
        buffer("prescale", prescale, torch.float32, hidden)
        matrices("inter_rotation", inter_rotation, self.inter_rotation_size, inter)
        buffer("inter_prescale", inter_prescale, torch.float32, inter)
        owned = all_experts is not None
        buffer("expert_mask", owned and not expert_map, torch.int32, all_experts or 0)
        buffer("expert_map", owned and expert_map, torch.int32, all_experts or 0)

    @classmethod
    @torch.no_grad()
    def from_weights(
        cls,
        w1: Tensor,
        w2: Tensor,
        *,
        w1_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        gate_rows: GateRows = "separated",
        rotation: _Rotation = "hadamard",
        rotation_size: int = 64,
        prescale: Tensor | None = None,
        inter_rotation: _Rotation = None,
        inter_rotation_size: int = 64,
        inter_prescale: Tensor | None = None,
        expert_mask: Tensor | None = None,
        expert_map: Tensor | None = None,
        weight_scale_mode: ScaleMode = "mse",
        **options: Any,
    ) -> RotQuantMoE:
        """Rotate and quantise weights; expert by expert, so that little more than they is needed.

        Args:
            w1: [E, 2I, H], any floating dtype.
            w2: [E, H, I].
            w1_bias: [E, 2I]; ``w2_bias``: [E, H].
            gate_rows: how gate and up rows lie in w1 and w1_bias: ``separated``, gate rows first;
                or ``alternating``, gate in even rows and up in odd ones, as gpt-oss has them.
            rotation: "hadamard", None or "none", or an orthogonal matrix [RS, RS] or
                [H / RS, RS, RS], rounded to bf16 first.
            rotation_size: RS; a matrix brings its own.
            prescale: s [H]; x * s goes into the rotation and w1 / s into the weights.
            inter_rotation: the same of the intermediate, RS up to 128, with w2.
            inter_rotation_size: see there.
            inter_prescale: [I].
            expert_mask: [routed experts of all ranks], or in its place
            expert_map: see ``fused_moe``.
            weight_scale_mode: of the weights.
            options: of the constructor.

        Raises:
            ValueError: an argument has another shape, dtype, device or range than described, a
                matrix is not orthogonal, or there is a NaN, an Inf, or a 0 in a prescale.
        """
        check_one_of(weight_scale_mode, "weight_scale_mode", SCALE_MODES)
        w1, w2 = weight_of(w1, "w1", 3), weight_of(w2, "w2", 3)
        rotated = _Rotated.of(
            rotation, rotation_size, prescale, "rotation", "prescale", w1.shape[-1], w1.device
        )
        inter_rotated = _Rotated.of(
            inter_rotation,
            inter_rotation_size,
            inter_prescale,
            "inter_rotation",
            "inter_prescale",
            w2.shape[-1],
            w1.device,
        )
        layer = cls._made(
            w1,
            w2,
            w1.shape[-1],
            w2.shape[-1],
            rotated,
            inter_rotated,
            (expert_mask, expert_map),
            (w1_bias, w2_bias, gate_rows),
            options,
        )
        check_orthogonal(rotated.matrix, "rotation")
        check_orthogonal(inter_rotated.matrix, "inter_rotation")

        def quantise(weight: Tensor, r: _Rotated) -> tuple[Tensor, Tensor]:
            return quantise_weight(
                weight.float(), r.kind, r.size, r.matrix, r.prescale, weight_scale_mode
            )

        layer._fill(
            (quantise(_separated(w, gate_rows), rotated) for w in w1),
            (quantise(w, inter_rotated) for w in w2),
        )
        return layer

    @classmethod
    @torch.no_grad()
    def from_quantized(
        cls,
        w1: Tensor,
        w1_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        *,
        w1_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        gate_rows: GateRows = "separated",
        input_rotation: _Rotation = None,
        rotation_size: int = 64,
        input_prescale: Tensor | None = None,
        inter_rotation: _Rotation = None,
        inter_rotation_size: int = 64,
        inter_prescale: Tensor | None = None,
        expert_mask: Tensor | None = None,
        expert_map: Tensor | None = None,
        **options: Any,
    ) -> RotQuantMoE:
        """A layer from weights that are rotated and quantised already, as in a checkpoint.

        Args:
            w1: codes [E, 2I, H / 2], or [E, 2I, H / 32, 16] as gpt-oss has them, and ``w1_scale``
                [E, 2I, H / 32]: neither shuffled nor padded; dtypes as in ``RotQuantLinear``.
            w2: codes [E, H, I / 2], and ``w2_scale`` [E, H, I / 32].
            input_rotation: what x is to be multiplied with, see ``RotQuantLinear.from_quantized``;
                likewise ``inter_rotation`` for the intermediate.
            input_prescale: [H], multiplied in before; likewise ``inter_prescale`` [I].
            options: as in ``from_weights``, as are the others.

        Raises:
            ValueError: an argument has another shape, dtype, device or range than described, or
                scales are in another order (B19).
        """
        w1, w2 = codes_of(w1, "w1", 3), codes_of(w2, "w2", 3)
        w1_scale, w2_scale = (
            scales_of(w1_scale, "w1_scale", w1),
            scales_of(w2_scale, "w2_scale", w2),
        )
        hidden, inter = w1.shape[-1] * 2, w2.shape[-1] * 2
        layer = cls._made(
            w1,
            w2,
            hidden,
            inter,
            _Rotated.of(
                input_rotation,
                rotation_size,
                input_prescale,
                "input_rotation",
                "input_prescale",
                hidden,
                w1.device,
                quantised=True,
            ),
            _Rotated.of(
                inter_rotation,
                inter_rotation_size,
                inter_prescale,
                "inter_rotation",
                "inter_prescale",
                inter,
                w1.device,
                quantised=True,
            ),
            (expert_mask, expert_map),
            (w1_bias, w2_bias, gate_rows),
            options,
        )
        first = zip(w1, w1_scale, strict=True)
        layer._fill(
            ((_separated(c, gate_rows), _separated(s, gate_rows)) for c, s in first),
            zip(w2, w2_scale, strict=True),
        )
        return layer

    @classmethod
    def _made(
        cls,
        w1: Tensor,
        w2: Tensor,
        hidden: int,
        inter: int,
        x: _Rotated,
        between: _Rotated,
        owned: tuple[Tensor | None, Tensor | None],
        biases: tuple[Tensor | None, Tensor | None, GateRows],
        options: dict[str, Any],
    ) -> RotQuantMoE:
        """A layer with everything but its weights. Every argument is checked before it is made."""
        experts, device = w1.shape[0], w1.device
        if w1.shape[1] != 2 * inter:
            raise ValueError(
                f"w1: expected 2 I = {2 * inter} rows for w2 of I = {inter}, got {list(w1.shape)}"
            )
        if w2.shape[:2] != (experts, hidden):
            raise ValueError(f"w2: expected [{experts}, {hidden}, I], got {list(w2.shape)}")
        if w2.device != device:
            raise ValueError(f"w2: expected device {device}, that of w1, got {w2.device}")
        w1_bias, w2_bias, gate_rows = biases
        check_one_of(gate_rows, "gate_rows", GATE_ROWS)
        if (w1_bias is None) != (w2_bias is None):
            raise ValueError("w1_bias, w2_bias: expected both or none, got one")
        w1_bias = bias_of(w1_bias, "w1_bias", (experts, 2 * inter), device)
        w2_bias = bias_of(w2_bias, "w2_bias", (experts, hidden), device)
        local = experts - options.get("num_shared_experts", 0)
        mask, expert_map = owned
        if mask is not None and expert_map is not None:
            raise ValueError("expert_map: expected None beside an expert_mask, got a tensor")
        mask = None if mask is None else _mask_of(mask, local, device)
        expert_map = None if expert_map is None else _map_of(expert_map, local, device)
        everywhere = next((t.numel() for t in (mask, expert_map) if t is not None), None)
        layer = cls(
            experts,
            hidden,
            inter,
            w1_bias is not None,
            rotation=x.kind,
            rotation_size=x.size,
            prescale=x.prescale is not None,
            inter_rotation=between.kind,
            inter_rotation_size=between.size,
            inter_prescale=between.prescale is not None,
            all_experts=everywhere,
            expert_map=expert_map is not None,
            device=device,
            **options,
        )
        layer.rotation, layer.prescale = x.matrix, x.prescale
        layer.inter_rotation, layer.inter_prescale = between.matrix, between.prescale
        layer.expert_mask, layer.expert_map = mask, expert_map
        if w1_bias is not None:
            layer.w1_bias, layer.w2_bias = (
                _separated(w1_bias.mT, gate_rows).mT.contiguous(),
                w2_bias,
            )
        return layer

    def _fill(self, first: Any, second: Any) -> None:
        """Buffers from natural codes and scales of each expert, gate rows first."""
        for name, experts, mode in (
            ("w1", first, self.gate_mode),
            ("w2", second, "separated"),
        ):
            weight, scales = getattr(self, name), []
            for expert, (codes, scale) in enumerate(experts):
                weight[expert] = shuffle_weight(codes, gate_mode=mode)
                scales.append(scale)
            setattr(self, f"{name}_scale", shuffle_scales(torch.stack(scales), gate_mode=mode))

    def forward(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *, shared: Tensor | None = None
    ) -> Tensor:
        """x [..., H], topk_weights and topk_ids [..., topk], to [..., H] in x's dtype.

        Args:
            shared: [..., H], the output of a dense shared expert, added.

        Gradients are straight-through, see ``fused_moe``.

        Raises:
            ValueError: the last dimension of x is not H, or leading dimensions differ.
        """
        # NOTE: flat ids must not become one route per token (B39), nor a wide x more tokens.
        if x.dim() == 0 or x.shape[-1] != self.hidden:
            raise ValueError(
                f"x: expected last dimension hidden {self.hidden}, got shape {list(x.shape)}"
            )
        for name, routes in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if routes.dim() != x.dim() or routes.shape[:-1] != x.shape[:-1]:
                raise ValueError(
                    f"{name}: expected the leading dimensions of x {list(x.shape)} and topk, "
                    f"got shape {list(routes.shape)}"
                )
        if shared is not None and shared.shape != x.shape:
            raise ValueError(
                f"shared: expected the shape of x {list(x.shape)}, got {list(shared.shape)}"
            )
        out = fused_moe(
            x.reshape(-1, self.hidden),
            self.w1,
            self.w2,
            topk_weights.reshape(-1, topk_weights.shape[-1]),
            topk_ids.reshape(-1, topk_ids.shape[-1]),
            w1_scale=self.w1_scale,
            w2_scale=self.w2_scale,
            w1_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            activation=self.activation,
            limit=self.limit,
            alpha=self.alpha,
            gate_mode=self.gate_mode,
            rotation=self.rotation,
            rotation_size=self.rotation_size,
            prescale=self.prescale,
            inter_rotation=self.inter_rotation,
            inter_rotation_size=self.inter_rotation_size,
            inter_prescale=self.inter_prescale,
            scale_mode=self.scale_mode,
            expert_mask=self.expert_mask,
            expert_map=self.expert_map,
            apply_weight_on_input=self.apply_weight_on_input,
            num_shared_experts=self.num_shared_experts,
            shared_weight=self.shared_weight,
            shared=None if shared is None else shared.reshape(-1, self.hidden),
            deterministic=self.deterministic,
            fp4_intermediate=self.fp4_intermediate,
        )
        return out.view(x.shape)

    def extra_repr(self) -> str:
        def rotation(kind: RotationKind, size: int) -> str:
            return kind if kind == "none" else f"{kind} {size}"

        limit = "" if self.limit is None else f", limit={self.limit:g}"
        shared = f", shared={self.num_shared_experts}" if self.num_shared_experts else ""
        return (
            f"experts={self.num_experts}, hidden={self.hidden}, inter={self.inter}, "
            f"bias={self.w1_bias is not None}, a4w4, {self.activation}{limit}, "
            f"rotation={rotation(self.rotation_kind, self.rotation_size)}, "
            f"inter_rotation={rotation(self.inter_rotation_kind, self.inter_rotation_size)}, "
            f"scale_mode={self.scale_mode}, gate_mode={self.gate_mode}{shared}"
        )

    def _format(self) -> dict[str, Any]:
        return {
            "element": "e2m1",
            "num_experts": self.num_experts,
            "hidden": self.hidden,
            "inter": self.inter,
            "bias": self.w1_bias is not None,
            "rotation": self.rotation_kind,
            "rotation_size": self.rotation_size,
            "prescale": self.prescale is not None,
            "inter_rotation": self.inter_rotation_kind,
            "inter_rotation_size": self.inter_rotation_size,
            "inter_prescale": self.inter_prescale is not None,
            "scale_mode": self.scale_mode,
            "gate_mode": self.gate_mode,
            "activation": self.activation,
            "limit": None if self.limit is None else float(self.limit),
            "alpha": float(self.alpha),
            "num_shared_experts": self.num_shared_experts,
            "shared_weight": float(self.shared_weight),
            "apply_weight_on_input": bool(self.apply_weight_on_input),
            "all_experts": next(
                (t.numel() for t in (self.expert_mask, self.expert_map) if t is not None), None
            ),
            "expert_map": self.expert_map is not None,
        }

    @staticmethod
    def _format_of_version_1(numbers: list[float]) -> dict[str, Any]:
        # The orders that format version 1 counted in.
        kinds = ("none", "hadamard", "matrix", "matrices")
        modes = ("round_up", "floor", "even", "ceil", "mse")
        *whole, limit, alpha, shared_weight = numbers
        _, kind, bits, inter_kind, inter_bits, mode, gate, activation, shared, on_input = map(
            int, whole
        )
        return {
            "rotation": kinds[kind],
            "rotation_size": 1 << bits >> 1,
            "inter_rotation": kinds[inter_kind],
            "inter_rotation_size": 1 << inter_bits >> 1,
            "scale_mode": modes[mode],
            "gate_mode": ("separated", "interleave")[gate],
            "activation": ("silu", "swiglu", "gelu", "gelu_tanh")[activation],
            "num_shared_experts": shared,
            "apply_weight_on_input": bool(on_input),
            "limit": None if limit == -1 else limit,
            "alpha": alpha,
            "shared_weight": shared_weight,
        }


def route(
    router_logits: Tensor,
    top_k: int,
    renormalize: bool = True,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int32, both [..., top_k], of the best experts of every token.

    Args:
        router_logits: [..., experts], any floating dtype.
        top_k: how many, 1 to experts.
        renormalize: divide the weights by their sum.
        scoring: what makes weights of logits: "softmax" over all experts, or "sigmoid" of each.

    The best are those with the largest logits, which both scorings order alike, however close or
    saturated their scores are; of equal ones the lowest numbered, on every device. Weights descend.
    They are rounded once, from float64, and sum to 1 even where all scores are tiny.

    An expert at -Inf has weight 0, and so have all where no other is left; several at +Inf share
    softmax's 1 equally. A NaN among a token's logits makes all its weights NaN; its ids are still
    top_k different experts. Gradients flow to the logits of the chosen (softmax without
    renormalize: of all).

    Raises:
        ValueError: an argument is not one of these.
    """
    check_one_of(scoring, "scoring", ("softmax", "sigmoid"))
    # NOTE: float8_e8m0fnu and the like count as floating point in torch, which cannot sort them.
    number = router_logits.is_floating_point() and router_logits.dtype.itemsize >= 2
    if router_logits.dim() == 0 or not number:
        raise ValueError(
            "router_logits: expected [..., experts] of a floating-point dtype, got "
            f"{tuple(router_logits.shape)} of {router_logits.dtype}"
        )
    experts = router_logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k: expected 1 to {experts}, the number of experts, got {top_k}")
    # NOTE: torch.topk promises no order among equals; NaN sorts first here.
    ordered, ids = router_logits.sort(dim=-1, descending=True, stable=True)
    ids = ids[..., :top_k].to(torch.int32)
    if scoring == "sigmoid" or renormalize:
        ordered = ordered[..., :top_k]
    logits = ordered.double()
    if scoring == "sigmoid" and not renormalize:
        weights = logits.sigmoid()
    else:
        weights = _shares(functional.logsigmoid(logits) if scoring == "sigmoid" else logits)
    weights = weights[..., :top_k].masked_fill(ordered[..., :1].isnan(), torch.nan)
    return weights.float(), ids


def _shares(logs: Tensor) -> Tensor:
    """Softmax of descending logs, infinite ones as `route` says."""
    of_infinite = torch.where(logs == torch.inf, 0.0, -torch.inf)
    logs = torch.where(logs[..., :1] == torch.inf, of_infinite, logs)
    largest = logs[..., :1].detach().clamp(min=torch.finfo(logs.dtype).min)  # -Inf less this: -Inf
    shares = (logs - largest).exp()
    return shares / shares.sum(-1, keepdim=True).clamp(min=1)  # less than 1 is 0: nothing to share


def _mask_of(mask: Tensor, local: int, device: torch.device) -> Tensor:
    """int32 0 and 1, with as many ones as there are routed experts here."""
    check_tensor(mask, "expert_mask")
    if mask.is_floating_point() or mask.is_complex() or mask.dim() != 1:
        raise ValueError(
            "expert_mask: expected bool or integers of one dimension, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    if not mask.is_meta:
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                "expert_mask: expected 1 for the experts of this rank and 0 for the others, got "
                "other numbers (a map to local experts goes into expert_map)"
            )
        if (found := int(mask.sum())) != local:
            raise ValueError(
                f"expert_mask: expected {local} ones, the routed experts of w1, got {found}"
            )
    return placed(mask, "expert_mask", device).to(torch.int32, copy=True)


def _map_of(expert_map: Tensor, local: int, device: torch.device) -> Tensor:
    """int32 local numbers, -1 for the experts of other ranks."""
    check_tensor(expert_map, "expert_map")
    if expert_map.dtype not in (torch.int32, torch.int64) or expert_map.dim() != 1:
        raise ValueError(
            "expert_map: expected int32 or int64 of one dimension, "
            f"got {expert_map.dtype} {list(expert_map.shape)}"
        )
    if not expert_map.is_meta and not ((expert_map >= -1) & (expert_map < local)).all():
        raise ValueError(
            f"expert_map: expected -1 or a number below {local}, the routed experts of w1, got "
            f"{expert_map.tolist()!s:.80}"
        )
    return placed(expert_map, "expert_map", device).to(torch.int32, copy=True)


def _separated(rows: Tensor, gate_rows: GateRows) -> Tensor:
    """[2I, ...] with gate rows first."""
    return rows if gate_rows == "separated" else torch.cat((rows[0::2], rows[1::2]))


def _checked_size(name: str, kind: RotationKind, size: int, channels: int, largest: int) -> int:
    check_one_of(kind, name, ROTATION_KINDS)
    if kind == "none":
        return 0
    fitting = [s for s in ROTATION_SIZES if s <= largest and channels % s == 0]
    if size not in fitting:
        raise ValueError(f"{name}_size: expected one of {fitting} for {channels}, got {size}")
    return size
