# SPDX-License-Identifier: MIT
"""emu.load and the loaded object: the package's whole interface."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import arguments, decode, elf
from .core import core
from .errors import Access, EmulatorError
from .stats import Stats

_ENABLE_DISPATCH, _ENABLE_QUEUE, _ENABLE_KERNARG, _ENABLE_DISPATCH_ID, _ENABLE_PRIVATE = (
    2,
    4,
    8,
    16,
    64,
)
_LDS_MAX = 163840
_STRADDLING = ("fault", "outside", "inside")  # in the order of the core
_SCRATCH_MAX = 131056  # per work item: 13 bits of 1 KiB for a wave


def load(source: str | Path | bytes) -> Object:
    """Loads a gfx950 code object: path or bytes of an AMDGPU ELF (version 5, 6) or a clang offload
    bundle. Raises ValueError for anything else, or what is damaged."""
    return Object(elf.load(source))


class Object:
    """A loaded code object. `kernels` maps names to KernelInfo."""

    def __init__(self, code_object: elf.CodeObject) -> None:
        self._object = code_object
        self.kernels = code_object.kernels
        begin, end = code_object.code
        self._code = bytes(code_object.image[begin:end])
        self._decoded = decode.decode(self._code)
        self._program = core.Program(self._decoded.records, self._decoded.names, len(self._code))

    def run(
        self,
        name: str,
        *,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Any] | None = None,
        dynamic_lds: int = 0,
        check: bool = True,
        count: bool | None = None,
        kernarg: bytes | Callable[[list[int]], bytes] | None = None,
        buffers: Sequence[np.ndarray | arguments.Uninitialized] = (),
        seed: int | None = None,
        threads: int | None = None,
        max_instructions: int = 0,
        unaligned: bool = False,
        straddling: str | None = None,
        strict_races: bool = False,
        latency: str | int | None = None,
        host_regions: Sequence[tuple[int, int, bool, int, str]] = (),
    ) -> Stats:
        """Runs one kernel over `grid` workgroups of `block` work items; arrays among the arguments
        change in place.

        args: arrays (buffers), None (null), numbers (converted to the metadata's size), bytes or
        Struct (by value).
        kernarg: the raw segment instead of args, or a function of the addresses of `buffers` that
        returns it.
        check: stop at the first fault (EmulatorError). count: collect memory counts; default: as
        check.
        seed: shuffles the order of workgroups and waves. threads: worker threads, default all
        cores.
        max_instructions: per wave, about; 0 is no limit.
        unaligned: vector memory accesses need no alignment, as in the unaligned access mode that
        ROCm sets.
        straddling: what a dword of a buffer is that begins before num_records and ends behind it:
        "fault", "outside" (reads 0, writes nothing; as documented) or "inside" (as one of AMD's
        kernels needs). Default: "fault" with checks, else "outside".
        strict_races: a store to LDS is a race also where it stores the bytes that are there.
        latency: when memory operations take effect. "early": at once. "late": when an s_waitcnt (or
        a full counter) forces them; until then a destination holds poison, and stores are not
        visible. A non-negative int: at some moment between, by that seed. Default:
        GFX950_EMULATOR_LATENCY, else "early". None of them depends on `check`.
        host_regions: host memory usable at its true address, as (address, bytes, writable, address
        of a byte map of
        what was written or 0, label), ascending and disjoint; raw pointers inside arguments may
        point there.
        """
        info = self._kernel(name)
        launch = arguments.Geometry(_triple(grid), _triple(block), dynamic_lds)
        items = launch.block[0] * launch.block[1] * launch.block[2]
        if not 0 < items <= min(info.max_workgroup, 1024):
            raise ValueError(
                f"{name}: block {launch.block} has {items} work items, at most {info.max_workgroup}"
            )
        if info.lds_bytes + dynamic_lds > _LDS_MAX:
            raise ValueError(
                f"{name}: {info.lds_bytes} + {dynamic_lds} bytes of LDS, at most {_LDS_MAX}"
            )
        if info.scratch_bytes > _SCRATCH_MAX:
            raise ValueError(
                f"{name}: {info.scratch_bytes} bytes of scratch, at most {_SCRATCH_MAX}"
            )
        if (args is None) == (kernarg is None):
            raise TypeError(f"{name}: expected either args or kernarg")
        if args is not None and not info.has_metadata:
            raise TypeError(f"{name}: has no argument metadata, use kernarg")
        _check_mode(info)
        straddling = straddling or ("fault" if check else "outside")
        if straddling not in _STRADDLING:
            raise ValueError(f"straddling: expected one of {_STRADDLING}, got {straddling!r}")
        latency, latency_seed = _latency(latency)
        count = check if count is None else count
        memory = arguments.Memory(count)
        memory.native.map_host(list(host_regions))
        if args is not None:
            segment = arguments.kernarg(info, args, launch, memory)
        else:
            mapped = [memory.map(b, f"{name}: buffer {i}") for i, b in enumerate(buffers)]
            segment = bytearray(kernarg(mapped) if callable(kernarg) else kernarg or b"")
        # Compilers may widen the last scalar load; a real segment ends on a cache line.
        segment = segment.ljust(-(-max(len(segment), info.kernarg_bytes) // 64) * 64, b"\0")
        image = memory.map_internal(self._object.image, "code object", self._object.writable)
        segment_at = memory.map_internal(segment, "kernarg segment")
        sgprs = self._user_sgprs(info, launch, memory, segment, segment_at)
        entry = info.entry - self._object.code[0] + (256 if info.preload[0] else 0)
        out = core.run(
            self._program,
            memory.native,
            {
                "code_address": image + self._object.code[0],
                "check": check,
                "count": count,
                "lds_size": info.lds_bytes + dynamic_lds,
                "scratch_size": info.scratch_bytes,
                "arch_vgprs": info.arch_vgprs,
                "acc_vgprs": info.acc_vgprs,
                "max_instructions": max_instructions,
                "unaligned": unaligned,
                "straddling": _STRADDLING.index(straddling),
                "strict_races": strict_races,
                "latency": latency,
                "latency_seed": latency_seed,
                "grid": list(launch.grid),
                "block": list(launch.block),
                "sgprs": sgprs,
                "wg_id": list(info.workgroup_ids),
                "mode": info.mode,
                "seed": -1 if seed is None else int(seed),
                "threads": threads or os.cpu_count() or 1,
                "entry": entry,
            },
        )
        if "fault" in out:
            raise self._error(name, out["fault"])
        return Stats(self._decoded, out, memory.native.touched(name) if count else None)

    def mnemonics(self, name: str | None = None) -> set[str]:
        """Mnemonics in the code of one kernel (up to its last s_endpgm before the next kernel), or
        of the object."""
        pcs, names = self._decoded.column("pc"), self._decoded.column("name")
        begin, end = 0, len(self._code)
        if name is not None:
            entries = sorted(k.entry - self._object.code[0] for k in self.kernels.values())
            begin = self._kernel(name).entry - self._object.code[0]
            end = min([e for e in entries if e > begin], default=end)
        inside = (pcs >= begin) & (pcs < end)
        found = {self._decoded.names[i] for i in np.unique(names[inside])}
        return {n for n in found if not n.startswith("?")}

    def unimplemented(self, name: str | None = None) -> set[str]:
        """Mnemonics in the code that the emulator cannot execute; executing one is an error that
        names it."""
        return self.mnemonics(name) - set(core.implemented())

    def _kernel(self, name: str) -> elf.KernelInfo:
        if name not in self.kernels:
            raise KeyError(f"no kernel {name!r}; this object has {sorted(self.kernels)}")
        return self.kernels[name]

    def _user_sgprs(self, info, launch, memory, segment, segment_at) -> list[int]:
        words: list[int] = []

        def pointer(value: int) -> None:
            words.extend([value & 0xFFFFFFFF, value >> 32])

        if info.properties & _ENABLE_DISPATCH:
            packet = arguments.dispatch_packet(launch, info, segment_at)
            pointer(memory.map_internal(packet, "dispatch packet"))
        if info.properties & _ENABLE_QUEUE:
            pointer(0)
        if info.properties & _ENABLE_KERNARG:
            pointer(segment_at)
        if info.properties & _ENABLE_DISPATCH_ID:
            pointer(0)
        if info.properties & _ENABLE_PRIVATE:
            words.append(info.scratch_bytes)
        count, offset = info.preload
        for i in range(count):
            at = 4 * (offset + i)
            words.append(int.from_bytes(segment[at : at + 4].ljust(4, b"\0"), "little"))
        if len(words) > info.user_sgprs:
            raise ValueError(
                f"{info.name}: {len(words)} user SGPRs, "
                f"the descriptor has room for {info.user_sgprs}"
            )
        return words + [0] * (info.user_sgprs - len(words))

    def _error(self, kernel: str, fault: dict) -> EmulatorError:
        text, source = self._place(fault["pc"])
        earlier = None
        if fault["earlier"] is not None:
            pc, wave = fault["earlier"]
            earlier = Access(*self._place(pc), pc, wave)
        return EmulatorError(kernel, text, fault, source, earlier)

    def _place(self, pc: int) -> tuple[str, str | None]:
        """Text and source line of the instruction at byte `pc` of the code."""
        from .debug_line import lookup

        inst = decode.instruction(self._code[pc : pc + 16])
        text = repr(inst) if inst is not None else "(not an instruction)"
        return text, lookup(self._object.sections, self._object.code[0] + pc)


def _latency(value: str | int | None) -> tuple[str, int]:
    """(mode, seed) of the argument `latency`, or of the environment where it is None."""
    name = "latency"
    if value is None:
        name = "GFX950_EMULATOR_LATENCY"
        value = os.environ.get(name) or "early"
        value = int(value) if value.isdecimal() else value
    if value in ("early", "late"):
        return value, 0
    if (
        isinstance(value, (int, np.integer))
        and not isinstance(value, bool)
        and 0 <= value < 1 << 64
    ):
        return "random", int(value)
    raise ValueError(f"{name}: expected 'early', 'late' or a seed of 0 to 2**64 - 1, got {value!r}")


def _triple(value: Sequence[int] | int) -> tuple[int, int, int]:
    items = [value] if isinstance(value, (int, np.integer)) else list(value)
    if not 1 <= len(items) <= 3 or any(int(v) < 1 for v in items):
        raise ValueError(f"expected one to three positive sizes, got {value!r}")
    x, y, z = (int(v) for v in items + [1] * (3 - len(items)))
    return x, y, z


def _check_mode(info: elf.KernelInfo) -> None:
    if info.mode & 0xF:
        raise NotImplementedError(f"{info.name}: MODE rounding other than nearest even")
    if info.mode >> 6 & 3 != 3:
        raise NotImplementedError(f"{info.name}: MODE that flushes float16 and float64 denormals")
