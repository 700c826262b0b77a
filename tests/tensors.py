# SPDX-License-Identifier: MIT
"""Between torch tensors and the numpy arrays of the reference.

bfloat16 has no numpy type: its arrays are uint16 bit patterns, here as in `strategies`.
"""

from __future__ import annotations

from contextlib import contextmanager
from math import prod

import numpy as np
import torch
from compare import assert_bytes_equal
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

import rotquant_hip
from rotquant_hip import reference as ref

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# How a tensor can lie in memory; see `place`.
PLACEMENTS = (
    "contiguous",
    "offset",
    "rows",
    "gaps",
    "permuted",
    "columns",
    "expanded",
    "overlapping",
)
POISON = 255  # what `poisoned_allocations` leaves in uninitialised bytes


def runs_cpu_code(device: torch.device) -> bool:
    """Whether the ops run csrc/cpu there: not on a GPU, nor in the build for the emulator."""
    return device.type == "cpu" and not rotquant_hip.BUILD_INFO.get("emulated")


def to_tensor(array: NDArray, device: torch.device | str = "cpu") -> Tensor:
    """A copy of the array; uint16 becomes bfloat16."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint16:
        return torch.tensor(array.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(array, device=device)


def to_array(tensor: Tensor) -> NDArray:
    """The tensor's values in row-major order; bfloat16 becomes uint16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def rounded(values: ArrayLike, dtype: torch.dtype) -> NDArray:
    """float32 values rounded to nearest even, as an array of that dtype."""
    if dtype == torch.bfloat16:
        return ref.float32_to_bf16(values)
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float32).astype(
            np.float16 if dtype == torch.float16 else np.float32
        )


def assert_values_equal(actual: Tensor, expected: ArrayLike, what: str) -> None:
    """The tensor holds the float32 values `expected` rounded to its dtype, bit for bit.

    A NaN only has to be where one is expected: its payload depends on the order of operands.
    """
    array, expected = to_array(actual), rounded(expected, actual.dtype)
    assert_bytes_equal(_with_one_nan(array), _with_one_nan(expected), what)


def _with_one_nan(array: NDArray) -> NDArray:
    if array.dtype == np.uint16:
        return np.where((array & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), array)
    return np.where(np.isnan(array), array.dtype.type(np.nan), array)


def place(x: Tensor, placement: str) -> Tensor:
    """x laid out differently in memory, with NaN in whatever lies between its rows.

    "rows" is one stride between rows, as a slice of a wider tensor has; "gaps" has two that do not
    collapse to one, "columns" a last stride that is not 1. "offset", "rows" and "gaps" start at an
    odd element. "expanded" repeats the first slice with stride 0 and "overlapping" takes [M, K]
    windows that overlap, so those two have other values than x.
    """
    *leading, k = x.shape
    match placement:
        case "contiguous":
            return x.clone()
        case "offset":
            memory = x.new_full((x.numel() + 1,), torch.nan)
            view = memory[1:].view(x.shape)
        case "rows":
            memory = x.new_full((*leading, k + 5), torch.nan)
            view = memory[..., 3 : 3 + k]
        case "gaps":
            memory = x.new_full((*(n + 1 for n in leading), k + 5), torch.nan)
            view = memory[(*(slice(n) for n in leading), slice(3, 3 + k))]
        case "permuted":
            reverse = tuple(reversed(range(len(leading))))
            memory = x.new_full((*reversed(leading), k), torch.nan)
            view = memory.permute(*reverse, len(leading))
        case "columns":
            memory = x.new_full((k, *leading), torch.nan)
            view = memory.movedim(0, -1)
        case "expanded":
            return x[:1].expand(x.shape) if leading and x.shape[0] else x
        case "overlapping":
            windows = (x.numel() - k) // 32 + 1 if x.numel() else 0
            return x.clone().as_strided((windows, k), (32, 1))
        case _:
            raise ValueError(f"placement: expected one of {PLACEMENTS}, got {placement!r}")
    return view.copy_(x)


def expected_scales(scales: NDArray, shuffle_scales: bool) -> NDArray:
    """Natural scales [..., G] as the ops return them."""
    if not shuffle_scales:
        return scales
    *leading, groups = scales.shape
    return ref.shuffle_scales(scales.reshape(prod(leading), groups))


@contextmanager
def poisoned_allocations():
    """Inside it, memory that torch allocates and does not initialise is full of 255 (NaN)."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)
        assert torch.empty(1000, dtype=torch.uint8).eq(POISON).all(), "nothing was poisoned"
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def poisoned_scales(
    natural: NDArray[np.uint8], poison: int = 255, gate_mode: str = "separated"
) -> NDArray[np.uint8]:
    """Shuffled scales of [..., N, G] with `poison` in all padding, which must not matter."""
    real = ref.shuffle_scales(np.ones_like(natural), gate_mode=gate_mode)
    shuffled = ref.shuffle_scales(natural, gate_mode=gate_mode)
    return np.where(real, shuffled, poison).astype(np.uint8)
