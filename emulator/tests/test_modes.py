# SPDX-License-Identifier: MIT
"""What MODE and M0 change: VGPR indexing, relative scalar moves, VSKIP, flushed denormals."""

from __future__ import annotations

import numpy as np
import pytest
from assemble import assemble, compile_hip, instruction_kernel, module, run_lines

import gfx950_emulator as emu

ITEM = np.arange(64, dtype=np.uint32).reshape(64, 1)


def fault(lines: str, **options) -> emu.EmulatorError:
    with pytest.raises(emu.EmulatorError) as caught:
        run_lines(lines, ITEM, 1, **options)
    return caught.value


# --- VGPR indexing. The rows are the manual's table of which bit moves which operand.
FILL = "\n".join(f"  v_mov_b32 v{20 + i}, {i + 1}" for i in range(8))
FILL_A = "\n".join(f"  v_accvgpr_write_b32 a{i}, {i + 33}" for i in range(8))
ON, OFF = "  s_mov_b32 s20, 3\n  s_set_gpr_idx_on s20, gpr_idx({})\n", "\n  s_set_gpr_idx_off\n"


@pytest.mark.parametrize(("lines", "which", "expected"), [
    # v20.. hold 1, 2, 3, ..., a0.. hold 33, 34, ...; the index is 3.
    ("  v_mov_b32 v60, v20", "SRC0", 4),
    ("  v_sub_u32 v60, v20, v21", "SRC0", 2),
    ("  v_sub_u32 v60, v24, v21", "SRC1", 0),
    ("  v_mad_u32_u24 v60, v20, v21, v22", "SRC2", 8),
    ("  v_mad_u32_u24 v57, v20, v21, v22", "SRC0,SRC1,SRC2,DST", 26),
    ("  v_accvgpr_read_b32 v60, a0", "SRC0", 36),
    ("  v_accvgpr_read_b32 v57, a0", "SRC0,DST", 36),
    ("  v_accvgpr_read_b32 v60, a0", "SRC1,SRC2", 33),
    ("  v_accvgpr_write_b32 a4, v20\n  s_set_gpr_idx_off\n  v_accvgpr_read_b32 v60, a7", "DST", 1),
    ("  v_accvgpr_write_b32 a4, v20\n  s_set_gpr_idx_off\n  v_accvgpr_read_b32 v60, a4", "SRC0", 4),
    ("  v_accvgpr_mov_b32 a4, a0\n  s_set_gpr_idx_off\n  v_accvgpr_read_b32 v60, a7", "SRC0,DST", 36),
    ("  v_readlane_b32 s21, v20, 0\n  s_set_gpr_idx_off\n  v_mov_b32 v60, s21", "SRC0", 4),
    ("  v_readfirstlane_b32 s21, v20\n  s_set_gpr_idx_off\n  v_mov_b32 v60, s21", "SRC0", 4),
    ("  v_mov_b32 v60, v21\n  v_pk_add_u16 v60, v20, v20", "SRC0", 5),
])  # fmt: skip
def test_indexed_operands(lines: str, which: str, expected: int) -> None:
    got = run_lines(FILL + "\n" + FILL_A + "\n" + ON.format(which) + lines + OFF, ITEM, 1)
    assert (got == expected).all()


def test_indexed_accumulator_moves_with_the_destination() -> None:
    """The addend of v_fmac is the destination, and moves by DST and not by SRC2."""
    floats = "\n".join(f"  v_mov_b32 v{60 + i}, {i}.0" for i in (1, 2)) + "\n"
    floats += "  v_mov_b32 v60, 0.5\n  v_mov_b32 v63, 4.0\n  v_mov_b32 v20, 1.0\n"
    for which, at in (("DST", 63), ("SRC2", 60)):
        lines = floats + ON.format(which) + "  v_fmac_f32 v60, v20, v20" + OFF
        got = run_lines(lines, ITEM, 4)[0].view(np.float32)
        expected = np.array([0.5, 1, 2, 4], np.float32)
        expected[at - 60] += 1
        assert (got == expected).all(), which


def test_indexed_writelane_and_memory() -> None:
    """v_writelane moves its destination; loads, stores and LDS are not indexed."""
    lines = (
        FILL
        + "\n  v_mov_b32 v60, 0\n  v_mov_b32 v61, 0\n"
        + ON.format("SRC0,SRC1,SRC2,DST").replace("s20, 3", "s20, 1")
        + "  v_writelane_b32 v60, s20, 5\n  global_load_dword v62, v1, s[4:5]\n  s_waitcnt vmcnt(0)"
        + OFF
    )
    got = run_lines(lines, ITEM, 3)
    assert got[5].tolist() == [0, 1, 5] and got[6].tolist() == [0, 0, 6]


def test_index_on_through_the_mode_register() -> None:
    lines = f"""{FILL}
  s_mov_b32 m0, 0x1002
  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 27, 1), 1
  v_mov_b32 v60, v20
  s_getreg_b32 s21, hwreg(HW_REG_MODE, 27, 1)
  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 27, 1), 0
  v_mov_b32 v61, v20
  v_mov_b32 v62, s21"""
    assert run_lines(lines, ITEM, 3)[0].tolist() == [3, 1, 1]


def test_index_errors() -> None:
    on = "  s_movk_i32 s20, 200\n  s_set_gpr_idx_on s20, gpr_idx({})\n"
    error = fault(FILL + "\n" + on.format("SRC0") + "  v_mov_b32 v60, v100")
    assert error.kind == "register out of range" and "v255" in str(error)
    error = fault(FILL_A + "\n" + on.format("DST") + "  v_accvgpr_write_b32 a100, v10")
    assert error.kind == "register out of range" and "a255" in str(error)
    # Inside the register file, but nothing wrote a201; not allocated to the kernel.
    assert fault(on.format("SRC0") + "  v_accvgpr_read_b32 v60, a1").kind in (
        "uninitialized register", "register out of range")  # fmt: skip
    for line in (
        "v_swap_b32 v60, v10",
        "v_permlane32_swap_b32 v60, v10",
        "v_mfma_f32_4x4x1_16b_f32 v[60:63], v10, v10, v[60:63]",
    ):
        error = fault("  s_mov_b32 s20, 0\n" + ON.format("SRC0") + "  " + line)
        assert error.kind == "unimplemented" and line.split()[0][:12] in str(error)
    error = fault("  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 27, 1), 1\n  v_mov_b32 v60, v10")
    assert error.kind == "uninitialized register" and "M0" in str(error)


def test_relative_scalar_moves() -> None:
    lines = """
  s_mov_b32 s20, 5
  s_mov_b32 s21, 6
  s_mov_b32 s22, 7
  s_mov_b32 s23, 8
  s_mov_b32 m0, 2
  s_movrels_b32 s30, s20
  s_movrels_b64 s[32:33], s[20:21]
  s_movreld_b32 s40, s20
  s_movreld_b64 s[44:45], s[20:21]
  s_mov_b32 m0, -2
  s_movrels_b32 s31, s22"""
    for i, reg in enumerate((30, 32, 33, 42, 46, 47, 31)):
        lines += f"\n  v_mov_b32 v{60 + i}, s{reg}"
    assert run_lines(lines, ITEM, 7)[0].tolist() == [7, 7, 8, 5, 5, 6, 5]


def test_relative_scalar_move_errors() -> None:
    assert fault("  s_movrels_b32 s30, s20").kind == "uninitialized register"  # m0
    m0 = "  s_mov_b32 m0, {}\n"
    assert fault(m0.format(2) + "  s_movrels_b32 s30, s20").kind == "uninitialized register"
    assert fault(m0.format(90) + "  s_movrels_b32 s30, s20").kind == "register out of range"
    assert fault(m0.format(81) + "  s_movreld_b64 s[20:21], s[4:5]").kind == "register out of range"
    load = "  s_load_dword s22, s[4:5], 0x0\n"
    assert fault(m0.format(2) + load + "  s_movrels_b32 s30, s20").kind == "missing wait"
    assert fault(m0.format(2) + load + "  s_movreld_b32 s20, s4").kind == "missing wait"


# --- VSKIP
def test_vskip() -> None:
    """No vector instruction is issued: registers, memory, LDS and counters stay; scalar code runs."""
    lines = """
  v_mov_b32 v60, 1
  v_mov_b32 v61, 2
  s_mov_b32 s21, 7
  s_mov_b32 s20, 0x10
  v_lshlrev_b32 v5, 2, v0
  s_setvskip s20, 4
  v_mov_b32 v60, 9
  v_readfirstlane_b32 s21, v10
  v_cmp_eq_u32 vcc, v10, v10
  ds_write_b32 v5, v10 offset:1024
  global_load_dword v61, v2, s[4:5]
  global_store_dword v2, v10, s[6:7] offset:4092
  v_mfma_f32_4x4x1_16b_f32 v[60:63], v10, v10, 0
  s_mov_b32 s22, 5
  s_getreg_b32 s23, hwreg(HW_REG_MODE, 28, 1)
  s_setvskip s20, 0
  v_add_u32 v61, v61, v61
  v_mov_b32 v62, s21
  v_mov_b32 v63, s22
  v_mov_b32 v64, s23"""
    obj = emu.load(assemble(module([instruction_kernel("t", lines, 1, 5, 256)], ["t"], 256)))
    out = np.zeros((64, 5), np.uint32)
    stats = obj.run("t", grid=1, block=64, args=[ITEM.copy(), emu.Uninitialized(out)])
    assert out[0].tolist() == [1, 4, 7, 5, 1]
    assert "ds_write_b32" not in stats.mnemonics and stats.mnemonics["global_load_dword"] == 1


# --- denormals
def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


TINY, MIN = np.float32(2.0**-130), np.float32(2.0**-126)
FLUSH = (
    "  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), {}\n"  # 0 flushes both, 1 results, 2 sources
)


def run_mode(denorm: int, line: str, values: np.ndarray, outputs: int = 1) -> np.ndarray:
    data = np.tile(values, (64, 1))
    return run_lines(FLUSH.format(denorm) + line, data, outputs)[0]


@pytest.mark.parametrize(("line", "values", "both", "results", "sources"), [
    # bits that MODE.denorm 0, 1 and 2 give; 3 keeps everything and is what the other tests run in
    ("v_add_f32 v60, v10, v11", (-TINY, 0.0), (0.0,), (-0.0,), (0.0,)),
    ("v_mul_f32 v60, v10, v11", (-TINY, 1.0), (-0.0,), (-0.0,), (-0.0,)),
    ("v_mul_f32 v60, v10, v11", (TINY, 2.0**10), (0.0,), (TINY * 1024,), (0.0,)),
    ("v_mul_f32 v60, v10, v11", (MIN, 0.5), (0.0,), (0.0,), (MIN / 2,)),
    ("v_fma_f32 v60, v10, v11, v12", (MIN, 0.5, TINY), (0.0,), (0.0,), (MIN / 2,)),
    ("v_fma_f32 v60, v10, v11, -v12", (0.0, 1.0, TINY), (0.0,), (-0.0,), (0.0,)),
    ("v_mov_b32 v60, v12\n  v_fmac_f32 v60, v10, v11", (TINY, 2.0**10, 1.0), (1.0,), (1.0,), (1.0,)),
    ("v_fmaak_f32 v60, v10, v11, 0x80000001", (0.0, 1.0), (0.0,), (-0.0,), (0.0,)),
    ("v_max_f32 v60, v10, v11", (TINY, -1.0), (0.0,), (0.0,), (0.0,)),
    ("v_med3_f32 v60, v10, v11, v12", (TINY, -1.0, 1.0), (0.0,), (0.0,), (0.0,)),
    ("v_ceil_f32 v60, v10", (TINY,), (0.0,), (1.0,), (0.0,)),
    ("v_ldexp_f32 v60, v10, 10", (TINY,), (0.0,), (TINY * 1024,), (0.0,)),
    ("v_pk_mul_f32 v[60:61], v[10:11], v[12:13]", (TINY, MIN, 2.0**10, 0.5), (0.0, 0.0), (TINY * 1024, 0.0), (0.0, MIN / 2)),
    ("v_pk_fma_f32 v[60:61], v[10:11], v[12:13], v[10:11]", (TINY, MIN, 2.0**10, 0.0), (0.0, MIN), (TINY * 1025, MIN), (0.0, MIN)),
    ("v_fma_mix_f32 v60, v10, v11, v12", (TINY, 2.0**10, 0.0), (0.0,), (TINY * 1024,), (0.0,)),
    # Copies, selects, classes: MODE does not act.
    ("v_mov_b32 v60, v10", (TINY,), (TINY,), (TINY,), (TINY,)),
    ("v_cndmask_b32 v60, v10, -v10, vcc", (TINY,), (TINY,), (TINY,), (TINY,)),
    ("v_pk_mov_b32 v[60:61], v[10:11], v[10:11]", (TINY, TINY), (TINY, TINY), (TINY, TINY), (TINY, TINY)),
    ("v_mfma_f32_4x4x1_16b_f32 v[60:63], v11, v11, 0\n  v_mov_b32 v60, v10", (TINY, 0.0), (TINY,), (TINY,), (TINY,)),
])  # fmt: skip
def test_flushed_float32(line: str, values, both, results, sources) -> None:
    line = "  s_mov_b64 vcc, 0\n  " + line
    for denorm, expected in ((0, both), (1, results), (2, sources)):
        got = run_mode(denorm, line, floats(*values), len(expected))
        assert got.tolist() == floats(*expected).tolist(), denorm


def test_flushed_compares_conversions_and_lds() -> None:
    tiny64 = np.array([2.0**-130], np.float64).view(np.uint32)
    lines = """
  v_cmp_gt_f32 vcc, v10, 0
  v_cndmask_b32 v60, 0, 1, vcc
  v_cmp_class_f32 vcc, v10, v11
  v_cndmask_b32 v61, 0, 1, vcc
  v_cvt_f32_f64 v64, v[12:13]
  v_cvt_f64_f32 v[62:63], v10
  v_lshlrev_b32 v5, 2, v0
  ds_write_b32 v5, v14
  ds_add_f32 v5, v10
  ds_read_b32 v65, v5
  s_waitcnt lgkmcnt(0)"""
    data = np.concatenate([floats(TINY), np.array([128], np.uint32), tiny64, floats(TINY)])
    for denorm, expected in (
        (0, [0, 1, 0, 0, 0, 0]),
        (3, [1, 1, *tiny64, *floats(TINY), *floats(2 * TINY)]),
    ):
        got = run_lines(FLUSH.format(denorm) + lines, np.tile(data, (64, 1)), 6, lds=256)[0]
        assert got.tolist() == list(expected)


def test_matrix_products_keep_denormals() -> None:
    line = "  v_mfma_f32_4x4x1_16b_f32 v[60:63], v10, v11, 0\n  s_nop 7"
    got = run_mode(0, line, floats(TINY, 1.0), 4)
    assert (got == floats(TINY)).all()


def test_descriptor_that_flushes() -> None:
    """MODE 0xC0, the assembler's default: what every hand-written kernel of AMD's starts with."""
    source = module([instruction_kernel("t", "  v_mul_f32 v60, v10, v11", 2, 1)], ["t"])
    source = source.replace(".amdhsa_float_denorm_mode_32 3", ".amdhsa_float_denorm_mode_32 0")
    obj = emu.load(assemble(source))
    assert obj.kernels["t"].mode & 0xFF == 0xC0
    data = np.tile(floats(TINY, 2.0**10), (64, 1))
    out = np.ones((64, 1), np.uint32)
    obj.run("t", grid=1, block=64, args=[data, out])
    assert (out == 0).all()
    data[:] = floats(3.0, 0.5)
    obj.run("t", grid=1, block=64, args=[data, out])
    assert (out == floats(1.5)).all()


def test_modes_that_are_refused() -> None:
    source = module([instruction_kernel("t", "  v_mov_b32 v60, v10", 1, 1)], ["t"])
    for directive, what in (
        (".amdhsa_float_denorm_mode_16_64 0", "float16"),
        (".amdhsa_float_round_mode_32 3", "round"),
    ):
        key, value = directive.split()
        changed = source.replace(f"{key} 3", directive) if "denorm" in key else source.replace(
            ".amdhsa_ieee_mode 1", f".amdhsa_ieee_mode 1\n    {directive}")  # fmt: skip
        obj = emu.load(assemble(changed))
        with pytest.raises(NotImplementedError, match=what):
            obj.run("t", grid=1, block=64, args=[ITEM.copy(), np.zeros((64, 1), np.uint32)])
    for lines, what in (
        ("  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 6, 2), 0", "float16"),
        ("  s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1", "round"),
    ):
        error = fault(lines)
        assert error.kind == "unimplemented" and what in str(error)


def test_division_of_code_that_flushes() -> None:
    """clang turns denormals on and off again around a division (s_setreg); the quotient is IEEE's,
    flushed."""
    source = """
extern "C" __attribute__((global)) void k(const float* x, float* y) {
  int t = __builtin_amdgcn_workitem_id_x();
  y[t] = x[2 * t] / x[2 * t + 1];
}"""
    obj = emu.load(compile_hip(source, "-fgpu-flush-denormals-to-zero"))
    assert obj.kernels["k"].mode & 0x30 == 0 and "s_setreg_imm32_b32" in obj.mnemonics()
    rng = np.random.default_rng(0)
    x = np.ldexp(rng.uniform(1, 2, (1024, 2)), rng.integers(-126, 127, (1024, 2)))
    x = (x * rng.choice([-1, 1], x.shape)).astype(np.float32)
    y = np.zeros(1024, np.float32)
    obj.run("k", grid=1, block=1024, args=[x, y])
    with np.errstate(all="ignore"):
        exact = x[:, 0] / x[:, 1]
    exact[np.abs(exact) < MIN] *= 0
    assert (y.view(np.uint32) == exact.view(np.uint32)).all()
