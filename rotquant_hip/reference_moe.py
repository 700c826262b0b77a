# SPDX-License-Identifier: MIT
"""The numpy oracle of the mixture-of-experts ops; see reference.py for what an oracle is here.

A route is a (token, slot) pair. The ids of a sorted row, the padding and the layouts are those of
csrc/core/moe.h, built here from lists instead of counts and offsets.
"""

from __future__ import annotations

from math import erfc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rotquant_hip import reference
from rotquant_hip.reference import F32, F64, U8

ACTIVATIONS = ("silu", "swiglu", "gelu", "gelu_tanh")
MAX_EXPERTS, MAX_TOPK, SLOT_SHIFT = 1024, 16, 24
BLOCK_M = (16, 32, 64, 128)

_quiet = np.errstate(all="ignore")


class Sorting(NamedTuple):
    """What moe_sort returns."""

    sorted_ids: NDArray[np.int32]  # [max_rows] slot << 24 | token
    sorted_weights: NDArray[np.float32]  # [max_rows], 0 in padding
    sorted_expert_ids: NDArray[np.int32]  # [max_rows / block_m] local expert, -1 past the end
    num_valid: NDArray[np.int32]  # [2] rows in use, tokens
    reverse_sorted: NDArray[np.int32]  # [M * topk] row of a route, -1 if it was dropped


def max_rows(routes: int, experts: int, block_m: int) -> int:
    """The most rows that `routes` can need, padding included: found by spreading them worst."""
    active = min(experts, routes)
    if not active:
        return 0
    # One route to each expert wastes the most; then whole blocks are all that can be added.
    return block_m * (active + (routes - active) // block_m)


def moe_sort(
    topk_ids: NDArray[np.integer],
    topk_weights: NDArray[np.float32],
    *,
    num_experts: int,
    block_m: int,
    expert_mask: NDArray[np.integer] | None = None,
    expert_map: NDArray[np.integer] | None = None,
    num_local_experts: int | None = None,
) -> Sorting:
    """Routes by local expert, token and slot, each expert padded to whole blocks."""
    tokens, topk = topk_ids.shape
    local_experts = num_experts if num_local_experts is None else num_local_experts
    if expert_map is None:
        is_local = np.ones(num_experts, bool) if expert_mask is None else expert_mask != 0
        numbers = {e: i for i, e in enumerate(np.flatnonzero(is_local))}
    else:
        numbers = dict(enumerate(expert_map.tolist()))
    local_of = {e: i for e, i in numbers.items() if 0 <= i < local_experts}

    routes: dict[int, list[tuple[int, int]]] = {}
    for token in range(tokens):
        for slot in range(topk):
            expert = local_of.get(int(topk_ids[token, slot]))
            if expert is not None:
                routes.setdefault(expert, []).append((token, slot))

    rows = max_rows(tokens * topk, local_experts, block_m)
    ids = np.full(rows, topk << SLOT_SHIFT | tokens, np.int32)
    weights = np.zeros(rows, np.float32)
    experts = np.full(rows // block_m, -1, np.int32)
    reverse = np.full(tokens * topk, -1, np.int32)
    row = 0
    for expert in sorted(routes):
        first = row
        for token, slot in routes[expert]:
            ids[row] = slot << SLOT_SHIFT | token
            weights[row] = topk_weights[token, slot]
            reverse[token * topk + slot] = row
            row += 1
        row = -(-row // block_m) * block_m
        experts[first // block_m : row // block_m] = expert
    return Sorting(ids, weights, experts, np.array([row, tokens], np.int32), reverse)


class Route(NamedTuple):
    """A sorted row that is no padding."""

    row: int
    token: int
    slot: int
    expert: int


def routes(sorting: Sorting) -> list[Route]:
    """The rows that stand for a route, in their order."""
    block_m = len(sorting.sorted_ids) // max(1, len(sorting.sorted_expert_ids))
    found = []
    for row in range(sorting.num_valid[0]):
        slot, token = divmod(int(sorting.sorted_ids[row]), 1 << SLOT_SHIFT)
        if token < sorting.num_valid[1]:
            found.append(Route(row, token, slot, int(sorting.sorted_expert_ids[row // block_m])))
    return found


def sort_scales(scales: U8, sorting: Sorting) -> U8:
    """Natural scales [M, G] by sorted row [max_rows, G], 0 in padding; not shuffled."""
    out = np.zeros((len(sorting.sorted_ids), scales.shape[-1]), np.uint8)
    for route in routes(sorting):
        out[route.row] = scales[route.token]
    return out


# --- GEMMs ------------------------------------------------------------------------------------
# Weights and scales here are in their natural order, gate rows first. Results are by sorted row
# and 0 in padding.


def grouped_gemm(
    a: U8, a_scales: U8, w: U8, w_scales: U8, sorting: Sorting, *, by_token: bool
) -> tuple[F64, F64]:
    """a @ w[expert].T and that of the magnitudes, [max_rows, N], as reference.gemm_a4w4.

    Row i is token i of `a` [M, K/2], or with by_token=False row i itself.
    """
    out = np.zeros((2, len(sorting.sorted_ids), w.shape[1]))
    by_expert: dict[int, list[Route]] = {}
    for route in routes(sorting):
        by_expert.setdefault(route.expert, []).append(route)
    for expert, mine in by_expert.items():
        rows = [route.row for route in mine]
        of_a = [route.token for route in mine] if by_token else rows
        out[:, rows] = reference.gemm_a4w4(a[of_a], w[expert], a_scales[of_a], w_scales[expert])
    return out[0], out[1]


@_quiet
def activate(
    gate: F64, up: F64, activation: str, *, limit: float | None = None, alpha: float = 1.702
) -> F64:
    """silu(gate) * up and its relatives, in float64."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    match activation:
        case "silu":
            return gate / (1 + np.exp(-gate)) * up
        case "swiglu":
            return gate / (1 + np.exp(-alpha * gate)) * (up + 1)
        case "gelu":
            return 0.5 * gate * _erfc(-gate / np.sqrt(2)) * up  # 1 + erf(x) = erfc(-x)
    z = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + np.exp(-2 * z)) * up


def _erfc(x: F64) -> F64:
    return np.vectorize(erfc, otypes=[np.float64])(x)


def moe_reduce(
    rows: F32,
    topk_weights: F32 | None,
    reverse_sorted: NDArray[np.int32],
    shared: F32 | None = None,
) -> F32:
    """rows [M, topk, H] to [M, H]: shared, then the slots in ascending order, all in float32.

    The product is rounded, then the sum: a fused multiply-add gives other bytes.

    The row of a dropped route (reverse_sorted < 0) is not looked at.
    """
    tokens, topk, hidden = rows.shape
    kept = reverse_sorted.reshape(tokens, topk) >= 0
    out = np.zeros((tokens, hidden), np.float32) if shared is None else shared.copy()
    for token in range(tokens):
        for slot in range(topk):
            if kept[token, slot]:
                weight = np.float32(1) if topk_weights is None else topk_weights[token, slot]
                out[token] = out[token] + weight * rows[token, slot]
    return out


def fused_moe(
    x: NDArray[np.floating],
    w1: NDArray[np.floating],
    w2: NDArray[np.floating],
    topk_weights: NDArray[np.floating],
    topk_ids: NDArray[np.integer],
    *,
    w1_bias: NDArray[np.floating] | None = None,
    w2_bias: NDArray[np.floating] | None = None,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    apply_weight_on_input: bool = False,
) -> F64:
    """A mixture of experts in float64, with nothing quantised: [M, H].

    x [M, H], w1 [E, 2I, H] with gate rows first, w2 [E, H, I]; ids out of range are dropped.
    """
    out = np.zeros(x.shape, np.float64)
    for token, slot in np.ndindex(topk_ids.shape):
        expert, weight = topk_ids[token, slot], np.float64(topk_weights[token, slot])
        if not 0 <= expert < len(w1):
            continue
        pre = w1[expert].astype(np.float64) @ x[token].astype(np.float64)
        if apply_weight_on_input:
            pre, weight = pre * weight, 1.0
        if w1_bias is not None:
            pre = pre + w1_bias[expert]
        inter = len(pre) // 2
        h = activate(pre[:inter], pre[inter:], activation, limit=limit, alpha=alpha)
        y = w2[expert].astype(np.float64) @ h
        if w2_bias is not None:
            y = y + w2_bias[expert]
        out[token] += weight * y
    return out
