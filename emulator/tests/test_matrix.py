# SPDX-License-Identifier: MIT
"""Matrix instructions: every operand element by one-hot, random matrices exactly, scale bytes and
lanes.

The element positions below are written from the published layouts (Modular's and AMD's MXFP4
kernels, the
rocjitsu conformance tests), not from the emulator; Triton's kernels (test_triton.py) are the second
witness.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from assemble import run_lines
from test_conversions import BITS, DTYPES, values_of

import gfx950_emulator as emu

FORMAT_CODE = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}
SHAPES = {16: 128, 32: 64}  # dim -> K of f8f6f4


def place(fmt: str, dim: int, K: int, i: int, k: int) -> tuple[int, int]:
    """Lane and bit of element k of row (or column) i."""
    if fmt in ("fp4", "fp6", "bf6"):
        return dim * (k // 32) + i, BITS[fmt] * (k % 32)
    if fmt in ("fp8", "bf8"):
        half = K // 2
        return dim * (k % half // 16) + i, 8 * (16 * (k // half) + k % 16)
    per_lane = K * dim // 64
    bits = {"bf16": 16, "f16": 16, "f32": 32, "i8": 8}[fmt]
    return dim * (k // per_lane) + i, bits * (k % per_lane)


def pack(fmt: str, codes: np.ndarray, registers: int) -> np.ndarray:
    """codes [n, dim, K] to fragments, uint32 [n, 64, registers]."""
    n, dim, K = codes.shape
    width = BITS.get(fmt) or {"bf16": 16, "f16": 16, "f32": 32, "i8": 8}[fmt]
    bits = np.zeros((n, 64, 32 * registers), np.uint8)
    for i in range(dim):
        for k in range(K):
            lane, bit = place(fmt, dim, K, i, k)
            for b in range(width):
                bits[:, lane, bit + b] = codes[:, i, k] >> b & 1
    return np.packbits(bits, axis=2, bitorder="little").view(np.uint32)


def unpack_d(out: np.ndarray, dim: int) -> np.ndarray:
    """[n * 64, registers] to D [n, dim, dim]."""
    n = out.shape[0] // 64
    out = out.reshape(n, 64, -1)
    d = np.zeros((n, dim, dim), out.dtype)
    for i in range(dim):
        for j in range(dim):
            lane, reg = (
                (16 * (i // 4) + j, i % 4)
                if dim == 16
                else (32 * (i // 4 % 2) + j, 4 * (i // 8) + i % 4)
            )
            d[:, i, j] = out[:, lane, reg]
    return d


def run(
    name: str,
    dim: int,
    a: np.ndarray,
    b: np.ndarray,
    scales: np.ndarray | None,
    tail: str,
    c: float = 0.0,
) -> np.ndarray:
    """a, b: fragments [n, 64, r]. Returns D as uint32 [n, dim, dim]."""
    n, regs = a.shape[0], dim * dim // 64
    waves = -(-n // 16) * 16
    parts = [a, b] + ([] if scales is None else [scales])
    data = np.concatenate([np.pad(p, ((0, waves - n), (0, 0), (0, 0))) for p in parts], axis=2)
    ra, rb = a.shape[2], b.shape[2]
    # Fragments need even registers: A at v60.., B at v70.., scales at v80, v81, D at v90...
    inputs = data.shape[2]
    moves = [f"  v_mov_b32 v{t}, v{10 + i}" for i, t in enumerate(
        [*range(60, 60 + ra), *range(70, 70 + rb), *([80, 81] if scales is not None else [])])]  # fmt: skip
    bits = int(np.float32(c).view(np.uint32))
    init = [f"  v_mov_b32 v{90 + r}, 0x{bits:x}" for r in range(regs)]
    text = f"  {name} v[90:{89 + regs}], v[60:{59 + ra}], v[70:{69 + rb}], v[90:{89 + regs}]{tail}"
    back = [f"  v_mov_b32 v{60 + r}, v{90 + r}" for r in range(regs)]
    assert inputs == len(moves)
    out = run_lines("\n".join([*moves, *init, text, *back]), data.reshape(waves * 64, inputs), regs)
    return unpack_d(out, dim)[:n]


REGISTERS = {"fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4}
PAIRS = [
    ("fp4", "fp4"),
    ("fp8", "fp4"),
    ("fp4", "bf8"),
    ("fp6", "fp4"),
    ("bf6", "fp6"),
    ("fp8", "bf8"),
]


@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("fa,fb", PAIRS)
def test_scaled_one_hot(fa: str, fb: str, dim: int) -> None:
    """One element of A is 1 and the rest 0: row i of D is row k of B times both scales, other rows
    are 0. And swapped."""
    K = SHAPES[dim]
    name = f"v_mfma_scale_f32_{dim}x{dim}x{K}_f8f6f4"
    rng = np.random.default_rng(dim)
    one = {f: int(np.nonzero(values_of(f) == 1.0)[0][0]) for f in DTYPES}
    where = [(i, k) for i in range(dim) for k in range(K)]
    small = {
        f: np.nonzero(np.isfinite(values_of(f)) & (np.abs(values_of(f)) <= 6))[0] for f in DTYPES
    }
    for hot in "AB":
        f_hot, f_full = (fa, fb) if hot == "A" else (fb, fa)
        codes = np.zeros((len(where), dim, K), np.uint32)
        for n, (i, k) in enumerate(where):
            codes[n, i, k] = one[f_hot]
        full = rng.choice(small[f_full], (dim, K)).astype(np.uint32)
        scale = rng.integers(124, 131, (2, dim, K // 32))
        lanes = np.zeros((64, 2), np.uint32)
        for s in range(2):
            for i in range(dim):
                for kb in range(K // 32):
                    lanes[dim * kb + i, s] = scale[s, i, kb]
        hot_frag = pack(f_hot, codes, REGISTERS[f_hot])
        full_frag = np.broadcast_to(
            pack(f_full, full[None], REGISTERS[f_full]), (len(where), 64, REGISTERS[f_full])
        )
        a, b = (hot_frag, full_frag) if hot == "A" else (full_frag, hot_frag)
        tail = f", v80, v81 op_sel_hi:[0,0,0] cbsz:{FORMAT_CODE[fa]} blgp:{FORMAT_CODE[fb]}"
        d = run(name, dim, a, b, np.broadcast_to(lanes, (len(where), 64, 2)), tail).view(np.float32)
        s_hot, s_full = (scale[0], scale[1]) if hot == "A" else (scale[1], scale[0])
        values = values_of(f_full)[full] * np.exp2(s_full.repeat(32, 1) - 127.0)
        for n, (i, k) in enumerate(where):
            want = np.zeros((dim, dim))
            want[i] = values[:, k] * np.exp2(s_hot[i, k // 32] - 127.0)
            got = d[n] if hot == "A" else d[n].T
            assert (got == want).all(), (hot, i, k)


@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("fa,fb", PAIRS)
@pytest.mark.parametrize("scaled", [False, True])
def test_f8f6f4_random(fa: str, fb: str, dim: int, scaled: bool) -> None:
    """Random codes, one random scale byte per 32-block in each of the four byte positions; equals
    float64 to 1e-6."""
    K, n = SHAPES[dim], 16
    rng = np.random.default_rng(dim + scaled)
    codes = []
    for f in (fa, fb):
        finite = np.nonzero(np.isfinite(values_of(f)))[0]
        codes.append(rng.choice(finite, (n, dim, K)).astype(np.uint32))
    frags = [pack(f, c, REGISTERS[f]) for f, c in zip((fa, fb), codes, strict=True)]
    scale = rng.integers(117, 137, (2, 4, n, dim, K // 32))
    exact = exact_terms = None
    for byte in range(4) if scaled else [0]:
        v = [values_of(f)[c] * (np.exp2(scale[s, byte].repeat(32, 2) - 127.0) if scaled else 1.0)
             for s, (f, c) in enumerate(zip((fa, fb), codes, strict=True))]  # fmt: skip
        exact = np.einsum("nik,njk->nij", v[0], v[1]) + 1.0
        exact_terms = np.einsum("nik,njk->nij", np.abs(v[0]), np.abs(v[1])) + 1.0
        lanes = np.zeros((n, 64, 2), np.uint32)
        for s in range(2):
            for i in range(dim):
                for kb in range(K // 32):
                    for q in range(4):
                        lanes[:, dim * kb + i, s] |= scale[s, q, :, i, kb].astype(
                            np.uint32
                        ) << np.uint32(8 * q)
        formats = f" cbsz:{FORMAT_CODE[fa]} blgp:{FORMAT_CODE[fb]}"
        sel = f"op_sel:[{byte & 1},{byte & 1},0] op_sel_hi:[{byte >> 1},{byte >> 1},0]"
        name = f"v_mfma_{'scale_' if scaled else ''}f32_{dim}x{dim}x{K}_f8f6f4"
        tail = f", v80, v81 {sel}{formats}" if scaled else formats
        d = run(name, dim, *frags, lanes if scaled else None, tail, c=1.0).view(np.float32)
        error = np.abs(d - exact) / exact_terms
        assert error.max() < 2e-7, (byte, error.max())


def test_scale_nan_and_zero() -> None:
    """Byte 255 makes the rows or columns that it scales NaN; byte 0 is 2^-127."""
    ones = pack("fp4", np.full((1, 16, 128), 2, np.uint32), 4)
    lanes = np.full((1, 64, 2), 127, np.uint32)
    lanes[0, 16 * 2 + 5, 0] = 255  # row 5, block 2
    lanes[0, 3, 1] = 0  # column 3, block 0
    d = run("v_mfma_scale_f32_16x16x128_f8f6f4", 16, ones, ones, lanes,
            ", v80, v81 op_sel_hi:[0,0,0] cbsz:4 blgp:4")[0].view(np.float32)  # fmt: skip
    assert np.isnan(d[5]).all() and not np.isnan(np.delete(d, 5, 0)).any()
    assert (np.delete(d, 5, 0)[:, 3] == 96).all() and (
        np.delete(np.delete(d, 5, 0), 3, 1) == 128
    ).all()


PLAIN = [("bf16", 16, 32, 4), ("bf16", 32, 16, 4), ("f16", 16, 32, 4), ("f16", 32, 16, 4), ("bf16", 16, 16, 2),
         ("bf16", 32, 8, 2), ("f16", 16, 16, 2), ("f16", 32, 8, 2), ("f32", 16, 4, 1), ("f32", 32, 2, 1)]  # fmt: skip


@pytest.mark.parametrize("fmt,dim,K,registers", PLAIN)
def test_plain_integers(fmt: str, dim: int, K: int, registers: int) -> None:
    """Small integers: exact in any order of summation; the layout is all that can be wrong."""
    rng = np.random.default_rng(K)
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[fmt]
    a, b = (rng.integers(-8, 9, (32, dim, K)).astype(dtype) for _ in range(2))
    raw = [pack(fmt, m.view(f"u{m.itemsize}").astype(np.uint32), registers) for m in (a, b)]
    d = run(f"v_mfma_f32_{dim}x{dim}x{K}_{fmt}", dim, *raw, None, "", c=3.0).view(np.float32)
    assert (d == np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64)) + 3).all()


@pytest.mark.parametrize("dim,blocks", [(16, 4), (32, 2)])
@pytest.mark.parametrize("fmt,K", [("f16", 4), ("bf16", 4), ("f32", 1)])
def test_blocks(fmt: str, K: int, dim: int, blocks: int) -> None:
    """Several products in one instruction: block = lane / dim; each has its own registers of D."""
    rng = np.random.default_rng(K)
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[fmt]
    a, b = (rng.integers(-8, 9, (blocks, dim, K)).astype(dtype) for _ in range(2))
    raw = [m.reshape(64, K).view(np.uint32) for m in (a, b)]
    n, regs = raw[0].shape[1], dim * dim // 64
    x, y = ("v10", "v11") if n == 1 else ("v[10:11]", "v[12:13]")
    total = regs * blocks
    lines = "\n".join(f"  v_mov_b32 v{60 + i}, 2.0" for i in range(total))
    d = f"v[60:{59 + total}]"
    lines += f"\n  v_mfma_f32_{dim}x{dim}x{K}_{blocks}b_{fmt} {d}, {x}, {y}, {d}"
    out = run_lines(lines, np.hstack(raw), total).view(np.float32)
    want = np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64)) + 2
    for block in range(blocks):
        part = np.ascontiguousarray(out[:, block * regs : (block + 1) * regs])
        assert (unpack_d(part, dim)[0] == want[block]).all()


@pytest.mark.parametrize("fmt,K", [("f16", 4), ("bf16", 4), ("f32", 1)])
def test_four_by_four(fmt: str, K: int) -> None:
    """Sixteen independent 4x4 products: lane 4 * block + index."""
    rng = np.random.default_rng(K)
    dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}[fmt]
    a, b = (rng.integers(-8, 9, (16, 4, K)).astype(dtype) for _ in range(2))
    raw = [m.reshape(64, K).view(np.uint32) for m in (a, b)]
    n = raw[0].shape[1]
    operand = lambda base: f"v{base}" if n == 1 else f"v[{base}:{base + n - 1}]"  # noqa: E731
    lines = "\n".join(f"  v_mov_b32 v{60 + i}, 1.0" for i in range(4))
    suffix = f"4x4x{K}_16b_{fmt}"
    lines += f"\n  v_mfma_f32_{suffix} v[60:63], {operand(10)}, {operand(10 + n)}, v[60:63]"
    out = run_lines(lines, np.hstack(raw), 4).view(np.float32)
    want = np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64)) + 1
    assert (out.reshape(16, 4, 4).transpose(0, 2, 1) == want).all()


@pytest.mark.parametrize("fa,fb", [("fp8", "fp8"), ("fp8", "bf8"), ("bf8", "fp8"), ("bf8", "bf8")])
@pytest.mark.parametrize("dim,K", [(16, 32), (32, 16)])
def test_plain_fp8(fa: str, fb: str, dim: int, K: int) -> None:
    """The CDNA3 forms keep 8 consecutive k in a lane."""
    rng = np.random.default_rng(K)
    codes, frags = [], []
    for f in (fa, fb):
        small = np.nonzero(np.isin(values_of(f), np.arange(-8, 9)))[0]
        codes.append(rng.choice(small, (16, dim, K)).astype(np.uint32))
        frags.append(pack("i8", codes[-1], 2))
    d = run(f"v_mfma_f32_{dim}x{dim}x{K}_{fa}_{fb}", dim, *frags, None, "").view(np.float32)
    assert (d == np.einsum("nik,njk->nij", values_of(fa)[codes[0]], values_of(fb)[codes[1]])).all()


@pytest.mark.parametrize("dim,K,registers", [(16, 64, 4), (32, 32, 4), (16, 32, 2), (32, 16, 2)])
def test_plain_int8(dim: int, K: int, registers: int) -> None:
    rng = np.random.default_rng(K)
    a, b = (rng.integers(-128, 128, (16, dim, K)) for _ in range(2))
    frags = [pack("i8", (m & 255).astype(np.uint32), registers) for m in (a, b)]
    d = run(f"v_mfma_i32_{dim}x{dim}x{K}_i8", dim, *frags, None, "").view(np.int32)
    assert (d == np.einsum("nik,njk->nij", a, b)).all()


# Forms with blocks: (type, dim, blocks, k of a lane). Block b's A and B are in lanes dim*b + index.
BLOCKED = [(t, dim, 64 // dim, k) for dim in (4, 16, 32)
           for t, k in (("f16", 4), ("bf16", 4), ("f32", 1), ("i8", 4))]  # fmt: skip
BLOCK_DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "i8": np.int8,
}
# BLGP -> the groups of 16 lanes of B that are read in place of groups 0, 1, 2, 3 (AMD's matrix
# instruction calculator and the ISA manual).
LANE_GROUPS = [[0, 1, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3], [1, 2, 3, 0],
               [0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]  # fmt: skip


def blocked_name(fmt: str, dim: int, blocks: int, k: int) -> str:
    return f"v_mfma_{'i32' if fmt == 'i8' else 'f32'}_{dim}x{dim}x{k}_{blocks}b_{fmt}"


def run_blocked(
    name: str, fmt: str, dim: int, blocks: int, a: np.ndarray, b: np.ndarray, tails: list[str]
) -> np.ndarray:
    """a, b: values by lane [n, 64, k of a lane]. C = 2. D [tails, n, blocks, dim, dim]."""
    n, regs = a.shape[0], blocks * dim * dim // 64
    dtype = BLOCK_DTYPES[fmt]
    raw = [np.ascontiguousarray(x.astype(dtype)).view(np.uint32) for x in (a, b)]
    raw = [x.reshape(n, 64, -1) for x in raw]
    r = raw[0].shape[2]
    waves = -(-n // 16) * 16 if n > 1 else 1
    data = np.pad(np.concatenate(raw, axis=2), ((0, waves - n), (0, 0), (0, 0)))
    x, y = ("v10", "v11") if r == 1 else ("v[10:11]", "v[12:13]")
    two, results = 2 if fmt == "i8" else 2.0, []
    at_once = 64 // regs
    for first in range(0, len(tails), at_once):
        some = tails[first : first + at_once]
        total = regs * len(some)
        lines = [f"  v_mov_b32 v{60 + i}, {two}" for i in range(total)]
        for s, tail in enumerate(some):
            d = f"v[{60 + regs * s}:{59 + regs * (s + 1)}]"
            lines.append(f"  {name} {d}, {x}, {y}, {d}{tail}")
        out = run_lines("\n".join(lines), data.reshape(waves * 64, -1), total)
        results += np.split(out.reshape(waves, 64, total)[:n], len(some), axis=2)
    out = np.stack(results).view(np.int32 if fmt == "i8" else np.float32)
    if dim == 4:
        return out.reshape(len(tails), n, 16, 4, 4).transpose(0, 1, 2, 4, 3)
    per_block = np.split(out, blocks, axis=3)
    flat = [unpack_d(np.ascontiguousarray(p).reshape(-1, regs // blocks), dim) for p in per_block]
    return np.stack(flat, 1).reshape(len(tails), n, blocks, dim, dim)


def product(a: np.ndarray, b: np.ndarray, dim: int, blocks: int) -> np.ndarray:
    """A B^T + 2 of every block from values by lane [n, 64, k]; single blocks spread k over lanes."""
    n, groups = len(a), 64 // dim // blocks
    a, b = (x.astype(np.float64).reshape(n, groups, blocks, dim, -1) for x in (a, b))
    return np.einsum("ngbik,ngbjk->nbij", a, b) + 2


@pytest.mark.parametrize("fmt,dim,blocks,k", BLOCKED)
def test_blocks_one_hot(fmt: str, dim: int, blocks: int, k: int) -> None:
    """Every element of A, then of B, is 1 alone."""
    rng = np.random.default_rng(dim)
    hot = np.eye(64 * k, dtype=np.int64).reshape(-1, 64, k)
    full = np.broadcast_to(rng.integers(-8, 9, (64, k)), hot.shape)
    name = blocked_name(fmt, dim, blocks, k)
    for a, b in ((hot, full), (full, hot)):
        d = run_blocked(name, fmt, dim, blocks, a, b, [""])
        assert (d[0] == product(a, b, dim, blocks)).all()


@pytest.mark.parametrize("fmt,dim,blocks,k", [*BLOCKED, ("f32", 16, 1, 1), ("f32", 32, 1, 1)])
def test_operand_permutes(fmt: str, dim: int, blocks: int, k: int) -> None:
    """Every legal CBSZ and ABID, every BLGP."""
    rng = np.random.default_rng(dim + blocks)
    a, b = (rng.integers(-8, 9, (1, 64, k)) for _ in range(2))
    broadcasts = [
        (c, i) for c in range(blocks.bit_length()) if 1 << c <= blocks for i in range(1 << c)
    ]
    cases = [(0, 0, g) for g in range(8)] + [(c, i, (c + i) % 8) for c, i in broadcasts]
    name = blocked_name(fmt, dim, blocks, k)
    if blocks == 1:
        name = f"v_mfma_f32_{dim}x{dim}x{64 // dim}_f32"
    tails = [f" cbsz:{c} abid:{i} blgp:{g}" for c, i, g in cases]
    d = run_blocked(name, fmt, dim, blocks, a, b, tails)
    for (c, i, g), got in zip(cases, d, strict=True):
        sources = [block // (1 << c) * (1 << c) + i for block in range(blocks)]
        a_used = a.reshape(1, -1, blocks, dim, k)[:, :, sources].reshape(a.shape)
        b_used = b.reshape(1, 4, 16, k)[:, LANE_GROUPS[g]].reshape(b.shape)
        assert (got == product(a_used, b_used, dim, blocks)).all(), (c, i, g)


@pytest.mark.parametrize("line", [
    "v_mfma_f32_16x16x32_bf16 v[60:63], v[10:13], v[14:17], v[60:63] cbsz:1",
    "v_mfma_f32_16x16x32_bf16 v[60:63], v[10:13], v[14:17], v[60:63] blgp:1",
    "v_mfma_i32_16x16x64_i8 v[60:63], v[10:13], v[14:17], v[60:63] blgp:1",
    "v_mfma_f32_4x4x1_16b_f32 v[60:63], v10, v11, v[60:63] cbsz:2 abid:4",
    "v_mfma_f32_4x4x1_16b_f32 v[60:63], v10, v11, v[60:63] cbsz:5",
])  # fmt: skip
def test_no_such_permute(line: str) -> None:
    zero = "".join(f"  v_mov_b32 v{60 + r}, 0\n" for r in range(4))
    with pytest.raises(emu.EmulatorError, match="unimplemented"):
        run_lines(zero + "  " + line, np.zeros((64, 8), np.uint32), 4)


@pytest.mark.parametrize("dim", [4, 16])
def test_float64(dim: int) -> None:
    """Every element of A and B by one-hot, random integers, and BLGP, which negates A, B and C.
    A and B are in lane 16*k + 4*block + index of 4x4x4, D in lane 16*row + 4*block + column."""
    rng = np.random.default_rng(dim)
    blocks, regs = 16 // dim, dim * dim // 32 if dim == 16 else 2
    name = f"v_mfma_f64_{dim}x{dim}x4_{'4b_' if dim == 4 else ''}f64"
    a, b = (rng.integers(-9, 10, (144, 64)).astype(np.float64) for _ in range(2))
    a[:64], b[64:128] = np.eye(64), np.eye(64)
    c = rng.integers(-9, 10, (144, 64, regs // 2)).astype(np.float64)
    data = np.concatenate([a[..., None], b[..., None], c], axis=2).view(np.uint32)
    move = "".join(f"  v_mov_b32 v{60 + i}, v{14 + i}\n" for i in range(regs))
    for neg in range(8):
        bits = ",".join(str(neg >> i & 1) for i in range(3))
        d = f"v[60:{59 + regs}]"
        line = f"  {name} {d}, v[10:11], v[12:13], {d} neg:[{bits}]"
        out = run_lines(move + line, data.reshape(144 * 64, -1), regs)
        got = out.view(np.float64).reshape(144, 64, regs // 2)
        sa, sb, sc = (1 - 2 * (neg >> i & 1) for i in range(3))
        m = [x.reshape(144, 4, blocks, dim) for x in (a, b)]
        want = sa * sb * np.einsum("nkbi,nkbj->nbij", *m)
        if dim == 4:
            place = lambda x: x.reshape(144, 4, 4, 4).transpose(0, 2, 1, 3)  # noqa: E731
        else:  # D[i][j]: register pair i/4 of lane 16*(i%4) + j
            place = lambda x: x.reshape(144, 4, 16, 4).transpose(0, 3, 1, 2).reshape(  # noqa: E731
                144, 1, 16, 16)  # fmt: skip
        assert (place(got) == want + sc * place(c)).all(), neg
