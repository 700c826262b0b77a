# SPDX-License-Identifier: MIT
"""When memory operations take effect (`latency=`): code that lacks a wait gives other results in
late mode, without the checks; code that has its waits gives the same in every mode."""

from __future__ import annotations

import numpy as np
import pytest
from assemble import assemble, instruction_kernel, module, run_lines

import gfx950_emulator as emu

MODES = ["early", "late", 0, 1, 2]
PER_LANE = "  v_lshlrev_b32 v5, 2, v0\n"
TO_LDS = PER_LANE + "  ds_write_b32 v5, v10\n  s_waitcnt lgkmcnt(0)\n"
FLAT_ADDRESS = (
    "  v_mov_b32 v7, s5\n  v_add_co_u32 v6, vcc, s4, v1\n  v_addc_co_u32 v7, vcc, 0, v7, vcc\n"
)
BUFFER = "  s_mov_b32 s8, s4\n  s_mov_b32 s9, s5\n  s_mov_b32 s10, 512\n  s_mov_b32 s11, 0x20000\n"

# What comes first, what reads memory, the wait that covers it, where the value is then.
LOADS = {
    "global": ("", "global_load_dword v20, v1, s[4:5]", "vmcnt(0)", "v20"),
    "buffer": (BUFFER, "buffer_load_dword v20, v1, s[8:11], 0 offen", "vmcnt(0)", "v20"),
    "flat": (FLAT_ADDRESS, "flat_load_dword v20, v[6:7]", "vmcnt(0) lgkmcnt(0)", "v20"),
    "into its address": (FLAT_ADDRESS, "global_load_dword v6, v[6:7], off", "vmcnt(0)", "v6"),
    "into an accumulator": ("", "global_load_dword a2, v1, s[4:5]", "vmcnt(0)", "a2"),
    "atomic": ("", "global_atomic_add v20, v1, v11, s[4:5] sc0", "vmcnt(0)", "v20"),
    "ds_read": (TO_LDS, "ds_read_b32 v20, v5", "lgkmcnt(0)", "v20"),
    "ds_read2": (TO_LDS, "ds_read2_b32 v[20:21], v5 offset1:64", "lgkmcnt(0)", "v20"),
    "ds_atomic": (TO_LDS, "ds_add_rtn_u32 v20, v5, v11", "lgkmcnt(0)", "v20"),
    "bpermute": (PER_LANE, "ds_bpermute_b32 v20, v5, v10", "lgkmcnt(0)", "v20"),
    "scalar": ("", "s_load_dword s20, s[4:5], 0x0", "lgkmcnt(0)", "s20"),
    "scalar into its base": ("  s_mov_b64 s[20:21], s[4:5]\n", "s_load_dwordx2 s[20:21], s[20:21], 0x0", "lgkmcnt(0)", "s20"),
}  # fmt: skip


def data(items: int = 64) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 30, (items, 2), dtype=np.uint32)


def result(
    lines: str, latency: str | int | None = None, *, items: int = 64, lds: int = 512, check=False
):
    return run_lines(lines, data(items), 1, lds=lds, latency=latency, check=check)[:, 0]


@pytest.mark.parametrize("kind", LOADS)
def test_load(kind: str) -> None:
    """With its wait a load is right in every mode; without it only when it arrives at once."""
    first, load, wait, where = LOADS[kind]
    copy = "v_accvgpr_read_b32" if where == "a2" else "v_mov_b32"
    if kind == "ds_read2":  # the second half of LDS
        first += "  ds_write_b32 v5, v11 offset:256\n  s_waitcnt lgkmcnt(0)\n"
    lines = f"{first}  {load}\n  {{}}\n  {copy} v60, {where}"
    want = np.full(64, data()[0, 0]) if "scalar" in kind else data()[:, 0]
    for mode in MODES:
        assert (result(lines.format(f"s_waitcnt {wait}"), mode, check=True) == want).all(), mode
    without = lines.format("s_nop 0")
    assert (result(without, "early") == want).all()
    assert (result(without, "late") != want).all()
    with pytest.raises(emu.EmulatorError, match="missing wait"):
        result(without, "late", check=True)
    some = [tuple(result(without, seed)) for seed in range(40)]
    assert 1 < len(set(some)) and some[3] == tuple(result(without, 3))


def test_flat_needs_both_counters() -> None:
    first, load, _, _ = LOADS["flat"]
    for wait in ("vmcnt(0)", "lgkmcnt(0)"):
        lines = f"{first}  {load}\n  s_waitcnt {wait}\n  v_mov_b32 v60, v20"
        assert (result(lines, "late") != data()[:, 0]).all()


def test_leaning_on_lateness() -> None:
    """The other direction: a register is not there any more once a load into it has been issued."""
    lines = "  v_mov_b32 v20, 7\n  global_load_dword v20, v1, s[4:5]\n  v_mov_b32 v60, v20"
    assert (result(lines, "early") == data()[:, 0]).all()
    assert (result(lines, "late") != 7).all()


@pytest.mark.parametrize("kind,wait", [("vector", "vmcnt"), ("LDS", "lgkmcnt")])
def test_counters_are_exact(kind: str, wait: str) -> None:
    """A wait for n leaves the n youngest operations under way."""
    loads = "".join(f"  global_load_dword v{20 + i}, v1, s[4:5] offset:{4 * i}\n" for i in range(2))
    if kind == "LDS":
        loads = (
            TO_LDS
            + "  ds_write_b32 v5, v11 offset:256\n  ds_read_b32 v20, v5\n  ds_read_b32 v21, v5 offset:256\n"
        )
    for i in range(2):
        lines = f"{loads}  s_waitcnt {wait}(1)\n  v_mov_b32 v60, v{20 + i}"
        right = result(lines, "late") == data()[:, i]
        assert right.all() if i == 0 else not right.any()


def test_full_counter() -> None:
    """The 64th vector memory operation waits for the oldest, the 17th LDS operation as well."""
    for count, right in ((63, False), (64, True)):
        more = "  global_load_dword v21, v1, s[4:5] offset:4\n" * (count - 1)
        lines = f"  global_load_dword v20, v1, s[4:5]\n{more}  v_mov_b32 v60, v20"
        assert ((result(lines, "late") == data()[:, 0]) == right).all()


def test_order_within_a_wave() -> None:
    """A load sees what its own wave stored, without a wait between them."""
    memory = "  global_store_dword v1, v11, s[4:5]\n  global_load_dword v60, v1, s[4:5]"
    lds = PER_LANE + "  ds_write_b32 v5, v10\n  ds_write_b32 v5, v11\n  ds_read_b32 v60, v5"
    for lines in (memory, lds):
        for mode in MODES:
            assert (result(lines, mode) == data()[:, 1]).all()


@pytest.mark.parametrize("space", ["LDS", "DMA"])
def test_store_before_barrier(space: str) -> None:
    """Another wave sees what goes to LDS only when it was waited for before the barrier."""
    fill = {
        "LDS": "  v_lshlrev_b32 v5, 2, v0\n  ds_write_b32 v5, v11\n",
        "DMA": "  v_readfirstlane_b32 s8, v0\n  s_lshl_b32 m0, s8, 2\n  v_add_u32 v7, 4, v1\n"
        "  global_load_lds_dword v7, s[4:5]\n",
    }[space]  # fmt: skip
    lines = f"{fill}  v_xor_b32 v6, 64, v0\n  v_lshlrev_b32 v6, 2, v6\n  {{}}\n  s_barrier\n  ds_read_b32 v60, v6"
    want = data(128)[np.arange(128) ^ 64, 1]
    for mode in MODES:
        waited = lines.format("s_waitcnt vmcnt(0) lgkmcnt(0)")
        assert (result(waited, mode, items=128, check=True) == want).all(), mode
    without = lines.format("s_nop 0")
    assert (result(without, "early", items=128) == want).all()
    # The wave that runs first reads before the other one's store has landed.
    assert (result(without, "late", items=128) != want).any()


def test_memory_order_of_a_workgroup() -> None:
    """Global accesses of a workgroup keep the order of issue: its waves share a compute unit, and
    the memory model asks for no vmcnt at a barrier. Registers arrive late nevertheless."""
    lines = """
  v_xor_b32 v6, 64, v0
  v_lshlrev_b32 v6, 3, v6
  global_load_dword v20, v6, s[4:5]
  s_barrier
  global_store_dword v1, v11, s[4:5]
  {}
  s_barrier
  global_load_dword v21, v6, s[4:5]
  s_waitcnt vmcnt(0)
  v_mov_b32 v60, v2{}"""
    other = data(128)[np.arange(128) ^ 64]
    for mode in MODES:
        for register in (0, 1):  # before and after the other wave's store
            got = result(lines.format("s_nop 0", register), mode, items=128)
            assert (got == other[:, register]).all(), (mode, register)
    assert (result(lines.format("v_mov_b32 v60, v20\n  s_branch .Lend", 1) + "\n.Lend:", "late", items=128)
            != other[:, 0]).any()  # fmt: skip


def test_half_of_a_register() -> None:
    """Two loads of a half each do not disturb each other."""
    lines = """
  v_mov_b32 v20, 0
  global_load_short_d16 v20, v1, s[4:5]
  global_load_short_d16_hi v20, v1, s[4:5] offset:4
  s_waitcnt vmcnt(0)
  v_mov_b32 v60, v20"""
    want = (data()[:, 0] & 0xFFFF) | (data()[:, 1] << 16)
    for mode in MODES:
        assert (result(lines, mode) == want).all()


def test_lanes_at_issue() -> None:
    """EXEC, M0 and the operands count as they were when the instruction was issued."""
    lines = """
  v_mov_b32 v20, 5
  v_mov_b32 v21, v1
  s_mov_b64 s[8:9], s[4:5]
  s_mov_b64 s[20:21], exec
  s_mov_b64 exec, 0xff
  global_load_dword v20, v21, s[8:9]
  v_mov_b32 v21, 0
  s_mov_b64 s[8:9], 0
  s_mov_b64 exec, s[20:21]
  s_waitcnt vmcnt(0)
  v_mov_b32 v60, v20"""
    want = np.where(np.arange(64) < 8, data()[:, 0], 5)
    for mode in MODES:
        assert (result(lines, mode) == want).all()


@pytest.mark.parametrize("check", [True, False])
def test_fault_names_the_operation(check: bool) -> None:
    """Not the wait at which it took effect."""
    obj = emu.load(assemble(module([instruction_kernel(
        "k", "  global_load_dword v60, v1, s[4:5] offset:2048\n  v_mov_b32 v61, 0", 1, 1)], ["k"])))  # fmt: skip
    for mode in MODES:
        args = [np.zeros((64, 1), np.uint32), np.zeros((64, 1), np.uint32)]
        with pytest.raises(emu.EmulatorError, match="out of buffer") as caught:
            obj.run("k", grid=1, block=64, args=args, latency=mode, check=check)
        assert "global_load_dword" in caught.value.instruction and caught.value.lane == 0


def test_default_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    without = "  global_load_dword v20, v1, s[4:5]\n  v_mov_b32 v60, v20"
    assert (result(without) == data()[:, 0]).all()
    monkeypatch.setenv("GFX950_EMULATOR_LATENCY", "late")
    assert (result(without) != data()[:, 0]).all()
    assert (result(without, "early") == data()[:, 0]).all()
    monkeypatch.setenv("GFX950_EMULATOR_LATENCY", "17")
    result(without)
    monkeypatch.setenv("GFX950_EMULATOR_LATENCY", "soon")
    with pytest.raises(ValueError, match="GFX950_EMULATOR_LATENCY: expected .* got 'soon'"):
        result(without)
    for bad in (-1, "lazy", 1.5, True):
        with pytest.raises(ValueError, match="latency: expected 'early', 'late' or a seed"):
            result(without, bad)
