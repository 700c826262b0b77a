# SPDX-License-Identifier: MIT
"""The numpy oracle of the mixture-of-experts ops; see reference.py for what an oracle is here.

A route is a (token, slot) pair. The ids of a sorted row, the padding and the layouts are those of
csrc/core/moe.h, built here from lists instead of counts and offsets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_EXPERTS, MAX_TOPK, SLOT_SHIFT = 1024, 16, 24
BLOCK_M = (16, 32, 64, 128)


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
    num_local_experts: int | None = None,
) -> Sorting:
    """Routes by local expert, token and slot, each expert padded to whole blocks."""
    tokens, topk = topk_ids.shape
    local_experts = num_experts if num_local_experts is None else num_local_experts
    is_local = np.ones(num_experts, bool) if expert_mask is None else expert_mask != 0
    local_of = {e: i for i, e in enumerate(np.flatnonzero(is_local)) if i < local_experts}

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
