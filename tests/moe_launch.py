# SPDX-License-Identifier: MIT
"""The MoE kernels one after the other on a model's layer, as the ops launch them, in the emulator.

Weights lie in the kernels' own layout and are passed as they are, so that layers of full size fit;
outputs begin unwritten and poisoned. What the host code decides (how a sort is cut, configurations)
is asked of the project's own headers.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass

import gfx950_emulator as emu
import gfx950_kernels as kernels
import moe_gemm2_kernels as gemm2_kernels
import moe_gemm_kernels as gemm1_kernels
import moe_rotate_kernels as rotate_kernels
import moe_routing
import moe_scales
import moe_sort_kernels as sort_kernels
import numpy as np
from numpy.typing import NDArray

from rotquant_hip import reference
from rotquant_hip.reference import GATE_MODES, GROUP
from rotquant_hip.reference_moe import SLOT_SHIFT, Sorting

TOKEN_MASK = (1 << SLOT_SHIFT) - 1
_SORTING, _ROTATION = "PPPPPqqii", "iPqPP"


@dataclass
class Launched:
    """Counts of a launch and what it was."""

    stats: emu.Stats
    info: object  # emu.KernelInfo
    threads: int


@dataclass(frozen=True)
class Layer:
    """One MoE layer: w1 [E, 2I, H/2] and w2 [E, H, I/2] in weight_offset()'s order."""

    w1: NDArray
    w1_scale: NDArray  # shuffled [E * 2I, ceil8(H / 32)]
    w2: NDArray
    w2_scale: NDArray  # shuffled [E * H, ceil8(I / 32)]
    bias1: NDArray | None = None  # [E, 2I]
    bias2: NDArray | None = None  # [E, H]
    gate_mode: str = "separated"
    activation: str = "silu"
    limit: float = math.inf
    alpha: float = 1.702

    @property
    def experts(self) -> int:
        return len(self.w1)

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    @property
    def inter(self) -> int:
        return self.w1.shape[1] // 2

    def natural_w1(self, experts: NDArray) -> tuple[NDArray, NDArray]:
        """Codes and scales of some experts, gate rows first."""
        codes = reference.unshuffle_weight(self.w1[experts], gate_mode=self.gate_mode)
        scale = self.w1_scale.reshape(self.experts, 2 * self.inter, -1)[experts]
        return codes, self._natural_scales(scale, self.hidden // GROUP, self.gate_mode)

    def natural_w2(self, experts: NDArray) -> tuple[NDArray, NDArray]:
        codes = reference.unshuffle_weight(self.w2[experts])
        scale = self.w2_scale.reshape(self.experts, self.hidden, -1)[experts]
        return codes, self._natural_scales(scale, self.inter // GROUP, "separated")

    @staticmethod
    def _natural_scales(scale: NDArray, groups: int, gate_mode: str) -> NDArray:
        rows = scale.shape[1]
        one = [
            reference.unshuffle_scales(s, rows=rows, groups=groups, gate_mode=gate_mode)
            for s in scale
        ]
        return np.stack(one)


def make_layer(
    rng: np.random.Generator,
    experts: int,
    hidden: int,
    inter: int,
    *,
    bias: bool = False,
    gate_mode: str = "separated",
    **options,
) -> Layer:
    """Random codes, scales for which gate and up are a few units in size, 255 (NaN) in padding."""

    def codes(*shape: int) -> NDArray:
        count = math.prod(shape)
        return (
            rng.integers(0, 2**64, -(-count // 8), np.uint64).view(np.uint8)[:count].reshape(shape)
        )

    def scales(rows: int, k: int, mode: str) -> NDArray:
        # Products of codes have a standard deviation of 9, their sums over k of 9 sqrt(k).
        middle = 127 - round(math.log2(9 * math.sqrt(k)) / 2)
        natural = np.full((experts, rows, -(-k // 256) * 8), 255, np.uint8)
        natural[..., : k // GROUP] = middle - 2 + codes(experts, rows, k // GROUP) % 5
        # Separated scales get padding rows, which the next expert's rows replace.
        return np.concatenate([reference.shuffle_scales(s, gate_mode=mode)[:rows] for s in natural])

    def added(rows: int) -> NDArray | None:
        return rng.standard_normal((experts, rows)).astype(np.float32) if bias else None

    return Layer(
        codes(experts, 2 * inter, hidden // 2),
        scales(2 * inter, hidden, gate_mode),
        codes(experts, hidden, inter // 2),
        scales(hidden, inter, "separated"),
        added(2 * inter),
        added(hidden),
        gate_mode,
        **options,
    )


# --- sorting ------------------------------------------------------------------------------------


def grid_rows(routes: int, experts: int, block_m: int) -> int:
    """Rows that the grids of the GEMMs cover: moe_max_rows()."""
    return sort_kernels.host().rows(*map(ctypes.c_long, (routes, experts, block_m)))


@dataclass(frozen=True)
class Routing:
    """Where tokens go, and the sorted rows once sort() has made them."""

    ids: NDArray[np.int32]  # [tokens, topk]
    weights: NDArray[np.float32]
    experts: int
    block_m: int
    sorting: Sorting | None = None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def topk(self) -> int:
        return self.ids.shape[1]

    @property
    def rows(self) -> int:
        """In use, padding included."""
        return int(self.sorting.num_valid[0])

    @property
    def max_rows(self) -> int:
        return len(self.sorting.sorted_ids)

    @property
    def padding(self) -> NDArray[np.bool_]:
        """Sorted rows [max_rows] that are no route."""
        return (self.sorting.sorted_ids & TOKEN_MASK) >= self.tokens

    def fields(self, *, reverse: bool = False, weights: bool = True) -> tuple:
        s = self.sorting
        return (
            *(s.sorted_ids, s.sorted_weights if weights else None, s.sorted_expert_ids),
            *(s.num_valid, s.reverse_sorted if reverse else None),
            *(self.max_rows, self.tokens, self.topk, self.block_m),
        )


def sort(r: Routing, zero: NDArray | None = None, **options) -> tuple[Sorting, list[Launched]]:
    """moe_sort; `zero` is cleared by the same launches."""
    given = {
        "num_experts": r.experts,
        "block_m": r.block_m,
        "expert_mask": None,
        "expert_map": None,
    }
    routing = moe_routing.Routing(r.ids, r.weights, given)
    sorting, done = sort_kernels.run(routing, zero=zero, **options)
    infos = kernels.load(sort_kernels.STEM).kernels
    return sorting, [Launched(d.stats, infos[d.symbol], sort_kernels.THREADS) for d in done]


# --- tokens -------------------------------------------------------------------------------------


def _run(
    stem: str, parts: Iterable[str], grid, threads: int, args: list, options: dict
) -> Launched:
    obj, name = kernels.kernel(stem, *parts)
    stats = obj.run(name, grid=grid, block=threads, args=args, **options)
    return Launched(stats, obj.kernels[name], threads)


def _scale_shape(rows: int, k: int) -> tuple[int, int]:
    return (-(-rows // 32) * 32, -(-k // 256) * 8)


def rotate_quant(
    x: NDArray, r: Routing, rotation_size: int, **options
) -> tuple[NDArray, NDArray, Launched]:
    """moe_rotate_quant of bf16 bits [tokens, K]; a Hadamard rotation, or none (0)."""
    given = x, r.sorting, r.topk, rotation_size
    codes, scales, stats = rotate_kernels.rotate_quant(*given, **options)
    parts = ("moe_rotate_quant_kernel", f"ELi{rotation_size}E", "Lb0E")
    obj, name = kernels.kernel(rotate_kernels.stem(x), *parts)
    threads = rotate_kernels.plan_tiles(x.shape[1], r.tokens, r.max_rows)[0].threads
    return codes, scales, Launched(stats, obj.kernels[name], threads)


def sort_scales(
    natural: NDArray, r: Routing, *, by_route: bool = False, **options
) -> tuple[NDArray, Launched]:
    """moe_sort_scales of natural scales [tokens or routes, groups]."""
    given = natural, r.sorting, r.topk
    out, stats = rotate_kernels.sort_scales(*given, by_route=by_route, **options)
    obj, name = kernels.kernel(rotate_kernels.SORT_SCALES, "moe_sort_scales_kernel")
    return out, Launched(stats, obj.kernels[name], 256)


def sorted_scales(natural: NDArray, r: Routing, *, by_route: bool = False) -> NDArray:
    """What sort_scales and rotate_quant must return."""
    return moe_scales.sorted_scales(natural, r.sorting, r.topk, by_route=by_route)


def natural_scales(shuffled: NDArray) -> NDArray:
    """[rows, groups], padding included."""
    rows, groups = shuffled.shape
    return reference.unshuffle_scales(shuffled, rows=rows, groups=groups)


def poison_padding(scales: NDArray, r: Routing, k: int) -> NDArray:
    """Sorted scales with 255 (NaN) in rows and groups that are padding: they must not matter."""
    natural = natural_scales(scales)
    natural[: r.max_rows][r.padding] = 255
    natural[r.max_rows :] = 255
    natural[:, k // GROUP :] = 255
    return reference.shuffle_scales(natural)[: len(scales)]


# --- GEMMs --------------------------------------------------------------------------------------


def gemm1(
    layer: Layer,
    r: Routing,
    config: int,
    *,
    a: tuple[NDArray, NDArray] | None = None,
    x: NDArray | None = None,
    rotation_size: int = 0,
    inter_rotation: int = 0,
    **options,
) -> tuple[NDArray, NDArray, Launched]:
    """moe_gemm1 of codes and sorted scales, or of x; returns sorted codes and shuffled scales."""
    chosen = gemm1_kernels.configs()[config]
    assert (chosen.kind == "inline") == (x is not None) and chosen.block_m == r.block_m
    inter = layer.inter
    codes = kernels.poisoned((r.max_rows, inter // 2))
    scales = kernels.poisoned(_scale_shape(r.max_rows, inter))
    no_x = ("Piqqq", (None, 0, 0, 0, 0))
    fmt, activation = no_x if x is None else kernels.activation_fields(x)
    tiles_n = -(-2 * inter // chosen.tile_n)
    args = emu.Struct(
        _SORTING + "PP" + fmt + _ROTATION + "PPP??iff" + _ROTATION + "iqqiiPP" + "i0q",
        *r.fields(),
        *((None, None) if a is None else a),
        *activation,
        *(rotation_size, None, 0, None, None),
        *(layer.w1, layer.w1_scale, layer.bias1),
        *(layer.gate_mode == GATE_MODES[1], False),
        *(gemm1_kernels.ACTIVATIONS.index(layer.activation), layer.limit, layer.alpha),
        *(inter_rotation, None, 0, None, None),
        *(0, layer.hidden, inter, layer.experts, config),
        *(emu.Uninitialized(codes), emu.Uninitialized(scales), tiles_n),
    )
    options.setdefault("unaligned", x is not None)
    grid = r.max_rows // r.block_m * tiles_n
    done = _run(chosen.stem, ("moe_gemm1", chosen.symbol), grid, chosen.threads, [args], options)
    return codes, scales, done


def gemm2(
    w2: NDArray,
    w2_scale: NDArray,
    bias: NDArray | None,
    r: Routing,
    config: int,
    codes: NDArray,
    scales: NDArray,
    finish: str,
    *,
    out: NDArray | None = None,
    **options,
) -> tuple[tuple[NDArray, ...], Launched]:
    """moe_gemm2: bf16 rows by route, (codes, scales) of mxfp4, or added to `out`."""
    experts, hidden, _ = w2.shape
    chosen = gemm2_kernels.configs()[config]
    assert chosen.tile_m == r.block_m
    routes, index = r.ids.size, gemm2_kernels.FINISHES.index(finish)
    fields: list = [out, None, None]
    if finish == "rows":
        fields[0] = kernels.poisoned((routes, hidden), np.uint16)
    elif finish == "mxfp4":
        fields[1:] = (
            kernels.poisoned((routes, hidden // 2)),
            kernels.poisoned((routes, hidden // GROUP)),
        )
    given = [a if a is None or a is out else emu.Uninitialized(a) for a in fields]
    tiles_n = -(-hidden // chosen.tile_n)
    args = emu.Struct(
        _SORTING + "PPPPPqqiii?Pi" + "PP" + "i0q",
        *r.fields(),
        *(codes, scales, w2, w2_scale, bias),
        *(2 * codes.shape[1], hidden, experts, config, index, True),
        *(given[0], gemm2_kernels.DTYPE_INDEX["bf16"], *given[1:], tiles_n),
    )
    grid = r.max_rows // r.block_m * tiles_n
    parts = ("moe_gemm2_", chosen.symbol, f"FinishE{index}E")
    stem = gemm2_kernels.stem(finish)
    done = _run(stem, parts, grid, chosen.threads, [args], options)
    return tuple(array for array in fields if array is not None), done


def reduce(
    rows: NDArray | tuple[NDArray, NDArray], r: Routing, **options
) -> tuple[NDArray, Launched]:
    """moe_reduce to bf16 of bf16 rows by route or MXFP4 ones."""
    out, stats = gemm2_kernels.reduce(
        rows, r.sorting.reverse_sorted, r.topk, weights=r.weights, **options
    )
    row_format = 3 if isinstance(rows, tuple) else 0
    obj, name = kernels.kernel("moe_reduce-kernel", "moe_reduce_kernel", f"FormatE{row_format}E")
    return out, Launched(stats, obj.kernels[name], 256)
