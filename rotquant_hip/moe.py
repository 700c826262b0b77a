# SPDX-License-Identifier: MIT
"""The mixture-of-experts ops with types and documentation; most users want ``fused_moe`` only.

Shapes: M tokens of H channels, topk routes each; E local experts of inner width I. A route is a
(token, slot) pair. ``moe_sort`` orders the routes by expert and pads every expert to whole blocks
of block_m rows; "sorted" scales and the intermediate have one row for each of those rows. H and I
are multiples of 32, topk <= 16, M < 2^24, no more than 1024 experts.

Codes, scales and errors are as in ``ops``. Dropped routes, which are ids that are negative, name
no expert, or name one that ``expert_mask`` gives to another rank, contribute nothing; a token that
has no other comes out as zero.

``moe_reduce`` has exact gradients, ``moe_gemm2`` one of its bias, ``fused_moe`` straight-through
ones. Any other argument that requires grad is refused where gradients are recorded.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rotquant_hip import dispatch
from rotquant_hip.ops import GateMode, ScaleMode

Activation = Literal["silu", "swiglu", "gelu", "gelu_tanh"]

_ops = torch.ops.rotquant_hip


class MoeSorting(NamedTuple):
    """Routes by local expert, then token, then slot: what ``moe_sort`` returns.

    Every byte is written, and is the same on every run. The ops read nothing outside their
    arguments whatever the numbers are: an expert, token or slot that does not exist contributes
    nothing, and of ``num_valid[0]`` counts what is in 0 .. rows.
    """

    sorted_ids: Tensor  # int32 [rows], slot << 24 | token; padding is topk << 24 | M
    sorted_weights: Tensor  # float32 [rows], 0 in padding
    sorted_expert_ids: Tensor  # int32 [rows / block_m], local expert of a block; -1 past the end
    num_valid: Tensor  # int32 [2]: rows in use, M
    reverse_sorted: Tensor  # int32 [M * topk], row of a route; -1 if it is dropped
    block_m: int
    topk: int


# --- sorting --------------------------------------------------------------------------------------


def moe_sort(
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    block_m: int,
    expert_mask: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_local_experts: int | None = None,
) -> MoeSorting:
    """Order routes by expert.

    Args:
        topk_ids: int32 or int64 [M, topk], experts by their number over all ranks.
        topk_weights: [M, topk], any floating dtype.
        num_experts: that an id can name.
        block_m: 16, 32, 64 or 128; every expert with routes is padded to a multiple of it.
        expert_mask: int or bool [num_experts], 1 for the experts of this rank and 0 for others;
            the ones are numbered in that order. Default: all.
        expert_map: in its place, int32 or int64 [num_experts], the local number of an expert or
            -1, in any order, as vLLM and SGLang have it. Numbers past num_local_experts are -1.
        num_local_experts: experts of this rank, which bounds the rows; those of higher local
            numbers are dropped. Default: num_experts.

    Returns:
        A ``MoeSorting``; rows is what the worst routing of this shape needs. A mask with numbers
        other than 0 and 1 is an error on a CPU. On a GPU nothing is read back: there every sorted
        weight is then NaN, and ``moe_reduce`` gives NaN for every token.
    """
    tensors = _ops.moe_sort(
        topk_ids,
        topk_weights,
        num_experts=num_experts,
        block_m=block_m,
        expert_mask=expert_mask,
        expert_map=expert_map,
        num_local_experts=num_local_experts,
    )
    return MoeSorting(*tensors, block_m, topk_ids.shape[1])


def moe_sort_zero_(
    zero: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_experts: int,
    block_m: int,
    expert_mask: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_local_experts: int | None = None,
) -> MoeSorting:
    """``moe_sort``, and ``zero``, any contiguous tensor, set to 0 in the same launch."""
    tensors = _ops.moe_sort_zero_(
        zero,
        topk_ids,
        topk_weights,
        num_experts=num_experts,
        block_m=block_m,
        expert_mask=expert_mask,
        expert_map=expert_map,
        num_local_experts=num_local_experts,
    )
    return MoeSorting(*tensors, block_m, topk_ids.shape[1])


def moe_rotate_quant(
    x: Tensor,
    sorting: MoeSorting,
    rotation: Tensor | None = None,
    *,
    rotation_size: int | None = None,
    prescale: Tensor | None = None,
    scale_mode: ScaleMode = "round_up",
    bf16_intermediate: bool = False,
) -> tuple[Tensor, Tensor]:
    """``rotate_quant`` of every token once, with its scales where gemm1 reads them.

    Args:
        x: [M, H], bf16, fp16 or float32; rows may be strided.
        sorting: of the M tokens.
        rotation: as in ``rotate_quant``, as are the others, except that
        rotation_size: 0 means no rotation. Default: the size of ``rotation``, else 64.

    Returns:
        codes [M, H / 2] in token order; scales [ceil32(rows), ceil8(H / 32)], sorted and shuffled,
        all of it written: 0 in padding. (A GPU needs ``sorted_ids`` and ``reverse_sorted`` that
        agree for that, as those of ``moe_sort`` do.)
    """
    return _ops.moe_rotate_quant(
        x,
        sorting.sorted_ids,
        sorting.num_valid,
        sorting.reverse_sorted,
        rotation,
        rotation_size=rotation_size,
        prescale=prescale,
        scale_mode=scale_mode,
        bf16_intermediate=bf16_intermediate,
    )


def moe_sort_scales(scales: Tensor, sorting: MoeSorting, *, by_route: bool = False) -> Tensor:
    """Scales that exist already, sorted and shuffled as ``moe_rotate_quant`` returns them.

    Args:
        scales: natural [M, G], or with ``by_route`` one row per route, [M * topk, G].
        sorting: of the M tokens.
        by_route: see ``scales``.
    """
    return _ops.moe_sort_scales(
        scales, sorting.sorted_ids, sorting.num_valid, topk=sorting.topk, by_route=by_route
    )


# --- GEMMs ----------------------------------------------------------------------------------------


def moe_gemm1(
    a: Tensor,
    w1: Tensor,
    w1_scale: Tensor,
    sorting: MoeSorting,
    *,
    a_scales: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    gate_mode: GateMode = "separated",
    apply_weight: bool = False,
    rotation: Tensor | None = None,
    rotation_size: int | None = 0,
    prescale: Tensor | None = None,
    inter_rotation: Tensor | None = None,
    inter_rotation_size: int | None = 0,
    inter_prescale: Tensor | None = None,
    scale_mode: ScaleMode = "round_up",
    config: int = -1,
) -> tuple[Tensor, Tensor]:
    """Gate and up projection of every route, activated, rotated and quantised.

    Args:
        a: codes [M, H / 2] in token order with ``a_scales``; or x [M, H], bf16 or fp16, which is
            rotated and quantised inside to the same codes (blocks of 16 rows on a GPU).
        w1: codes [E, 2I, H / 2] in the order of ``shuffle_weight``, gate rows first.
        w1_scale: ``shuffle_scales`` of [E, 2I, H / 32].
        sorting: of the M tokens.
        a_scales: sorted scales of ``a``, see ``moe_rotate_quant``.
        bias: [E, 2I], any floating dtype, gate rows first whatever ``gate_mode``.
        activation: of gate g and up u, in float32. ``silu``: g * sigmoid(g) * u; ``swiglu``:
            g * sigmoid(alpha * g) * (u + 1), needs ``limit``; ``gelu`` and ``gelu_tanh``: that
            of g, times u.
        limit: first g = min(g, limit) and u = clamp(u, -limit, limit); gpt-oss has 7.
        alpha: of swiglu.
        gate_mode: in which w1 and w1_scale were shuffled.
        apply_weight: multiply ``a @ w1`` by the route's weight, before the bias.
        rotation: of x, with ``rotation_size`` (0: none) and ``prescale``; not of codes.
        inter_rotation: of the activated value before it is quantised, [RS, RS] or
            [I / RS, RS, RS], with ``inter_rotation_size`` (0: none; up to 128) and
            ``inter_prescale`` [I].
        scale_mode: of the result, and of x; not "mse".
        config: index into ``moe_gemm1_configs()``; -1 picks one by shape.

    Returns:
        codes [rows, I / 2], scales [ceil32(rows), ceil8(I / 32)] shuffled, both in sorted rows. A
        row that is no route is 0; blocks past ``num_valid[0]``, and of an expert that ``w1`` does
        not have, are not written.

    In float32: sums as in ``gemm_a4w4``; times the route's weight, plus the bias, clamped,
    activated, rounded after each operation. On a CPU the activations are those of
    csrc/cpu/activate.h, the same bytes on every machine; a GPU's exponential and order of sums
    differ in the last bits, and its codes with them where a value lies between two. Then
    ``rotate_quant``, with its bound on magnitudes that a rotation can add up.
    """
    return _ops.moe_gemm1(
        a,
        w1,
        w1_scale,
        *sorting[:4],
        a_scales=a_scales,
        bias=bias,
        topk=sorting.topk,
        activation=activation,
        limit=limit,
        alpha=alpha,
        gate_mode=gate_mode,
        apply_weight=apply_weight,
        rotation=rotation,
        rotation_size=rotation_size,
        prescale=prescale,
        inter_rotation=inter_rotation,
        inter_rotation_size=inter_rotation_size,
        inter_prescale=inter_prescale,
        scale_mode=scale_mode,
        config=config,
    )


def moe_gemm2(
    a: Tensor,
    a_scales: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    sorting: MoeSorting,
    *,
    tokens: int,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: int = -1,
) -> Tensor:
    """Down projection, one row for each route, without its weight.

    Args:
        a: codes of the intermediate, with ``a_scales`` what ``moe_gemm1`` returns.
        w2: codes [E, H, I / 2] in the order of ``shuffle_weight``.
        w2_scale: ``shuffle_scales`` of [E, H, I / 32].
        sorting: of the M tokens.
        tokens: M.
        bias: [E, H], any floating dtype.
        out_dtype: bf16, fp16 or float32.
        config: index into ``moe_gemm2_configs()``; -1 picks one by shape.

    Returns:
        [M * topk, H], token by token; rows of dropped routes, and of those whose expert ``w2`` does
        not have, are not written.

    Sums are float32, as in ``gemm_a4w4``; the bias is added in float32 and the result rounded once,
    to nearest even.
    """
    return _ops.moe_gemm2(
        a,
        a_scales,
        w2,
        w2_scale,
        sorting.sorted_ids,
        sorting.sorted_expert_ids,
        sorting.num_valid,
        tokens=tokens,
        topk=sorting.topk,
        bias=bias,
        out_dtype=out_dtype,
        config=config,
    )


def moe_gemm2_mxfp4(
    a: Tensor,
    a_scales: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    sorting: MoeSorting,
    *,
    tokens: int,
    bias: Tensor | None = None,
    config: int = -1,
) -> tuple[Tensor, Tensor]:
    """``moe_gemm2`` with its rows in MXFP4 ("round_up"): a quarter of the bytes, and lossy.

    Returns:
        codes [M * topk, H / 2], scales [M * topk, H / 32], natural.
    """
    return _ops.moe_gemm2_mxfp4(
        a,
        a_scales,
        w2,
        w2_scale,
        sorting.sorted_ids,
        sorting.sorted_expert_ids,
        sorting.num_valid,
        tokens=tokens,
        topk=sorting.topk,
        bias=bias,
        config=config,
    )


def moe_gemm2_atomic_(
    out: Tensor,
    a: Tensor,
    a_scales: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    sorting: MoeSorting,
    *,
    apply_weight: bool = True,
    bias: Tensor | None = None,
    config: int = -1,
) -> None:
    """``moe_gemm2`` that adds every row, times its weight, to ``out[token]``.

    The row plus its bias times its weight, each rounded to float32, is rounded to the dtype of
    ``out`` and added there, which rounds again: on a CPU in the order of sorted rows, on a GPU in
    any order, so that results may differ in their last bits from run to run.

    Args:
        out: [M, H], contiguous, bf16, fp16 or float32; zeros, or what is to be added to.
        apply_weight: whether to multiply by ``sorting.sorted_weights``.
    """
    _ops.moe_gemm2_atomic_(
        out,
        a,
        a_scales,
        w2,
        w2_scale,
        sorting.sorted_ids,
        sorting.sorted_weights if apply_weight else None,
        sorting.sorted_expert_ids,
        sorting.num_valid,
        topk=sorting.topk,
        bias=bias,
        config=config,
    )


def moe_reduce(
    rows: Tensor,
    topk_weights: Tensor | None,
    sorting: MoeSorting,
    *,
    scales: Tensor | None = None,
    shared: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``out[t] = shared[t] + sum over slots of topk_weights[t, slot] * rows[t, slot]``.

    In float32, ``shared`` (else 0) first, then the slots in ascending order: the product is
    rounded, then the sum (no fused multiply-add), and at the end once to ``out_dtype``, to nearest
    even. The same bytes on every run and every device. An MXFP4 row is its code's value times its
    scale, rounded to float32, before that. Of ``sorting.reverse_sorted`` only the sign counts.

    Args:
        rows: [M * topk, H], what ``moe_gemm2`` returns; or with ``scales`` its MXFP4 codes.
        topk_weights: [M, topk], or None where all are 1.
        sorting: says which routes are dropped.
        scales: of MXFP4 rows.
        shared: [M, H] in ``out_dtype``, what shared experts have computed.
        out_dtype: default: the dtype of ``shared``, else of ``rows``, else bf16.

    Returns:
        [M, H].
    """
    if rows.dim() != 2 or sorting.topk < 1 or rows.shape[0] % sorting.topk:
        raise RuntimeError(
            f"rows: expected shape [M * topk, H] with topk {sorting.topk} of the sorting, "
            f"got shape {list(rows.shape)}"
        )
    return _ops.moe_reduce(
        rows.view(rows.shape[0] // sorting.topk, sorting.topk, rows.shape[1]),  # which tells M
        topk_weights,
        sorting.reverse_sorted,
        scales=scales,
        shared=shared,
        out_dtype=out_dtype,
    )


def moe_gemm1_configs() -> tuple[str, ...]:
    """Names of the tile configurations of ``moe_gemm1``: kind, rows of a block, weight rows."""
    return tuple(_ops._moe_gemm1_configs())


def moe_gemm2_configs() -> tuple[str, ...]:
    """Names of the tile configurations of ``moe_gemm2`` and its variants."""
    return tuple(_ops._moe_gemm2_configs())


# --- the whole layer ------------------------------------------------------------------------------


def fused_moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    w1_scale: Tensor,
    w2_scale: Tensor,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: Activation = "silu",
    limit: float | None = None,
    alpha: float = 1.702,
    gate_mode: GateMode = "separated",
    rotation: Tensor | None = None,
    rotation_size: int | None = 0,
    prescale: Tensor | None = None,
    inter_rotation: Tensor | None = None,
    inter_rotation_size: int | None = 0,
    inter_prescale: Tensor | None = None,
    scale_mode: ScaleMode = "round_up",
    expert_mask: Tensor | None = None,
    expert_map: Tensor | None = None,
    apply_weight_on_input: bool = False,
    num_shared_experts: int = 0,
    shared_weight: float = 1.0,
    shared: Tensor | None = None,
    deterministic: bool = False,
    fp4_intermediate: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A mixture-of-experts layer in MXFP4, from the router's choice to the reduced output.

    ``sum over slots of topk_weights * (act(rotate(x) @ w1[e].T + b1[e]) @ w2[e].T + b2[e])``.
    Which of its pipelines runs is chosen by shape: ``dispatch.explain`` says which and why.

    Args:
        x: [M, H], bf16, fp16 or float32; rows may be strided. M may be 0.
        w1: codes [E, 2I, H / 2], gate rows first, in the order of ``shuffle_weight``.
        w2: codes [E, H, I / 2], likewise.
        topk_weights: [M, topk], any floating dtype.
        topk_ids: int32 or int64 [M, topk].
        w1_scale: ``shuffle_scales`` of [E, 2I, H / 32], in the same ``gate_mode`` as w1.
        w2_scale: ``shuffle_scales`` of [E, H, I / 32].
        w1_bias: [E, 2I], gate rows first; ``w2_bias``: [E, H].
        activation: as in ``moe_gemm1``, as are ``limit``, ``alpha`` and ``gate_mode``.
        rotation: of x along H, as in ``rotate_quant``; the weights must have been rotated by the
            same matrix before they were quantised. Without a matrix a ``rotation_size`` of 16 to
            256 is the Hadamard matrix and 0 is none.
        prescale: [H], multiplied into x before it is rotated.
        inter_rotation: the same of the intermediate along I, ``inter_rotation_size`` up to 128.
        inter_prescale: [I].
        scale_mode: of x and the intermediate, as in ``quant``; not "mse".
        expert_mask: with expert parallelism, int or bool [routed experts of all ranks], 1 for
            those of this rank, as many as w1 has besides shared ones, and 0 for others. The sum
            of the ranks' results is the layer's. Another mask is an error on a CPU, and on a GPU,
            where nothing is read back, the result is NaN.
        expert_map: in its place, int32 or int64, the local number of each routed expert or -1.
        apply_weight_on_input: multiply ``x @ w1.T`` by the route's weight instead of the result.
        num_shared_experts: how many of w1's experts, the last ones, every token goes to besides
            its topk. Mask and map have no place for them: they are on every rank that is given
            them. No id in ``topk_ids`` names one.
        shared_weight: of those routes.
        shared: [M, H], the output of a dense shared expert, added to the result.
        deterministic: the same bytes on every run: no pipeline that adds atomically.
        fp4_intermediate: allow gemm2's rows to be stored as MXFP4, which is lossy, where the
            table or the rule has a pipeline that does (many tokens). Nothing else does.
            ROTQUANT_HIP_FP4_INTERMEDIATE=1 allows it in every call.
        out_dtype: bf16, fp16 or float32; x's by default.

    Returns:
        [M, H] in ``out_dtype``. A token whose row in x holds a NaN or Inf comes out as NaN; no
        other is touched.

    Gradients of x, topk_weights, biases, rotations, prescales and shared are those of the formula
    with x and the intermediate not quantised and w1 and w2 dequantised. They are computed in
    float32, expert by expert; that reads back how many routes each has.
    """
    return _ops.fused_moe(
        x,
        w1,
        w2,
        topk_weights,
        topk_ids,
        w1_scale=w1_scale,
        w2_scale=w2_scale,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        activation=activation,
        limit=limit,
        alpha=alpha,
        gate_mode=gate_mode,
        rotation=rotation,
        rotation_size=rotation_size,
        prescale=prescale,
        inter_rotation=inter_rotation,
        inter_rotation_size=inter_rotation_size,
        inter_prescale=inter_prescale,
        scale_mode=scale_mode,
        expert_mask=expert_mask,
        expert_map=expert_map,
        apply_weight_on_input=apply_weight_on_input,
        num_shared_experts=num_shared_experts,
        shared_weight=shared_weight,
        shared=shared,
        deterministic=deterministic,
        fp4_intermediate=fp4_intermediate,
        out_dtype=out_dtype,
    )


@torch.library.impl("rotquant_hip::fused_moe", ("cpu", "cuda"))
def _choose_and_run(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    rotation: Tensor | None = None,
    inter_rotation: Tensor | None = None,
    inter_rotation_size: int | None = 0,
    expert_mask: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_shared_experts: int = 0,
    deterministic: bool = False,
    fp4_intermediate: bool = False,
    **options,
) -> Tensor:
    """Below torch.compile's tracing: the sizes are numbers here, and choosing makes no guards."""
    pipeline, block_m, gemm1, gemm2 = "staged_reduce", 32, -1, -1
    missed = None
    # What is wrong is _fused_moe's to refuse. No tokens are not worth a miss.
    has_sizes = x.dim() == topk_ids.dim() == 2 and w1.dim() == 3
    if has_sizes and x.shape[0] > 0 and w1.shape[0] > 0 and topk_ids.shape[1] > 0:
        experts = w1.shape[0]
        inter_size = 64 if inter_rotation_size is None else inter_rotation_size
        if inter_rotation is not None and inter_rotation.dim() > 0:
            inter_size = inter_rotation.shape[-1]
        everywhere = experts
        owned = expert_mask if expert_map is None else expert_map
        if owned is not None:
            everywhere = max(1, owned.numel() + num_shared_experts)
        plan, missed = dispatch.choose(
            dispatch.gfx_of(x.device),
            x.shape[0],
            x.shape[1],
            w1.shape[1] // 2,
            experts,
            topk_ids.shape[1] + num_shared_experts,
            activation,
            everywhere,
            (
                deterministic,
                fp4_intermediate or dispatch.fp4_by_default(),
                rotation is not None or x.dtype == torch.float32,
                inter_size,
            ),
        )
        pipeline, block_m = plan.pipeline, plan.block_m
        gemm1, gemm2 = plan.gemm1_config, plan.gemm2_config
    out = _ops._fused_moe(
        x,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation=activation,
        rotation=rotation,
        inter_rotation=inter_rotation,
        inter_rotation_size=inter_rotation_size,
        expert_mask=expert_mask,
        expert_map=expert_map,
        num_shared_experts=num_shared_experts,
        **options,
        pipeline=pipeline,
        block_m=block_m,
        gemm1_config=gemm1,
        gemm2_config=gemm2,
    )
    if missed is not None:  # after the call: one that is refused is no miss
        dispatch.count(missed)
    return out
