# SPDX-License-Identifier: MIT
"""MoE kernels on sortings that no moe_sort made: forged, of another routing, of more experts than
there are weights for. The emulator reports every access outside the buffers; results are those of
what can be trusted, on gfx950 and on a CPU.

A GEMM's row depends on nothing but its operand and its expert: what it must be is taken from the
same launch with a sorting that is in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import moe_gemm2_kernels as gemm2_kernels
import moe_gemm_kernels as gemm1_kernels
import moe_launch as moe
import moe_rotate_kernels as rotate_kernels
import moe_routing
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matrix_kernels import CONFIGS as MATRICES
from numpy.typing import NDArray
from tensors import to_array, to_tensor

import rotquant_hip  # noqa: F401  (registers the ops)
from rotquant_hip import reference, reference_moe
from rotquant_hip.reference_moe import BLOCK_M, SLOT_SHIFT, Sorting

TOKENS, EXPERTS, HIDDEN, INTER = 24, 3, 64, 64
UNWRITTEN = 0xA5
INT_MIN, INT_MAX = moe_routing.INT32_MIN, moe_routing.INT32_MAX
FORGED = ("num_valid", "experts", "ids", "reverse")
# A launch is slow, and no smaller example is easier to read.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
few = settings(max_examples=10, phases=NO_SHRINKING)


@dataclass(frozen=True)
class Untrusted:
    """A sorting, and the layer that it is used for: TOKENS tokens, EXPERTS experts."""

    sorting: Sorting
    topk: int
    block_m: int
    tokens: int = TOKENS

    @property
    def max_rows(self) -> int:
        return len(self.sorting.sorted_ids)

    @property
    def routing(self) -> moe.Routing:
        ids = np.zeros((self.tokens, self.topk), np.int32)
        return moe.Routing(ids, ids.astype(np.float32), EXPERTS, self.block_m, self.sorting)

    @property
    def in_use(self) -> int:
        return int(np.clip(self.sorting.num_valid[0], 0, self.max_rows)) // 16 * 16

    def routes(self) -> list[tuple[int, int, int]]:
        """(row, token, slot) of the rows that are a route."""
        found = []
        for row in range(self.in_use):
            slot, token = divmod(int(self.sorting.sorted_ids[row]) & 0xFFFFFFFF, 1 << SLOT_SHIFT)
            if token < self.tokens and slot < self.topk:
                found.append((row, token, slot))
        return found

    def counts(self, row: int) -> bool:
        """For a GEMM: the row's block is one."""
        block = row // self.block_m
        whole = (block + 1) * self.block_m <= self.in_use
        return whole and 0 <= self.sorting.sorted_expert_ids[block] < EXPERTS

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: to_tensor(array) for name, array in self.sorting._asdict().items()}


@st.composite
def untrusted(
    draw, block_m: int | None = None, forged: tuple[str, ...] = FORGED, unique: bool = False
) -> Untrusted:
    """The sorting of more tokens, slots and experts than there are, with some numbers replaced.

    unique: a route is named by no two rows, or it would be chance whose result stays.
    """
    topk = draw(st.integers(1, 3))
    block_m = block_m or draw(st.sampled_from(BLOCK_M))
    made = moe_routing.make(
        TOKENS + draw(st.sampled_from((0, 0, 5))),
        topk + draw(st.sampled_from((0, 0, 1))),
        EXPERTS + draw(st.sampled_from((0, 0, 1, 5))),
        block_m,
        seed=draw(moe_routing.seeds),
    ).sorting()
    rng = np.random.default_rng(draw(moe_routing.seeds))
    forged = [name for name in forged if draw(st.booleans())]
    num_valid, ids, experts, reverse = (
        a.copy()
        for a in (made.num_valid, made.sorted_ids, made.sorted_expert_ids, made.reverse_sorted)
    )
    max_rows = len(ids)
    reverse = reverse[: TOKENS * topk]

    def replaced(array: NDArray, *values: int) -> None:
        some = rng.random(array.shape) < 1 / 4
        array[some] = rng.choice(np.array(values, np.int64), some.sum()).astype(np.int32)

    if "num_valid" in forged:
        near = st.integers(-block_m, max_rows + block_m)
        num_valid[0] = draw(near | st.sampled_from((INT_MIN, -1, INT_MAX, 1 << 24)))
        num_valid[1] = draw(st.sampled_from((0, INT_MAX)))
    if "experts" in forged:
        replaced(experts, -1, INT_MIN, EXPERTS, EXPERTS + 1, INT_MAX, EXPERTS - 1, 0)
    if "ids" in forged:
        slots = np.array((0, topk, topk + 1, 15, 127)) << SLOT_SHIFT
        route = [] if unique else [int(rng.integers(topk)) << SLOT_SHIFT | 1]
        replaced(ids, -1, INT_MIN, INT_MAX, *(slots | TOKENS), *(slots[1:] | 1), *route)
    if "reverse" in forged:
        replaced(reverse, -1, INT_MIN, INT_MAX, max_rows, max_rows - 1, 0, 16)
    weights = 2.0 ** rng.integers(-2, 2, max_rows).astype(np.float32)  # sums of few bits are exact
    return Untrusted(Sorting(ids, weights, experts, num_valid, reverse), topk, block_m)


@cache
def layer() -> moe.Layer:
    made = moe.make_layer(np.random.default_rng(1), EXPERTS, HIDDEN, INTER)
    made.w2_scale[made.w2_scale != 255] = 127
    return made


@cache
def tokens() -> NDArray:
    """bf16 bits [TOKENS, HIDDEN]."""
    x = np.random.default_rng(2).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    return reference.float32_to_bf16(x)


@cache
def quantised_tokens() -> tuple[NDArray, NDArray]:
    return reference.quant(reference.bf16_to_float32(tokens()))


def in_order(u: Untrusted, ids: NDArray, tokens: int) -> Untrusted:
    """All rows are in use, slot 0 of the tokens `ids`, and all blocks of experts that there are."""
    experts = u.sorting.sorted_expert_ids
    experts = np.where((experts >= 0) & (experts < EXPERTS), experts, 0).astype(np.int32)
    num_valid = np.array([u.max_rows, tokens], np.int32)
    sorting = Sorting(ids, np.ones(u.max_rows, np.float32), experts, num_valid, ids)
    return Untrusted(sorting, 1, u.block_m, tokens)


def shuffled(rows: NDArray) -> NDArray:
    """Scales by sorted row [max_rows, G] as [ceil32(max_rows), ceil8(G)]."""
    return reference.shuffle_scales(rows)[: -(-len(rows) // 32) * 32]


def natural(scales: NDArray, rows: int, groups: int) -> NDArray:
    return reference.unshuffle_scales(scales, rows=rows, groups=groups)


# --- scales ---------------------------------------------------------------------------------------


@few
@given(untrusted(), st.booleans())
def test_sort_scales(u: Untrusted, by_route: bool) -> None:
    given_scales = np.random.default_rng(3).integers(1, 255, (TOKENS * u.topk, 9), np.uint8)
    given_scales = given_scales if by_route else given_scales[:TOKENS]
    rows = np.zeros((u.max_rows, 9), np.uint8)
    for row, token, slot in u.routes():
        rows[row] = given_scales[token * u.topk + slot if by_route else token]
    scales, _ = moe.sort_scales(given_scales, u.routing, by_route=by_route, unaligned=True)
    np.testing.assert_array_equal(scales, shuffled(rows))
    s = u.tensors()
    on_cpu = torch.ops.rotquant_hip.moe_sort_scales(
        to_tensor(given_scales), s["sorted_ids"], s["num_valid"], topk=u.topk, by_route=by_route
    )
    np.testing.assert_array_equal(on_cpu.numpy(), shuffled(rows))


def reversed_again(u: Untrusted) -> Untrusted:
    """With a reverse_sorted that agrees with the ids."""
    reverse = np.full(TOKENS * u.topk, -1, np.int32)
    for row, token, slot in u.routes():
        reverse[token * u.topk + slot] = row
    return replace(u, sorting=u.sorting._replace(reverse_sorted=reverse))


def rotate_quant(u: Untrusted, by: str) -> tuple[NDArray, NDArray]:
    """The kernel's codes and sorted scales."""
    if by == "hadamard":
        return rotate_kernels.rotate_quant(tokens(), u.sorting, u.topk, 64)[:2]
    config = next(c for c in MATRICES if c.dtype == "bf16" and c.size == 64)
    return rotate_kernels.rotate_matrix(config, tokens(), u.sorting, u.topk, permutation())[:2]


@cache
def permutation() -> NDArray[np.float32]:
    """A rotation by which nothing is rounded, not in bf16 either."""
    return np.eye(64, dtype=np.float32)[np.random.default_rng(4).permutation(64)]


def rotated(by: str) -> tuple[NDArray, NDArray]:
    """Codes and natural scales of the tokens."""
    x = reference.bf16_to_float32(tokens())
    return reference.rotate_quant(x, permutation() if by == "matrix" else None)


@few
@given(
    untrusted(None, ("num_valid", "experts", "ids"), unique=True),
    st.sampled_from(("hadamard", "matrix")),
)
def test_rotate_quant(u: Untrusted, by: str) -> None:
    u = reversed_again(u)
    codes, by_token = rotated(by)
    rows = np.zeros((u.max_rows, by_token.shape[1]), np.uint8)
    for row, token, _ in u.routes():
        rows[row] = by_token[token]
    s = u.tensors()
    on_cpu = torch.ops.rotquant_hip.moe_rotate_quant(
        to_tensor(tokens()),
        *(s["sorted_ids"], s["num_valid"], s["reverse_sorted"]),
        to_tensor(permutation()) if by == "matrix" else None,
    )
    for got in (rotate_quant(u, by), tuple(map(to_array, on_cpu))):
        np.testing.assert_array_equal(got[0], codes)
        np.testing.assert_array_equal(got[1], shuffled(rows))


@few
@given(untrusted(), st.sampled_from(("hadamard", "matrix")))
def test_rotate_quant_stays_inside_what_contradicts_itself(u: Untrusted, by: str) -> None:
    codes, _ = rotate_quant(u, by)
    np.testing.assert_array_equal(codes, rotated(by)[0])


# --- GEMMs ----------------------------------------------------------------------------------------


def gemm1_on_gfx950(u: Untrusted, config: int) -> tuple[NDArray, NDArray]:
    """Codes and natural scales by sorted row."""
    if gemm1_kernels.configs()[config].kind == "inline":
        given = {"x": tokens()}
    else:
        given = {"a": gemm1_operand(u)}
    codes, scales, _ = moe.gemm1(layer(), u.routing, config, **given)
    return codes, natural(scales, u.max_rows, INTER // 32)


def gemm1_operand(u: Untrusted) -> tuple[NDArray, NDArray]:
    """Codes by token, and scales by sorted row: 255 in those that are no route."""
    codes, by_token = quantised_tokens()
    rows = np.full((u.max_rows, HIDDEN // 32), 255, np.uint8)
    for row, token, _ in u.routes():
        rows[row] = by_token[token]
    return codes, shuffled(rows)


def gemm1_on_cpu(u: Untrusted, config: int) -> tuple[NDArray, NDArray]:
    s = u.tensors()
    inside = gemm1_kernels.configs()[config].kind == "inline"
    a, a_scales = (tokens(), None) if inside else gemm1_operand(u)
    codes, scales = torch.ops.rotquant_hip.moe_gemm1(
        *(to_tensor(a), to_tensor(layer().w1), to_tensor(layer().w1_scale)),
        *(s["sorted_ids"], s["sorted_weights"], s["sorted_expert_ids"], s["num_valid"]),
        a_scales=None if a_scales is None else to_tensor(a_scales),
        topk=u.topk,
        config=config,
    )
    return codes.numpy(), natural(scales.numpy(), u.max_rows, INTER // 32)


@pytest.mark.parametrize("config", range(len(gemm1_kernels.configs())))
@settings(max_examples=5, phases=NO_SHRINKING)
@given(data=st.data())
def test_gemm1(config: int, data: st.DataObject) -> None:
    u = data.draw(untrusted(gemm1_kernels.configs()[config].block_m))
    token_of = np.zeros(u.max_rows, np.int32)
    for row, token, _ in u.routes():
        token_of[row] = token
    routes = {row for row, _, _ in u.routes()}
    for run in (gemm1_on_gfx950, gemm1_on_cpu):
        trusted, got = run(in_order(u, token_of, TOKENS), config), run(u, config)
        for part, right in zip(got, trusted, strict=True):
            for row in filter(u.counts, range(u.max_rows)):
                np.testing.assert_array_equal(part[row], right[row] if row in routes else 0)
            if run is gemm1_on_gfx950:
                left = part[[row for row in range(u.max_rows) if not u.counts(row)]]
                # The last block may have cleared scales of the half band after it.
                assert np.isin(left, (UNWRITTEN, 0) if part is got[1] else UNWRITTEN).all()


def gemm2_operand(u: Untrusted) -> tuple[NDArray, NDArray]:
    """Codes, of which row i depends on i alone, and scales of 1, natural."""
    codes = np.random.default_rng(5).integers(0, 256, (4096, INTER // 2), np.uint8)
    return codes[: u.max_rows], np.full((u.max_rows, INTER // 32), 127, np.uint8)


def gemm2_on_gfx950(u: Untrusted, config: int, finish: str) -> tuple[NDArray, ...]:
    codes, scales = gemm2_operand(u)
    problem = gemm2_kernels.Problem(
        *(u.sorting, u.tokens, u.topk, u.block_m, None, codes, scales),
        *(layer().w2, None, None),
    )
    weights = layer().w2, layer().w2_scale
    return gemm2_kernels.run(problem, config, finish=finish, shuffled=weights)[0]


def gemm2_on_cpu(u: Untrusted, config: int, finish: str) -> tuple[NDArray, ...]:
    s, ops = u.tensors(), torch.ops.rotquant_hip
    codes, scales = gemm2_operand(u)
    operands = (to_tensor(a) for a in (codes, shuffled(scales), layer().w2, layer().w2_scale))
    ids, num_valid, experts = (s[n] for n in ("sorted_ids", "num_valid", "sorted_expert_ids"))
    if finish == "atomic":
        out = torch.zeros(TOKENS, HIDDEN)
        ops.moe_gemm2_atomic_(
            *(out, *operands, ids, s["sorted_weights"], experts, num_valid),
            topk=u.topk,
            config=config,
        )
        return (out.numpy(),)
    op, more = (
        (ops.moe_gemm2, {"out_dtype": torch.float32})
        if finish == "rows"
        else (ops.moe_gemm2_mxfp4, {})
    )
    out = op(
        *(*operands, ids, experts, num_valid), tokens=u.tokens, topk=u.topk, config=config, **more
    )
    return tuple(part.numpy() for part in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("finish", gemm2_kernels.FINISHES)
@pytest.mark.parametrize("config", range(len(gemm2_kernels.configs())))
@settings(max_examples=3, phases=NO_SHRINKING)
@given(data=st.data())
def test_gemm2(config: int, finish: str, data: st.DataObject) -> None:
    adds = finish == "atomic"
    u = data.draw(untrusted(gemm2_kernels.configs()[config].tile_m, unique=not adds))
    routes = {row: (token, token * u.topk + slot) for row, token, slot in u.routes()}
    routes = {row: where for row, where in routes.items() if u.counts(row)}
    trusted = in_order(u, np.arange(u.max_rows, dtype=np.int32), u.max_rows)
    for run in (gemm2_on_gfx950, gemm2_on_cpu):
        rows, got = run(trusted, config, "rows" if adds else finish), run(u, config, finish)
        if adds:
            sums = np.zeros((TOKENS, HIDDEN), np.float32)
            for row, (token, _) in routes.items():
                sums[token] += rows[0][row] * u.sorting.sorted_weights[row]
            np.testing.assert_array_equal(got[0], sums)
            continue
        written = [route for _, route in routes.values()]
        for part, right in zip(got, rows, strict=True):
            np.testing.assert_array_equal(part[written], right[list(routes)])
            if run is gemm2_on_gfx950:
                left = np.delete(part, written, 0)
                np.testing.assert_array_equal(left.view(np.uint8), UNWRITTEN)


# --- reduce ---------------------------------------------------------------------------------------


@few
@given(st.integers(1, 4), moe_routing.seeds)
def test_reduce(topk: int, seed: int) -> None:
    """Nothing but the sign of reverse_sorted counts."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((TOKENS * topk, HIDDEN)).astype(np.float32)
    weights = rng.random((TOKENS, topk)).astype(np.float32)
    reverse = rng.integers(INT_MIN, INT_MAX, TOKENS * topk).astype(np.int32)
    got, _ = gemm2_kernels.reduce(rows, reverse, topk, weights=weights, out_dtype="fp32")
    on_cpu = torch.ops.rotquant_hip.moe_reduce(*map(to_tensor, (rows, weights, reverse)))
    np.testing.assert_array_equal(got, on_cpu.numpy())
    expected = reference_moe.moe_reduce(rows.reshape(TOKENS, topk, HIDDEN), weights, reverse)
    np.testing.assert_array_equal(got, expected)
