# SPDX-License-Identifier: MIT
"""Damaged code objects: one ValueError that says what is wrong, whatever the bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from assemble import assemble, instruction_kernel, module
from hypothesis import given, settings
from hypothesis import strategies as st

import gfx950_emulator as emu

GOOD = assemble(module([instruction_kernel("t", "  v_mov_b32 v60, v10", 1, 1)], ["t"]))
SECTION_TABLE = struct.unpack_from("<Q", GOOD, 40)[0]


def bundle(payload: bytes, offset: int | None = None, size: int | None = None) -> bytes:
    triple = b"hipv4-amdgcn-amd-amdhsa--gfx950"
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", 1)
    at = len(head) + 24 + len(triple)
    head += struct.pack("<QQQ", at if offset is None else offset,
                        len(payload) if size is None else size, len(triple))  # fmt: skip
    return head + triple + payload


def loads(data: bytes) -> bool:
    """True when it loads; a ValueError of one line otherwise; nothing else."""
    try:
        emu.load(data)
    except ValueError as error:
        text = str(error)
        assert text.startswith(("code object: ", "offload bundle: ")) and "\n" not in text, text
        return False
    return True


def test_whole_objects_load() -> None:
    assert loads(GOOD) and loads(bundle(GOOD))


@pytest.mark.parametrize(("data", "what"), [
    (b"", "nothing"),
    (b"\x7fELF", "truncated"),
    (b"not a code object", "expected an ELF"),
    (GOOD[:4] + b"\1" + GOOD[5:], "64-bit"),
    (GOOD[:18] + b"\x3e\0" + GOOD[20:], "another machine"),
    (GOOD[: SECTION_TABLE + 7], "section table"),
    (b"__CLANG_OFFLOAD_BUNDLE__", "truncated"),
    (bundle(GOOD, size=1 << 40), "truncated"),
    (bundle(bundle(GOOD)), "expected an ELF"),
    (bundle(GOOD, offset=0), "expected an ELF"),  # a bundle that holds itself
    (GOOD.replace(b"amdhsa.kernels", b"amdhsa.kernelz"), ""),
    (GOOD.replace(b"amdhsa.version", b"\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1\xc1"), "metadata"),
    (GOOD.replace(b".kernarg_segment_size", b".kernarg_segment_sizf").replace(b".symbol", b".symbal"), "metadata"),
    (GOOD.replace(b".offset", b".offsat"), "metadata"),
])  # fmt: skip
def test_what_is_wrong(data: bytes, what: str) -> None:
    if what:
        with pytest.raises(ValueError, match=what):
            emu.load(data)
    loads(data)


def test_every_truncation() -> None:
    """No prefix of a code object loads, in a bundle or not, but those that only lose padding."""
    assert not any(loads(GOOD[:n]) for n in range(0, len(GOOD) - 64, 7))
    whole = bundle(GOOD)
    assert not any(loads(whole[:n]) for n in range(0, len(whole) - 64, 13))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), max_size=4))
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, bits in flips:
        data[at] ^= bits
    loads(bytes(data))


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 63), st.integers(0, (1 << 64) - 1), st.sampled_from(["header", "program", "section"]))  # fmt: skip
def test_header_fields(at: int, value: int, table: str) -> None:
    """Any 64 bits anywhere in the tables that give offsets and sizes."""
    base = {"header": 0, "program": struct.unpack_from("<Q", GOOD, 32)[0], "section": SECTION_TABLE}
    data = bytearray(GOOD)
    for entry in range(4 if table != "header" else 1):
        struct.pack_into("<Q", data, min(base[table] + 64 * entry + at, len(data) - 8), value)
        loads(bytes(data))


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    for prefix in (b"", b"\x7fELF", b"\x7fELF\2\1", b"__CLANG_OFFLOAD_BUNDLE__"):
        assert not loads(prefix + data)


NOPS = assemble(module([instruction_kernel("t", "  s_nop 0\n" * 64, 1, 1)], ["t"]))


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=256, max_size=256))
def test_random_code_decodes(code: bytes) -> None:
    """Any instruction bytes decode, to instructions or to records that fault."""
    nops = struct.pack("<I", 0xBF800000) * 64
    assert nops in NOPS
    emu.load(NOPS.replace(nops, code)).unimplemented()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("line", "field"), [
    ("v_mov_b64 v[60:61], v[10:11]", 0x1FE),  # v[255:256], through the destination
    ("s_mov_b64 s[20:21], s[22:23]", None),
])  # fmt: skip
def test_registers_past_the_last_one(line: str, field: int | None, check: bool) -> None:
    """Code that names a register past its file, which no assembler makes, faults also without
    checks."""
    good = assemble(
        module([instruction_kernel("t", f"  {line}\n  v_mov_b32 v60, v10", 1, 1)], ["t"])
    )
    if field:
        word = 0x7E000000 | (60 << 17) | (0x38 << 9) | (256 + 10)  # VOP1
        bad = (word & ~(0xFF << 17)) | (255 << 17)
    else:
        word = 0xBE800000 | (20 << 16) | (1 << 8) | 22  # SOP1
        bad = (word & ~(0x7F << 16)) | (127 << 16)
    at = good.index(struct.pack("<I", word))
    obj = emu.load(good[:at] + struct.pack("<I", bad) + good[at + 4 :])
    with pytest.raises(emu.EmulatorError, match="register out of range") as caught:
        obj.run("t", grid=1, block=64, check=check,
                args=[np.zeros((64, 1), np.uint32), np.zeros((64, 1), np.uint32)])  # fmt: skip
    assert caught.value.kind == "register out of range"
