# SPDX-License-Identifier: MIT
"""What the layers do with weights and rotations when they are made, saved and loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE

from rotquant_hip.ops import GROUP, ScaleMode, quant, rotate_quant

RotationKind = Literal["none", "hadamard", "matrix", "matrices"]
ROTATION_KINDS = ("none", "hadamard", "matrix", "matrices")

# One byte wide, and read as bytes.
BYTE_DTYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
FORMAT_VERSION = 2  # of what get_extra_state returns; 1 was a buffer of numbers


class PackedModule(nn.Module):
    """Buffers of bytes that mean nothing without the options that the layer was made with.

    ``.to(dtype)`` leaves their dtypes alone. The state_dict says what they are, as JSON in a uint8
    tensor (``get_extra_state``), and loading compares that, every shape and every dtype before
    anything is copied: a state that is refused leaves the layer as it was.
    """

    _old_format_key: str  # in state_dicts of format version 1

    def _format(self) -> dict[str, Any]:
        """Everything that the bytes' meaning depends on, by name; JSON values."""
        raise NotImplementedError

    @staticmethod
    def _format_of_version_1(numbers: list[float]) -> dict[str, Any]:
        """What a state_dict of format version 1 says, in the words of `_format`."""
        raise NotImplementedError

    def _register(self, name: str, present: bool, dtype: torch.dtype, *shape: int, device) -> None:
        """A buffer of zeros, or None."""
        # NOTE: not register_buffer(name, None): torch.export counts such a buffer and then misses
        # the ones behind it.
        if present:
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))
        else:
            setattr(self, name, None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def get_extra_state(self) -> Tensor:
        """The format as JSON, in a tensor because safetensors holds nothing else."""
        text = json.dumps({"version": FORMAT_VERSION, **self._format()}, sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: the layer's options were compared before, and stay."""

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
        form, old = f"{prefix}{EXTRA_STATE}", f"{prefix}{self._old_format_key}"
        problems = self._different_format(state_dict, form, old)
        for name, buffer in self._buffers.items():
            key = prefix + name
            if key in state_dict:
                try:
                    state_dict[key] = _loadable(state_dict[key], key, buffer)
                except ValueError as error:
                    problems.append(str(error))
        if problems:
            error_msgs.extend(problems)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As in torch; a state that is refused leaves the layer as it was.

        NOTE: inside a model torch calls only what lies below this and does not say whether it is
        strict. A model's load_state_dict copies what it finds before it says that a key is missing.
        """
        old = self._old_format_key
        if strict and not self._different_format(dict(state_dict), EXTRA_STATE, old):
            form = old if old in state_dict else EXTRA_STATE
            expected, given = {form, *self._buffers}, set(state_dict)
            if expected != given:
                raise RuntimeError(
                    f"state_dict: expected the keys {sorted(expected)} of a "
                    f"{type(self).__name__}.state_dict() or, for codes and scales as a checkpoint "
                    f"holds them, from_quantized; missing are {sorted(expected - given)}, unknown "
                    f"are {sorted(given - expected)}"
                )
        return super().load_state_dict(state_dict, strict, assign)

    def _different_format(self, state_dict: dict[str, Any], form: str, old: str) -> list[str]:
        """What the file says that this layer is not; a file of version 1 is brought up to date."""
        expected = self._format()
        if form in state_dict:
            try:
                found = json.loads(bytes(state_dict[form].cpu().tolist()))
                version = found.pop("version")
            except (ValueError, TypeError, KeyError, AttributeError):
                return [f"{form}: expected JSON with a version, got {state_dict[form]!r:.80}"]
            if version != FORMAT_VERSION:
                return [
                    f"{form}: expected format version {FORMAT_VERSION}, got {version}, of another "
                    "rotquant_hip; load it there and save the model as Quark's format"
                ]
        elif old in state_dict:
            try:
                found = self._format_of_version_1(state_dict.pop(old).tolist())
            except (ValueError, IndexError, AttributeError):
                return [f"{old}: expected the numbers of format version 1, got something else"]
            state_dict[form] = self.get_extra_state()
        else:
            return []
        return [
            f"{form}: expected {key} {expected.get(key)!r}, which this {type(self).__name__} was "
            f"made with, got {value!r}"
            for key, value in found.items()
            if key not in expected or expected[key] != value
        ]


def _loadable(value: Any, key: str, buffer: Tensor) -> Tensor:
    """`value` as something that can be copied into the buffer without a change of its meaning."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{key}: expected a tensor, got {type(value).__name__}")
    if buffer.dtype == torch.uint8:
        value = as_bytes(value, key)
    elif buffer.dtype == torch.int32:
        if value.is_floating_point() or value.is_complex():
            raise ValueError(f"{key}: expected an integer dtype or bool, got {value.dtype}")
    else:
        check_floating(value, key)
    if value.shape != buffer.shape:
        raise ValueError(
            f"{key}: expected shape {list(buffer.shape)}, got shape {list(value.shape)}"
        )
    # Also with assign=True the layer keeps its dtypes.
    return value if value.dtype == buffer.dtype else value.to(buffer.dtype)


# --- checks ---------------------------------------------------------------------------------------


def check_one_of(value: object, name: str, known: Sequence[object]) -> None:
    if not any(value is each or (type(value) is type(each) and value == each) for each in known):
        raise ValueError(f"{name}: expected one of {tuple(known)}, got {value!r}")


def check_count(value: object, name: str, low: int, high: int | None = None, unit: int = 1) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or value % unit or (high is not None and value > high):
        kind = "an integer" if unit == 1 else f"a multiple of {unit}"
        span = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: expected {kind}, {span}, got {value!r}")


def check_real(value: object, name: str, positive: bool = False) -> None:
    """A finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or (positive and value <= 0):
        kind = "positive number" if positive else "number"
        raise ValueError(f"{name}: expected a finite {kind}, got {value!r}")


def check_tensor(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {value!r:.60}")


def check_floating(tensor: Tensor, name: str) -> None:
    # NOTE: float8_e8m0fnu and float4 count as floating point in torch, and hold bytes here.
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ValueError(f"{name}: expected a floating-point dtype, got {tensor.dtype}")


def check_finite(tensor: Tensor, name: str) -> None:
    if not tensor.is_meta and not tensor.isfinite().all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or Inf among them")


def placed(tensor: Tensor, name: str, device: torch.device) -> Tensor:
    """On the device of the weights, from there or from the CPU."""
    if tensor.device != device and tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: expected device {device}, that of the weights, or cpu, got {tensor.device}"
        )
    return tensor.detach().to(device)


def as_bytes(tensor: Tensor, name: str) -> Tensor:
    """Codes or scales as uint8, whatever byte-wide dtype they are saved in."""
    check_tensor(tensor, name)
    if tensor.dtype not in BYTE_DTYPES:
        raise ValueError(
            f"{name}: expected dtype uint8 (or int8, float4_e2m1fn_x2, float8_e8m0fnu, which are "
            f"taken as bytes), got {tensor.dtype}"
        )
    return tensor.detach().view(torch.uint8)


def codes_of(codes: Tensor, name: str, dims: int) -> Tensor:
    """Packed codes [.., N, K / 2] as bytes; also as gpt-oss has them, [.., N, K / 32, 16]."""
    codes = as_bytes(codes, name)
    if codes.dim() == dims + 1 and codes.shape[-1] == GROUP // 2:
        codes = codes.flatten(-2)
    if codes.dim() != dims or codes.shape[-1] % (GROUP // 2) or not codes.shape[-1]:
        shape = "[N, K / 2]" if dims == 2 else "[E, N, K / 2]"
        raise ValueError(
            f"{name}: expected shape {shape} with K % {GROUP} == 0, or with {GROUP // 2} bytes a "
            f"group in a dimension of their own, got {list(codes.shape)}"
        )
    return codes


def scales_of(scales: Tensor, name: str, codes: Tensor) -> Tensor:
    """The scales of such codes, natural, as bytes."""
    scales = as_bytes(scales, name)
    natural = (*codes.shape[:-1], codes.shape[-1] * 2 // GROUP)
    if scales.shape != natural:
        raise ValueError(
            f"{name}: expected {list(natural)} in natural order, got {list(scales.shape)}"
        )
    if scales.device != codes.device:
        raise ValueError(f"{name}: expected device {codes.device}, got {scales.device}")
    return scales


def weight_of(weight: Tensor, name: str, dims: int) -> Tensor:
    check_tensor(weight, name)
    check_floating(weight, name)
    if weight.dim() != dims or not weight.shape[-1] or weight.shape[-1] % GROUP:
        shape = "[N, K]" if dims == 2 else "[E, N, K]"
        raise ValueError(
            f"{name}: expected shape {shape} with K % {GROUP} == 0, got {list(weight.shape)}"
        )
    check_finite(weight, name)
    return weight.detach()


def bias_of(
    bias: Tensor | None, name: str, shape: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """A float32 copy."""
    if bias is None:
        return None
    check_tensor(bias, name)
    check_floating(bias, name)
    if bias.shape != shape:
        raise ValueError(f"{name}: expected {list(shape)}, got {list(bias.shape)}")
    return placed(bias, name, device).to(torch.float32, copy=True)


def rotation_of(
    rotation: Tensor | str | None, name: str, size: int, k: int, device: torch.device
) -> tuple[RotationKind, int, Tensor | None]:
    """Kind, size and bf16 matrix of a rotation argument."""
    if rotation is None or (isinstance(rotation, str) and rotation == "none"):
        return "none", 0, None
    if not isinstance(rotation, Tensor):
        check_one_of(rotation, name, ("hadamard", "none"))
        return "hadamard", size, None
    shape = tuple(rotation.shape)
    size = shape[-1] if shape else 0
    if not size or shape not in ((size, size), (k // size, size, size)):
        raise ValueError(f"{name}: expected [RS, RS] or [{k} / RS, RS, RS], got {list(shape)}")
    if rotation.is_complex():
        raise ValueError(f"{name}: expected real numbers, got {rotation.dtype}")
    kind: RotationKind = "matrix" if rotation.dim() == 2 else "matrices"
    if rotation.is_floating_point():
        check_floating(rotation, name)
        check_finite(rotation, name)
        matrix = placed(rotation, name, device).to(torch.bfloat16).contiguous()
        return kind, size, matrix.clone()
    # Signs: +-1 without the factor 1/sqrt(RS); bool is True for +1.
    signs = rotation.float() * 2 - 1 if rotation.dtype == torch.bool else rotation.float()
    if not rotation.is_meta:
        product = signs @ signs.mT - size * torch.eye(size, device=signs.device)
        if not signs.abs().eq(1).all() or product.any():
            raise ValueError(
                f"{name}: expected a Hadamard matrix of +1 and -1 (R R^T = RS) where its dtype is "
                f"{rotation.dtype}, got another matrix"
            )
        if kind == "matrix" and torch.equal(signs.cpu(), sylvester(size)):
            return "hadamard", size, None
    matrix = placed(signs * size**-0.5, name, device).to(torch.bfloat16)
    return kind, size, matrix.contiguous()


def sylvester(size: int) -> Tensor:
    """The Hadamard matrix of +-1 that the ops use, float32; size a power of two, or it is empty."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def prescale_of(
    prescale: Tensor | None, name: str, k: int, device: torch.device, divided: bool
) -> Tensor | None:
    """A float32 copy; `divided`: the weights are to be divided by it."""
    if prescale is None:
        return None
    check_tensor(prescale, name)
    check_floating(prescale, name)
    if prescale.shape != (k,):
        raise ValueError(f"{name}: expected [{k}], got {list(prescale.shape)}")
    check_finite(prescale, name)
    if divided and not prescale.is_meta and prescale.float().eq(0).any():
        raise ValueError(f"{name}: expected numbers other than 0, which divide the weight, got 0")
    return placed(prescale, name, device).to(torch.float32, copy=True)


def check_orthogonal(matrix: Tensor | None, name: str) -> None:
    """R R^T = 1 to what rounding to bf16 leaves of it."""
    if matrix is None or matrix.is_meta:
        return
    r = matrix.float()
    error = (r @ r.mT - torch.eye(r.shape[-1], device=r.device)).abs().max().item()
    if not error < 0.05:
        raise ValueError(
            f"{name}: expected an orthogonal matrix, got one with |R R^T - 1| up to {error:.3g}; "
            "rotate and quantise the weight yourself and use from_quantized"
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
