# SPDX-License-Identifier: MIT
"""Kernel arguments: host arrays to mapped buffers, values to the kernarg segment, hidden arguments
per the ABI."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .core import core
from .elf import KernelInfo


class Uninitialized:
    """Marks an array whose contents count as never written: reading a byte before a store
    faults."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


class Struct:
    """A by-value argument packed like struct.pack; arrays (format P) become device addresses.

    Example: Struct("PPqi", x, y, rows, cols). Native alignment, as a C++ compiler lays the fields
    out.
    """

    def __init__(self, fmt: str, *values: Any) -> None:
        self.fmt, self.values = fmt, values


class Memory:
    """Host arrays mapped at device addresses, each one once."""

    def __init__(self, count: bool) -> None:
        self.native = core.Memory()
        self._count = count
        self._mapped: dict[tuple[int, int], int] = {}

    def map(self, array: np.ndarray | Uninitialized, label: str) -> int:
        """Address of the first byte of an array, which must be C-contiguous."""
        undefined = isinstance(array, Uninitialized)
        array = array.array if isinstance(array, Uninitialized) else array
        if not array.flags.c_contiguous:
            raise ValueError(f"{label}: expected a C-contiguous array, got strides {array.strides}")
        flat = array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
        key = (array.ctypes.data, flat.nbytes)
        if key in self._mapped and flat.nbytes:
            return self._mapped[key]
        end = flat.nbytes if array.flags.writeable else 0
        text = f"{label} {array.dtype}{list(array.shape)}"
        address = self.native.map(flat, 0, end, undefined, self._count, text)
        self._mapped[key] = address
        return address

    def map_internal(self, data: bytearray, label: str, writable: tuple[int, int] = (0, 0)) -> int:
        """Maps memory that the loader owns; it takes no part in the byte counts of the
        arguments."""
        return self.native.map(np.frombuffer(data, np.uint8), *writable, False, False, label)


@dataclass(frozen=True)
class Geometry:
    """A launch: grid counts workgroups, block counts work items."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int


def _scalar(value: Any, size: int, where: str) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        data = bytes(value)
    elif isinstance(value, ctypes.Structure):
        data = bytes(value)
    elif isinstance(value, np.generic):
        data = value.tobytes()
        if len(data) != size and value.dtype.kind in "iub":
            return _scalar(int(value), size, where)
    elif isinstance(value, (bool, int)):
        data = (int(value) % (1 << (8 * size))).to_bytes(size, "little")
    elif isinstance(value, float):
        fmt = {2: "<e", 4: "<f", 8: "<d"}.get(size)
        if fmt is None:
            raise ValueError(f"{where}: a float does not fit an argument of {size} bytes")
        data = struct.pack(fmt, value)
    else:
        raise TypeError(
            f"{where}: expected an array, a number, bytes or None, got {type(value).__name__}"
        )
    if len(data) != size:
        raise ValueError(f"{where}: expected {size} bytes, got {len(data)}")
    return data


def encode(value: Any, size: int, memory: Memory, where: str) -> bytes:
    """Bytes of one explicit argument of `size` bytes."""
    if value is None:
        return bytes(size)
    if isinstance(value, (np.ndarray, Uninitialized)):
        if size != 8:
            raise ValueError(
                f"{where}: an array needs a pointer argument, this one has {size} bytes"
            )
        return memory.map(value, where).to_bytes(8, "little")
    if isinstance(value, Struct):
        plain = [
            memory.map(v, f"{where}.{i}")
            if isinstance(v, (np.ndarray, Uninitialized))
            else 0
            if v is None
            else v
            for i, v in enumerate(value.values)
        ]
        data = struct.pack("@" + value.fmt, *plain)
        return (
            data.ljust(size, b"\0") if size - 8 < len(data) <= size else _scalar(data, size, where)
        )
    return _scalar(value, size, where)


def kernarg(info: KernelInfo, args: Sequence[Any], launch: Geometry, memory: Memory) -> bytearray:
    """The kernarg segment: explicit arguments in order, hidden ones by kind."""
    explicit = [a for a in info.args if not a.hidden]
    if len(args) != len(explicit):
        names = ", ".join(a.name for a in explicit)
        raise TypeError(
            f"{info.name}: expected {len(explicit)} arguments ({names}), got {len(args)}"
        )
    segment = bytearray(max(info.kernarg_bytes, 16))
    for value, spec in zip(args, explicit, strict=True):
        where = f"{info.name}: argument {spec.name}"
        segment[spec.offset : spec.offset + spec.size] = encode(value, spec.size, memory, where)
    for spec in info.args:
        if spec.hidden:
            value = hidden_value(spec.kind, launch)
            segment[spec.offset : spec.offset + spec.size] = value.to_bytes(spec.size, "little")
    return segment


def hidden_value(kind: str, launch: Geometry) -> int:
    """Value of a hidden argument. Host services (printf, hostcall, heap) get null."""
    axis = {"x": 0, "y": 1, "z": 2}.get(kind[-1], 0)
    if kind.startswith("hidden_block_count"):
        return launch.grid[axis]
    if kind.startswith("hidden_group_size"):
        return launch.block[axis]
    if kind == "hidden_grid_dims":
        return (
            3
            if launch.grid[2] * launch.block[2] > 1
            else 2
            if launch.grid[1] * launch.block[1] > 1
            else 1
        )
    if kind == "hidden_dynamic_lds_size":
        return launch.dynamic_lds
    if kind == "hidden_private_base":
        return 0x00020000
    if kind == "hidden_shared_base":
        return 0x00010000
    return 0


def dispatch_packet(launch: Geometry, info: KernelInfo, kernarg_address: int) -> bytearray:
    """The 64-byte AQL kernel dispatch packet."""
    size = [g * b for g, b in zip(launch.grid, launch.block, strict=True)]
    return bytearray(
        struct.pack(
            "<HHHHHHIIIIIQQQQ",
            2, 3, *launch.block, 0, *size, info.scratch_bytes, info.lds_bytes + launch.dynamic_lds,
            0, kernarg_address, 0, 0,
        )
    )  # fmt: skip
