# SPDX-License-Identifier: MIT
"""W4A4: every linear of the decoder reads MXFP4 activations and holds MXFP4 weights.

The product itself runs in bfloat16 (or float32) on the dequantised operands. An MXFP4 value is
exact in both, so all that is lost is lost in `torch.ops.rotquant_hip`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import rotquant_hip  # noqa: F401  (registers torch.ops.rotquant_hip)

GROUP = 32  # channels that share a scale


@dataclass(frozen=True)
class Recipe:
    """How activations and weights are quantised. rotation_size None: no rotation."""

    rotation_size: int | None
    scale_mode: str = "round_up"

    @property
    def label(self) -> str:
        return f"MXFP4, rotated {self.rotation_size}" if self.rotation_size else "MXFP4"


def fitting_rotation_size(width: int, wanted: int) -> int:
    """`wanted`, halved until it divides `width`: 128 becomes 64 for 576 channels."""
    size = wanted
    while width % size:
        size //= 2
    return size


def rotate(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """What gets quantised, in float32: x [..., K], rotated if the recipe says so."""
    if recipe.rotation_size is None:
        return x.float()
    size = fitting_rotation_size(x.shape[-1], recipe.rotation_size)
    return torch.ops.rotquant_hip.rotate(x, rotation_size=size, out_dtype=torch.float32)


def encode(x: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] -> codes uint8 [..., K/2], scales uint8 [..., K/32]; rotated in the same pass."""
    if recipe.rotation_size is None:
        return torch.ops.rotquant_hip.quant(x, scale_mode=recipe.scale_mode)
    size = fitting_rotation_size(x.shape[-1], recipe.rotation_size)
    return torch.ops.rotquant_hip.rotate_quant(x, rotation_size=size, scale_mode=recipe.scale_mode)


def fake_quant(x: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """x [..., K] to MXFP4 and back, in x's dtype. Stays in the rotated basis."""
    codes, scales = encode(x, recipe)
    return torch.ops.rotquant_hip.dequant(codes, scales, dtype=x.dtype)


class SharedInput:
    """Quantises an activation once for the neighbours that read it (q/k/v; gate/up)."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._seen: torch.Tensor | None = None
        self._quantised: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # NOTE: identity is enough only because the decoder never writes into an activation that
        # it has handed to a linear; holding `_seen` keeps its identity from being reused.
        if self._quantised is None or x is not self._seen:
            self._seen, self._quantised = x, fake_quant(x, self._recipe)
        return self._quantised


class FakeQuantLinear(nn.Module):
    """x R (W R)^T with both factors rounded to MXFP4; R is orthogonal, so unrounded it is x W^T."""

    def __init__(self, linear: nn.Linear, shared_input: SharedInput, recipe: Recipe) -> None:
        super().__init__()
        self._input = shared_input
        # Rows of W [N, K] are rotated along K, exactly as the activation's are.
        self.register_buffer("weight", fake_quant(linear.weight.detach(), recipe))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._input(x), self.weight, self.bias)


def decoder_linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """(parent, attribute, linear) of every linear inside the decoder's layers; not lm_head."""
    return [
        (parent, name, child)
        for parent in model.model.layers.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]


@contextmanager
def quantized(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Replaces the decoder's linears by FakeQuantLinear; puts the originals back at the end."""
    originals = decoder_linears(model)
    shared: dict[nn.Module, SharedInput] = {}
    try:
        for parent, name, linear in originals:
            shared_input = shared.setdefault(parent, SharedInput(recipe))
            setattr(parent, name, FakeQuantLinear(linear, shared_input, recipe))
        yield
    finally:
        for parent, name, linear in originals:
            setattr(parent, name, linear)
