# SPDX-License-Identifier: MIT
"""What the layers do with weights and rotations when they are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rotquant_hip.ops import ScaleMode, quant, rotate_quant

RotationKind = Literal["none", "hadamard", "matrix", "matrices"]
ROTATION_KINDS = ("none", "hadamard", "matrix", "matrices")


class PackedModule(nn.Module):
    """Buffers of bytes that mean nothing without the options that the layer was made with.

    ``.to(dtype)`` leaves their dtypes alone, and the state_dict says what they are, so that they
    are not loaded into a layer that would read them differently.
    """

    _format_key: str  # in the state_dict
    _format_fields: str  # what the numbers of _format are, for people

    def _format(self) -> list[float]:
        """What the buffers' shapes do not say."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        numbers = self._format()
        whole = all(isinstance(number, int) for number in numbers)
        dtype = torch.uint8 if whole else torch.float64
        destination[prefix + self._format_key] = torch.tensor(numbers, dtype=dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + self._format_key
        found = state_dict.pop(key, None)
        if found is None:
            missing_keys.append(key)
        elif found.tolist() != self._format():
            error_msgs.append(
                f"{key}: expected {self._format()} ({self._format_fields}) of "
                f"{type(self).__name__}({self.extra_repr()}), got {found.tolist()}"
            )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def quantise_weight(
    weight: Tensor,
    kind: RotationKind,
    size: int,
    matrix: Tensor | None,
    prescale: Tensor | None,
    scale_mode: ScaleMode,
) -> tuple[Tensor, Tensor]:
    """Natural codes and scales of ``(W / prescale) @ R``, W [N, K] in float32."""
    if prescale is not None:
        weight = weight / prescale
    if matrix is not None:
        rows, k = weight.shape
        each = matrix.float().expand(k // size, size, size)
        weight = torch.einsum("nbi,bij->nbj", weight.view(rows, -1, size), each).flatten(1)
    if kind == "hadamard":
        return rotate_quant(weight, rotation_size=size, scale_mode=scale_mode)
    return quant(weight, scale_mode=scale_mode)


def round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def check_one_of(value: object, name: str, known: Sequence[object]) -> None:
    if value not in known:
        raise ValueError(f"{name}: expected one of {tuple(known)}, got {value!r}")


def rotation_of(
    rotation: Tensor | str | None, size: int, k: int, device: torch.device
) -> tuple[RotationKind, int, Tensor | None]:
    """Kind, size and bf16 matrix of a `rotation` argument."""
    if rotation is None or rotation == "none":
        return "none", 0, None
    if isinstance(rotation, str):
        check_one_of(rotation, "rotation", ("hadamard", "none"))
        return "hadamard", size, None
    shape, size = tuple(rotation.shape), rotation.shape[-1]
    if shape not in ((size, size), (k // max(size, 1), size, size)):
        raise ValueError(f"rotation: expected [RS, RS] or [{k} / RS, RS, RS], got {shape}")
    if rotation.dtype == torch.bool:
        rotation = rotation.float() * 2 - 1
    elif not rotation.is_floating_point():
        rotation = rotation.float()
    else:
        matrix = rotation.detach().to(device, torch.bfloat16).contiguous()
        return ("matrix" if rotation.dim() == 2 else "matrices"), size, matrix.clone()
    if rotation.dim() == 2 and torch.equal(rotation.cpu(), sylvester(size)):
        return "hadamard", size, None
    matrix = (rotation * size**-0.5).to(device, torch.bfloat16).contiguous()
    return ("matrix" if rotation.dim() == 2 else "matrices"), size, matrix


def sylvester(size: int) -> Tensor:
    """The Hadamard matrix of +-1 that the ops use, float32; size a power of two, or it is empty."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def as_prescale(prescale: Tensor, k: int, device: torch.device) -> Tensor:
    if prescale.shape != (k,):
        raise ValueError(f"prescale: expected [{k}], got {tuple(prescale.shape)}")
    return prescale.detach().to(device, torch.float32).clone()


def check_orthogonal(matrix: Tensor) -> None:
    """R R^T = 1 to what rounding to bf16 leaves of it."""
    r = matrix.float()
    error = (r @ r.mT - torch.eye(r.shape[-1], device=r.device)).abs().max().item()
    if not error < 0.05:
        raise ValueError(
            f"rotation: expected an orthogonal matrix, got one with |R R^T - 1| up to {error:.3g}; "
            "rotate and quantise the weight yourself and use from_quantized"
        )
