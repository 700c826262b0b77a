# SPDX-License-Identifier: MIT
"""A linear layer in MXFP4: rotate and quantise the input, multiply with quantised weights.

One activation that several layers read (q/k/v; gate/up) is quantised once in either of two ways.
Where you write the forward pass yourself, quantise it and hand it on::

    x = attention.q_proj.quantize_input(x)
    q, k, v = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)

Where a model calls its layers with plain tensors, tell them once: ``share_input([q, k, v])``. The
first works everywhere, the second in eager mode and in captured graphs; under ``torch.compile`` it
does no harm, but every layer quantises for itself again.

Nothing in a forward pass reads a value back or has a shape that depends on data, so that layers
can be captured in a graph and compiled with ``fullgraph=True``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotquant_hip import autograd
from rotquant_hip._weights import (
    ROTATION_KINDS,
    PackedModule,
    RotationKind,
    as_prescale,
    check_one_of,
    check_orthogonal,
    quantise_weight,
    rotation_of,
    round_up,
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
_FORMAT_VERSION = 1


class InputRecipe(NamedTuple):
    """How a layer's input becomes MXFP4; equal for all layers that share one quantised input."""

    rotation: RotationKind
    rotation_size: int  # 0 without rotation
    prescaled: bool
    scale_mode: ScaleMode


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

    _format_key = "input_format"
    _format_fields = "version, rotation, bits of its size, scale mode"

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
        if in_features % GROUP:
            raise ValueError(f"in_features: expected a multiple of {GROUP}, got {in_features}")
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
        self.recipe = InputRecipe(rotation, rotation_size, prescale, scale_mode)
        self._shared_input: _SharedInput | None = None  # set by share_input

        def buffer(name: str, present: bool, dtype: torch.dtype, *shape: int) -> None:
            values = torch.zeros(shape, dtype=dtype, device=device) if present else None
            self.register_buffer(name, values)

        rows, rs, groups = round_up(out_features, _ROW_BLOCK), rotation_size, in_features // GROUP
        buffer("weight_codes", True, torch.uint8, rows, in_features // 2)
        buffer("weight_scales", True, torch.uint8, round_up(rows, 256), round_up(groups, 8))
        blocks = (in_features // rs,) if rotation == "matrices" else ()
        buffer("rotation", rotation.startswith("matri"), torch.bfloat16, *blocks, rs, rs)
        buffer("prescale", prescale, torch.float32, in_features)
        buffer("bias", bias, torch.float32, out_features)

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
            ValueError: K and the rotation do not fit, or the matrix is not orthogonal.
        """
        weight = linear.weight.detach().float()
        rows, k = weight.shape
        kind, size, matrix = rotation_of(rotation, rotation_size, k, weight.device)
        layer = cls(
            k,
            rows,
            linear.bias is not None,
            rotation=kind,
            rotation_size=size,
            prescale=prescale is not None,
            scale_mode=scale_mode,
            device="meta",
        )
        check_one_of(weight_scale_mode, "weight_scale_mode", SCALE_MODES)
        if prescale is not None:
            prescale = as_prescale(prescale, k, weight.device)
        if matrix is not None:
            check_orthogonal(matrix)
        codes, scales = quantise_weight(weight, kind, size, matrix, prescale, weight_scale_mode)
        layer._fill(codes, scales, matrix, prescale, linear.bias)
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
            codes: ``weight`` [N, K / 2], two e2m1 codes a byte, even channel in the low nibble.
            scales: ``weight_scale`` [N, K / 32], e8m0, row-major: neither shuffled nor padded.
            bias: [N], any floating dtype.
            input_rotation: what x is to be multiplied with, block by block: "hadamard", None or
                "none", or a matrix [RS, RS] or [K / RS, RS, RS]. Integer and bool matrices are
                Hadamard matrices without their factor 1/sqrt(RS); bool is +1 for True and -1 for
                False. A matrix is rounded to bf16, in which the GPU multiplies.
            rotation_size: RS for "hadamard"; a matrix brings its own.
            input_prescale: [K], multiplied in before the rotation.
            scale_mode: of the activations. Quark's own is "even".

        Raises:
            ValueError: shapes do not fit.
        """
        if codes.dim() != 2 or codes.shape[1] % (GROUP // 2):
            raise ValueError(f"codes: expected [N, K / 2] with K % 32 == 0, got {codes.shape}")
        rows, k = codes.shape[0], codes.shape[1] * 2
        if scales.shape != (rows, k // GROUP):
            raise ValueError(
                f"scales: expected [{rows}, {k // GROUP}] in natural order, got {scales.shape}"
            )
        if bias is not None and bias.shape != (rows,):
            raise ValueError(f"bias: expected [{rows}], got {bias.shape}")
        kind, size, matrix = rotation_of(input_rotation, rotation_size, k, codes.device)
        layer = cls(
            k,
            rows,
            bias is not None,
            rotation=kind,
            rotation_size=size,
            prescale=input_prescale is not None,
            scale_mode=scale_mode,
            device="meta",
        )
        if input_prescale is not None:
            input_prescale = as_prescale(input_prescale, k, codes.device)
        layer._fill(codes.view(torch.uint8), scales.view(torch.uint8), matrix, input_prescale, bias)
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
        self.rotation, self.prescale = rotation, prescale
        self.bias = None if bias is None else bias.detach().to(codes.device, torch.float32).clone()

    def quantize_input(self, x: Tensor) -> QuantizedActivation:
        """Rotate and quantise x [..., K], for this layer and all with the same rotation.

        x: bf16, fp16 or float32, and not to be differentiated: codes carry no gradient, ``forward``
        has one. The result goes into ``forward`` in place of x. Layers with
        matrices or prescales of their own must have the same values; ``share_input`` checks that.
        """
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
            ValueError: x was quantised for a layer with another rotation.
        """
        if not isinstance(x, QuantizedActivation):
            if autograd.needed(self, x):
                return autograd.linear(self, x)
            shared = self._shared_input
            x = self.quantize_input(x) if shared is None else shared(self, x)
        if x.recipe != self.recipe:
            raise ValueError(f"x: expected an input quantised as {self.recipe}, got {x.recipe}")
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
        kind, size, prescaled, scale_mode = self.recipe
        rotation = kind if kind == "none" else f"{kind} {size}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, a4w4, rotation={rotation}, prescale={prescaled}, "
            f"scale_mode={scale_mode}"
        )

    def _format(self) -> list[float]:
        recipe = self.recipe
        kind, mode = ROTATION_KINDS.index(recipe.rotation), SCALE_MODES.index(recipe.scale_mode)
        return [_FORMAT_VERSION, kind, recipe.rotation_size.bit_length(), mode]


def share_input(layers: Sequence[RotQuantLinear]) -> None:
    """From now on, what goes into several of these layers is quantised by the first one only.

    They recognise the activation as the same tensor object, not written to since, and each takes it
    once. Where that cannot be told, every layer quantises for itself: in inference mode, where
    torch keeps no count of writes, and under ``torch.compile``, where ``quantize_input`` does what
    this does. The rotation and prescale buffers become one tensor each.

    Raises:
        ValueError: the layers rotate or quantise differently, or their matrices or prescales do.
    """
    first, *others = layers
    for layer in others:
        same = layer.recipe == first.recipe and layer.in_features == first.in_features
        for name in ("rotation", "prescale"):
            mine, its = getattr(first, name), getattr(layer, name)
            same = same and (mine is its or (mine is not None and torch.equal(mine, its)))
        if not same:
            raise ValueError(
                f"layers: expected the same input rotation and scaling in all, got "
                f"{first.recipe} and {layer.recipe} or different matrices or prescales"
            )
    shared = _SharedInput(len(layers))
    for layer in layers:
        layer.rotation, layer.prescale = first.rotation, first.prescale
        layer._shared_input = shared


class _SharedInput:
    """Hands what the first of `readers` layers made of an activation to the others, once each.

    NOTE: once, because a captured graph that met what an earlier run had left here would lack the
    quantisation when it is replayed.
    """

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._last: _LastInput | None = None

    def __call__(self, layer: RotQuantLinear, x: Tensor) -> QuantizedActivation:
        # An inference tensor has no version to tell whether it was written to.
        if torch.compiler.is_compiling() or x.is_inference():
            return layer.quantize_input(x)
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        last = self._last  # read once: another thread may replace it
        if last is None or not last.serves(layer, x, capturing):
            last = _LastInput(weakref.ref(x), x._version, capturing, layer.quantize_input(x), set())
        last.served.add(id(layer))
        self._last = last if len(last.served) < self._readers else None
        return last.quantised

    def __getstate__(self) -> dict[str, Any]:
        return {"_readers": self._readers, "_last": None}  # copies and files start without


class _LastInput(NamedTuple):
    x: weakref.ref[Tensor]
    version: int
    capturing: bool
    quantised: QuantizedActivation
    served: set[int]

    def serves(self, layer: RotQuantLinear, x: Tensor, capturing: bool) -> bool:
        same = self.x() is x and self.version == x._version and self.capturing == capturing
        return same and id(layer) not in self.served
