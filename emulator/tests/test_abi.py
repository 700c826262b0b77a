# SPDX-License-Identifier: MIT
"""Loading and launching: containers, code object versions, arguments of all kinds, ids, dynamic LDS, modes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from assemble import compile_hip

import gfx950_emulator as emu

SOURCE = """
#define G extern "C" __attribute__((global))
#define B(name) __builtin_amdgcn_##name
struct Params { const int* x; int* y; int n; float f; long long big; char flag; };
G void by_value(Params p, short s, double d, unsigned char c) {
  int i = B(workitem_id_x)();
  if (i < p.n) p.y[i] = p.x[i] + (int)p.f + (int)p.big + p.flag + s + (int)d + c;
}
G void ids(int* y) {
  int wx = B(workgroup_id_x)(), wy = B(workgroup_id_y)(), wz = B(workgroup_id_z)();
  int bx = B(workgroup_size_x)(), by = B(workgroup_size_y)(), bz = B(workgroup_size_z)();
  int x = wx * bx + B(workitem_id_x)(), yy = wy * by + B(workitem_id_y)(), z = wz * bz + B(workitem_id_z)();
  int gx = B(grid_size_x)(), gy = B(grid_size_y)();
  y[(z * gy + yy) * gx + x] = x | yy << 10 | z << 20;
}
G void dynamic(const int* x, int* y) {
  extern __attribute__((shared)) int s[];
  __attribute__((shared)) static volatile int fixed[64];
  int t = B(workitem_id_x)();
  fixed[t] = x[t];
  s[4096 + t] = 2 * x[t];
  y[t] = fixed[t] + s[4096 + t];
}
__attribute__((constant)) int table[4] = {5, 6, 7, 8};
G void constants(int* y) { int t = B(workitem_id_x)(); y[t] = table[(t * 7) & 3]; }
"""


@pytest.fixture(scope="module")
def obj() -> emu.Object:
    return emu.load(compile_hip(SOURCE))


def test_kernel_info(obj: emu.Object) -> None:
    info = obj.kernels["dynamic"]
    assert info.lds_bytes == 256 and info.max_workgroup == 1024 and info.scratch_bytes == 0
    assert [a.kind for a in info.args if not a.hidden] == ["global_buffer"] * 2
    assert info.vgprs >= 2 and info.sgprs >= 4 and info.agprs == 0


def test_by_value(obj: emu.Object) -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    params = emu.Struct("PPifqb", x, y, 50, 2.5, -(1 << 40) + 7, -3)
    obj.run("by_value", grid=1, block=64, args=[params, -5, 9.75, np.uint8(200)])
    want = x + 2 + ((-(1 << 40) + 7) & 0xFFFFFFFF) - 3 - 5 + 9 + 200
    assert (y == np.where(x < 50, want, 0)).all()


def test_raw_kernarg(obj: emu.Object) -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)

    def segment(addresses: list[int]) -> bytes:
        return struct.pack("<QQifqb7xhxxxxxxdB", *addresses, 64, 1.0, 0, 0, 0, 0.0, 0)

    obj.run("by_value", grid=1, block=64, kernarg=segment, buffers=[x, y])
    assert (y == x + 1).all()
    with pytest.raises(TypeError, match="either args or kernarg"):
        obj.run("by_value", grid=1, block=64)


def test_ids_and_sizes(obj: emu.Object) -> None:
    """Workgroup and work item ids in three dimensions, hidden sizes, the dispatch packet, a partial wave."""
    grid, block = (3, 2, 2), (5, 3, 2)
    gx, gy, gz = (g * b for g, b in zip(grid, block, strict=True))
    y = np.zeros((gz, gy, gx), np.int32)
    stats = obj.run("ids", grid=grid, block=block, args=[emu.Uninitialized(y)])
    z, yy, x = np.meshgrid(np.arange(gz), np.arange(gy), np.arange(gx), indexing="ij")
    assert (y == (x | yy << 10 | z << 20)).all()
    assert stats.workgroups == 12 and stats.waves == 12


def test_dynamic_lds(obj: emu.Object) -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    obj.run("dynamic", grid=1, block=64, args=[x, y], dynamic_lds=4 * (4096 + 64))
    assert (y == 3 * x).all()
    with pytest.raises(emu.EmulatorError, match="out of LDS"):
        obj.run("dynamic", grid=1, block=64, args=[x, y], dynamic_lds=4 * 4096)
    with pytest.raises(ValueError, match="at most 163840"):
        obj.run("dynamic", grid=1, block=64, args=[x, y], dynamic_lds=163840)


def test_constants_in_the_image(obj: emu.Object) -> None:
    y = np.zeros(64, np.int32)
    obj.run("constants", grid=1, block=64, args=[y])
    assert (y == np.array([5, 6, 7, 8])[np.arange(64) * 7 & 3]).all()


def test_versions_and_bundles(tmp_path) -> None:
    source = '#define G extern "C" __attribute__((global))\nG void k(int* y) { *y = 7; }'
    images = {v: compile_hip(source, f"-mcode-object-version={v}") for v in (5, 6)}
    triple, host = b"hipv4-amdgcn-amd-amdhsa--gfx950", b"host-x86_64-unknown-linux-gnu-"
    for image in images.values():
        head = 24 + 8 + 24 + len(host) + 24 + len(triple)
        bundle = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", 2)
        bundle += struct.pack("<QQQ", 4096, 0, len(host)) + host
        bundle += struct.pack("<QQQ", 4096, len(image), len(triple)) + triple
        assert len(bundle) == head
        path = tmp_path / "k.hipfb"
        path.write_bytes(bundle.ljust(4096, b"\0") + image)
        for form in (image, path, str(path), path.read_bytes()):
            y = np.zeros(1, np.int32)
            emu.load(form).run("k", grid=1, block=1, args=[y])
            assert y[0] == 7
    with pytest.raises(ValueError, match="no gfx950 entry"):
        emu.load(path.read_bytes().replace(b"gfx950", b"gfx942"))
    with pytest.raises(ValueError, match="expected an ELF"):
        emu.load(b"something else")
    wrong = bytearray(images[6])
    wrong[48] = 0x4C
    with pytest.raises(ValueError, match="expected gfx950"):
        emu.load(bytes(wrong))
