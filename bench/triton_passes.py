# SPDX-License-Identifier: MIT
"""What rotquant_hip fuses, as separate passes in plain Triton, for gfx950 in the emulator.

Rotation as a matrix product in bf16, quantise with float and integer arithmetic, scales moved by
index; the GEMM is tl.dot_scaled on natural weights and scales. Tiles: of a few that were counted,
ones with few instructions and registers. Arguments are specialised as Triton's launcher does
(16-byte alignment, buffers below 2 GiB), so that accesses are vectorised.

NOTE: quantise packs eight codes in an int32 and takes one group a lane: with bytes, or several
groups, LLVM picks v_bitop3_b16, which the emulator does not execute. So it does in the GEMM with 4
waves for few tokens, hence 2.
"""

from __future__ import annotations

import gfx950_emulator as emu
import numpy as np
import triton
import triton.language as tl
from counted import Launch
from numpy.typing import NDArray
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("hip", "gfx950", 64)
POINTERS = {np.dtype(np.uint8): "*u8", np.dtype(np.int32): "*i32", np.dtype(np.uint16): "*bf16"}


@triton.jit
def rotate_kernel(x, matrix, y, blocks, factor, RS: tl.constexpr, B: tl.constexpr):
    """x as [blocks, RS] times matrix [RS, RS] in bf16, summed and scaled in float32."""
    row = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    column = tl.arange(0, RS)
    v = tl.load(x + row * RS + column[None, :], mask=row < blocks, other=0.0)
    r = tl.load(matrix + column[:, None] * RS + column[None, :])
    acc = tl.dot(v, r) * factor
    tl.store(y + row * RS + column[None, :], acc.to(tl.bfloat16), mask=row < blocks)


@triton.jit
def quantise_kernel(y, codes, scales, groups, B: tl.constexpr, TILES: tl.constexpr):
    """y as [groups, 32] bf16 to e2m1, eight in an int32, and e8m0, mode round_up; finite y."""
    for tile in tl.static_range(TILES):
        group = (tl.program_id(0) * TILES + tile) * B + tl.arange(0, B)
        inside = group[:, None] < groups
        v = tl.load(y + group[:, None] * 32 + tl.arange(0, 32)[None, :], mask=inside, other=0.0)
        v = v.to(tl.float32)
        amax = tl.max(tl.abs(v), axis=1)
        # Smallest power of two >= amax / 6: a mantissa above 1.5 carries into the exponent.
        byte = tl.maximum(((amax.to(tl.int32, bitcast=True) + 0x3FFFFF) >> 23) - 2, 0)
        t = v * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
        bits = t.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Below 1 the step is 0.5, the last place of floats near 2^22; above, keep a mantissa bit.
        small = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True)
        even = (magnitude >> 22) & 1
        large = (magnitude + even + (0x1FFFFF - (126 << 23))) >> 22
        code = tl.where(magnitude < 0x3F800000, small - 0x4A800000, large)  # |t| <= 6
        code = tl.where(amax[:, None] > 0, code | ((bits >> 28) & 8), 0)
        nibble = 4 * tl.arange(0, 8)[None, None, :]
        packed = tl.sum(code.reshape(B, 4, 8) << nibble, axis=2)
        tl.store(codes + group[:, None] * 4 + tl.arange(0, 4)[None, :], packed, mask=inside)
        tl.store(scales + group, byte.to(tl.uint8), mask=group < groups)


@triton.jit
def shuffle_kernel(scales, out, rows, groups, cells, padded_groups, B: tl.constexpr):
    """Natural scales [rows, groups] to the GEMM's order, padding 0; see rotquant_hip/layouts.py."""
    cell = tl.program_id(0) * B + tl.arange(0, B)
    tile = cell >> 8  # of 32 rows and 8 groups
    tiles = padded_groups >> 3
    row = (tile // tiles) * 32 + (cell & 1) * 16 + ((cell >> 2) & 15)
    group = (tile % tiles) * 8 + ((cell >> 1) & 1) * 4 + ((cell >> 6) & 3)
    exists = (row < rows) & (group < groups) & (cell < cells)
    tl.store(
        out + cell, tl.load(scales + row * groups + group, mask=exists, other=0), mask=cell < cells
    )


@triton.jit
def gemm_kernel(
    a, b, a_scales, b_scales, out, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """a [m, k/2] times b [n, k/2] transposed, scales [., k/32]; k divisible by BK."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    byte, group = tl.arange(0, BK // 2), tl.arange(0, BK // 32)
    row, column = (rows % m)[:, None], (columns % n)[:, None]
    left = a + row * (k // 2) + byte[None, :]
    right = b + (columns % n)[None, :] * (k // 2) + byte[:, None]
    left_scales = a_scales + row * (k // 32) + group[None, :]
    right_scales = b_scales + column * (k // 32) + group[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, k // BK):
        acc = tl.dot_scaled(
            tl.load(left), tl.load(left_scales), "e2m1",
            tl.load(right), tl.load(right_scales), "e2m1", acc,
        )  # fmt: skip
        left += BK // 2
        right += BK // 2
        left_scales += BK // 32
        right_scales += BK // 32
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    where = rows[:, None] * n + columns[None, :]
    tl.store(out + where, acc.to(tl.bfloat16), mask=inside)


@triton.jit
def gather_kernel(
    source, ids, out, rows, tokens, words, topk,
    BY_ROUTE: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Rows of int32 words by sorted id, slot << 24 | token; of tokens or of routes, else 0."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    word = tl.program_id(1) * W + tl.arange(0, W)
    id = tl.load(ids + row, mask=row < rows, other=0xFFFFFF)
    token = id & 0xFFFFFF
    where = token * topk + (id >> 24) if BY_ROUTE else token
    exists = (token < tokens)[:, None] & (word < words)[None, :]
    v = tl.load(source + where[:, None] * words + word[None, :], mask=exists, other=0)
    inside = (row < rows)[:, None] & (word < words)[None, :]
    tl.store(out + row[:, None] * words + word[None, :], v, mask=inside)


@triton.jit
def activate_kernel(h, out, values, inter, B: tl.constexpr):
    """h [rows, 2 * inter] bf16, gate first, to silu(gate) * up in bf16."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    at = i // inter * (2 * inter) + i % inter
    g = tl.load(h + at, mask=i < values, other=0.0).to(tl.float32)
    u = tl.load(h + at + inter, mask=i < values, other=0.0).to(tl.float32)
    tl.store(out + i, (g / (1 + tl.exp(-g)) * u).to(tl.bfloat16), mask=i < values)


def launch(function, grid, args: list, constants: dict, warps: int = 4, **options) -> Launch:
    """Compiles for gfx950, loads, runs. Triton's own trailing pointer arguments are null."""
    signature, attributes = {}, {}
    for i, (name, value) in enumerate(zip(function.arg_names, args, strict=False)):
        array = value.array if isinstance(value, emu.Uninitialized) else value
        pointer = isinstance(array, np.ndarray)
        whole = isinstance(value, int)
        signature[name] = POINTERS[array.dtype] if pointer else "i32" if whole else "fp32"
        if pointer or whole and value % 16 == 0:
            attributes[(i,)] = [["tt.divisibility", 16]]
        if pointer:
            attributes[(i,)].append(["tt.pointer_range", 32])
    source = ASTSource(
        function,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs=attributes,
    )
    built = triton.compile(source, target=TARGET, options={"num_warps": warps, **options})
    obj = emu.load(built.asm["hsaco"])
    info = obj.kernels[built.metadata.name]
    assert not info.scratch_bytes, f"{info.name} spills"
    lds = max(info.lds_bytes, built.metadata.shared)
    missing = sum(not a.hidden for a in info.args) - len(args)
    stats = obj.run(
        info.name,
        grid=grid,
        block=64 * warps,
        args=args + [None] * missing,
        dynamic_lds=lds - info.lds_bytes,
    )
    return Launch(stats, info.arch_vgprs + info.acc_vgprs, lds, 64 * warps)


def rotate_quant(
    x: NDArray,
    matrix: NDArray,
    factor: float,
    *,
    shuffle: bool,
    rows: int = 128,
    groups: int = 64,
    tiles: int = 4,
) -> tuple[NDArray, NDArray, dict[str, Launch]]:
    """x bf16 bits [M, K] and matrix bf16 bits [RS, RS] to codes, scales and the counts by pass."""
    size, (m, k) = len(matrix), x.shape
    blocks, cells = x.size // size, x.size // 32
    y = np.zeros(x.shape, np.uint16)
    codes, scales = np.zeros((m, k // 2), np.uint8), np.zeros((m, k // 32), np.uint8)
    passes = {}
    passes["rotate"] = launch(
        rotate_kernel,
        -(-blocks // rows),
        [x, matrix, emu.Uninitialized(y), blocks, float(factor)],
        {"RS": size, "B": rows},
    )
    passes["quantise"] = launch(
        quantise_kernel,
        -(-cells // (groups * tiles)),
        [y, emu.Uninitialized(codes.view(np.int32)), emu.Uninitialized(scales), cells],
        {"B": groups, "TILES": tiles},
    )
    if shuffle:
        out = np.zeros((-(-m // 256) * 256, -(-k // 256) * 8), np.uint8)
        arguments = [scales, emu.Uninitialized(out), m, k // 32, out.size, out.shape[1]]
        passes["shuffle"] = launch(shuffle_kernel, -(-out.size // 1024), arguments, {"B": 1024})
        scales = out
    return codes, scales, passes


def gemm(
    a: NDArray,
    b: NDArray,
    a_scales: NDArray,
    b_scales: NDArray,
    *,
    tile: tuple[int, int, int],
    warps: int = 4,
) -> tuple[NDArray, dict[str, Launch]]:
    """Codes [rows, K/2] and natural scales to bf16 bits [M, N]; tile is (BM, BN, BK)."""
    m, n = len(a), len(b)
    out = np.zeros((m, n), np.uint16)
    done = launch(
        gemm_kernel,
        (-(-m // tile[0]), -(-n // tile[1])),
        [a, b, a_scales, b_scales, emu.Uninitialized(out), m, n, 2 * a.shape[1]],
        dict(zip(("BM", "BN", "BK"), tile, strict=True)),
        warps=warps,
        matrix_instr_nonkdim=16,
    )
    return out, {"gemm": done}


def gather(
    source: NDArray, sorted_ids: NDArray, rows: int, tokens: int, topk: int, *, by_route: bool
) -> tuple[NDArray, Launch]:
    """Codes [tokens or routes, K/2] in the order of the first `rows` sorted rows."""
    words, width = source.shape[1] // 4, 256
    out = np.zeros((len(sorted_ids), words), np.int32)
    done = launch(
        gather_kernel,
        (-(-rows // 4), -(-words // width)),
        [source.view(np.int32), sorted_ids, emu.Uninitialized(out), rows, tokens, words, topk],
        {"BY_ROUTE": by_route, "R": 4, "W": width},
    )
    return out.view(np.uint8), done


def activate(h: NDArray) -> tuple[NDArray, Launch]:
    """bf16 bits [rows, 2I], gate first, to bf16 bits [rows, I]."""
    rows, columns = h.shape
    out = np.zeros((rows, columns // 2), np.uint16)
    arguments = [h, emu.Uninitialized(out), out.size, columns // 2]
    return out, launch(activate_kernel, -(-out.size // 1024), arguments, {"B": 1024})
