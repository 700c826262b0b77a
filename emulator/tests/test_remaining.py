# SPDX-License-Identifier: MIT
"""The instructions that no other file executes, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from assemble import run_lines
from test_lanes import half, halves, lanes

NO_OPS = ["s_nop 3", "s_sleep 1", "s_setprio 2", "s_icache_inv", "s_dcache_inv", "s_dcache_wb", "v_nop",
          "s_incperflevel 1", "s_decperflevel 1", "s_ttracedata", "ds_nop", "s_sethalt 0"]  # fmt: skip


def test_no_ops_and_clock() -> None:
    lines = (
        "\n".join(f"  {n}" for n in NO_OPS)
        + """
  s_memtime s[20:21]
  s_memrealtime s[22:23]
  s_load_dwordx16 s[32:47], s[4:5], 0x0
  s_waitcnt lgkmcnt(0)
  v_mov_b32 v60, v10
  v_mov_b32 v61, s47"""
    )
    data = lanes(np.random.default_rng(0), 1)
    out = run_lines(lines, data, 2)
    assert (out[:, 0] == data[:, 0]).all() and (out[:, 1] == data[15, 0]).all()


COMPARE = {
    "eq": np.equal,
    "lg": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}


@pytest.mark.parametrize("value", [5, 0xFFFF8000, 0x8000, 0x7FFF, 0xFFFFFFFF])
def test_scalar_compare_with_immediate(value: int) -> None:
    """The immediate is sign extended for i32, zero extended for u32."""
    for immediate in (5, 0x8000, 0x7FFF):
        lines, want = [f"  s_mov_b32 s20, 0x{value:x}"], []
        for kind in ("i32", "u32"):
            wide = immediate - (1 << 16) if kind == "i32" and immediate >> 15 else immediate
            left = value - (1 << 32) if kind == "i32" and value >> 31 else value
            for name, f in COMPARE.items():
                lines.append(
                    f"  s_cmpk_{name}_{kind} s20, 0x{immediate:x}\n  s_cselect_b32 s21, 1, 0"
                )
                lines.append(f"  v_mov_b32 v{60 + len(want)}, s21")
                want.append(int(f(left, wide)))
        out = run_lines("\n".join(lines), np.zeros((64, 1), np.uint32), len(want))
        assert out[0].tolist() == want


def test_branches_and_mode() -> None:
    lines = """
  v_mov_b32 v60, 0
  s_mov_b64 vcc, 0
  s_cbranch_vccz .L1
  v_mov_b32 v60, 1
.L1:
  s_cmp_eq_u32 s2, 1
  s_cbranch_scc0 .L2
  v_mov_b32 v60, 2
.L2:
  s_mov_b32 s20, 0xf
  s_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s20
  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1
  s_getreg_b32 s21, hwreg(HW_REG_MODE, 23, 1)
  v_mov_b32 v61, s21
  s_mov_b64 s[22:23], 0x10
  s_wqm_b64 s[22:23], s[22:23]
  v_mov_b32 v62, s22
  v_mov_b32 v20, 1
  v_mov_b32 v21, 2
  s_mov_b32 s24, 0
  s_set_gpr_idx_on s24, gpr_idx(SRC0)
  s_set_gpr_idx_idx s2
  s_set_gpr_idx_mode gpr_idx(SRC0,DST)
  v_mov_b32 v63, v21
  s_set_gpr_idx_off"""
    assert run_lines(lines, np.zeros((64, 1), np.uint32), 4)[0].tolist() == [0, 1, 0xF0, 2]


def test_integer_helpers() -> None:
    rng = np.random.default_rng(1)
    x = lanes(rng, 3)
    x[::2, 2] &= 31
    lines = """
  v_sad_u8 v60, v10, v11, v12
  v_sad_u16 v61, v10, v11, v12
  v_sad_u32 v62, v10, v11, v12
  v_sat_pk_u8_i16 v63, v10
  v_dot2_i32_i16 v64, v10, v11, v12
  v_dot2_u32_u16 v65, v10, v11, v12
  v_mov_b32 v66, v12
  v_dot2c_i32_i16 v66, v10, v11
  v_mov_b32 v67, v10
  v_mov_b32 v68, v11
  v_swap_b32 v67, v68
  v_mov_b32 v69, v12
  v_ashr_pk_i8_i32 v69, v10, v11, v12
  v_mov_b32 v70, v12
  v_ashr_pk_u8_i32 v70, v10, v11, v12 op_sel:[0,0,0,1]
  v_mad_legacy_u16 v71, v10, v11, v12
  v_mad_legacy_i16 v72, v10, v11, v12"""
    out = run_lines(lines, x, 13)
    a, b, c = x.T
    for column, dtype in ((0, np.uint8), (1, np.uint16)):
        parts = [
            np.ascontiguousarray(v).view(dtype).reshape(64, -1).astype(np.int64) for v in (a, b)
        ]
        assert (out[:, column] == (c + np.abs(parts[0] - parts[1]).sum(1)).astype(np.uint32)).all()
    assert (out[:, 2] == (np.abs(a.astype(np.int64) - b) + c).astype(np.uint32)).all()
    h = [np.ascontiguousarray(v).view(np.int16).reshape(64, 2).astype(np.int64) for v in (a, b)]
    clipped = np.clip(h[0], 0, 255)
    assert (out[:, 3] == (clipped[:, 0] | clipped[:, 1] << 8)).all()
    dot = ((h[0] * h[1]).sum(1) + c).astype(np.uint32)
    assert (out[:, 4] == dot).all() and (out[:, 6] == dot).all()
    u = [v & 0xFFFF for v in h]
    assert (out[:, 5] == ((u[0] * u[1]).sum(1) + c).astype(np.uint32)).all()
    assert (out[:, 7] == b).all() and (out[:, 8] == a).all()
    shifted = [v.astype(np.uint32).view(np.int32) >> (c & 31).astype(np.int32) for v in (a, b)]
    signed = [np.clip(v, -128, 127) & 255 for v in shifted]
    assert (out[:, 9] == (c & 0xFFFF0000 | signed[0] | signed[1] << 8)).all()
    unsigned = [np.clip(v, 0, 255).astype(np.uint32) for v in shifted]
    assert (out[:, 10] == (c & 0xFFFF | (unsigned[0] | unsigned[1] << 8) << 16)).all()
    low = (a & 0xFFFF) * (b & 0xFFFF) + c & 0xFFFF
    assert (out[:, 11] & 0xFFFF == low).all() and (out[:, 12] & 0xFFFF == low).all()


def test_half_functions() -> None:
    """Half precision functions to one unit in the last place."""
    rng = np.random.default_rng(2)
    x = halves(rng, 1) & 0x7FFF7FFF  # positive
    names = [
        "rcp",
        "sqrt",
        "rsq",
        "exp",
        "log",
        "floor",
        "ceil",
        "fract",
        "frexp_mant",
        "sin",
        "cos",
    ]
    lines = "\n".join(f"  v_{n}_f16 v{60 + i}, v10" for i, n in enumerate(names))
    out = run_lines(lines + "\n  v_frexp_exp_i16_f16 v71, v10", x, 12)
    v = half(x[:, 0]).astype(np.float64)
    turn = 2 * np.pi * v
    want = [1 / v, np.sqrt(v), 1 / np.sqrt(v), np.exp2(v), np.log2(v), np.floor(v), np.ceil(v), v - np.floor(v),
            np.frexp(v)[0], np.sin(turn), np.cos(turn)]  # fmt: skip
    for i, w in enumerate(want):
        assert (np.abs(half(out[:, i]) - w) <= 2.0**-10 * np.abs(w) + 1e-7).all(), names[i]
    assert (out[:, 11].astype(np.uint16).view(np.int16) == np.frexp(v)[1]).all()


def test_double_functions_and_the_rest() -> None:
    rng = np.random.default_rng(3)
    d = np.abs(rng.standard_normal(64) * 1e3)
    f = rng.uniform(0.1, 300, (64, 1)).astype(np.float32)
    old = rng.integers(0, 1 << 32, (64, 1), dtype=np.uint32)
    data = np.hstack([d.view(np.uint32).reshape(64, 2), f.view(np.uint32), old])
    lines = """
  v_fract_f64 v[60:61], v[10:11]
  v_frexp_mant_f64 v[62:63], v[10:11]
  v_frexp_exp_i32_f64 v64, v[10:11]
  v_sqrt_f64 v[66:67], v[10:11]
  v_rsq_f64 v[68:69], v[10:11]
  v_mov_b32 v65, 0
  v_sin_f32 v70, v12
  v_cos_f32 v71, v12
  v_rcp_iflag_f32 v72, v12
  v_cvt_pk_u8_f32 v73, v12, 2, v13"""
    out = run_lines(lines, data, 14)

    def pair(i: int) -> np.ndarray:
        return np.ascontiguousarray(out[:, i : i + 2]).view(np.float64)[:, 0]

    assert (pair(0) == d - np.floor(d)).all() and (pair(2) == np.frexp(d)[0]).all()
    assert (out[:, 4].view(np.int32) == np.frexp(d)[1]).all()
    assert np.allclose(pair(6), np.sqrt(d), rtol=1e-15) and np.allclose(
        pair(8), 1 / np.sqrt(d), rtol=1e-15
    )
    turn = 2 * np.pi * f[:, 0].astype(np.float64)
    assert np.allclose(out[:, 10].view(np.float32), np.sin(turn), atol=1e-6)
    assert np.allclose(out[:, 11].view(np.float32), np.cos(turn), atol=1e-6)
    assert np.allclose(out[:, 12].view(np.float32), 1 / f[:, 0].astype(np.float64), rtol=1e-7)
    byte = np.clip(np.rint(f[:, 0]), 0, 255).astype(np.uint32)
    assert (out[:, 13] == (old[:, 0] & 0xFF00FFFF | byte << 16)).all()


def test_remaining_lds() -> None:
    """Exchange, reverse subtract, float extremes, compare and swap without result, far pairs."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((64, 4)).astype(np.float32).view(np.uint32)
    lines = """
  v_lshlrev_b32 v5, 3, v0
  ds_write_b64 v5, v[10:11]
  ds_write_b64 v5, v[12:13] offset:512
  s_waitcnt lgkmcnt(0)
  ds_read2st64_b64 v[60:63], v5 offset0:0 offset1:1
  ds_wrxchg_rtn_b32 v64, v5, v12
  ds_wrxchg_rtn_b64 v[66:67], v5, v[12:13] offset:512
  ds_rsub_u32 v5, v10 offset:4
  ds_rsub_rtn_u32 v65, v5, v10 offset:4
  s_waitcnt lgkmcnt(0)
  ds_read_b64 v[68:69], v5
  ds_write_b64 v5, v[10:11]
  ds_max_f32 v5, v12
  ds_min_rtn_f32 v70, v5, v13 offset:4
  ds_min_f32 v5, v13 offset:4
  ds_max_rtn_f32 v71, v5, v12
  ds_read_b64 v[72:73], v5
  ds_write_b64 v5, v[10:11]
  ds_cmpst_b32 v5, v10, v13
  ds_cmpst_b32 v5, v10, v12 offset:4
  ds_read_b64 v[74:75], v5
  ds_write_b64 v5, v[10:11]
  ds_cmpst_b64 v5, v[10:11], v[12:13]
  ds_rsub_u64 v5, v[10:11]
  ds_rsub_rtn_u64 v[76:77], v5, v[10:11]
  ds_read_b64 v[78:79], v5"""
    out = run_lines(lines, x, 20, lds=1024)
    f = x.view(np.float32)
    assert (
        (out[:, :4] == x).all() and (out[:, 4] == x[:, 0]).all() and (out[:, 6:8] == x[:, 2:]).all()
    )
    assert (out[:, 8] == x[:, 2]).all()
    assert (out[:, 5] == x[:, 0] - x[:, 1]).all() and (out[:, 9] == x[:, 1]).all()  # twice reversed
    assert (out[:, 12].view(np.float32) == np.maximum(f[:, 0], f[:, 2])).all()
    assert (out[:, 13].view(np.float32) == np.minimum(f[:, 1], f[:, 3])).all() and (
        out[:, 10] == x[:, 1]
    ).all()
    assert (out[:, 14] == x[:, 3]).all() and (out[:, 15] == x[:, 1]).all()
    wide = np.ascontiguousarray(x[:, :2]).view(np.uint64)[:, 0]
    swapped = np.ascontiguousarray(x[:, 2:]).view(np.uint64)[:, 0]
    assert (np.ascontiguousarray(out[:, 16:18]).view(np.uint64)[:, 0] == wide - swapped).all()
    assert (np.ascontiguousarray(out[:, 18:20]).view(np.uint64)[:, 0] == swapped).all()
