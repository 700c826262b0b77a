# SPDX-License-Identifier: MIT
"""Single instructions against the ISA manual's pseudocode (see pseudocode.py), random and edge
operands."""

from __future__ import annotations

import math
import re
import struct
from functools import cache

import numpy as np
import pytest
from assemble import assemble, instruction_kernel, kernel, module, run_lines
from pseudocode import Machine, Parser, Unsupported, Val, execute, table, to_float
from tinygrad.renderer.amd.dsl import OPERANDS
from tinygrad.runtime.autogen.amd.cdna import enum as tables

import gfx950_emulator as emu

PSEUDOCODE = table()

# Where the pseudocode is imprecise on purpose or leaves a word undefined; tested elsewhere or not
# at all.
OTHER_ORACLE = {
    "v_exp_f32", "v_log_f32", "v_rcp_f32", "v_rcp_iflag_f32", "v_rsq_f32", "v_sqrt_f32", "v_sin_f32", "v_cos_f32",
    "v_rcp_f16", "v_sqrt_f16", "v_sin_f16", "v_cos_f16", "v_rsq_f16", "v_exp_f16", "v_log_f16", "v_rcp_f64", "v_sqrt_f64", "v_rsq_f64",
    "v_rndne_f32", "v_rndne_f16", "v_rndne_f64",  # floor(x + 0.5) rounds twice
    "v_fract_f32",  # hardware keeps the result below 1
    "v_frexp_exp_i32_f32",  # zero and denormals
    "v_cvt_pkrtz_f16_f32",  # needs another rounding mode
    "v_readfirstlane_b32", "v_readlane_b32", "v_writelane_b32", "v_swap_b32", "v_nop",
    "v_permlane16_swap_b32", "v_permlane32_swap_b32", "v_mov_b64",
    "v_mad_mix_f32", "v_mad_mixlo_f16", "v_mad_mixhi_f16", "v_bitop3_b32", "v_bitop3_b16", "v_fmamk_f32", "v_fmaak_f32",
    "v_div_scale_f32", "v_div_fmas_f32", "v_div_fixup_f32", "v_pk_mov_b32",
    "v_div_scale_f64", "v_div_fmas_f64", "v_div_fixup_f64",  # a whole division is tested
    "v_fract_f16", "v_frexp_exp_i16_f16", "v_div_fixup_f16", "v_fract_f64", "v_frexp_exp_i32_f64",  # as for float32
}  # fmt: skip
CARRY = {
    "v_add_co_u32",
    "v_sub_co_u32",
    "v_subrev_co_u32",
    "v_addc_co_u32",
    "v_subb_co_u32",
    "v_subbrev_co_u32",
}
CARRY_IN = {"v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"}


@cache
def operands(name: str) -> dict[str, int]:
    """Dwords of each operand, from the widest encoding that has it."""
    for enum in (
        "VOP3Op",
        "VOP3SDOp",
        "VOP3POp",
        "VOP2Op",
        "VOP1Op",
        "VOPCOp",
        "SOP1Op",
        "SOP2Op",
        "SOPCOp",
    ):
        for suffix in ("", "_E64", "_E32"):
            op = getattr(getattr(tables, enum), (name + suffix).upper(), None)
            if op is not None and op in OPERANDS:
                return {k: max(1, bits // 32) for k, (_, bits, _) in OPERANDS[op].items()}
    return {}


def supported(name: str) -> bool:
    """Whether the interpreter runs this pseudocode at all (tried on arbitrary operands)."""
    try:
        block = Parser(PSEUDOCODE[name].replace("WAVE_MODE.IEEE", "WAVE_MODE")).block()
        state = {k: Val(0x3F800000, "b", 64) for k in ("S0", "S1", "S2", "D0", "D1", "VCC", "EXEC")}
        Machine(state | {"SCC": Val(0, "b", 1), "WAVE_MODE": Val(1, "b", 1)}, 0).run(block)
    except Unsupported:
        return False
    return True


def _names(prefix: str) -> list[str]:
    return sorted(
        n for n in emu.implemented()
        if n.startswith(prefix) and n in PSEUDOCODE and n not in OTHER_ORACLE
        and "mfma" not in n and "scalef32" not in n and not re.search(r"fp8|bf8|_sr_", n) and operands(n) and supported(n)
    )  # fmt: skip


VECTOR = _names("v_")
SCALAR = [n for n in _names("s_") if not n.startswith(("s_load", "s_store", "s_atomic", "s_movrel", "s_setvskip", "s_buffer", "s_cbranch", "s_call", "s_getpc", "s_setpc",
                                                        "s_swappc", "s_wakeup", "s_wqm"))]  # fmt: skip


def _vector_line(name: str) -> str:
    o = operands(name)
    wide = {k: n for k, n in o.items()}

    def reg(base: int, dwords: int) -> str:
        return f"v{base}" if dwords == 1 else f"v[{base}:{base + dwords - 1}]"

    sources = [reg(10 + 2 * i, wide.get(f"src{i}", wide.get(f"vsrc{i}", 1)))
               for i in range(3) if f"src{i}" in wide or f"vsrc{i}" in wide]  # fmt: skip
    if name in CARRY:
        text = [reg(60, 1), "s[20:21]", *sources[:2]] + (["vcc"] if name in CARRY_IN else [])
        return f"  {name}_e64 {', '.join(text)}"
    if name.startswith("v_cmpx_"):
        # The result mask lands in EXEC as well; all lanes must store.
        return f"  {name}_e64 s[20:21], {', '.join(sources)}\n  s_mov_b64 exec, -1"
    if name.startswith("v_cmp_"):
        return f"  {name}_e64 s[20:21], {', '.join(sources)}"
    if name == "v_cndmask_b32":
        return f"  {name}_e64 v60, {', '.join(sources[:2])}, vcc"
    if name.startswith("v_mad_") and "64" in name:
        return f"  {name} v[60:61], s[20:21], {', '.join(sources)}"
    if name.startswith(("v_fmac", "v_dot2c", "v_dot4c")):
        sources = sources[:2]
    return f"  {name} {reg(60, wide.get('vdst', 1))}, {', '.join(sources)}"


@cache
def vector_object() -> emu.Object:
    kernels = []
    for name in VECTOR:
        lines = f"""
  v_mov_b32 v60, v16
  v_mov_b32 v61, v17
  v_cmp_ne_u32 vcc, 0, v18
  s_mov_b64 s[20:21], 0
{_vector_line(name)}
  v_cndmask_b32_e64 v62, 0, 1, s[20:21]"""
        kernels.append(instruction_kernel(f"t_{name}", lines, inputs=9, outputs=3))
    return emu.load(assemble(module(kernels, [f"t_{n}" for n in VECTOR])))


F32_EDGES = [0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFA00000, 1,
             0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F000000, 0x3FC00000, 0x40200000, 0x4F000000, 0xCF000000, 0x4F800000,
             0x3EFFFFFF, 0x4B000001, 0x477FF000, 0x33000000]  # fmt: skip
F16_EDGES = [
    0,
    0x8000,
    0x3C00,
    0xBC00,
    0x7C00,
    0xFC00,
    0x7E00,
    0x7C01,
    1,
    0x83FF,
    0x0400,
    0x7BFF,
    0x3800,
    0x3E00,
]
INT_EDGES = [0, 1, 2, 31, 32, 33, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFF, 0x800000, 0xFFFFFF,
             0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00100005]  # fmt: skip
F64_EDGES = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    math.inf,
    -math.inf,
    math.nan,
    2.0**31,
    -(2.0**31) - 1,
    2.0**32,
    5e-324,
    1e308,
    0.5,
]


def random_operands(
    rng: np.random.Generator, shape: tuple[int, ...], name: str, wide: bool
) -> np.ndarray:
    """uint32 operands: edges, arbitrary bits and ordinary numbers of the type that the mnemonic
    works on."""
    out = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    pick = rng.random(shape)
    if wide and "f64" in name:
        values = np.where(
            rng.random(shape[:-1]) < 0.4,
            rng.choice(F64_EDGES, shape[:-1]),
            rng.standard_normal(shape[:-1]) * 1e5,
        )
        return values[..., None].view(np.uint32).reshape(shape)
    if "f16" in name and "f32" not in name:
        edges = rng.choice(np.array(F16_EDGES, np.uint32), (*shape, 2))
        usual = (
            rng.standard_normal((*shape, 2)).astype(np.float16).view(np.uint16).astype(np.uint32)
        )
        halves = np.where(rng.random((*shape, 2)) < 0.4, edges, usual)
        special = halves[..., 0] | halves[..., 1] << 16
    elif "f32" in name:
        usual = (
            (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 6, shape))
            .astype(np.float32)
            .view(np.uint32)
        )
        special = np.where(
            rng.random(shape) < 0.5, rng.choice(np.array(F32_EDGES, np.uint32), shape), usual
        )
    else:
        special = rng.choice(np.array(INT_EDGES, np.uint32), shape)
    return np.where(pick < 0.7, special, out).astype(np.uint32)


def equal(name: str, got: int, want: int, width: int) -> bool:
    """Bit equality; any NaN equals any NaN."""
    if got == want:
        return True
    if "f64" in name and width == 64:
        return math.isnan(to_float(got, 64)) and math.isnan(to_float(want, 64))
    if "f32" in name:
        words = [(got >> s & 0xFFFFFFFF, want >> s & 0xFFFFFFFF) for s in range(0, width, 32)]
        if all(nan_equal(a, b) for a, b in words):
            return True
    if "f16" in name:
        halves = [(got >> s & 0xFFFF, want >> s & 0xFFFF) for s in range(0, width, 16)]
        return all(
            a == b or (math.isnan(to_float(a, 16)) and math.isnan(to_float(b, 16)))
            for a, b in halves
        )
    return False


def nan_equal(a: int, b: int) -> bool:
    f = [struct.unpack("<f", struct.pack("<I", v))[0] for v in (a, b)]
    return a == b or (math.isnan(f[0]) and math.isnan(f[1]))


@pytest.mark.parametrize("name", VECTOR)
def test_vector(name: str) -> None:
    rng = np.random.default_rng(len(name) * 1000 + sum(map(ord, name)))
    waves = 2
    o = operands(name)
    data = np.zeros((64 * waves, 9), np.uint32)
    for i in range(3):
        width = o.get(f"src{i}", o.get(f"vsrc{i}", 1))
        data[:, 2 * i : 2 * i + 2] = random_operands(rng, (64 * waves, 2), name, width == 2)
    data[:, 6:8] = random_operands(rng, (64 * waves, 2), name, o.get("vdst", 1) == 2)
    data[:, 8] = rng.integers(0, 2, 64 * waves)
    out = np.zeros((64 * waves, 3), np.uint32)
    vector_object().run(f"t_{name}", grid=1, block=64 * waves, args=[data, emu.Uninitialized(out)])
    compare = name.startswith(("v_cmp_", "v_cmpx_"))
    width = 32 * o.get("vdst", 1)
    for lane in range(64 * waves):
        row = [int(v) for v in data[lane]]
        state = {f"S{i}": Val(row[2 * i] | row[2 * i + 1] << 32, "b", 64) for i in range(3)}
        for i in range(3):
            if o.get(f"src{i}", o.get(f"vsrc{i}", 1)) == 1:
                state[f"S{i}"] = Val(row[2 * i], "b", 32)
        state["D0"] = Val(0, "b", 64) if compare else Val(row[6] | row[7] << 32, "b", 64)
        if not compare and width == 32:
            state["D0"] = Val(row[6], "b", 32)
        state["D1"] = Val(0, "b", 1)
        state["VCC"] = Val(row[8] << (lane % 64), "b", 64)
        state["EXEC"] = Val((1 << 64) - 1, "b", 64)
        state["SCC"], state["WAVE_MODE"] = Val(0, "b", 1), Val(1, "b", 1)
        after = execute(PSEUDOCODE[name], state, lane % 64)
        text = f"{name} lane {lane}: S0 {row[0]:08x} {row[1]:08x} S1 {row[2]:08x} {row[3]:08x} S2 {row[4]:08x} {row[5]:08x}"
        if compare:
            # cmpx forms say EXEC where cmp forms say D0.
            where = "EXEC" if name.startswith("v_cmpx") else "D0"
            assert out[lane, 2] == (after[where].bits >> (lane % 64) & 1), text
            continue
        got = int(out[lane, 0]) | (int(out[lane, 1]) << 32 if width == 64 else 0)
        want = after["D0"].bits & ((1 << width) - 1)
        if width == 32 and writes_16_bits(name):
            got, want = got & 0xFFFF, want & 0xFFFF
        assert equal(name, got, want, width), f"{text}: got {got:08x}, want {want:08x}"
        if name in CARRY:
            assert out[lane, 2] == (after["VCC"].bits >> (lane % 64) & 1), text
        if name in ("v_mad_u64_u32", "v_mad_i64_i32"):
            assert out[lane, 2] == (after["D1"].bits & 1), text


@pytest.mark.parametrize("name", ["v_bitop3_b32", "v_bitop3_b16"])
def test_bitop3(name: str) -> None:
    """The table is in the instruction, so the pseudocode gets it by hand."""
    first, text = PSEUDOCODE[name].split("\n", 1)
    assert first.startswith("TTBL = { INST.")
    tables = [0x1B, 0x96, 0xE8, 0x80, 0x01, 0xFE]
    lines = "\n".join(f"  {name} v{60 + i}, v10, v11, v12 bitop3:{t}" for i, t in enumerate(tables))
    data = np.random.default_rng(3).integers(0, 1 << 32, (64, 3), dtype=np.uint32)
    out = run_lines(lines, data, len(tables))
    width = 16 if name.endswith("b16") else 32
    for (lane, i), got in np.ndenumerate(out):
        state = {f"S{k}": Val(int(data[lane, k]), "b", 32) for k in range(3)}
        state |= {"TTBL": Val(tables[i], "b", 32), "D": Val(0, "b", 32)}
        want = execute(text, state, lane)["D"].bits & ((1 << width) - 1)
        assert got == want, f"{name} bitop3:{tables[i]:#x} lane {lane}: {got:08x}, want {want:08x}"


def test_bitop3_halves() -> None:
    """op_sel picks a half of each source and of the destination, which keeps its other half."""
    data = np.random.default_rng(4).integers(0, 1 << 32, (64, 4), dtype=np.uint32)
    a, b, c, d = data.T
    lines = """  v_mov_b32 v60, v13
  v_bitop3_b16 v60, v10, v11, v12 bitop3:0x96 op_sel:[1,0,1,1]
  v_bitop3_b16 v61, v10, v11, v12 bitop3:0x96 op_sel:[0,1,0,0]"""
    out = run_lines(lines, data, 2)
    assert (out[:, 0] == (d & 0xFFFF | ((a >> 16 ^ b ^ c >> 16) << np.uint32(16)))).all()
    assert (out[:, 1] == ((a ^ b >> 16 ^ c) & 0xFFFF)).all()


def writes_16_bits(name: str) -> bool:
    """Results whose upper half the pseudocode does not define."""
    return (
        bool(re.search(r"D0\.[uifb]16|D0\[15", PSEUDOCODE[name]))
        and "D0[31" not in PSEUDOCODE[name]
    )


@cache
def scalar_object() -> emu.Object:
    kernels = []
    for name in SCALAR:
        o = operands(name)

        def reg(base: int, dwords: int) -> str:
            return f"s{base}" if dwords == 1 else f"s[{base}:{base + dwords - 1}]"

        sources = [reg(8 + 2 * i, o[f"ssrc{i}"]) for i in range(2) if f"ssrc{i}" in o]
        text = ([reg(12, o["sdst"])] if "sdst" in o else []) + sources
        body = f"""
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_lshl_b32 s20, s2, 5
  s_waitcnt lgkmcnt(0)
  s_load_dwordx8 s[8:15], s[4:5], s20
  s_mul_i32 s21, s2, 20
  s_waitcnt lgkmcnt(0)
  s_cmp_lg_u32 s14, 0
  {name} {", ".join(text)}
  s_cselect_b32 s15, 1, 0
  s_mov_b64 s[16:17], exec
  s_mov_b64 exec, -1
  v_mov_b32 v1, s21
  v_mov_b32 v60, s12
  v_mov_b32 v61, s13
  v_mov_b32 v62, s15
  v_mov_b32 v63, s16
  v_mov_b32 v64, s17
  v_cmp_eq_u32 vcc, 0, v0
  s_and_saveexec_b64 s[18:19], vcc
  global_store_dwordx4 v1, v[60:63], s[6:7]
  global_store_dword v1, v64, s[6:7] offset:16"""
        kernels.append(kernel(f"t_{name}", body))
    return emu.load(assemble(module(kernels, [f"t_{n}" for n in SCALAR])))


@pytest.mark.parametrize("name", SCALAR)
def test_scalar(name: str) -> None:
    rng = np.random.default_rng(len(name) * 77 + sum(map(ord, name)))
    count, o = 64, operands(name)
    data = random_operands(rng, (count, 8), name, False)
    data[:, 6] = rng.integers(0, 2, count)
    out = np.zeros((count, 5), np.uint32)
    scalar_object().run(f"t_{name}", grid=count, block=64, args=[data, emu.Uninitialized(out)])
    for i in range(count):
        row = [int(v) for v in data[i]]
        wide = {f"S{k}": o.get(f"ssrc{k}", 1) for k in range(2)}
        state = {f"S{k}": Val(row[2 * k] | (row[2 * k + 1] << 32 if wide[f"S{k}"] == 2 else 0), "b", 32 * wide[f"S{k}"])
                 for k in range(2)}  # fmt: skip
        width = 32 * o.get("sdst", 1)
        state["D0"] = Val(row[4] | (row[5] << 32 if width == 64 else 0), "b", width)
        state["EXEC"], state["SCC"] = Val((1 << 64) - 1, "b", 64), Val(row[6], "b", 1)
        state["VCC"] = Val(0, "b", 64)
        after = execute(PSEUDOCODE[name], state, 0)
        text = f"{name}: S0 {row[0]:08x} {row[1]:08x} S1 {row[2]:08x} {row[3]:08x} D {row[4]:08x} {row[5]:08x} SCC {row[6]}"
        if "sdst" in o:
            got = int(out[i, 0]) | (int(out[i, 1]) << 32 if width == 64 else 0)
            want = after["D0"].bits & ((1 << width) - 1)
            assert got == want, f"{text}: got {got:x}, want {want:x}"
        assert out[i, 2] == after["SCC"].bits & 1, f"{text}: SCC"
        assert int(out[i, 3]) | int(out[i, 4]) << 32 == after["EXEC"].bits, f"{text}: EXEC"


def test_most_are_covered() -> None:
    """The pseudocode covers the bulk of the ALU; what it leaves is listed above or tested by its
    own table."""
    assert len(VECTOR) > 270 and len(SCALAR) > 80, (len(VECTOR), len(SCALAR))
