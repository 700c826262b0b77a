# SPDX-License-Identifier: MIT
"""A linear layer in MXFP4: rotate and quantise the input, multiply with quantised weights.

One activation that several layers read (q/k/v; gate/up) is quantised once and handed on::

    x = attention.q_proj.quantize_input(x)
    q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)

A layer refuses what was quantised for another rotation.

Nothing in a forward pass reads a value back or has a shape that depends on data, so that layers
can be captured in a graph and compiled with ``fullgraph=True``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotquant_hip import autograd
from rotquant_hip._weights import (
    ROTATION_KINDS,
    PackedModule,
    RotationKind,
    bias_of,
    check_count,
    check_one_of,
    check_orthogonal,
    codes_of,
    prescale_of,
    quantise_weight,
    rotation_of,
    round_up,
    scales_of,
    weight_of,
)
from rotquant_hip.ops import (
    GROUP,
    ROTATION_SIZES,
    SCALE_MODES,
    ScaleMode,
    gemm_a4w4,
    quant,
    rotate_quant,
    shuffle_scales,
    shuffle_weight,
)

_ROW_BLOCK = 16  # weight rows that the GEMM reads together


class InputRecipe(NamedTuple):
    """How a layer's input becomes MXFP4; equal for all layers that share one quantised input."""

    rotation: RotationKind
    rotation_size: int  # 0 without rotation
    prescaled: bool
    scale_mode: ScaleMode
    values: str = ""  # tells matrices and prescales apart; empty where there are none, or on meta


class QuantizedActivation(NamedTuple):
    """A rotated, quantised activation, as ``RotQuantLinear.quantize_input`` makes it."""

    codes: Tensor  # uint8 [..., K / 2]
    scales: Tensor  # uint8 [ceil256(M), ceil8(K / 32)], shuffled
    dtype: torch.dtype  # of the activation it was, and of the layers' outputs
    recipe: InputRecipe


class RotQuantLinear(PackedModule):
    """``y = x @ W.T + bias`` with x rotated and both operands in MXFP4 ("a4w4").

    R is orthogonal, so that ``x @ W.T == (x * s) @ R @ ((W / s) @ R).T``; rotating spreads outliers
    over a block of channels before x and W are rounded. Make a layer with ``from_linear`` or
    ``from_quantized``; the constructor makes an empty one (all zeros) for ``load_state_dict``.

    Args:
        in_features: K, divisible by 32 and by ``rotation_size``.
        out_features: N, any.
        bias: whether there is one.
        rotation: "none"; "hadamard", which needs no memory; "matrix", one for all blocks; or
            "matrices", one per block of ``rotation_size`` channels.
        rotation_size: RS, one of 16, 32, 64, 128, 256.
        prescale: whether x is multiplied by a factor per channel first.
        scale_mode: of the activations, see ``quant``.
        device: where the buffers are; "meta" works.

    Buffers, all saved; none changes its dtype in ``.to(dtype)`` or ``.half()``:
        weight_codes: uint8 [ceil16(N), K / 2] in the order of ``shuffle_weight``, padding rows 0.
        weight_scales: uint8 [ceil256(ceil16(N)), ceil8(K / 32)] in that of ``shuffle_scales``.
        rotation: bf16 [RS, RS] or [K / RS, RS, RS], or None.
        prescale: float32 [K], or None.
        bias: float32 [N], or None.
    """

    _old_format_key = "input_format"

    weight_codes: Tensor
    weight_scales: Tensor
    rotation: Tensor | None
    prescale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        rotation: RotationKind = "hadamard",
        rotation_size: int = 64,
        prescale: bool = False,
        scale_mode: ScaleMode = "round_up",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_one_of(rotation, "rotation", ROTATION_KINDS)
        check_one_of(scale_mode, "scale_mode", SCALE_MODES)
        check_count(in_features, "in_features", GROUP, unit=GROUP)
        check_count(out_features, "out_features", 1)
        if rotation == "none":
            rotation_size = 0
        else:
            check_one_of(rotation_size, "rotation_size", ROTATION_SIZES)
            if in_features % rotation_size:
                fitting = [size for size in ROTATION_SIZES if in_features % size == 0]
                raise ValueError(
                    f"rotation_size: expected a divisor of in_features {in_features} "
                    f"(one of {fitting}), got {rotation_size}"
                )
        self.in_features, self.out_features = in_features, out_features
        self.recipe = InputRecipe(rotation, rotation_size, bool(prescale), scale_mode)

        def buffer(name: str, present: bool, dtype: torch.dtype, *shape: int) -> None:
            self._register(name, present, dtype, *shape, device=device)

        rows, rs, groups = round_up(out_features, _ROW_BLOCK), rotation_size, in_features // GROUP
        buffer("weight_codes", True, torch.uint8, rows, in_features // 2)
        buffer("weight_scales", True, torch.uint8, round_up(rows, 256), round_up(groups, 8))
        blocks = (in_features // rs,) if rotation == "matrices" else ()
        buffer("rotation", rotation.startswith("matri"), torch.bfloat16, *blocks, rs, rs)
        buffer("prescale", bool(prescale), torch.float32, in_features)
        buffer("bias", bool(bias), torch.float32, out_features)
        self._note_input_values()

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        rotation: Tensor | Literal["hadamard", "none"] | None = "hadamard",
        rotation_size: int = 64,
        prescale: Tensor | None = None,
        scale_mode: ScaleMode = "round_up",
        weight_scale_mode: ScaleMode = "mse",
    ) -> RotQuantLinear:
        """Quantise a linear layer; the original is left as it is.

        Args:
            linear: weight [N, K] of any floating dtype, K % 32 == 0; worked on in float32.
            rotation: "hadamard", None or "none" for a layer that shall not be rotated, or an
                orthogonal matrix [RS, RS] or [K / RS, RS, RS]. A matrix is rounded to bf16 before
                anything else, so that weights and activations see the same one.
            rotation_size: RS; a matrix brings its own.
            prescale: s [K]; x * s goes into the rotation and W / s into the weights.
            scale_mode: of the activations.
            weight_scale_mode: of the weights, where "mse" costs nothing at run time.

        Raises:
            ValueError: an argument has another shape, dtype or device than described, a matrix is
                not orthogonal, or there is a NaN, an Inf, or a 0 in ``prescale``.
        """
        check_one_of(weight_scale_mode, "weight_scale_mode", SCALE_MODES)
        weight = weight_of(linear.weight, "linear.weight", 2)
        rows, k = weight.shape
        device = weight.device
        kind, size, matrix = rotation_of(rotation, "rotation", rotation_size, k, device)
        prescale = prescale_of(prescale, "prescale", k, device, divided=True)
        bias = bias_of(linear.bias, "linear.bias", (rows,), device)
        layer = cls(
            k,
            rows,
            bias is not None,
            rotation=kind,
            rotation_size=size,
            prescale=prescale is not None,
            scale_mode=scale_mode,
            device="meta",
        )
        check_orthogonal(matrix, "rotation")
        codes, scales = quantise_weight(
            weight.float(), kind, size, matrix, prescale, weight_scale_mode
        )
        layer._fill(codes, scales, matrix, prescale, bias)
        return layer

    @classmethod
    @torch.no_grad()
    def from_quantized(
        cls,
        codes: Tensor,
        scales: Tensor,
        *,
        bias: Tensor | None = None,
        input_rotation: Tensor | Literal["hadamard", "none"] | None = None,
        rotation_size: int = 64,
        input_prescale: Tensor | None = None,
        scale_mode: ScaleMode = "round_up",
    ) -> RotQuantLinear:
        """A layer from weights that are already rotated and quantised, as AMD Quark exports them.

        Args:
            codes: ``weight`` [N, K / 2], two e2m1 codes a byte, even channel in the low nibble; or
                [N, K / 32, 16], as gpt-oss has it. uint8, int8 or torch's float4_e2m1fn_x2.
            scales: ``weight_scale`` [N, K / 32], e8m0 bytes, row-major: neither shuffled nor
                padded. uint8, int8 or torch's float8_e8m0fnu.
            bias: [N], any floating dtype.
            input_rotation: what x is to be multiplied with, block by block: "hadamard", None or
                "none", or a matrix [RS, RS] or [K / RS, RS, RS]. Integer and bool matrices are
                Hadamard matrices without their factor 1/sqrt(RS); bool is +1 for True and -1 for
                False. A matrix is rounded to bf16, in which the GPU multiplies.
            rotation_size: RS for "hadamard"; a matrix brings its own.
            input_prescale: [K], multiplied in before the rotation.
            scale_mode: of the activations. Quark's own is "even".

        Raises:
            ValueError: an argument has another shape, dtype or device than described, an integer
                matrix is not a Hadamard matrix, or there is a NaN or an Inf.
        """
        codes = codes_of(codes, "codes", 2)
        scales = scales_of(scales, "scales", codes)
        rows, k = codes.shape[0], codes.shape[1] * 2
        device = codes.device
        kind, size, matrix = rotation_of(input_rotation, "input_rotation", rotation_size, k, device)
        prescale = prescale_of(input_prescale, "input_prescale", k, device, divided=False)
        bias = bias_of(bias, "bias", (rows,), device)
        layer = cls(
            k,
            rows,
            bias is not None,
            rotation=kind,
            rotation_size=size,
            prescale=prescale is not None,
            scale_mode=scale_mode,
            device="meta",
        )
        layer._fill(codes, scales, matrix, prescale, bias)
        return layer

    def _fill(
        self,
        codes: Tensor,
        scales: Tensor,
        rotation: Tensor | None,
        prescale: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        """Buffers from natural codes [N, K / 2] and scales [N, K / 32]."""
        padding = (0, 0, 0, -codes.shape[0] % _ROW_BLOCK)
        self.weight_codes = shuffle_weight(functional.pad(codes, padding))
        self.weight_scales = shuffle_scales(functional.pad(scales, padding))
        self.rotation, self.prescale, self.bias = rotation, prescale, bias
        self._note_input_values()

    def _note_input_values(self) -> None:
        """Makes `recipe` tell this layer's matrix and prescale from others. Reads them back."""
        values = [t for t in (self.rotation, self.prescale) if t is not None and not t.is_meta]
        digest = hashlib.sha256()
        for tensor in values:
            digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
        self.recipe = self.recipe._replace(values=digest.hexdigest()[:16] if values else "")
        self._noted = self._input_versions()

    def _input_versions(self) -> list[tuple[int, int | None]]:
        # An inference tensor has no version.
        return [
            (id(t), None if t.is_inference() else t._version)
            for t in (self.rotation, self.prescale)
            if t is not None
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotQuantLinear:
        super()._apply(fn, recurse)
        self._note_input_values()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._note_input_values()

    def _check_width(self, x: Tensor) -> None:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x: expected last dimension in_features {self.in_features}, "
                f"got shape {list(x.shape)}"
            )

    def quantize_input(self, x: Tensor) -> QuantizedActivation:
        """Rotate and quantise x [..., K], for this layer and all with the same rotation.

        x: bf16, fp16 or float32, and not to be differentiated: codes carry no gradient, ``forward``
        has one. The result goes into ``forward`` in place of x, of every layer
        whose rotation, matrix and prescale have the same values. A change of those buffers by hand
        is noticed unless it goes through ``.data``, which torch does not count, or is compiled.

        Raises:
            ValueError: the last dimension of x is not K.
        """
        self._check_width(x)
        if not torch.compiler.is_compiling() and self._input_versions() != self._noted:
            self._note_input_values()
        recipe = self.recipe
        if recipe.rotation == "none":
            scaled = x if self.prescale is None else x * self.prescale
            codes, scales = quant(scaled, scale_mode=recipe.scale_mode, shuffle_scales=True)
        else:
            codes, scales = rotate_quant(
                x,
                self.rotation,
                rotation_size=recipe.rotation_size,
                prescale=self.prescale,
                scale_mode=recipe.scale_mode,
                shuffle_scales=True,
            )
        return QuantizedActivation(codes, scales, x.dtype, recipe)

    def forward(self, x: Tensor | QuantizedActivation) -> Tensor:
        """x [..., K], or what ``quantize_input`` made of it, to [..., N] in x's dtype.

        Gradients of x, bias, rotation and prescale, where they require grad, are those of
        ``rotate(x) @ W.T + bias`` with the dequantised W: straight through the quantiser of x.

        Raises:
            ValueError: the last dimension of x is not K, or x was quantised for a layer with
                another rotation, matrix or prescale.
        """
        if not isinstance(x, QuantizedActivation):
            self._check_width(x)
            if autograd.needed(self, x):
                return autograd.linear(self, x)
            x = self.quantize_input(x)
        elif x.recipe != self.recipe:
            raise ValueError(f"x: expected an input quantised as {self.recipe}, got {x.recipe}")
        elif x.codes.shape[-1] * 2 != self.in_features:
            raise ValueError(
                f"x: expected an input of in_features {self.in_features} channels, "
                f"got {x.codes.shape[-1] * 2}"
            )
        return gemm_a4w4(
            x.codes,
            self.weight_codes,
            x.scales,
            self.weight_scales,
            self.bias,
            n=self.out_features,
            out_dtype=x.dtype,
        )

    def extra_repr(self) -> str:
        kind, size, prescaled, scale_mode, _ = self.recipe
        rotation = kind if kind == "none" else f"{kind} {size}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, a4w4, rotation={rotation}, prescale={prescaled}, "
            f"scale_mode={scale_mode}"
        )

    def _format(self) -> dict[str, Any]:
        return {
            "element": "e2m1",
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            **_input_format(*self.recipe[:4]),
        }

    @staticmethod
    def _format_of_version_1(numbers: list[float]) -> dict[str, Any]:
        _, kind, size_bits, mode = map(int, numbers)
        found = _input_format(_KINDS_1[kind], 1 << size_bits >> 1, False, _MODES_1[mode])
        del found["prescale"]  # which the buffers say
        return found


# The orders that format version 1 counted in.
_KINDS_1 = ("none", "hadamard", "matrix", "matrices")
_MODES_1 = ("round_up", "floor", "even", "ceil", "mse")


def _input_format(kind: str, size: int, prescaled: bool, scale_mode: str) -> dict[str, Any]:
    return {
        "rotation": kind,
        "rotation_size": size,
        "prescale": prescaled,
        "scale_mode": scale_mode,
    }
