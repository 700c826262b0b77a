# SPDX-License-Identifier: MIT
"""The Python half of the stand-in for libamdhip64: loads code objects, runs launches.

The C++ half (hip/) keeps memory, streams and what the program registered; it calls the four
functions that `attach` hands over. Environment, read at every launch:
    GFX950_EMULATOR_CHECK=0        no checks
    GFX950_EMULATOR_MEMORY=known   kernels may touch only memory from HIP and registered memory; the
                                   default, "mapped", lets them touch whatever the process has
                                   mapped, without bounds
    GFX950_EMULATOR_ALIGNED=1      global accesses must be aligned; by default any address will do,
                                   as under ROCm
    GFX950_EMULATOR_SEED=n         shuffle the order of workgroups and waves
    GFX950_EMULATOR_LATENCY=late   (early, a seed) when memory operations take effect (Object.run)
    GFX950_EMULATOR_THREADS=n      worker threads
    GFX950_EMULATOR_TRACE=1        one line per launch on stderr
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_int32, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

from . import elf
from .errors import EmulatorError
from .program import Object

# hipError_t
_SUCCESS, _INVALID_CONFIGURATION, _INVALID_IMAGE = 0, 9, 200
_NOT_FOUND, _LAUNCH_FAILURE, _NOT_SUPPORTED, _UNKNOWN = 500, 719, 801, 999

_MESSAGE_BYTES = 2048


class _Region(ctypes.Structure):
    """gfx950::Region in hip/runtime.h."""

    _fields_ = [
        ("begin", c_uint64),
        ("bytes", c_uint64),
        ("guard", c_uint64),
        ("written", c_uint64),
        ("label", c_char_p),
    ]


class _Kernel(ctypes.Structure):
    """gfx950::Kernel."""

    _fields_ = [
        (n, c_int32)
        for n in ("vgprs", "agprs", "sgprs", "lds_bytes", "scratch_bytes", "max_workgroup")
    ]


class _Launch(ctypes.Structure):
    """gfx950::Launch."""

    _fields_ = [
        ("module", c_int32),
        ("name", c_char_p),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("dynamic_lds", c_uint32),
        ("args", POINTER(c_void_p)),
        ("kernarg", c_void_p),
        ("kernarg_bytes", c_uint64),
        ("regions", POINTER(_Region)),
        ("region_count", c_uint64),
        ("instructions", c_uint64),
        ("message", c_char * _MESSAGE_BYTES),
    ]


class _Module:
    """A loaded code object and where its variables are."""

    def __init__(self, data: bytes) -> None:
        data = elf.read(data)
        self.object = Object(elf.load(data))
        self._symbols = elf._symbols(data, elf._sections(data))
        self.image = np.frombuffer(self.object._object.image, np.uint8)
        self.exposed = False  # the program knows an address inside the image

    def symbol(self, name: str) -> tuple[int, int]:
        if name not in self._symbols:
            raise KeyError(f"no variable {name!r} in the code object")
        self.exposed = True
        value, size, _ = self._symbols[name]
        return self.image.ctypes.data + value, size


_modules: list[_Module] = []
_loaded: dict[tuple[int, int], int] = {}  # (address, hash) of an image: index in _modules
_lock = threading.Lock()  # one launch at a time: a program's address changes from one to the next

HostRegion = tuple[int, int, bool, int, str]  # what Object.run takes


def mapped(maps: Iterable[str]) -> list[tuple[int, int, bool]]:
    """(begin, end, writable) of readable memory, neighbours joined, from /proc/self/maps."""
    out: list[tuple[int, int, bool]] = []
    for line in maps:
        where, permissions, _, _, _, *name = line.split(maxsplit=5)
        if permissions[0] != "r" or (name and name[0].startswith(("[v", "[stack"))):
            continue
        begin, end = (int(x, 16) for x in where.split("-"))
        writable = permissions[1] == "w"
        if out and out[-1][1:] == (begin, writable):
            begin = out.pop()[0]
        out.append((begin, end, writable))
    return out


def host_regions(
    known: list[tuple[int, int, int, int, str]], maps: list[tuple[int, int, bool]]
) -> list[HostRegion]:
    """Regions of a launch: what is known, and what else is mapped.

    known: (begin, bytes, guard, written, label). What is mapped less than `guard` bytes from known
    memory is left out.
    """
    out: list[HostRegion] = [
        (begin, size, True, written, label) for begin, size, _, written, label in known
    ]
    cuts = [(begin - guard, begin + size + guard) for begin, size, guard, *_ in known]
    at = 0
    for begin, end, writable in maps:
        while at < len(cuts) and cuts[at][1] <= begin:
            at += 1
        k = at
        while begin < end:
            low, high = cuts[k] if k < len(cuts) else (end, end)
            if begin < low:
                out.append((begin, min(low, end) - begin, writable, 0, "mapped by the process"))
            if low >= end:
                break
            begin, k = max(begin, high), k + 1
    return sorted(out)


def _regions(launch: _Launch) -> list[HostRegion]:
    known = [
        (r.begin, r.bytes, r.guard, r.written, r.label.decode())
        for r in launch.regions[: launch.region_count]
    ]
    known += [
        (m.image.ctypes.data, m.image.nbytes, 0, 0, "code object") for m in _modules if m.exposed
    ]
    known.sort()
    mode = os.environ.get("GFX950_EMULATOR_MEMORY", "mapped")
    if mode not in ("mapped", "known"):
        raise ValueError(f"GFX950_EMULATOR_MEMORY: expected 'mapped' or 'known', got {mode!r}")
    if mode == "known":
        return host_regions(known, [])
    with open("/proc/self/maps") as maps:
        return host_regions(known, mapped(maps))


def _arguments(launch: _Launch, name: str, module: _Module) -> list[bytes]:
    explicit = [a for a in module.object.kernels[name].args if not a.hidden]
    if launch.args:
        return [ctypes.string_at(launch.args[i], a.size) for i, a in enumerate(explicit)]
    packed = ctypes.string_at(launch.kernarg, launch.kernarg_bytes) if launch.kernarg else b""
    needed = max((a.offset + a.size for a in explicit), default=0)
    if len(packed) < needed:
        raise ValueError(f"{name}: {len(packed)} bytes of arguments, expected {needed}")
    return [packed[a.offset : a.offset + a.size] for a in explicit]


def _option(name: str) -> int | None:
    value = os.environ.get(f"GFX950_EMULATOR_{name}")
    return int(value) if value else None


def _run(launch: _Launch) -> None:
    module, name = _modules[launch.module], launch.name.decode()
    if name not in module.object.kernels:
        raise KeyError(f"no kernel {name!r} in the code object")
    grid, block = tuple(launch.grid), tuple(launch.block)
    with _lock:
        stats = module.object.run(
            name,
            grid=grid,
            block=block,
            args=_arguments(launch, name, module),
            dynamic_lds=launch.dynamic_lds,
            check=_option("CHECK") != 0,
            count=False,
            unaligned=not _option("ALIGNED"),
            seed=_option("SEED"),
            threads=_option("THREADS"),
            host_regions=_regions(launch),
        )
    launch.instructions = stats.instructions
    if _option("TRACE"):
        text = f"{name} grid {grid} block {block}: {stats.instructions} wave instructions"
        print(f"gfx950_emulator: {text}", file=sys.stderr)


def _guarded(work: Callable[[], None], report: Callable[[bytes], None]) -> int:
    """The hipError_t of `work`; an exception must not leave a callback."""
    try:
        work()
        return _SUCCESS
    except EmulatorError as e:
        error, text = _LAUNCH_FAILURE, str(e)
    except NotImplementedError as e:
        error, text = _NOT_SUPPORTED, str(e)
    except KeyError as e:
        error, text = _NOT_FOUND, str(e.args[0])
    except (ValueError, TypeError) as e:
        error, text = _INVALID_CONFIGURATION, str(e)
    except BaseException as e:  # noqa: BLE001  (Ctrl-C too: an exception here would be lost)
        traceback.print_exc()
        error, text = _UNKNOWN, f"{type(e).__name__}: {e}"
    report(text.encode()[: _MESSAGE_BYTES - 1])
    return error


def _load(data: int, size: int, out: Any, message: int) -> int:
    def work() -> None:
        image = ctypes.string_at(data, size)
        key = data, hash(image)
        with _lock:
            if key not in _loaded:
                _modules.append(_Module(image))
                _loaded[key] = len(_modules) - 1
            out[0] = _loaded[key]

    error = _guarded(work, _into(message))
    return _INVALID_IMAGE if error == _INVALID_CONFIGURATION else error


def _kernel(module: int, name: bytes, out: Any, message: int) -> int:
    def work() -> None:
        kernels = _modules[module].object.kernels
        if name.decode() not in kernels:
            raise KeyError(f"no kernel {name.decode()!r} in the code object")
        for field, _ in _Kernel._fields_:
            setattr(out[0], field, getattr(kernels[name.decode()], field))

    return _guarded(work, _into(message))


def _symbol(module: int, name: bytes, address: Any, size: Any, message: int) -> int:
    def work() -> None:
        address[0], size[0] = _modules[module].symbol(name.decode())

    return _guarded(work, _into(message))


def _launch(launch: Any) -> int:
    return _guarded(lambda: _run(launch[0]), lambda text: setattr(launch[0], "message", text))


def _into(buffer: int) -> Callable[[bytes], None]:
    return lambda text: ctypes.memmove(buffer, text + b"\0", len(text) + 1) and None


class _Interpreter(ctypes.Structure):
    """gfx950::Interpreter."""

    _fields_ = [
        ("load", CFUNCTYPE(c_int32, c_void_p, c_uint64, POINTER(c_int32), c_void_p)),
        ("kernel", CFUNCTYPE(c_int32, c_int32, c_char_p, POINTER(_Kernel), c_void_p)),
        (
            "symbol",
            CFUNCTYPE(c_int32, c_int32, c_char_p, POINTER(c_uint64), POINTER(c_uint64), c_void_p),
        ),
        ("launch", CFUNCTYPE(c_int32, POINTER(_Launch))),
    ]


_keep: list[Any] = []


def attach(address: int, *sizes: int) -> None:
    """Fills the gfx950::Interpreter at `address` with this module's functions.

    sizes: bytes of Region, Kernel and Launch as the library was compiled with.
    """
    if sizes != tuple(ctypes.sizeof(c) for c in (_Region, _Kernel, _Launch)):
        raise RuntimeError("libamdhip64 is of another version than gfx950_emulator: link again")
    table = _Interpreter.from_address(address)
    functions = {"load": _load, "kernel": _kernel, "symbol": _symbol, "launch": _launch}
    for name, kind in _Interpreter._fields_:
        callback = kind(functions[name])
        _keep.append(callback)
        setattr(table, name, callback)
