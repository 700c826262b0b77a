# SPDX-License-Identifier: MIT
"""A routing, activations and weights for the MoE GEMMs, with NaN in all padding, and what is right.

Sums are right within what float32 may lose of float64: every group's sum and every addition of one
rounds by at most 2^-24 of what it adds up to, twice that where a matrix unit truncates. An
activation f(g) u moves by no more than |f'| <= 1.2 times what g moves by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from interval import Values
from numpy.typing import NDArray
from tensors import poisoned_allocations, poisoned_scales, to_array, to_tensor
from torch import Tensor

from rotquant_hip import reference as ref
from rotquant_hip import reference_moe as ref_moe

OPS = torch.ops.rotquant_hip
NAN = 255
ODD_INTERS = (96, 192, 224, 352, 576, 704)


def _float32(values: NDArray) -> NDArray:
    return values.astype(np.float32)


@dataclass
class Problem:
    """Codes are drawn from all bytes, scales so that sums are of the order of 1."""

    tokens: int
    topk: int
    experts: int
    hidden: int
    inter: int
    block_m: int = 16
    dropped: float = 0.0  # of the routes
    seed: int = 0
    poison: int = NAN

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        self.topk = min(self.topk, self.experts)
        choices = [rng.permutation(self.experts)[: self.topk] for _ in range(self.tokens)]
        self.ids = np.array(choices, np.int64).reshape(self.tokens, self.topk)
        self.ids[rng.random(self.ids.shape) < self.dropped] = -1
        self.topk_weights = rng.random(self.ids.shape).astype(np.float32)
        self.sort()

        def draw(shape: tuple[int, ...], k: int, largest: int) -> tuple[NDArray, NDArray]:
            scales = rng.integers(largest - 2, largest + 1, (*shape, k // 32), np.uint8)
            return rng.integers(0, 256, (*shape, k // 2), np.uint8), scales

        def largest(k: int) -> int:  # sums of k products grow with its root
            return 123 - round(np.log2(k) / 2)

        self.a, self.a_scales = draw((self.tokens,), self.hidden, 127)
        self.w1, self.w1_scale = draw(
            (self.experts, 2 * self.inter), self.hidden, largest(self.hidden)
        )
        self.w2, self.w2_scale = draw((self.experts, self.hidden), self.inter, largest(self.inter))
        # gemm2's rows, so that it can be tested alone.
        rows = len(self.sorting.sorted_ids)
        self.h, self.h_scales = draw((rows,), self.inter, 127)
        self.bias1 = _float32(rng.standard_normal((self.experts, 2 * self.inter)))
        self.bias2 = _float32(rng.standard_normal((self.experts, self.hidden)))

    def sort(self) -> None:
        self.sorting = ref_moe.moe_sort(
            self.ids, self.topk_weights, num_experts=self.experts, block_m=self.block_m
        )
        self.routes = ref_moe.routes(self.sorting)

    @property
    def used(self) -> int:
        return int(self.sorting.num_valid[0])

    @property
    def real(self) -> NDArray[np.bool_]:
        """Which of the sorted rows are routes."""
        real = np.zeros(len(self.sorting.sorted_ids), bool)
        real[[route.row for route in self.routes]] = True
        return real

    def sorted_scales(self, scales: NDArray) -> NDArray:
        """[max_rows, G] by sorted row as an op takes them, with poison where there is no route."""
        scales = np.where(self.real[:, None], scales, self.poison).astype(np.uint8)
        return poisoned_scales(scales, self.poison)[: -(-len(scales) // 32) * 32]

    # --- gemm1 ---------------------------------------------------------------------------------

    def gemm1_arguments(self, device="cpu", gate_mode: str = "separated") -> dict[str, Tensor]:
        s = self.sorting
        arrays = {
            "a": self.a,
            "w1": ref.shuffle_weight(self.w1, gate_mode=gate_mode),
            "w1_scale": poisoned_scales(self.w1_scale, self.poison, gate_mode),
            "sorted_ids": s.sorted_ids,
            "sorted_weights": s.sorted_weights,
            "sorted_expert_ids": s.sorted_expert_ids,
            "num_valid": s.num_valid,
            "a_scales": self.sorted_scales(ref_moe.sort_scales(self.a_scales, s)),
        }
        tensors = {name: to_tensor(array, device) for name, array in arrays.items()}
        return tensors | {"topk": self.topk, "gate_mode": gate_mode}

    def gemm1(self, device="cpu", gate_mode="separated", **options) -> tuple[NDArray, NDArray]:
        """Codes [used, I/2] and natural scales [used, I/32]; checks what else may be written."""
        arguments = self.gemm1_arguments(device, gate_mode) | options
        with poisoned_allocations():
            codes, scales = (to_array(t) for t in OPS.moe_gemm1(**arguments))
        rows, groups = len(self.sorting.sorted_ids), self.inter // 32
        assert codes.shape == (rows, self.inter // 2)
        assert scales.shape == (-(-rows // 32) * 32, -(-groups // 8) * 8)
        natural = ref.unshuffle_scales(scales, rows=scales.shape[0], groups=scales.shape[1])
        assert (codes[self.used :] == NAN).all(), "codes behind the rows in use"
        padding = ~self.real[: self.used]
        assert not codes[: self.used][padding].any(), "codes of padding rows"
        assert not natural[: self.used][padding].any(), "scales of padding rows"
        assert not natural[: self.used, groups:].any(), "scales of padding groups"
        return codes[: self.used], natural[: self.used, :groups]

    def activated(
        self, activation="silu", limit=None, alpha=1.702, apply_weight=False, bias=None
    ) -> Values:
        """gemm1's values before their rotation, by sorted row in use."""
        operands = (self.a, self.a_scales, self.w1, self.w1_scale, self.sorting)
        pre, magnitude = ref_moe.grouped_gemm(*operands, by_token=True)
        bound = (2 * self.hidden / 32 + 16) * 2.0**-24 * magnitude
        if apply_weight:
            weight = self.sorting.sorted_weights[:, None].astype(np.float64)
            pre, bound = pre * weight, (bound + 2.0**-23 * np.abs(pre)) * weight
        if bias is not None:
            for route in self.routes:
                pre[route.row] += bias[route.expert]
            bound = bound + 2.0**-23 * np.abs(pre)
        pre, bound, real = pre[: self.used], bound[: self.used], self.real[: self.used]
        gate, up = np.split(pre, 2, axis=-1)
        d_gate, d_up = np.split(bound, 2, axis=-1)
        exact = ref_moe.activate(gate, up, activation, limit=limit, alpha=alpha)
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        up = up + (activation == "swiglu")
        # What the functions themselves lose, in 2^-24 of the largest value that takes part.
        own = 32 * 2.0**-24 * np.abs(gate) * np.abs(up)
        bound = 1.2 * d_gate * (np.abs(up) + d_up) + (np.abs(gate) + d_gate) * d_up + own
        exact = np.where(real[:, None], exact, 0)
        bad = ~np.isfinite(exact)
        # Where nothing but zeros is added up, the sign of the zero is free.
        bound = np.where(real[:, None], bound + 2.0**-149, 0)
        return Values(np.where(bad, np.nan, exact), np.where(bad, np.nan, bound))

    # --- gemm2 ---------------------------------------------------------------------------------

    def gemm2_arguments(self, device="cpu") -> dict[str, Tensor]:
        s = self.sorting
        arrays = {
            "a": self.h,
            "a_scales": self.sorted_scales(self.h_scales),
            "w2": ref.shuffle_weight(self.w2),
            "w2_scale": poisoned_scales(self.w2_scale, self.poison),
            "sorted_ids": s.sorted_ids,
            "sorted_expert_ids": s.sorted_expert_ids,
            "num_valid": s.num_valid,
        }
        tensors = {name: to_tensor(array, device) for name, array in arrays.items()}
        return tensors | {"topk": self.topk}

    def gemm2(self, device="cpu", op=OPS.moe_gemm2, **options):
        arguments = self.gemm2_arguments(device) | {"tokens": self.tokens} | options
        with poisoned_allocations():
            return op(**arguments)

    def add_gemm2(self, out: Tensor, **options) -> None:
        arguments = self.gemm2_arguments(out.device) | {"sorted_weights": None} | options
        OPS.moe_gemm2_atomic_(out, **arguments)

    @property
    def weights(self) -> NDArray:
        """Of the routes, in the order of self.routes."""
        return self.sorting.sorted_weights[self.rows]

    @property
    def rows(self) -> NDArray[np.intp]:
        return np.array([route.row for route in self.routes], np.intp)

    def products(self, bias: bool = False) -> Values:
        """gemm2's y, by the routes in their order [routes, H]."""
        operands = (self.h, self.h_scales, self.w2, self.w2_scale, self.sorting)
        y, magnitude = (v[self.rows] for v in ref_moe.grouped_gemm(*operands, by_token=False))
        bound = (2 * self.inter / 32 + 16) * 2.0**-24 * magnitude
        if bias:
            y = y + self.bias2[[route.expert for route in self.routes]]
            bound = bound + 2.0**-23 * np.abs(y)
        return Values(y, bound)

    def cpu_products(self, bias: bool = False) -> NDArray[np.float32]:
        """The same in float32, as the CPU computes it bit for bit."""
        y = np.zeros((len(self.routes), self.hidden), np.float32)
        for i, route in enumerate(self.routes):
            row = slice(route.row, route.row + 1)
            operands = self.h[row], self.w2[route.expert], self.h_scales[row]
            y[i] = ref.gemm_a4w4_by_groups(*operands, self.w2_scale[route.expert])[0]
            if bias:
                y[i] += self.bias2[route.expert]
        return y
