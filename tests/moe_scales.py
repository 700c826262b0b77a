# SPDX-License-Identifier: MIT
"""Sorted, shuffled scales, built by numpy out of natural ones; and sortings to build them for."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensors import poisoned_scales

from rotquant_hip import reference, reference_moe
from rotquant_hip.reference_moe import SLOT_SHIFT, Sorting


def sorted_scales(
    natural: NDArray[np.uint8], sorting: Sorting, topk: int, *, by_route: bool = False
) -> NDArray[np.uint8]:
    """The tensor [ceil32(max_rows), ceil8(G)] of moe_rotate_quant and moe_sort_scales.

    natural [M, G], or with by_route [M * topk, G]. Rows that are no route's, and groups past G, are
    0: in padding inside an expert's blocks, past the rows in use, and past max_rows.
    """
    tokens = len(natural) // topk if by_route else len(natural)
    rows = np.zeros((-(-sorting.sorted_ids.size // 32) * 32, natural.shape[1]), np.uint8)
    for row, sorted_id in enumerate(sorting.sorted_ids.tolist()):
        slot, token = divmod(sorted_id, 1 << SLOT_SHIFT)
        if token < tokens:
            rows[row] = natural[token * topk + slot if by_route else token]
    # reference.shuffle_scales pads to 256 rows; bands of 32 follow each other.
    return reference.shuffle_scales(rows)[: len(rows)]


def poisoned_bands(natural: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """poisoned_scales of [rows, G] without the bands of 32 rows that are all padding."""
    # A copy, for which nothing lies behind the last band.
    return poisoned_scales(natural)[: -(-len(natural) // 32) * 32].copy()


def random_sorting(
    tokens: int,
    topk: int,
    experts: int,
    block_m: int,
    *,
    seed: int = 0,
    dropped: float = 0.0,
    used: int | None = None,
) -> Sorting:
    """moe_sort of random ids of `used` of the experts, of which a share is -1."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, used or experts, (tokens, topk))
    ids[rng.random(ids.shape) < dropped] = -1
    weights = rng.random((tokens, topk)).astype(np.float32)
    return reference_moe.moe_sort(ids, weights, num_experts=experts, block_m=block_m)


@st.composite
def sortings(draw, tokens: int, max_topk: int = 16) -> tuple[Sorting, int]:
    """(sorting, topk): few and many experts, some of them without tokens, dropped routes."""
    topk = draw(st.integers(1, max_topk))
    experts = draw(st.sampled_from((1, 2, 5, 16, 60)))
    sorting = random_sorting(
        tokens,
        topk,
        experts,
        draw(st.sampled_from(reference_moe.BLOCK_M)),
        seed=draw(st.integers(0, 2**32 - 1)),
        dropped=draw(st.sampled_from((0.0, 0.3, 1.0))),
        used=draw(st.sampled_from((1, experts))),
    )
    return sorting, topk
