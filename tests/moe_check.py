# SPDX-License-Identifier: MIT
"""Holds what moe_launch launched against the numpy oracle: float64 products of a sample of tokens.

A sample is a problem of its own: the tokens, the experts that they go to, sorted again. Functions
of rounded values return the worst error as a share of its bound, and raise beyond 1; of quantised
ones (bytes that differ from the exact values', bytes compared), and raise where one is none of a
value within the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import interval
import moe_gemm2_kernels as gemm2_kernels
import moe_gemm_kernels as gemm1_kernels
import moe_launch as moe
import numpy as np
from compare import assert_bytes_equal
from moe_launch import GROUP, Layer, Routing
from numpy.typing import NDArray

from rotquant_hip import reference
from rotquant_hip.reference_moe import SLOT_SHIFT, Sorting, moe_sort


@dataclass(frozen=True)
class Sample:
    tokens: NDArray  # of all
    experts: NDArray  # that they go to
    routing: Routing  # of the sample: its tokens, its experts
    rows: NDArray  # sorted row, among all, of the sample's own sorted rows that are routes

    @property
    def routes(self) -> NDArray:
        """Rows of outputs by route, in the order of the sample's routes."""
        topk = self.routing.topk
        return (self.tokens[:, None] * topk + np.arange(topk)).reshape(-1)


def sample(r: Routing, count: int, seed: int = 0) -> Sample:
    tokens = np.random.default_rng(seed).permutation(r.tokens)[:count]
    experts, ids = np.unique(r.ids[tokens], return_inverse=True)
    ids = ids.reshape(-1, r.topk).astype(np.int32)
    sorting = moe_sort(ids, r.weights[tokens], num_experts=len(experts), block_m=16)
    own = Routing(ids, r.weights[tokens], len(experts), 16, sorting)
    sorted_ids = sorting.sorted_ids[~own.padding]
    routes = tokens[sorted_ids & moe.TOKEN_MASK] * r.topk + (sorted_ids >> SLOT_SHIFT)
    return Sample(tokens, experts, own, r.sorting.reverse_sorted[routes])


def sorting(actual: Sorting, r: Routing) -> None:
    want = moe_sort(r.ids, r.weights, num_experts=r.experts, block_m=r.block_m)
    for name, a, b in zip(Sorting._fields, actual, want, strict=True):
        assert_bytes_equal(a, b, f"moe_sort: {name}")


def gemm1(
    layer: Layer,
    r: Routing,
    s: Sample,
    a: tuple[NDArray, NDArray],
    out: tuple[NDArray, NDArray],
    inter_rotation: int = 0,
    values: interval.Values | None = None,
) -> tuple[tuple[int, int], interval.Values]:
    """a: codes and natural scales by token; out: what the kernel wrote. `values`: from an earlier
    call with the same sample, a and rotation."""
    codes, scales = out[0], moe.natural_scales(out[1])
    groups, used = layer.inter // GROUP, np.arange(len(codes)) < r.rows
    assert (codes[~used] == 0xA5).all(), "gemm1: codes behind the rows in use"
    bands = -(-r.rows // 32) * 32
    assert (scales[r.rows : bands] == 0).all(), "gemm1: scales that fill the last band"
    assert (scales[bands:] == 0xA5).all(), "gemm1: scales behind the rows in use"
    assert not codes[used & r.padding].any(), "gemm1: codes of padding rows"
    assert not scales[: len(codes)][used & r.padding].any(), "gemm1: scales of padding rows"
    assert not scales[: r.rows, groups:].any(), "gemm1: scales of padding groups"
    if values is None:
        problem = gemm1_kernels.Problem(
            *(s.routing.sorting, r.topk, s.routing.block_m),
            *(part[s.tokens] for part in a),
            *layer.natural_w1(s.experts),
            bias=None if layer.bias1 is None else layer.bias1[s.experts],
            activation=layer.activation,
            limit=layer.limit,
            alpha=layer.alpha,
            inter_size=inter_rotation,
        )
        values = gemm1_kernels.expected(problem)
    return _quantised(codes[s.rows], scales[s.rows, :groups], values, "gemm1"), values


def _quantised(
    codes: NDArray, scales: NDArray, values: interval.Values, what: str
) -> tuple[int, int]:
    interval.assert_quantised(codes, scales, values.ends, "round_up", what)
    # The bound grows with K faster than errors do: where it leaves a choice, few may use it.
    exact = reference.quant(values.exact.astype(np.float32))
    others = np.count_nonzero(codes != exact[0]) + np.count_nonzero(scales != exact[1])
    assert others <= 0.01 * codes.size, (
        f"{what}: {others} of {codes.size} bytes are not the exact's"
    )
    return others, codes.size + scales.size


def _problem2(
    weights: tuple[NDArray, NDArray, NDArray | None],
    r: Routing,
    s: Sample,
    a: tuple[NDArray, NDArray],
) -> gemm2_kernels.Problem:
    """weights: natural codes and scales of the sample's experts, bias; a: sorted, as launched."""
    own, groups = s.routing, a[0].shape[1] * 2 // GROUP
    given = a[0], moe.natural_scales(a[1])[:, :groups]
    mine = [np.zeros((own.max_rows, part.shape[1]), np.uint8) for part in given]
    for part, full in zip(mine, given, strict=True):
        part[~own.padding] = full[s.rows]
    return gemm2_kernels.Problem(
        own.sorting, own.tokens, own.topk, own.block_m, own.weights, *mine, *weights
    )


def _of(layer: Layer, s: Sample) -> tuple[NDArray, NDArray, NDArray | None]:
    bias = None if layer.bias2 is None else layer.bias2[s.experts]
    return *layer.natural_w2(s.experts), bias


def _worst(actual: NDArray, exact: NDArray, bound: NDArray, what: str) -> float:
    ratio = np.abs(gemm2_kernels.to_float64(actual) - exact) / bound
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    at = np.unravel_index(ratio.argmax(), ratio.shape)
    assert ratio[at] <= 1, f"{what}: at {at} got {actual[at]}, exact {exact[at]}, bound {bound[at]}"
    return float(ratio[at])


def rows(
    layer_or_weights: Layer | tuple, r: Routing, s: Sample, a: tuple[NDArray, NDArray], out: NDArray
) -> float:
    """bf16 rows by route, of a layer's w2 or of (codes, scales, bias) of the sample's experts."""
    is_layer = isinstance(layer_or_weights, Layer)
    weights = _of(layer_or_weights, s) if is_layer else layer_or_weights
    exact, bound = gemm2_kernels.expected(_problem2(weights, r, s, a))
    bound = gemm2_kernels.output_bound(exact, bound, "bf16")
    return _worst(out[s.routes], exact, bound, "gemm2 rows")


def mxfp4(
    layer: Layer, r: Routing, s: Sample, a: tuple[NDArray, NDArray], out: tuple[NDArray, NDArray]
) -> tuple[int, int]:
    values = interval.Values(*gemm2_kernels.expected(_problem2(_of(layer, s), r, s, a)))
    return _quantised(out[0][s.routes], out[1][s.routes], values, "gemm2 mxfp4")


def atomic(layer: Layer, r: Routing, s: Sample, a: tuple[NDArray, NDArray], out: NDArray) -> float:
    exact, bound = gemm2_kernels.expected_sum(_problem2(_of(layer, s), r, s, a), "bf16")
    return _worst(out[s.tokens], exact, bound, "gemm2 atomic")


def reduce(rows: NDArray | tuple[NDArray, NDArray], r: Routing, out: NDArray) -> None:
    """Byte for byte: the order of the sum is fixed."""
    if isinstance(rows, tuple):
        values = reference.dequant(*rows)
    else:
        values = reference.bf16_to_float32(rows)
    total = gemm2_kernels.reduce_expected(values, r.sorting.reverse_sorted, r.topk, r.weights, None)
    assert_bytes_equal(out, reference.float32_to_bf16(total), "moe_reduce")
