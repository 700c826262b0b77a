# SPDX-License-Identifier: MIT
"""The stand-in for libamdhip64: a HIP program compiled whole, host and device, and run unchanged."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gfx950_emulator import hip_host, hipcc

SOURCE = Path(__file__).parent / "hip" / "runtime.hip"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runtime.hip as an executable, built with the command that users call."""
    out = tmp_path_factory.mktemp("hip") / "program"
    flags = ["-O2", "-std=c++17", "-Wall", "-Wno-unused-result", "-o", str(out), str(SOURCE)]
    subprocess.run([sys.executable, "-m", "gfx950_emulator.hipcc", *flags], check=True)
    return out


def run(
    program: Path, *arguments: str, check: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """Runs it as a plain C++ program: this test's Python is not around it."""
    unwanted = ("GFX950_EMULATOR_MEMORY", "GFX950_EMULATOR_CHECK", "PYTHONPATH", "PYTHONHOME")
    env = {k: v for k, v in os.environ.items() if k not in unwanted} | environment
    result = subprocess.run(
        [program, *arguments], check=False, capture_output=True, text=True, env=env
    )
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_launches_copies_streams_and_variables(program: Path) -> None:
    result = run(program, GFX950_EMULATOR_SUMMARY="1")
    assert result.stdout.splitlines() == [
        "add 1000: 0 wrong", "add 1: 0 wrong", "add 64: 0 wrong", "grid: 0 wrong", "symbols: 61 4 3",
    ]  # fmt: skip
    assert "7 launches" in result.stderr


def test_order_of_workgroups_does_not_matter(program: Path) -> None:
    run(program, GFX950_EMULATOR_SEED="7", GFX950_EMULATOR_THREADS="3")


def test_device_and_kernel_properties(program: Path) -> None:
    first, second, third, fourth = run(program, "properties").stdout.splitlines()
    assert first == "1 0 gfx950:sramecc+:xnack- 64 256 163840"
    assert second == "1024 1 2"  # 160 KiB of LDS hold two workgroups of 80 KiB
    assert third == "101 hipErrorInvalidDevice"
    assert fourth == "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "outside",
            "out of buffer: reads 4 bytes outside every buffer it may read at .*hipMalloc #1, byte 400 of 400",
        ),
        ("unwritten", "uninitialized memory: .*hipMalloc #1, byte 0 of 400"),
        ("freed", "out of buffer"),
        ("registered", "out of buffer: .*mine, byte 400 of 400"),
        ("block", ".* has 4096 work items, at most 1024"),
        ("copy", "copy of 404 bytes leaves hipMalloc #1 \\(400 bytes\\) at byte 0"),
        ("free", "hipFree: not the start of an allocation"),
    ],
)
def test_what_is_wrong_is_an_error_and_said(program: Path, what: str, message: str) -> None:
    result = run(program, what)
    assert re.search(f"gfx950_emulator: {message}", result.stderr), result.stderr
    if what in ("outside", "unwritten", "freed", "registered"):
        assert "kernel _Z5scalePff" in result.stderr and "lane " in result.stderr
        assert "unspecified launch failure: " in result.stdout


def test_out_of_bounds_without_checks_still_meets_a_gap(program: Path) -> None:
    assert "out of buffer" in run(program, "outside", GFX950_EMULATOR_CHECK="0").stderr


def test_memory_that_is_not_hips(program: Path) -> None:
    run(program, "host")
    run(program, "host-registered")
    run(program, "host-registered", GFX950_EMULATOR_MEMORY="known")
    refused = run(program, "host", check=False, GFX950_EMULATOR_MEMORY="known")
    assert refused.returncode == 1 and "in no buffer" in refused.stderr


# --- inside a Python process -----------------------------------------------------------------------


class Dim3(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in "xyz"]


def test_joins_the_python_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules loaded by hand, from a Python process: the launch runs in the interpreter of this test."""
    source = tmp_path / "kernel.hip"
    source.write_text(
        "#include <hip/hip_runtime.h>\n"
        'extern "C" __global__ void twice(const int* x, int* y, int n) {\n'
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < n) y[i] = 2 * x[i];\n"
        "}\n"
    )
    hipcc.compile_hip(source, tmp_path / "kernel.o", ["-O2"])
    lib = ctypes.CDLL(str(hipcc.build_runtime() / hipcc.LIBRARY))
    # hipModuleLoad also takes a host object: the code object is in its .hip_fatbin.
    image = (tmp_path / "kernel.o").read_bytes()
    start = image.index(b"\x7fELF", 1)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    assert lib.hipModuleLoadData(ctypes.byref(module), image[start:]) == 0
    assert lib.hipModuleGetFunction(ctypes.byref(function), module, b"twice") == 0
    x = np.arange(1000, dtype=np.int32)
    y = np.zeros_like(x)
    values = [ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int(len(x))]
    args = (ctypes.c_void_p * 3)(*(ctypes.addressof(v) for v in values))
    before = len(hip_host._modules)
    assert lib.hipModuleLaunchKernel(function, 16, 1, 1, 64, 1, 1, 0, None, args, None) == 0
    np.testing.assert_array_equal(y, 2 * x)
    assert len(hip_host._modules) == before == 1

    packed = np.zeros(24, np.uint8)
    packed[:8], packed[8:16] = (
        np.frombuffer(v.value.to_bytes(8, "little"), np.uint8) for v in values[:2]
    )
    packed[16:20] = np.frombuffer((7).to_bytes(4, "little"), np.uint8)
    size = ctypes.c_size_t(20)
    extra = (ctypes.c_void_p * 5)(1, packed.ctypes.data, 2, ctypes.addressof(size), 3)
    y[:] = 0
    assert lib.hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, None, None, extra) == 0
    np.testing.assert_array_equal(y[:8], [0, 2, 4, 6, 8, 10, 12, 0])
    assert lib.hipModuleGetFunction(ctypes.byref(function), module, b"thrice") == 500

    # Memory that is freed while a launch is prepared, as the garbage collector may do: the labels
    # that the launch holds stay readable, whatever takes the place of the freed ones.
    lib.gfx950_emulator_allocate.restype = ctypes.c_void_p
    lib.gfx950_emulator_allocate.argtypes = [ctypes.c_size_t, ctypes.c_char_p]
    lib.gfx950_emulator_free.argtypes = [ctypes.c_void_p]
    label = b"memory with a label that is long enough to be on the heap"
    blocks = [lib.gfx950_emulator_allocate(64, label) for _ in range(50)]
    regions = hip_host._regions
    labels: list[str] = []

    def freed_meanwhile(launch: hip_host._Launch) -> list[hip_host.HostRegion]:
        for block in blocks:
            lib.gfx950_emulator_free(block)
        for _ in range(500):
            lib.gfx950_emulator_allocate(64, b"\x86" * len(label))
        labels.extend(
            r.label.decode(errors="replace") for r in launch.regions[: launch.region_count]
        )
        return [r for r in regions(launch) if r[0] not in blocks]

    monkeypatch.setattr(hip_host, "_regions", freed_meanwhile)
    assert lib.hipModuleGetFunction(ctypes.byref(function), module, b"twice") == 0
    assert lib.hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, None, args, None) == 0
    assert sum(text.startswith(label.decode()) for text in labels) == len(blocks)


# --- which addresses a kernel may touch ------------------------------------------------------------

MAPS = """\
1000-3000 r--p 00000000 00:00 0 /lib/a b.so
3000-4000 rw-p 00000000 00:00 0
4000-6000 rw-p 00000000 00:00 0                          [heap]
6000-7000 ---p 00000000 00:00 0
7ff0000-7ff1000 rw-p 00000000 00:00 0                    [stack]
8000000-8001000 r-xp 00000000 00:00 0                    [vdso]
"""


def test_maps_are_joined_and_filtered() -> None:
    assert hip_host.mapped(MAPS.splitlines(True)) == [
        (0x1000, 0x3000, False),
        (0x3000, 0x6000, True),
    ]


ALL = [(0x1000, 0x2000, False), (0x3000, 0x3000, True)]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([], ALL),
        ([(0x9000, 8, 0)], [*ALL, (0x9000, 8, True)]),
        (
            [(0x3800, 0x10, 0)],
            [ALL[0], (0x3000, 0x800, True), (0x3800, 0x10, True), (0x3810, 0x27F0, True)],
        ),
        (
            [(0x3800, 0x10, 8)],
            [ALL[0], (0x3000, 0x7F8, True), (0x3800, 0x10, True), (0x3818, 0x27E8, True)],
        ),
        ([(0x3000, 100, 0x3000)], [(0x3000, 100, True)]),
        (
            [(0x2FF8, 0x10, 0x18), (0x3010, 8, 0x10), (0x3020, 0x10, 0x10)],
            [
                (0x1000, 0x1FE0, False),
                (0x2FF8, 0x10, True),
                (0x3010, 8, True),
                (0x3020, 0x10, True),
                (0x3040, 0x2FC0, True),
            ],
        ),
        (
            [(0x1800, 0x4000, 0x100)],
            [(0x1000, 0x700, False), (0x1800, 0x4000, True), (0x5900, 0x700, True)],
        ),
    ],
)
def test_known_memory_is_cut_out_of_what_is_mapped(known: list, expected: list) -> None:
    maps = hip_host.mapped(MAPS.splitlines(True))
    regions = hip_host.host_regions([(*k, 0, "known") for k in known], maps)
    assert [r[:3] for r in regions] == expected
