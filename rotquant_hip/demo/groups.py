# SPDX-License-Identifier: MIT
"""Why rotation helps: statistics of the groups of 32 channels that share a scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from rotquant_hip.demo.quantize import GROUP, Recipe, encode, rotate

LARGEST_CODE = 6.0  # of e2m1
ROWS = 512  # tokens kept of every activation

# Linears whose inputs differ, and what reads them.
SITES = {
    "self_attn.q_proj": "q/k/v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate/up",
    "mlp.down_proj": "down",
}


@dataclass(frozen=True)
class Activation:
    """Input of one linear layer: values [tokens, K] as the unquantised model computes it."""

    layer: int
    site: str
    values: torch.Tensor


@dataclass(frozen=True)
class GroupStats:
    """Means over the groups (outlier, clipped, zeroed) or tokens (error) of one activation."""

    layer: int
    site: str
    rotation_size: int | None
    outlier_ratio: float  # largest magnitude / root mean square of the group; sqrt(32) at most
    clipped: float  # share of values beyond the largest code
    zeroed: float  # share of values, not 0 themselves, that became 0
    error: float  # |x - quantised x| / |x| of a token


def middle_layers(count: int) -> list[int]:
    """Three layers spread over the decoder, the outermost avoided."""
    return sorted({count // 6, count // 2, 5 * count // 6})


@contextmanager
def recorded(model: nn.Module, layers: Sequence[int]) -> Iterator[list[Activation]]:
    """Collects the first ROWS tokens that reach each site of `layers` while the block runs."""
    activations: list[Activation] = []
    hooks = []

    def record(layer: int, name: str) -> None:
        linear = model.model.layers[layer].get_submodule(name)

        def keep(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            values = inputs[0].detach().reshape(-1, inputs[0].shape[-1])[:ROWS]
            activations.append(Activation(layer, SITES[name], values.clone()))
            hook.remove()  # the first batch is enough

        hook = linear.register_forward_pre_hook(keep)
        hooks.append(hook)

    for layer in layers:
        for name in SITES:
            record(layer, name)
    try:
        yield activations
    finally:
        for hook in hooks:
            hook.remove()


def outlier_ratios(values: torch.Tensor) -> torch.Tensor:
    """[..., K] -> [..., K/32] float32: largest magnitude over root mean square; 0 for zeros."""
    groups = values.float().unflatten(-1, (-1, GROUP))
    rms = groups.square().mean(-1).sqrt()
    return groups.abs().amax(-1) / rms.clamp_min(torch.finfo(torch.float32).tiny)


def measure(activation: Activation, recipe: Recipe) -> GroupStats:
    values = rotate(activation.values, recipe)
    codes, scales = encode(activation.values, recipe)
    quantised = torch.ops.rotquant_hip.dequant(codes, scales, dtype=torch.float32)

    step = torch.exp2(scales.float() - 127).unsqueeze(-1)
    in_steps = values.unflatten(-1, (-1, GROUP)).abs() / step
    distance = (values - quantised).norm(dim=-1)
    length = values.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return GroupStats(
        layer=activation.layer,
        site=activation.site,
        rotation_size=recipe.rotation_size,
        outlier_ratio=outlier_ratios(values).mean().item(),
        clipped=(in_steps > LARGEST_CODE).float().mean().item(),
        zeroed=((quantised == 0) & (values != 0)).float().mean().item(),
        error=(distance / length).mean().item(),
    )
