# SPDX-License-Identifier: MIT
"""Routings of tokens to experts that the MoE tests share, by name and as hypothesis strategies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import seeds

from rotquant_hip.reference_moe import BLOCK_M, Sorting, moe_sort

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

KINDS = (
    "random",  # distinct experts in a row, as a router's top-k makes them
    "last",  # every route to the last expert
    "sparse",  # to every third expert: the others have no token
    "repeated",  # any expert, also twice in a row
    "worst",  # one route to each expert, then one expert takes the rest: as much padding as can be
    "none",  # -1 everywhere
    "garbage",  # a third of the ids are no expert: negative, just out of range, huge
)
MASKS = ("all", "half", "one", "nothing")


@dataclass(frozen=True)
class Routing:
    """Arguments of moe_sort."""

    topk_ids: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    options: dict[str, Any] = field(default_factory=dict)  # num_experts, block_m, ...

    @property
    def tokens(self) -> int:
        return self.topk_ids.shape[0]

    @property
    def topk(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def local_experts(self) -> int:
        count = self.options.get("num_local_experts")
        return self.options["num_experts"] if count is None else count

    def sorting(self) -> Sorting:
        """What moe_sort must return."""
        return moe_sort(self.topk_ids, self.topk_weights, **self.options)


def make(
    tokens: int,
    topk: int,
    experts: int,
    block_m: int = 32,
    *,
    kind: str = "random",
    mask: str | None = None,
    local_experts: int | None = None,
    seed: int = 0,
) -> Routing:
    """A routing of a kind, with weights of which no two are likely to be equal, nor 0."""
    rng = np.random.default_rng(seed)
    return Routing(
        _ids(rng, tokens, topk, experts, kind).astype(np.int32),
        (1 - rng.random((tokens, topk))).astype(np.float32),
        {
            "num_experts": experts,
            "block_m": block_m,
            "expert_mask": None if mask is None else _mask(rng, experts, mask),
            "expert_map": None,
            "num_local_experts": local_experts,
        },
    )


@st.composite
def routings(draw, max_tokens: int = 80, max_topk: int = 16, max_experts: int = 600) -> Routing:
    """Any kind, shape and mask; tokens, slots and experts can be few or many."""
    experts = draw(st.sampled_from((1, 2, 8, 127, 128, 129)) | st.integers(1, max_experts))
    mask = draw(st.none() | st.sampled_from(MASKS))
    local_experts = draw(st.none() | st.integers(0, experts)) if mask or experts > 1 else None
    return make(
        draw(st.integers(0, max_tokens)),
        draw(st.integers(0, max_topk)),
        experts,
        draw(st.sampled_from(BLOCK_M)),
        kind=draw(st.sampled_from(KINDS)),
        mask=mask,
        local_experts=local_experts,
        seed=draw(seeds),
    )


def _ids(rng: np.random.Generator, tokens: int, topk: int, experts: int, kind: str) -> NDArray:
    shape = (tokens, topk)
    match kind:
        case "random":
            if topk > experts:
                return _ids(rng, tokens, topk, experts, "repeated")
            return rng.random((tokens, experts)).argsort(1)[:, :topk]
        case "last":
            return np.full(shape, experts - 1)
        case "sparse":
            return rng.integers(0, -(-experts // 3), shape) * 3
        case "repeated":
            return rng.integers(0, experts, shape)
        case "worst":
            order = np.arange(tokens * topk)
            return rng.permutation(np.where(order < experts, order, 0)).reshape(shape)
        case "none":
            return np.full(shape, -1)
        case "garbage":
            ids = rng.integers(0, experts, shape)
            bad = np.array([-1, -2, experts, experts + 1, 0x7FC00000, INT32_MIN, INT32_MAX])
            return np.where(rng.random(shape) < 1 / 3, rng.choice(bad, shape), ids)
    raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")


def _mask(rng: np.random.Generator, experts: int, mask: str) -> NDArray[np.int32]:
    match mask:
        case "all":
            return np.ones(experts, np.int32)
        case "half":
            return rng.integers(0, 2, experts, np.int32)
        case "one":
            return (np.arange(experts) == rng.integers(experts)).astype(np.int32)
        case "nothing":
            return np.zeros(experts, np.int32)
    raise ValueError(f"mask: expected one of {MASKS}, got {mask!r}")
