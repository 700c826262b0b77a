# SPDX-License-Identifier: MIT
"""Sparse matrix instructions: every element of A and B by one-hot, random matrices, index sets.

The positions below were measured on an MI350 with one-hot operands by the authors of ROCm/hip-fpsan
(amdgcn_smfmac.hpp); they number k in another order than the emulator does. The index sets are those
of AMD's matrix instruction calculator. Nothing published has the int8 forms of K = 128 and 64: they
are taken to be those of FP8.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from assemble import run_lines
from test_conversions import values_of
from test_matrix import unpack_d

import gfx950_emulator as emu

# (bits, dim, K) -> lane group and element of the c-th non-zero of a row of A, lane group and element
# of B[k], lane group and nibble of the index of the q-th four of a row.
PLACES = {
    (16, 16, 32): (
        lambda c: (c // 4, c % 4),
        lambda k: (k // 8, k % 8),
        lambda q: (q // 2, q % 2),
    ),
    (16, 16, 64): (
        lambda c: (c // 8, c % 8),
        lambda k: (k % 32 // 8, 8 * (k // 32) + k % 8),
        lambda q: (q // 4, q % 4),
    ),
    (16, 32, 32): (
        lambda c: (c // 8, c % 8),
        lambda k: (k % 16 // 8, 8 * (k // 16) + k % 8),
        lambda q: (q // 4, q % 4),
    ),
    (8, 16, 64): (
        lambda c: (c % 16 // 4, 4 * (c // 16) + c % 4),
        lambda k: (k % 32 // 8, 8 * (k // 32) + k % 8),
        lambda q: (q % 8 // 2, 2 * (q // 8) + q % 2),
    ),
    (8, 32, 32): (
        lambda c: (c % 8 // 4, 4 * (c // 8) + c % 4),
        lambda k: (k % 16 // 8, 8 * (k // 16) + k % 8),
        lambda q: (q % 4 // 2, 2 * (q // 4) + q % 2),
    ),
    (8, 16, 128): (
        lambda c: (2 * (c >> 5 & 1) + (c >> 3 & 1), 8 * (c >> 2 & 1) + 4 * (c >> 4 & 1) + c % 4),
        lambda k: (k % 32 // 8, 8 * (k // 32) + k % 8),
        lambda q: (2 * (q // 16) + q // 4 % 2, 2 * (q // 8 % 2) + 4 * (q % 4 // 2) + q % 2),
    ),
    (8, 32, 64): (
        lambda c: (c >> 4 & 1, 8 * (c >> 2 & 1) + 4 * (c >> 3 & 1) + c % 4),
        lambda k: (k % 16 // 8, 8 * (k // 16) + k % 8),
        lambda q: (q // 8, q % 2 + 2 * (q // 4 % 2) + 4 * (q // 2 % 2)),
    ),
}
PLACES[16, 32, 16] = PLACES[16, 16, 32]

PAIRS8 = [("fp8", "fp8"), ("fp8", "bf8"), ("bf8", "fp8"), ("bf8", "bf8"), ("i8", "i8")]
FORMS = [(a, b, dim, K) for dim, K in ((16, 32), (32, 16), (16, 64), (32, 32))
         for a, b in (("f16", "f16"), ("bf16", "bf16"))]  # fmt: skip
FORMS += [(a, b, dim, K) for dim, K in ((16, 64), (32, 32), (16, 128), (32, 64)) for a, b in PAIRS8]
PAIRS = [(p, q) for p in range(4) for q in range(p + 1, 4)]  # positions of two of four


def mnemonic(fa: str, fb: str, dim: int, K: int) -> str:
    kind = f"{fa}_{fb}" if fa in ("fp8", "bf8") else fa
    return f"v_smfmac_{'i32' if fa == 'i8' else 'f32'}_{dim}x{dim}x{K}_{kind}"


def width(fmt: str) -> int:
    return 16 if "16" in fmt else 8


def codes_of(fmt: str, x: np.ndarray) -> np.ndarray:
    """Integers of magnitude up to 8 in the format."""
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8,
             "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2}[fmt]  # fmt: skip
    return x.astype(np.float64).astype(dtype).view(f"u{width(fmt) // 8}")


def integers(fmt: str, rng: np.random.Generator, shape: tuple) -> np.ndarray:
    values = np.arange(-8, 9)
    if fmt in ("fp8", "bf8"):
        values = values[np.isin(values, values_of(fmt))]
    return rng.choice(values, shape)


def place(fmt: str, dim: int, x: np.ndarray, where, per_lane: int) -> np.ndarray:
    """x [n, dim, count] of integers to fragments, uint32 [n, 64, registers]."""
    out = np.zeros((len(x), 64, per_lane), f"u{width(fmt) // 8}")
    for c in range(x.shape[2]):
        group, element = where(c)
        out[:, dim * group : dim * (group + 1), element] = codes_of(fmt, x[:, :, c])
    return out.view(np.uint32)


def place_index(dim: int, positions: np.ndarray, where) -> np.ndarray:
    """positions [n, dim, fours, 2] to index words of set 0, uint32 [n, 64, 1]."""
    out = np.zeros((len(positions), 64), np.uint32)
    for q in range(positions.shape[2]):
        group, nibble = where(q)
        word = positions[:, :, q, 0] | positions[:, :, q, 1] << 2
        out[:, dim * group : dim * (group + 1)] |= (word << 4 * nibble).astype(np.uint32)
    return out[:, :, None]


def random_positions(rng: np.random.Generator, shape: tuple) -> np.ndarray:
    return np.array(PAIRS)[rng.integers(0, len(PAIRS), shape)]


def execute(form: tuple, a, b, positions, c: int = 0, tail: str = "", index=None) -> np.ndarray:
    """a [n, dim, K/2], b [n, dim, K] (columns), positions [n, dim, K/4, 2]. D as float64."""
    fa, fb, dim, K = form
    where_a, where_b, where_q = PLACES[width(fa), dim, K]
    fragment_a = place(fa, dim, a, where_a, K // 2 * dim // 64)
    fragment_b = place(fb, dim, b, where_b, K * dim // 64)
    index = place_index(dim, positions, where_q) if index is None else index
    n, ra, rb, regs = len(a), fragment_a.shape[2], fragment_b.shape[2], dim * dim // 64
    waves = -(-n // 16) * 16
    data = np.concatenate([fragment_a, fragment_b, index], axis=2)
    data = np.pad(data, ((0, waves - n), (0, 0), (0, 0)))
    bits = c if fa == "i8" else int(np.float32(c).view(np.uint32))
    lines = "".join(f"  v_mov_b32 v{60 + r}, 0x{bits:x}\n" for r in range(regs))
    b0 = 10 + ra
    lines += f"  {mnemonic(*form)} v[60:{59 + regs}], v[10:{b0 - 1}], v[{b0}:{b0 + rb - 1}], "
    lines += f"v{b0 + rb}{tail}"
    out = run_lines(lines, data.reshape(waves * 64, -1), regs)
    d = unpack_d(out, dim)[:n]
    return d.view(np.int32 if fa == "i8" else np.float32).astype(np.float64)


def dense(a: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A with its zeros, [n, dim, K]."""
    n, dim, half = a.shape
    out = np.zeros((n, dim, half // 2, 4))
    pairs = a.reshape(n, dim, half // 2, 2).astype(np.float64)
    np.put_along_axis(out, positions, pairs, axis=3)
    return out.reshape(n, dim, 2 * half)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: mnemonic(*f))
def test_one_hot(form: tuple) -> None:
    """One element of A is 1: its row of D is the row of B at its position. One element of B is 1."""
    fa, fb, dim, K = form
    rng = np.random.default_rng(K)
    where = [(i, c) for i in range(dim) for c in range(K // 2)]
    n = len(where)
    positions = random_positions(rng, (n, dim, K // 4))
    a = np.zeros((n, dim, K // 2), np.int64)
    for w, (i, c) in enumerate(where):
        a[w, i, c] = 1
    b = np.broadcast_to(integers(fb, rng, (dim, K)), (n, dim, K))
    d = execute(form, a, b, positions)
    for w, (i, c) in enumerate(where):
        want = np.zeros((dim, dim))
        want[i] = b[w][:, 4 * (c // 2) + positions[w, i, c // 2, c % 2]]
        assert (d[w] == want).all(), (i, c)
    where = [(j, k) for j in range(dim) for k in range(K)]
    n = len(where)
    b = np.zeros((n, dim, K), np.int64)
    for w, (j, k) in enumerate(where):
        b[w, j, k] = 1
    a = np.broadcast_to(integers(fa, rng, (dim, K // 2)), (n, dim, K // 2))
    positions = np.broadcast_to(random_positions(rng, (dim, K // 4)), (n, dim, K // 4, 2))
    d, full = execute(form, a, b, positions), dense(a[:1], positions[:1])[0]
    for w, (j, k) in enumerate(where):
        want = np.zeros((dim, dim))
        want[:, j] = full[:, k]
        assert (d[w] == want).all(), (j, k)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: mnemonic(*f))
def test_index_sets(form: tuple) -> None:
    """Random matrices added to C: CBSZ = 0 takes index set ABID, else the first one."""
    fa, fb, dim, K = form
    rng = np.random.default_rng(dim)
    n, bits = 16, K * dim // 64  # bits of one index set
    a, b = integers(fa, rng, (n, dim, K // 2)), integers(fb, rng, (n, dim, K))
    sets = 32 // bits
    positions = [random_positions(rng, (n, dim, K // 4)) for _ in range(sets)]
    where_q = PLACES[width(fa), dim, K][2]
    words = sum(
        place_index(dim, p, where_q) << np.uint32(bits * s) for s, p in enumerate(positions)
    )
    c = 100_000_007 if fa == "i8" else 3
    for s, tail in [(s, f" abid:{s}") for s in range(sets)] + [(0, f" cbsz:1 abid:{sets - 1}")]:
        d = execute(form, a, b, None, c, tail, words)
        assert (d == np.einsum("nik,njk->nij", dense(a, positions[s]), b) + c).all(), tail


def test_probe_of_an_mi350() -> None:
    """v_smfmac_f32_16x16x64_f16, row 0 selecting positions 0 and 1, row 1 positions 2 and 3: the
    pairs of A slot and lane group with B slot and lane group that another project's one-hot probe
    on an MI350 printed."""
    b_slot = [0, 1, 4, 5]
    seen = [(slot, g, b_slot[slot % 4] + 8 * (g // 2) + 2 * row, 2 * (g % 2) + slot // 4, row)
            for slot in range(8) for g in range(4) for row in range(2)]  # fmt: skip
    n = len(seen)
    a, b = np.zeros((n, 64, 8), np.float16), np.zeros((n, 64, 16), np.float16)
    index = np.zeros((n, 64, 1), np.uint32)
    index[:, 0::2], index[:, 1::2] = 0x4444, 0xEEEE
    for w, (slot, group, slot_b, group_b, row) in enumerate(seen):
        a[w, 16 * group + row, slot] = 1
        b[w, 16 * group_b, slot_b] = 1
    data = np.concatenate([a.view(np.uint32), b.view(np.uint32), index], axis=2)
    lines = "".join(f"  v_mov_b32 v{60 + r}, 0\n" for r in range(4))
    lines += "  v_smfmac_f32_16x16x64_f16 v[60:63], v[10:13], v[14:21], v22"
    d = unpack_d(run_lines(lines, data.reshape(n * 64, -1), 4), 16).view(np.float32)
    for w, (*_, row) in enumerate(seen):
        assert d[w, row, 0] == 1 and np.count_nonzero(d[w]) == 1, seen[w]


def test_accumulation_registers() -> None:
    """A and D in AccVGPRs; the index stays a VGPR. D is read: unwritten, it is an error."""
    data = np.full((64, 7), 0x3C003C00, np.uint32)
    data[:, 6] = 0x4444
    body = "  v_accvgpr_write a10, v10\n  v_accvgpr_write a11, v11\n"
    body += "  v_mov_b32 v40, 0\n"
    init = "".join(f"  v_accvgpr_write a{40 + r}, v40\n" for r in range(4))
    op = "  v_smfmac_f32_16x16x32_f16 a[40:43], a[10:11], v[12:15], v16\n"
    back = "".join(f"  v_accvgpr_read v{60 + r}, a{40 + r}\n" for r in range(4))
    assert (run_lines(body + init + op + back, data, 4).view(np.float32) == 16).all()
    with pytest.raises(emu.EmulatorError, match="uninitialized register"):
        run_lines(body + op + back, data, 4)


@pytest.mark.parametrize("name,a,b,abid", [
    ("v_smfmac_f32_16x16x64_fp8_fp8", "v[10:11]", "v[12:15]", 2),
    ("v_smfmac_f32_16x16x64_f16", "v[10:13]", "v[14:21]", 2),
    ("v_smfmac_i32_16x16x128_i8", "v[10:13]", "v[14:21]", 1),
])  # fmt: skip
def test_no_such_index_set(name: str, a: str, b: str, abid: int) -> None:
    lines = "".join(f"  v_mov_b32 v{60 + r}, 0\n" for r in range(4))
    lines += f"  {name} v[60:63], {a}, {b}, v22 abid:{abid}"
    with pytest.raises(emu.EmulatorError, match="index sets"):
        run_lines(lines, np.zeros((64, 13), np.uint32), 4)
