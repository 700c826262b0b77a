# SPDX-License-Identifier: MIT
"""Each check fires on a kernel written to break it, and stays silent on the same kernel put
right."""

from __future__ import annotations

import numpy as np
import pytest
from assemble import assemble, compile_hip, instruction_kernel, kernel, module

import gfx950_emulator as emu

PRELUDE = """
typedef int v4 __attribute__((ext_vector_type(4)));
#define G extern "C" __attribute__((global))
#define T __builtin_amdgcn_workitem_id_x()
#define LDS __attribute__((shared)) static
#define FENCED_BARRIER __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \\
  __builtin_amdgcn_s_barrier(); __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup")
"""


def fault(
    source: str, name: str = "k", *, args=None, block: int = 128, **options
) -> emu.EmulatorError | None:
    obj = emu.load(compile_hip(PRELUDE + source, *options.pop("flags", ())))
    args = args if args is not None else [np.arange(256, dtype=np.int32), np.zeros(256, np.int32)]
    try:
        obj.run(name, grid=1, block=block, args=args, **options)
    except emu.EmulatorError as error:
        return error
    return None


def assembly_fault(
    lines: str, inputs: int = 2, *, lds: int = 0, block: int = 64, **options
) -> emu.EmulatorError | None:
    obj = emu.load(assemble(module([instruction_kernel("k", lines, inputs, 1, lds)], ["k"], lds)))
    data = np.random.default_rng(0).integers(0, 1 << 30, (block, inputs), dtype=np.uint32)
    try:
        obj.run("k", grid=1, block=block, args=[data, np.zeros((block, 1), np.uint32)], **options)
    except emu.EmulatorError as error:
        return error
    return None


@pytest.mark.parametrize("check", [True, False])
def test_out_of_buffer(check: bool) -> None:
    """Also without checks: a stray access never touches the host."""
    source = "G void k(const int* x, int* y) {{ y[T] = x[T + {}]; }}"
    assert fault(source.format(128), check=check) is None
    error = fault(source.format(129), check=check)
    assert (
        error.kind == "out of buffer"
        and error.lane == 63
        and error.wave == 1
        and error.workgroup == (0, 0, 0)
    )
    assert (
        "k" == error.kernel
        and "global_load_dword" in error.instruction
        and error.address is not None
    )
    assert "byte 1024 of 1024" in str(error)


def test_write_outside_and_null() -> None:
    assert fault("G void k(const int* x, int* y) { y[T - 1] = x[T]; }").kind == "out of buffer"
    error = fault(
        "G void k(const int* x, int* y) { y[T] = x[T]; }", args=[None, np.zeros(256, np.int32)]
    )
    assert error.kind == "out of buffer" and "in no buffer" in str(error)


def test_read_only_array() -> None:
    x, y = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    y.flags.writeable = False
    assert (
        fault("G void k(const int* x, int* y) { y[T] = x[T]; }", args=[x, y]).kind
        == "out of buffer"
    )


def test_uninitialized_memory() -> None:
    source = "G void k(const int* x, int* y) {{ {} y[T] += x[T]; }}"
    x = np.arange(256, dtype=np.int32)
    assert (
        fault(source.format(""), args=[x, emu.Uninitialized(np.zeros(256, np.int32))]).kind
        == "uninitialized memory"
    )
    assert fault(source.format(""), args=[x, np.zeros(256, np.int32)]) is None
    first = '*(volatile int*)&y[T] = 1; __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");'
    assert fault(source.format(first), args=[x, emu.Uninitialized(np.zeros(256, np.int32))]) is None


def test_uninitialized_register() -> None:
    assert assembly_fault("  v_add_u32 v60, v10, v90").kind == "uninitialized register"
    assert (
        assembly_fault("  s_add_u32 s20, s30, 1\n  v_mov_b32 v60, s20").kind
        == "uninitialized register"
    )
    # A copy of an unwritten register is no use of it; storing the copy is.
    assert assembly_fault("  v_mov_b32 v91, v90\n  v_mov_b32 v60, v10") is None
    assert assembly_fault("  v_mov_b32 v60, v90").kind == "uninitialized register"
    # Written only in some lanes.
    part = "  s_mov_b64 s[20:21], exec\n  s_mov_b64 exec, 0xff\n  v_mov_b32 v90, 1\n  s_mov_b64 exec, s[20:21]\n"
    error = assembly_fault(part + "  v_add_u32 v60, v10, v90")
    assert error.kind == "uninitialized register" and error.lane == 8


def test_uninitialized_lds() -> None:
    source = "G void k(const int* x, int* y) {{ LDS volatile int s[128]; s[T {}] = x[T]; FENCED_BARRIER; y[T] = s[127 - T]; }}"
    assert fault(source.format("")) is None
    error = fault(source.format("& 63"), block=64)
    assert error.kind == "uninitialized LDS"


def test_out_of_lds() -> None:
    assert (
        assembly_fault(
            "  v_lshlrev_b32 v5, 2, v0\n  ds_write_b32 v5, v10\n  v_mov_b32 v60, v10", lds=252
        ).kind
        == "out of LDS"
    )
    assert (
        assembly_fault(
            "  v_lshlrev_b32 v5, 2, v0\n  ds_write_b32 v5, v10\n  v_mov_b32 v60, v10", lds=256
        )
        is None
    )


def test_lds_race() -> None:
    source = "G void k(const int* x, int* y) {{ LDS volatile int s[128]; s[T] = x[T]; {} y[T] = s[127 - T]; }}"
    assert fault(source.format("FENCED_BARRIER;")) is None
    for seed in (None, 1, 2, 3):
        assert fault(source.format(""), seed=seed).kind in ("LDS race", "uninitialized LDS")
    # Write after read: the second write needs a barrier too.
    again = "G void k(const int* x, int* y) {{ LDS volatile int s[128]; s[T] = x[T]; FENCED_BARRIER; y[T] = s[127 - T]; {} s[T] = 1; }}"
    assert fault(again.format("FENCED_BARRIER;")) is None
    assert {fault(again.format(""), seed=s).kind for s in range(6)} == {"LDS race"}


EQUAL = """G void k(const int* x, int* y) {{
  LDS volatile int s[64];
  s[T & 63] = x[{stored}];
  {between}
  y[T] = s[T & 63];
}}"""


def test_equal_stores_are_no_race() -> None:
    """Waves that store one value to the same bytes: no order of theirs can be told from another."""
    same = EQUAL.format(stored="T & 63", between="FENCED_BARRIER;")
    own = EQUAL.format(stored="T & 63", between="")
    other = EQUAL.format(stored="T", between="FENCED_BARRIER;")
    one = EQUAL.format(stored="T == 70 ? 7 : x[T & 63]", between="FENCED_BARRIER;")
    for seed in (None, 1, 2):
        assert fault(same, seed=seed) is None
        assert fault(own, seed=seed) is None  # each wave reads what it stored itself
        for source in (same, own):
            assert fault(source, seed=seed, strict_races=True).kind == "LDS race"
        assert fault(other, seed=seed).kind == "LDS race"
    error = fault(one, args=[np.arange(256, dtype=np.int32) % 64, np.zeros(256, np.int32)])
    assert error.kind == "LDS race" and error.lane == 6 and error.address == 6 * 4


def test_equal_stores_and_a_reader() -> None:
    """A third wave still needs the barrier, and an atomic next to a store does."""
    third = """G void k(const int* x, int* y) {
  LDS volatile int s[64];
  if (T < 128) s[T & 63] = x[T & 63];
  y[T] = s[T & 63];
}"""
    assert fault(third, block=192).kind == "LDS race"
    atomic = """G void k(const int* x, int* y) {
  LDS int s[64];
  if (T < 64) s[T] = x[T];
  FENCED_BARRIER;
  if (T < 64) __hip_atomic_fetch_add(&s[T & 63], y[T], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  else *(volatile int*)&s[T & 63] = x[T & 63];
}"""
    assert fault(atomic).kind == "LDS race"
    # What is there already may be stored again while others read it.
    again = """G void k(const int* x, int* y) {{
  LDS volatile int s[64];
  s[T & 63] = x[T & 63];
  FENCED_BARRIER;
  y[T] = s[T & 63];
  s[T & 63] = x[T & 63] {};
}}"""
    assert fault(again.format("")) is None
    assert fault(again.format(""), strict_races=True).kind == "LDS race"
    assert fault(again.format("+ 1")).kind == "LDS race"


def test_race_names_both_accesses() -> None:
    """The earlier one too: mnemonic, place, wave and source line."""
    source = """G void k(const int* x, int* y) {
  LDS volatile int s[128];
  s[T] = x[T];
  FENCED_BARRIER;
  int got = s[T ^ 64];
  s[T] = 1;
  y[T] = got + s[127 - T];
}"""
    line = PRELUDE.count("\n") + 1
    for seed in range(3):
        error = fault(source, flags=("-g",), seed=seed)
        assert error.kind == "LDS race" and error.earlier.wave == 1 - error.wave
        assert "load" in error.instruction and error.source.endswith(f":{line + 4}")
        assert "store" in error.earlier.instruction and error.earlier.pc > error.pc
        assert error.earlier.source.endswith(f":{line + 5}")
        assert f"earlier: {error.earlier}" in str(error)


def test_write_after_read_names_the_other_reader() -> None:
    """Also where the wave that writes has read the byte first."""
    both_read = """
  v_mov_b32 v5, 0
  v_mov_b32 v60, 1
  ds_write_b32 v5, v60
  s_waitcnt lgkmcnt(0)
  s_barrier
  ds_read_b32 v60, v5
  s_waitcnt lgkmcnt(0)
  v_cmp_gt_u32 vcc, 64, v0
  s_cbranch_vccz .Lend
  s_mov_b32 s20, 0x80000
.Lspin:
  s_sub_u32 s20, s20, 1
  s_cmp_lg_u32 s20, 0
  s_cbranch_scc1 .Lspin
  ds_write_b32 v5, v10
.Lend:"""
    error = assembly_fault(both_read, lds=64, block=128)
    assert error.kind == "LDS race" and (error.wave, error.earlier.wave) == (0, 1)
    assert "ds_write_b32" in error.instruction and "ds_read_b32" in error.earlier.instruction


@pytest.mark.parametrize("load,use", [
    ("global_load_dword v60, v1, s[4:5]", "v_add_u32 v60, v60, v60"),
    ("ds_bpermute_b32 v60, v1, v10", "v_add_u32 v60, v60, v60"),
    ("s_load_dword s20, s[4:5], 0x0", "v_mov_b32 v60, s20"),
    ("s_load_dwordx2 vcc, s[4:5], 0x0", "s_cbranch_vccz .Lon\n.Lon:\n  v_mov_b32 v60, 0"),
    ("global_load_lds_dword v5, s[4:5]", "ds_read_b32 v60, v5"),
])  # fmt: skip
def test_missing_wait_names_both(load: str, use: str) -> None:
    before = "  v_lshlrev_b32 v5, 2, v0\n  s_mov_b32 m0, 0\n"
    error = assembly_fault(f"{before}  {load}\n  s_nop 0\n  {use}", lds=256)
    assert error.kind == "missing wait" and error.earlier.wave == 0
    assert error.earlier.instruction.startswith(load.split()[0]) and error.earlier.pc < error.pc
    assert use.split()[0].split("_b32")[0] in error.instruction and "earlier: " in str(error)


def test_barrier_without_wait() -> None:
    """A barrier does not wait for an LDS write: without s_waitcnt the other wave may still see old
    data."""
    write = "  v_lshlrev_b32 v5, 2, v0\n  v_sub_u32 v6, 127, v0\n  v_lshlrev_b32 v6, 2, v6\n  ds_write_b32 v5, v10\n"
    read = "  s_barrier\n  ds_read_b32 v60, v6"
    assert assembly_fault(write + "  s_waitcnt lgkmcnt(0)\n" + read, lds=512, block=128) is None
    error = assembly_fault(write + read, lds=512, block=128)
    assert error.kind == "LDS race" and "ds_write_b32" in error.earlier.instruction


@pytest.mark.parametrize("load,wait", [
    ("  global_load_dword v60, v1, s[4:5]", "vmcnt"),
    ("  v_lshlrev_b32 v5, 2, v0\n  ds_write_b32 v5, v10\n  ds_read_b32 v60, v5", "lgkmcnt"),
    ("  s_load_dword s20, s[4:5], 0x0\n  v_mov_b32 v60, 1", "lgkmcnt"),
])  # fmt: skip
def test_missing_wait(load: str, wait: str) -> None:
    use = "\n  v_add_u32 v60, v60, v60" if "s20" not in load else "\n  v_mov_b32 v60, s20"
    assert assembly_fault(f"{load}\n  s_waitcnt {wait}(0){use}", lds=256) is None
    error = assembly_fault(load + use, lds=256)
    assert error.kind == "missing wait" and wait in str(error)


def test_wait_counts_are_exact() -> None:
    """vmcnt(n) leaves the n youngest loads under way; scalar loads are certain only at 0."""
    loads = "  global_load_dword v60, v1, s[4:5]\n  global_load_dword v61, v1, s[4:5] offset:4\n"
    use = "  v_add_u32 v60, v60, v60"
    assert assembly_fault(loads + "  s_waitcnt vmcnt(1)\n" + use) is None
    assert assembly_fault(loads + "  s_waitcnt vmcnt(2)\n" + use).kind == "missing wait"
    scalar = "  s_load_dword s20, s[4:5], 0x0\n  s_load_dword s21, s[4:5], 0x4\n  s_waitcnt lgkmcnt({})\n  v_mov_b32 v60, s20"
    assert assembly_fault(scalar.format(0)) is None
    assert assembly_fault(scalar.format(1)).kind == "missing wait"


def test_loads_return_in_order() -> None:
    """A load may overwrite the target of one under way, and one wait covers both; others may not."""
    load = "  global_load_dword v60, v1, s[4:5]\n"
    use = "  v_add_u32 v60, v60, v60"
    assert assembly_fault(2 * load + "  s_waitcnt vmcnt(0)\n" + use) is None
    assert assembly_fault(2 * load + "  s_waitcnt vmcnt(1)\n" + use).kind == "missing wait"
    assert assembly_fault(load + "  v_mov_b32 v60, 1").kind == "missing wait"


def test_dma_needs_wait() -> None:
    lines = "  v_lshlrev_b32 v5, 2, v0\n  s_mov_b32 m0, 0\n  global_load_lds_dword v5, s[4:5]\n{}  ds_read_b32 v60, v5"
    assert assembly_fault(lines.format("  s_waitcnt vmcnt(0)\n"), lds=256) is None
    assert assembly_fault(lines.format(""), lds=256).kind == "missing wait"


def test_misaligned() -> None:
    assert (
        assembly_fault("  v_add_u32 v5, 2, v1\n  global_load_dword v60, v5, s[4:5]").kind
        == "misaligned access"
    )
    assert (
        assembly_fault("  v_mov_b32 v5, 2\n  ds_write_b32 v5, v10\n  v_mov_b32 v60, 1", lds=64).kind
        == "misaligned access"
    )


def test_not_implemented_is_named() -> None:
    error = assembly_fault("  v_cubeid_f32 v60, v10, v11, v10")
    assert error.kind == "unimplemented" and "v_cubeid_f32" in str(error)
    obj = emu.load(assemble(module([kernel("k", "  v_cubeid_f32 v1, v2, v3, v4")], ["k"])))
    assert obj.unimplemented() == {"v_cubeid_f32"}


def test_instruction_limit() -> None:
    error = fault(
        "G void k(const int* x, volatile int* y) { while (y[0] == 0) {} }", max_instructions=1000
    )
    assert error.kind == "instruction limit"


def test_register_out_of_range() -> None:
    assert assembly_fault("  v_mov_b32 v200, 1\n  v_mov_b32 v60, 1").kind == "register out of range"


def test_source_line() -> None:
    """With -g the message names the source line."""
    source = "G void k(const int* x, int* y) {\n  int a = x[T];\n  y[T] = a + x[T + 200];\n}"
    error = fault(source, flags=("-g",))
    assert error.kind == "out of buffer"
    assert error.source is not None and error.source.endswith(f":{PRELUDE.count(chr(10)) + 3}"), (
        error.source
    )
    assert fault(source).source is None


def test_seed_shows_order_dependence() -> None:
    """Workgroups that overwrite each other give results that depend on the order; a seed is
    repeatable."""
    obj = emu.load(
        compile_hip(PRELUDE + "G void k(int* y) { y[0] = __builtin_amdgcn_workgroup_id_x(); }")
    )

    def last(seed: int | None) -> int:
        y = np.zeros(1, np.int32)
        obj.run("k", grid=32, block=1, args=[y], seed=seed, threads=1)
        return int(y[0])

    assert last(None) == 31
    assert len({last(s) for s in range(8)}) > 1 and last(5) == last(5)


def test_counts() -> None:
    source = """
G void k(const int* x, int* y) {
  LDS int s[64 * 64];
  s[T * 64] = x[T * 32];
  FENCED_BARRIER;
  y[T] = s[(T ^ 1) * 64];
}"""
    obj = emu.load(compile_hip(PRELUDE + source))
    x, y = np.arange(64 * 32, dtype=np.int32), np.zeros(64, np.int32)
    stats = obj.run("k", grid=1, block=64, args=[x, y])
    assert (
        stats.waves == 1 and stats.mnemonics["global_load_dword"] == 1 and stats.classes["lds"] == 2
    )
    # One dword per 128-byte line: 64 lines where 2 would do; the store is perfect. All LDS lanes in
    # one bank.
    assert stats.lines == 64 + 2 and stats.least_lines == 2 + 2
    assert stats.lds_cycles == 128 and stats.lds_least_cycles == 2
    assert stats.unique_read_bytes == 256 and stats.unique_written_bytes == 256
    floor = stats.resource_floor("mi355x")
    assert floor.us["hbm"] == 512 / 8e6 and "bound" in floor.note
    with pytest.raises(ValueError, match="count=True"):
        obj.run("k", grid=1, block=64, args=[x, y], check=False).resource_floor()


def test_argument_errors() -> None:
    obj = emu.load(compile_hip(PRELUDE + "G void k(const int* x, int n) {}"))
    x = np.zeros(4, np.int32)
    with pytest.raises(TypeError, match="expected 2 arguments"):
        obj.run("k", grid=1, block=64, args=[x])
    with pytest.raises(ValueError, match="needs a pointer argument"):
        obj.run("k", grid=1, block=64, args=[x, x])
    with pytest.raises(ValueError, match="C-contiguous"):
        obj.run("k", grid=1, block=64, args=[np.zeros((4, 4), np.int32)[:, ::2], 1])
    with pytest.raises(KeyError, match="no kernel 'q'"):
        obj.run("q", grid=1, block=64, args=[x, 1])
    with pytest.raises(ValueError, match="work items"):
        obj.run("k", grid=1, block=2048, args=[x, 1])
