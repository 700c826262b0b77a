# SPDX-License-Identifier: MIT
"""Lane movement and operand modifiers: DPP, SDWA, swaps, permutes, LDS reads, selects. Oracles are
numpy index maps."""

from __future__ import annotations

import numpy as np
import pytest
from assemble import compile_hip, run_lines

import gfx950_emulator as emu

LANE = np.arange(64)
ROW, IN_ROW = LANE & ~15, LANE & 15


def lanes(rng: np.random.Generator, inputs: int) -> np.ndarray:
    return rng.integers(0, 1 << 32, (64, inputs), dtype=np.uint32)


def within_row(source: np.ndarray) -> np.ndarray:
    """Source lane per lane, -1 where the in-row index leaves the row."""
    return np.where((source >= 0) & (source < 16), ROW + source, -1)


DPP = {
    "quad_perm:[3,0,2,1]": (LANE & ~3) | np.array([3, 0, 2, 1])[LANE & 3],
    **{f"row_shl:{n}": within_row(IN_ROW + n) for n in (1, 7, 15)},
    **{f"row_shr:{n}": within_row(IN_ROW - n) for n in (1, 8, 15)},
    **{f"row_ror:{n}": ROW | (IN_ROW - n) % 16 for n in (1, 5, 15)},
    "wave_shl:1": np.where(LANE < 63, LANE + 1, -1),
    "wave_shr:1": LANE - 1,
    "wave_rol:1": (LANE + 1) % 64,
    "wave_ror:1": (LANE - 1) % 64,
    "row_mirror": ROW | 15 - IN_ROW,
    "row_half_mirror": (LANE & ~7) | 7 - (LANE & 7),
    "row_bcast:15": np.where(LANE >= 16, ROW - 1, -1),
    "row_bcast:31": np.where(LANE >= 32, 31, -1),
    "row_newbcast:3": ROW | 3,
}


@pytest.mark.parametrize("ctrl", list(DPP))
@pytest.mark.parametrize("bound", [False, True])
def test_dpp(ctrl: str, bound: bool) -> None:
    """bound_ctrl writes 0 for a missing source lane; without it the old value stays. Masks keep old
    values."""
    data = lanes(np.random.default_rng(1), 3)
    source = DPP[ctrl]
    full = f"{ctrl} row_mask:0xf bank_mask:0xf" + (" bound_ctrl:0" if bound else "")
    part = f"{ctrl} row_mask:0xd bank_mask:0x7" + (" bound_ctrl:0" if bound else "")
    lines = f"""
  v_mov_b32 v60, v11
  v_mov_b32 v61, v11
  v_mov_b32 v62, v11
  v_mov_b32_dpp v60, v10 {full}
  v_mov_b32_dpp v61, v10 {part}
  v_add_u32_dpp v62, v10, v12 {full}"""
    out = run_lines(lines, data, 3)
    moved = np.where(source >= 0, data[np.maximum(source, 0), 0], 0).astype(np.uint32)
    write = (source >= 0) | bound
    enabled = np.isin(LANE // 16, [0, 2, 3]) & np.isin(LANE % 16 // 4, [0, 1, 2])
    assert (out[:, 0] == np.where(write, moved, data[:, 1])).all()
    assert (out[:, 1] == np.where(write & enabled, moved, data[:, 1])).all()
    assert (out[:, 2] == np.where(write, moved + data[:, 2], data[:, 1])).all()


def test_dpp_inactive_source_is_missing() -> None:
    data = lanes(np.random.default_rng(2), 2)
    lines = """
  v_mov_b32 v60, v11
  v_mov_b32 v61, v11
  s_mov_b64 s[20:21], exec
  s_mov_b32 exec_lo, 0x0f0f3333
  v_mov_b32_dpp v60, v10 quad_perm:[1,2,3,0] row_mask:0xf bank_mask:0xf
  v_mov_b32_dpp v61, v10 quad_perm:[1,2,3,0] row_mask:0xf bank_mask:0xf bound_ctrl:0
  s_mov_b64 exec, s[20:21]"""
    out = run_lines(lines, data, 2)
    exec_ = np.array([(0x0F0F3333 >> i & 1) if i < 32 else 1 for i in range(64)], bool)
    source = (LANE & ~3) | (LANE + 1) & 3
    ok = exec_[source]
    assert (out[:, 0] == np.where(exec_ & ok, data[source, 0], data[:, 1])).all()
    assert (out[:, 1] == np.where(exec_, np.where(ok, data[source, 0], 0), data[:, 1])).all()


SELECT = (
    {f"BYTE_{b}": (8 * b, 8) for b in range(4)}
    | {f"WORD_{h}": (16 * h, 16) for h in range(2)}
    | {"DWORD": (0, 32)}
)


@pytest.mark.parametrize("unused", ["PAD", "SEXT", "PRESERVE"])
@pytest.mark.parametrize("dst", list(SELECT))
def test_sdwa_destination(dst: str, unused: str) -> None:
    data = lanes(np.random.default_rng(3), 3)
    lines = f"""
  v_mov_b32 v60, v12
  v_add_u32_sdwa v60, v10, v11 dst_sel:{dst} dst_unused:UNUSED_{unused} src0_sel:BYTE_2 src1_sel:WORD_1"""
    out = run_lines(lines, data, 1)[:, 0]
    total = (data[:, 0] >> 16 & 255) + (data[:, 1] >> 16)
    at, width = SELECT[dst]
    ones = (1 << width) - 1
    placed = (total & ones).astype(np.uint64) << at
    if unused == "PRESERVE":
        want = placed | data[:, 2] & (0xFFFFFFFF ^ ones << at)
    elif unused == "SEXT":
        sign = placed >> (at + width - 1) & 1
        want = placed | np.where(sign == 1, 0xFFFFFFFF & ~((1 << (at + width)) - 1), 0).astype(
            np.uint64
        )
    else:
        want = placed
    assert (out == want.astype(np.uint32)).all()


@pytest.mark.parametrize("select", list(SELECT))
def test_sdwa_source(select: str) -> None:
    data = lanes(np.random.default_rng(4), 1)
    tail = "dst_sel:DWORD dst_unused:UNUSED_PAD"
    lines = f"""
  v_mov_b32_sdwa v60, v10 {tail} src0_sel:{select}
  v_mov_b32_sdwa v61, sext(v10) {tail} src0_sel:{select}
  v_cvt_f32_f16_sdwa v62, -v10 {tail} src0_sel:{select if select.startswith("WORD") else "WORD_0"}"""
    out = run_lines(lines, data, 3)
    at, width = SELECT[select]
    value = (data[:, 0] >> at).astype(np.int64) & ((1 << width) - 1)
    signed = np.where(value >> (width - 1) & 1, value - (1 << width), value)
    assert (out[:, 0] == value.astype(np.uint32)).all()
    assert (out[:, 1] == signed.astype(np.uint32)).all()
    half = (
        (data[:, 0] >> (at if select.startswith("WORD") else 0) & 0xFFFF)
        .astype(np.uint16)
        .view(np.float16)
    )
    got, want = out[:, 2].view(np.float32), -half.astype(np.float32)
    assert ((got == want) | (np.isnan(got) & np.isnan(want))).all()


@pytest.mark.parametrize("row", [16, 32])
def test_permlane_swap(row: int) -> None:
    """Odd rows of the first register change places with even rows of the second."""
    data = lanes(np.random.default_rng(5), 2)
    out = run_lines(
        f"  v_mov_b32 v60, v10\n  v_mov_b32 v61, v11\n  v_permlane{row}_swap_b32 v60, v61", data, 2
    )
    d, s = data[:, 0].reshape(-1, 2, row), data[:, 1].reshape(-1, 2, row)
    assert (out[:, 0].reshape(-1, 2, row) == np.stack([d[:, 0], s[:, 0]], 1)).all()
    assert (out[:, 1].reshape(-1, 2, row) == np.stack([d[:, 1], s[:, 1]], 1)).all()


def test_lane_reads_and_writes() -> None:
    data = lanes(np.random.default_rng(6), 2)
    lines = """
  v_mov_b32 v62, v11
  s_mov_b64 s[20:21], exec
  s_mov_b64 exec, 0xff00
  v_readfirstlane_b32 s10, v10
  s_mov_b64 exec, 0
  v_readfirstlane_b32 s11, v10
  v_readlane_b32 s12, v10, 37
  s_mov_b64 exec, s[20:21]
  v_writelane_b32 v62, s12, 5
  v_mov_b32 v60, s10
  v_mov_b32 v61, s11"""
    out = run_lines(lines, data, 3)
    assert (out[:, 0] == data[8, 0]).all() and (out[:, 1] == data[0, 0]).all()
    want = data[:, 1].copy()
    want[5] = data[37, 0]
    assert (out[:, 2] == want).all()


def test_permutes() -> None:
    rng = np.random.default_rng(7)
    data = lanes(rng, 2)
    data[:, 1] = rng.integers(0, 256, 64)
    lines = "  ds_bpermute_b32 v60, v11, v10 offset:8\n  ds_permute_b32 v61, v11, v10"
    out = run_lines(lines, data, 2)
    assert (out[:, 0] == data[(data[:, 1] + 8) // 4 % 64, 0]).all()
    pushed = np.zeros(64, np.uint32)
    for lane in range(64):
        pushed[data[lane, 1] // 4] = data[lane, 0]
    assert (out[:, 1] == pushed).all()


@pytest.mark.parametrize("text,source", [
    ("QUAD_PERM,1,0,3,2", LANE ^ 1), ("SWAP,16", LANE ^ 16), ("REVERSE,8", (LANE & ~7) | 7 - (LANE & 7)),
    ("BROADCAST,4,2", (LANE & ~3) | 2), ("BITMASK_PERM,\"01pip\"", (LANE & 32) | (LANE & 7 | 8) ^ 2),
])  # fmt: skip
def test_swizzle(text: str, source: np.ndarray) -> None:
    data = lanes(np.random.default_rng(8), 1)
    out = run_lines(f"  ds_swizzle_b32 v60, v10 offset:swizzle({text})", data, 1)
    assert (out[:, 0] == data[source, 0]).all()


def test_bitop3_and_perm() -> None:
    data = lanes(np.random.default_rng(9), 3)
    data[:, 2] = np.where(
        LANE % 2, data[:, 2], np.random.default_rng(1).integers(0, 14, 64) * 0x01010101
    )
    a, b, c = data.T
    out = run_lines(
        "\n".join(
            f"  v_bitop3_b32 v{60 + i}, v10, v11, v12 bitop3:{t}"
            for i, t in enumerate(range(0, 256, 37))
        ),
        data,
        7,
    )
    for i, t in enumerate(range(0, 256, 37)):
        want = np.zeros(64, np.uint32)
        for bit in range(32):
            index = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
            want |= (t >> index & 1).astype(np.uint32) << np.uint32(bit)
        assert (out[:, i] == want).all()
    out = run_lines("  v_perm_b32 v60, v10, v11, v12", data, 1)[:, 0]
    for lane in range(64):
        both, want = int(a[lane]) << 32 | int(b[lane]), 0
        for i in range(4):
            sel = int(c[lane]) >> 8 * i & 255
            sign = [both >> (16 * k + 15) & 1 for k in range(4)]
            byte = (
                255
                if sel >= 13
                else 0
                if sel == 12
                else 255 * sign[sel - 8]
                if sel >= 8
                else both >> 8 * sel & 255
            )
            want |= byte << 8 * i
        assert out[lane] == want


def test_packed_f32_selects() -> None:
    """op_sel picks the dword of the low result, op_sel_hi that of the high one; neg_lo and neg_hi
    negate per result."""
    rng = np.random.default_rng(10)
    x = rng.standard_normal((64, 6)).astype(np.float32)
    lines = """
  v_pk_fma_f32 v[60:61], v[10:11], v[12:13], v[14:15]
  v_pk_fma_f32 v[62:63], v[10:11], v[12:13], v[14:15] op_sel:[1,0,1] op_sel_hi:[0,1,1] neg_lo:[1,0,0] neg_hi:[0,0,1]
  v_pk_add_f32 v[64:65], v[10:11], v[12:13] op_sel:[0,1] op_sel_hi:[1,0]
  v_pk_mul_f32 v[66:67], v[10:11], v[12:13] neg_lo:[0,1] neg_hi:[0,1]
  v_pk_mov_b32 v[68:69], v[10:11], v[12:13] op_sel:[1,0]"""
    out = run_lines(lines, x.view(np.uint32), 10).view(np.float32)
    a, b, c = (x[:, 2 * i : 2 * i + 2].astype(np.float64) for i in range(3))
    want = np.stack([a[:, 0] * b[:, 0] + c[:, 0], a[:, 1] * b[:, 1] + c[:, 1],
                     -a[:, 1] * b[:, 0] + c[:, 1], a[:, 0] * b[:, 1] - c[:, 1]], 1)  # fmt: skip
    assert np.allclose(out[:, :4], want, rtol=1e-6, atol=1e-6)
    assert (out[:, 4] == x[:, 0] + x[:, 3]).all() and (out[:, 5] == x[:, 1] + x[:, 2]).all()
    assert (out[:, 6] == -x[:, 0] * x[:, 2]).all() and (out[:, 7] == -x[:, 1] * x[:, 3]).all()
    assert (out[:, 8] == x[:, 1]).all() and (out[:, 9] == x[:, 2]).all()


def test_three_way_maximum() -> None:
    """maximum3 and minimum3 let NaN win, max3 and min3 let numbers win."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((64, 3)).astype(np.float32)
    x[::5, 0] = np.nan
    x[::7, 1] = np.nan
    out = run_lines("\n".join(f"  v_{n}_f32 v{60 + i}, v10, v11, v12" for i, n in enumerate(
        ["maximum3", "minimum3", "max3", "min3"])) + "\n  v_maximum3_f32 v64, |v10|, -v11, |v12|", x.view(np.uint32), 5)  # fmt: skip
    out = out.view(np.float32)
    want = [
        x.max(1),
        x.min(1),
        np.fmax.reduce(x, 1),
        np.fmin.reduce(x, 1),
        (np.abs(x) * [1, 0, 1] - x * [0, 1, 0]).max(1),
    ]
    for i, w in enumerate(want):
        assert ((out[:, i] == w.astype(np.float32)) | (np.isnan(out[:, i]) & np.isnan(w))).all(), i


def test_transcendentals_are_close() -> None:
    """1 ulp of the exact value: the hardware's own last bit is not known."""
    rng = np.random.default_rng(12)
    x = np.exp(rng.uniform(-20, 20, (512, 1))).astype(np.float32)
    names = ["exp", "log", "rcp", "rsq", "sqrt"]
    lines = "  v_log_f32 v9, v10\n" + "\n".join(
        f"  v_{n}_f32 v{60 + i}, {'v9' if n == 'exp' else 'v10'}" for i, n in enumerate(names)
    )
    out = run_lines(lines, x.view(np.uint32), 5).view(np.float32).astype(np.float64)
    e = x[:, 0].astype(np.float64)
    log = np.log2(e).astype(np.float32).astype(np.float64)
    for i, want in enumerate([np.exp2(log), np.log2(e), 1 / e, 1 / np.sqrt(e), np.sqrt(e)]):
        assert (np.abs(out[:, i] - want) <= 1.2e-7 * np.abs(want)).all(), names[i]


@pytest.mark.parametrize("kind", ["float", "double", "_Float16"])
def test_division_sequence(kind: str) -> None:
    """clang's exact division: div_scale, rcp, fma steps, div_fmas, div_fixup."""
    source = f"""
extern "C" __attribute__((global)) void divide(const {kind}* a, const {kind}* b, {kind}* c) {{
  int i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
  c[i] = a[i] / b[i];
}}"""
    rng = np.random.default_rng(13)
    dtype = {"float": np.float32, "double": np.float64, "_Float16": np.float16}[kind]
    a, b = np.frombuffer(rng.bytes(2 * 16384 * dtype().itemsize), dtype).reshape(2, -1).copy()
    a[:512], b[:512] = rng.standard_normal((2, 512))
    a[512:576], b[576:640] = 0, -0.0
    c = np.zeros(16384, dtype)
    emu.load(compile_hip(source)).run(
        "divide", grid=64, block=256, args=[a, b, emu.Uninitialized(c)]
    )
    with np.errstate(all="ignore"):
        want = a / b
    if kind == "double":  # a denormal result is rounded twice
        keep = ~((np.abs(want) < 2.0**-1022) & (want != 0))
        c, want = c[keep], want[keep]
    bad = (c != want) & ~(np.isnan(c) & np.isnan(want))
    assert not bad.any(), np.nonzero(bad)[0][:5]


INDEXED = """
typedef int v16 __attribute__((ext_vector_type(16)));
extern "C" __attribute__((global)) void pick(const v16* x, const int* index, int* y) {
  int t = __builtin_amdgcn_workitem_id_x();
  v16 v = x[t];
  int i = index[0];
  v[index[1]] = 77;
  y[t] = v[i] + v[index[2]];
}"""


def test_register_arrays() -> None:
    """A uniform index into a register array: s_set_gpr_idx_on moves the operands of v_mov."""
    obj = emu.load(compile_hip(INDEXED))
    assert "s_set_gpr_idx_on" in obj.mnemonics()
    rng = np.random.default_rng(14)
    x = rng.integers(0, 1000, (64, 16)).astype(np.int32)
    for index in ([3, 9, 9], [0, 15, 1], [15, 0, 7]):
        y = np.zeros(64, np.int32)
        obj.run("pick", grid=1, block=64, args=[x, np.array(index, np.int32), y])
        v = x.copy()
        v[:, index[1]] = 77
        assert (y == v[:, index[0]] + v[:, index[2]]).all()


def half(x: np.ndarray, high: bool = False) -> np.ndarray:
    """One half of each dword as float32 of a float16."""
    return (x >> (16 * high)).astype(np.uint16).view(np.float16).astype(np.float32)


def halves(rng: np.random.Generator, count: int) -> np.ndarray:
    """uint32 [64, count], two ordinary float16 numbers each."""
    return rng.standard_normal((64, 2 * count)).astype(np.float16).view(np.uint32)


def test_mixed_precision() -> None:
    """fma_mix: op_sel_hi says half precision, op_sel which half; neg and abs apply to the value."""
    rng = np.random.default_rng(15)
    h = halves(rng, 2)
    f = rng.standard_normal((64, 1)).astype(np.float32)
    data = np.hstack([h, f.view(np.uint32), h[::-1, :1]])
    lines = """
  v_mov_b32 v61, v13
  v_mov_b32 v62, v13
  v_fma_mix_f32 v60, v10, -v11, |v12| op_sel:[1,0,0] op_sel_hi:[1,1,0]
  v_fma_mixlo_f16 v61, v10, v12, v11 op_sel:[0,0,1] op_sel_hi:[1,0,1]
  v_fma_mixhi_f16 v62, v10, v12, v11 op_sel:[0,0,1] op_sel_hi:[1,0,1]"""
    out = run_lines(lines, data, 3)
    a, b, c = half(h[:, 0], True), half(h[:, 1]), f[:, 0]
    assert np.allclose(out[:, 0].view(np.float32), -a * b + np.abs(c), rtol=1e-6, atol=1e-6)
    want = (half(h[:, 0]).astype(np.float64) * c + half(h[:, 1], True)).astype(np.float32)
    want = want.astype(np.float16).view(np.uint16).astype(np.uint32)
    assert (out[:, 1] == (data[:, 3] & 0xFFFF0000 | want)).all()
    assert (out[:, 2] == (data[:, 3] & 0xFFFF | want << 16)).all()


def test_packed_half_selects() -> None:
    rng = np.random.default_rng(16)
    x = halves(rng, 3)
    lines = """
  v_pk_mul_f16 v60, v10, v11 op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[1,0] neg_hi:[0,1]
  v_pk_add_u16 v61, v10, v11 op_sel:[0,1] op_sel_hi:[1,0]
  v_pk_fma_f16 v62, v10, v11, v12
  v_pk_maximum3_f16 v63, v10, v11, v12
  v_pk_minimum3_f16 v64, v10, v11, v12"""
    out = run_lines(lines, x, 5)
    a, b = x[:, 0], x[:, 1]
    low = (-half(a, True) * half(b)).astype(np.float16).view(np.uint16).astype(np.uint32)
    high = (half(a) * -half(b, True)).astype(np.float16).view(np.uint16).astype(np.uint32)
    assert (out[:, 0] == (low | high << 16)).all()
    assert (out[:, 1] == ((a + (b >> 16)) & 0xFFFF | ((a >> 16) + b & 0xFFFF) << 16)).all()
    for top in (False, True):
        s = [half(x[:, i], top).astype(np.float64) for i in range(3)]
        got = [half(out[:, k], top) for k in (2, 3, 4)]
        assert (got[0] == (s[0] * s[1] + s[2]).astype(np.float16)).all()
        assert (got[1] == np.maximum.reduce(s)).all() and (got[2] == np.minimum.reduce(s)).all()


def test_half_precision_selects() -> None:
    """op_sel of VOP3 half operations: source halves, and bit 3 for the destination half."""
    rng = np.random.default_rng(17)
    x = halves(rng, 4)
    lines = """
  v_mov_b32 v60, v13
  v_fma_f16 v60, v10, v11, v12 op_sel:[1,0,1,1]
  v_mov_b32 v61, v13
  v_add_u16_e64 v61, v10, 3
  v_mov_b32 v62, v13
  v_mad_u16 v62, v10, v11, v12 op_sel:[1,1,0,1]"""
    out = run_lines(lines, x, 3)
    want = half(x[:, 0], True).astype(np.float64) * half(x[:, 1]) + half(x[:, 2], True)
    assert (half(out[:, 0], True) == want.astype(np.float16)).all()
    assert (out[:, 0] & 0xFFFF == x[:, 3] & 0xFFFF).all()
    assert (out[:, 1] & 0xFFFF == x[:, 0] + 3 & 0xFFFF).all()
    assert (
        out[:, 2] >> 16 == ((x[:, 0] >> 16) * (x[:, 1] >> 16) + (x[:, 2] & 0xFFFF) & 0xFFFF)
    ).all()


def test_sdwa_compare() -> None:
    x = lanes(np.random.default_rng(18), 2)
    lines = """
  v_cmp_lt_u32_sdwa s[20:21], v10, v11 src0_sel:BYTE_1 src1_sel:BYTE_3
  v_cmp_eq_u32_sdwa vcc, v10, v10 src0_sel:WORD_0 src1_sel:WORD_1
  v_cndmask_b32_e64 v60, 0, 1, s[20:21]
  v_cndmask_b32_e64 v61, 0, 1, vcc
  v_cmp_gt_i32_sdwa s[20:21], sext(v10), sext(v11) src0_sel:BYTE_1 src1_sel:WORD_1
  v_cndmask_b32_e64 v62, 0, 1, s[20:21]"""
    x[::4, 0] = x[::4, 0] & 0xFFFF | x[::4, 0] << 16
    out = run_lines(lines, x, 3)
    byte, high = x[:, 0] >> 8 & 255, x[:, 1] >> 24
    assert (out[:, 0] == (byte < high)).all() and (
        out[:, 1] == (x[:, 0] & 0xFFFF == x[:, 0] >> 16)
    ).all()
    assert (
        out[:, 2]
        == (byte.astype(np.uint8).view(np.int8) > (x[:, 1] >> 16).astype(np.uint16).view(np.int16))
    ).all()


def test_literals_and_modifiers() -> None:
    """fmamk, fmaak, output modifiers, clamp, and saturating integer forms."""
    rng = np.random.default_rng(19)
    x = rng.standard_normal((64, 2)).astype(np.float32)
    lines = """
  v_fmamk_f32 v60, v10, 0x40490fdb, v11
  v_fmaak_f32 v61, v10, v11, 0x40490fdb
  v_mul_f32_e64 v62, v10, v11 mul:4
  v_add_f32_e64 v63, v10, v11 clamp div:2
  v_add_u32_e64 v64, v10, v11 clamp
  v_sub_i32 v65, v10, v11 clamp"""
    raw = x.view(np.uint32)
    out = run_lines(lines, raw, 6)
    f, k = out.view(np.float32), np.float32(3.14159274)
    assert np.allclose(f[:, 0], x[:, 0] * k + x[:, 1], rtol=1e-6, atol=1e-6)
    assert np.allclose(f[:, 1], x[:, 0] * x[:, 1] + k, rtol=1e-6, atol=1e-6)
    assert (f[:, 2] == x[:, 0] * x[:, 1] * 4).all()
    assert (f[:, 3] == np.clip((x[:, 0] + x[:, 1]) / 2, 0, 1)).all()
    wide = raw.astype(np.uint64)
    assert (out[:, 4] == np.minimum(wide[:, 0] + wide[:, 1], 0xFFFFFFFF)).all()
    signed = raw.view(np.int32).astype(np.int64)
    assert (
        out[:, 5].view(np.int32) == np.clip(signed[:, 0] - signed[:, 1], -(2**31), 2**31 - 1)
    ).all()


def test_roundings() -> None:
    """The conversions whose pseudocode is only an outline."""
    rng = np.random.default_rng(20)
    x = np.concatenate(
        [
            np.arange(-32, 32) / 4,
            rng.standard_normal(192) * 1e5,
            [np.inf, -np.inf, 1e30, 0.49999997],
        ]
    )
    x = np.resize(x, (320, 1)).astype(np.float32)
    lines = """
  v_rndne_f32 v60, v10
  v_fract_f32 v61, v10
  v_cvt_pkrtz_f16_f32 v62, v10, v10
  v_frexp_exp_i32_f32 v63, v10
  v_frexp_mant_f32 v64, v10
  v_cvt_f64_f32 v[4:5], v10
  v_rndne_f64 v[4:5], v[4:5]
  v_cvt_f32_f64 v65, v[4:5]
  v_cvt_f16_f32 v66, v10
  v_rndne_f16 v66, v66"""
    out = run_lines(lines, x.view(np.uint32), 7, block=320)
    f, v = out.view(np.float32), x[:, 0]
    with np.errstate(all="ignore"):
        assert (f[:, 0] == np.rint(v)).all() and (f[:, 5] == np.rint(v)).all()
        fract = np.minimum(v.astype(np.float64) - np.floor(v), 1 - 2.0**-24).astype(np.float32)
        assert ((f[:, 1] == fract) | np.isinf(v)).all()
        toward = v.astype(np.float16)
        toward = np.where(
            np.abs(toward.astype(np.float64)) > np.abs(v),
            np.nextafter(toward, np.float16(0)),
            toward,
        )
        assert (half(out[:, 2]) == toward).all()
        finite = np.isfinite(v)
        mantissa, exponent = np.frexp(v)
        assert (out[finite, 3].view(np.int32) == exponent[finite]).all() and (
            f[finite, 4] == mantissa[finite]
        ).all()
        assert (half(out[:, 6]) == np.rint(v.astype(np.float16))).all()


def test_scalar_immediates() -> None:
    """SOPK and branches; the value travels through a vector register at the end."""
    lines = """
  s_movk_i32 s20, 0x8001
  s_addk_i32 s20, 0x7000
  s_mulk_i32 s20, 3
  s_cmpk_lt_i32 s20, 0xfff0
  s_cselect_b32 s21, 1, 0
  s_cmpk_eq_u32 s20, 0xd003
  s_cselect_b32 s22, 1, 0
  s_cmp_eq_u32 s20, s20
  s_cmovk_i32 s23, 0x1234
  s_getreg_b32 s24, hwreg(HW_REG_MODE, 4, 4)
  s_call_b64 s[26:27], .Lsub
  s_branch .Lend
.Lsub:
  s_movk_i32 s25, 99
  s_setpc_b64 s[26:27]
.Lend:
  s_cmp_eq_u32 s22, 5
  s_cbranch_scc1 .Lskip
  s_add_u32 s25, s25, 1
.Lskip:
""" + "\n".join(f"  v_mov_b32 v{60 + i}, s{20 + i}" for i in range(6))
    out = run_lines(lines, np.zeros((64, 1), np.uint32), 6)[0].view(np.int32)
    value = (-0x7FFF + 0x7000) * 3
    assert out.tolist() == [value, int(value < -16), 0, 0x1234, 15, 100]
