# SPDX-License-Identifier: MIT
"""LDS, buffer, flat, scratch and DMA accesses; atomics. Oracles are numpy index maps."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from assemble import assemble, compile_hip, instruction_kernel, module, run_lines

import gfx950_emulator as emu

LANE = np.arange(64)


def data(inputs: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, (64, inputs), dtype=np.uint32)


def test_lds_sizes() -> None:
    """Every DS read and write width, sub-dword forms and both halves included."""
    x = data(4)
    lines = """
  v_lshlrev_b32 v5, 4, v0
  ds_write_b128 v5, v[10:13]
  ds_read_u8 v60, v5 offset:1
  ds_read_i8 v61, v5 offset:2
  ds_read_u16 v62, v5 offset:2
  ds_read_i16 v63, v5 offset:4
  ds_read_b32 v64, v5 offset:8
  ds_read_b64 v[66:67], v5 offset:8
  ds_read_b96 v[68:70], v5
  ds_read_b128 v[72:75], v5
  v_mov_b32 v65, -1
  v_mov_b32 v71, -1
  s_waitcnt lgkmcnt(0)
  ds_read_u16_d16 v65, v5 offset:4
  ds_read_u8_d16_hi v71, v5 offset:5"""
    out = run_lines(lines, x, 16, lds=1024)
    b = x.view(np.uint8).reshape(64, 16)
    assert (out[:, 0] == b[:, 1]).all() and (
        out[:, 1] == b[:, 2].view(np.int8).astype(np.int32).view(np.uint32)
    ).all()
    h = x.view(np.uint16).reshape(64, 8)
    assert (out[:, 2] == h[:, 1]).all() and (
        out[:, 3] == h[:, 2].view(np.int16).astype(np.int32).view(np.uint32)
    ).all()
    assert (out[:, 4] == x[:, 2]).all() and (out[:, 6:8] == x[:, 2:4]).all()
    assert (out[:, 8:11] == x[:, :3]).all() and (out[:, 12:16] == x).all()
    assert (out[:, 5] == (0xFFFF0000 | h[:, 2].astype(np.uint32))).all() and (
        out[:, 11] == (0x0000FFFF | b[:, 5].astype(np.uint32) << 16)
    ).all()


def test_lds_two_address_and_small_writes() -> None:
    x = data(4, 1)
    lines = """
  v_lshlrev_b32 v5, 3, v0
  ds_write2_b32 v5, v10, v11 offset0:1 offset1:128
  ds_write2_b64 v5, v[10:11], v[12:13] offset0:130 offset1:195
  ds_read2_b32 v[60:61], v5 offset0:1 offset1:128
  ds_read2_b64 v[62:65], v5 offset0:130 offset1:195
  v_lshlrev_b32 v6, 2, v0
  s_waitcnt lgkmcnt(0)
  ds_write2st64_b32 v6, v12, v13 offset0:10 offset1:11
  ds_read2st64_b32 v[66:67], v6 offset0:10 offset1:11
  ds_write_b32 v6, v10 offset:4096
  ds_write_b8 v6, v11 offset:4097
  ds_write_b16_d16_hi v6, v11 offset:4098
  ds_read_b32 v68, v6 offset:4096"""
    # write2_b64 reaches byte 504 + 195*8 + 8; the st64 forms 252 + 11*256 + 4.
    out = run_lines(lines, x, 9, lds=8192)
    assert (out[:, 0] == x[:, 0]).all()
    assert (out[:, 2:6] == x).all() and (out[:, 6:8] == x[:, 2:4]).all()
    want = x[:, 0] & 0xFF | (x[:, 1] & 0xFF) << 8 | x[:, 1] & 0xFFFF0000
    assert (out[:, 8] == want).all()


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_transpose_read(bits: int) -> None:
    """b16: a 4x16 tile per 16 lanes, b8: 8x16, b4: 16x16; lane l gets column l % 16, one element
    per row."""
    rows = 64 // bits
    tile = (
        np.random.default_rng(bits).integers(0, 1 << bits, (4, rows, 16)).astype(np.uint64)
    )  # one per 16 lanes
    per_lane = 64 // bits
    flat = tile.reshape(4, 16, per_lane)  # source lane s holds row s // P, columns E * (s % P)..
    words = np.zeros((64, 2), np.uint32)
    for e in range(per_lane):
        bit = e * bits
        words[:, bit // 32] |= (flat[:, :, e].reshape(64) << np.uint64(bit % 32)).astype(np.uint32)
    lines = f"""
  v_lshlrev_b32 v5, 3, v0
  ds_write_b64 v5, v[10:11]
  s_waitcnt lgkmcnt(0)
  ds_read_b64_tr_b{bits} v[60:61], v5"""
    out = run_lines(lines, words, 2, lds=512)
    for lane in range(64):
        got = int(out[lane, 0]) | int(out[lane, 1]) << 32
        column = [got >> bits * n & ((1 << bits) - 1) for n in range(rows)]
        assert column == tile[lane // 16, :, lane % 16].tolist()


def test_lds_float_and_integer_atomics() -> None:
    rng = np.random.default_rng(2)
    x = np.zeros((64, 4), np.uint32)
    x[:, 0] = rng.integers(0, 4, 64) * 16
    x[:, 1] = rng.integers(0, 100, 64)
    x[:, 2] = rng.integers(-50, 50, 64).astype(np.float32).view(np.uint32)
    pair = rng.integers(-8, 8, (64, 2)).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    x[:, 3] = pair[:, 0] | pair[:, 1] << 16
    lines = """
  v_mov_b32 v20, 0
  v_mov_b32 v21, 0
  v_mov_b32 v22, 0
  v_mov_b32 v23, 0
  ds_write_b128 v10, v[20:23]
  ds_add_u32 v10, v11
  ds_add_f32 v10, v12 offset:4
  ds_pk_add_bf16 v10, v13 offset:8
  ds_max_rtn_u32 v24, v10, v11 offset:12
  s_waitcnt lgkmcnt(0)
  ds_read_b128 v[60:63], v10"""
    out = run_lines(lines, x, 4, lds=64)
    for slot in range(4):
        who = x[:, 0] == 16 * slot
        row = out[who][0]
        assert (
            row[0] == x[who, 1].sum()
            and row[1:2].view(np.float32)[0] == x[who, 2].view(np.float32).sum()
        )
        assert row[3] == x[who, 1].max()
        sums = (
            np.array([row[2] & 0xFFFF, row[2] >> 16], np.uint16)
            .view(ml_dtypes.bfloat16)
            .astype(np.float32)
        )
        assert (
            sums == pair[who].astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32).sum(0)
        ).all()


BUFFER_SETUP = """
  s_mov_b32 s8, s4
  s_and_b32 s9, s5, 0xffff
  s_mov_b32 s10, {records}
  s_mov_b32 s11, 0x27000
"""


def test_buffer_ranges() -> None:
    """Raw resource: dwords past num_records read 0 and are not written, per dword of a wide
    access."""
    x = data(2, 3)
    lines = (
        BUFFER_SETUP.format(records=300)
        + """
  v_lshlrev_b32 v5, 3, v0
  buffer_load_dwordx2 v[60:61], v5, s[8:11], 0 offen
  buffer_load_dword v62, v5, s[8:11], 0 offen offset:4
  buffer_load_ubyte v63, v5, s[8:11], 0 offen offset:1
  buffer_load_ushort v64, off, s[8:11], 0 offset:298
  buffer_load_ushort v65, off, s[8:11], 0 offset:299
  s_mov_b32 s12, 8
  buffer_load_dword v66, off, s[8:11], s12 offset:4"""
    )
    out = run_lines(lines.replace("offset:299", "offset:300"), x, 7)
    flat = x.reshape(-1)
    inside = (np.arange(128) * 4 + 4 <= 300).reshape(64, 2)
    assert (out[:, :2] == np.where(inside, x, 0)).all()
    assert (out[:, 2] == np.where(inside[:, 1], x[:, 1], 0)).all()
    assert (out[:, 3] == np.where(LANE * 8 + 2 <= 300, x[:, 0] >> 8 & 255, 0)).all()
    assert (
        (out[:, 4] == flat[74] >> 16).all()
        and (out[:, 5] == 0).all()
        and (out[:, 6] == flat[3]).all()
    )


def test_buffer_structured_index() -> None:
    x = data(2, 4)
    lines = (
        BUFFER_SETUP.format(records=20).replace("0xffff\n", "0xffff\n  s_or_b32 s9, s9, 0x80000\n")
        + """
  buffer_load_dwordx2 v[60:61], v0, s[8:11], 0 idxen
  v_mov_b32 v6, v0
  v_mov_b32 v7, 4
  buffer_load_dword v62, v[6:7], s[8:11], 0 idxen offen"""
    )
    out = run_lines(lines, x, 3)
    ok = LANE < 20
    assert (out[:, :2] == np.where(ok[:, None], x, 0)).all() and (
        out[:, 2] == np.where(ok, x[:, 1], 0)
    ).all()


def test_buffer_store_drops() -> None:
    obj = emu.load(assemble(module([instruction_kernel("t", """
  s_mov_b32 s8, s6
  s_and_b32 s9, s7, 0xffff
  s_mov_b32 s10, 100
  s_mov_b32 s11, 0x27000
  v_lshlrev_b32 v5, 2, v0
  buffer_store_dword v10, v5, s[8:11], 0 offen""", 1, 0)], ["t"])))  # fmt: skip
    x, out = data(1, 5), np.full(64, 7, np.uint32)
    obj.run("t", grid=1, block=64, args=[x, out])
    assert (out == np.where(LANE * 4 + 4 <= 100, x[:, 0], 7)).all()


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("form", ["global", "buffer"])
def test_lds_dma(form: str, width: int) -> None:
    """LDS address = M0 + offset + lane * size; the offset counts on both sides; inactive lanes
    write nothing."""
    x = data(4, 6)
    suffix = {1: "dword", 4: "dwordx4"}[width]
    load = (f"  global_load_lds_{suffix} v5, s[4:5] offset:16" if form == "global"
            else f"  buffer_load_{suffix} v5, s[8:11], 0 offen offset:16 lds")  # fmt: skip
    lines = (
        BUFFER_SETUP.format(records=4096)
        + f"""
  v_mov_b32 v20, -1
  v_mov_b32 v21, -1
  v_mov_b32 v22, -1
  v_mov_b32 v23, -1
  v_lshlrev_b32 v6, 4, v0
  ds_write_b128 v6, v[20:23]
  ds_write_b128 v6, v[20:23] offset:1024
  v_sub_u32 v5, 62, v0
  v_max_i32 v5, 0, v5
  v_lshlrev_b32 v5, 4, v5
  s_mov_b32 m0, 256
  s_waitcnt lgkmcnt(0)
  s_mov_b32 exec_lo, 0xfffffff0
{load}
  s_mov_b32 exec_lo, -1
  s_waitcnt vmcnt(0)
  ds_read_b128 v[60:63], v6 offset:272"""
    )
    out = run_lines(lines, x, 4, lds=2048)
    # Lane l fetched 16 bytes further than row 62 - l: row 63 - l, the first `width` dwords.
    want = np.full(256, 0xFFFFFFFF, np.uint32)
    for lane in range(4, 64):
        want[lane * width : (lane + 1) * width] = x[max(62 - lane, 0) + 1, :width]
    assert (out.reshape(-1) == want).all()


GLOBAL_ATOMICS = """
typedef __attribute__((address_space(1))) float* gf;
typedef short s2 __attribute__((ext_vector_type(2)));
typedef __attribute__((address_space(1))) s2* gs2;
#define G extern "C" __attribute__((global))
#define I (__builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x())
G void add_float(const float* x, float* y) { unsafeAtomic: __builtin_amdgcn_global_atomic_fadd_f32((gf)&y[I % 7], x[I]); }
G void add_bf16(const s2* x, s2* y) { __builtin_amdgcn_global_atomic_fadd_v2bf16((gs2)&y[I % 3], x[I]); }
G void integers(const int* x, int* y) {
  __hip_atomic_fetch_add(&y[0], x[I], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_max(&y[1], x[I], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_min(&y[2], x[I], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_xor(&y[3], x[I], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_add((long long*)&y[4], (long long)x[I] << 20, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  int old = 0, n = I;  // the first in wins
  __hip_atomic_compare_exchange_strong(&y[6], &old, n + 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  y[8 + n] = __hip_atomic_fetch_add(&y[7], 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
"""


def test_global_atomics() -> None:
    obj = emu.load(compile_hip(GLOBAL_ATOMICS.replace("unsafeAtomic: ", "")))
    rng = np.random.default_rng(7)
    x, y = rng.integers(-9, 9, 1024).astype(np.float32), np.zeros(7, np.float32)
    stats = obj.run("add_float", grid=4, block=256, args=[x, y])
    assert (y == [x[i::7].sum() for i in range(7)]).all() and stats.atomics == 1024
    x = rng.integers(-2, 3, (1024, 2)).astype(ml_dtypes.bfloat16)
    y = np.zeros((3, 2), ml_dtypes.bfloat16)
    obj.run("add_bf16", grid=4, block=256, args=[x, y])
    assert (y.astype(np.float32) == [x[i::3].astype(np.float32).sum(0) for i in range(3)]).all()
    x, y = rng.integers(-1000, 1000, 1024).astype(np.int32), np.zeros(8 + 1024, np.int32)
    obj.run("integers", grid=4, block=256, args=[x, y])
    assert y[0] == x.sum() and y[1] == max(x.max(), 0) and y[2] == min(x.min(), 0)
    assert y[3] == np.bitwise_xor.reduce(x) and y[4:6].view(np.int64)[0] == int(x.sum()) << 20
    assert y[6] != 0 and sorted(y[8:]) == list(range(1024))


SCRATCH = """
extern "C" __attribute__((global)) void scratch(const int* x, int* y) {
  int t = __builtin_amdgcn_workitem_id_x();
  volatile int a[32];
  for (int i = 0; i < 32; ++i) a[i] = x[t] + i;
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += a[(i * x[64 + t]) & 31];
  y[t] = sum;
}
__attribute__((noinline)) __attribute__((device)) int through(volatile int* p, int i) { return p[i] * 3; }
extern "C" __attribute__((global)) void generic(const int* x, int* y) {
  int t = __builtin_amdgcn_workitem_id_x();
  __attribute__((shared)) static volatile int s[64];
  volatile int a[4] = {x[t], 1, 2, 3};
  s[t] = x[64 + t];
  y[t] = (t & 1) ? through(a, 0) : through(s, t);
}
"""


def test_scratch_and_flat() -> None:
    """Private arrays, function calls, and generic pointers into scratch and LDS."""
    obj = emu.load(compile_hip(SCRATCH))
    rng = np.random.default_rng(8)
    x, y = rng.integers(0, 1000, 128).astype(np.int32), np.zeros(64, np.int32)
    obj.run("scratch", grid=1, block=64, args=[x, emu.Uninitialized(y)])
    want = [sum(x[t] + ((i * x[64 + t]) & 31) for i in range(32)) for t in range(64)]
    assert (y == want).all()
    obj.run("generic", grid=1, block=64, args=[x, y])
    assert (y == np.where(LANE & 1, x[:64], x[64:]) * 3).all()


def test_global_sizes() -> None:
    """Loads and stores of every width, offsets and both halves."""
    x = data(4, 9)
    lines = """
  v_lshlrev_b32 v5, 4, v0
  global_load_ubyte v60, v5, s[4:5] offset:3
  global_load_sbyte v61, v5, s[4:5] offset:3
  global_load_ushort v62, v5, s[4:5] offset:6
  global_load_sshort v63, v5, s[4:5] offset:6
  global_load_dwordx2 v[64:65], v5, s[4:5] offset:8
  global_load_dwordx3 v[66:68], v5, s[4:5]
  v_mov_b32 v69, -1
  s_waitcnt vmcnt(0)
  global_load_short_d16_hi v69, v5, s[4:5] offset:2
  global_load_dword v70, v5, s[4:5] offset:12 nt sc0 sc1"""
    out = run_lines(lines, x, 11)
    b, h = x.view(np.uint8).reshape(64, 16), x.view(np.uint16).reshape(64, 8)
    assert (out[:, 0] == b[:, 3]).all() and (
        out[:, 1] == b[:, 3].view(np.int8).astype(np.int32).view(np.uint32)
    ).all()
    assert (out[:, 2] == h[:, 3]).all() and (
        out[:, 3] == h[:, 3].view(np.int16).astype(np.int32).view(np.uint32)
    ).all()
    assert (out[:, 4:6] == x[:, 2:]).all() and (out[:, 6:9] == x[:, :3]).all()
    assert (out[:, 9] == (0xFFFF | h[:, 1].astype(np.uint32) << 16)).all() and (
        out[:, 10] == x[:, 3]
    ).all()
