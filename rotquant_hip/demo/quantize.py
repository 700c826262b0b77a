# SPDX-License-Identifier: MIT
"""W4A4: every linear of the decoder becomes a RotQuantLinear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rotquant_hip import RotQuantLinear

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


def quantize_linear(linear: nn.Linear, recipe: Recipe) -> RotQuantLinear:
    size = recipe.rotation_size
    return RotQuantLinear.from_linear(
        linear,
        rotation=None if size is None else "hadamard",
        rotation_size=64 if size is None else fitting_rotation_size(linear.in_features, size),
        scale_mode=recipe.scale_mode,
        weight_scale_mode=recipe.scale_mode,
    )


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
    """Replaces the decoder's linears by RotQuantLinear; puts the originals back at the end."""
    originals = decoder_linears(model)
    try:
        for parent, name, linear in originals:
            setattr(parent, name, quantize_linear(linear, recipe))
        yield
    finally:
        for parent, name, linear in originals:
            setattr(parent, name, linear)
