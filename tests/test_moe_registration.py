# SPDX-License-Identifier: MIT
"""The mixture-of-experts ops as torch sees them: schemas, opcheck, fake kernels, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import PIPELINES, case
from test_registration import assert_fake_is_real, form
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rotquant_hip as rq
from rotquant_hip import fake_moe, reference_moe

OPS = torch.ops.rotquant_hip
MUTATED = {"moe_sort_zero_": "zero", "moe_gemm2_atomic_": "out"}
NAMES = (
    "moe_sort",
    "moe_sort_zero_",
    "moe_rotate_quant",
    "moe_sort_scales",
    "moe_gemm1",
    "moe_gemm2",
    "moe_gemm2_mxfp4",
    "moe_gemm2_atomic_",
    "moe_reduce",
    "fused_moe",
    "_fused_moe",
)


# B41: an op registered as mutating whatever it gets.
@pytest.mark.parametrize("name", NAMES)
def test_b41_mutates_what_it_says_and_aliases_nothing(name):
    schema = getattr(OPS, name).default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None]
    assert written == ([MUTATED[name]] if name in MUTATED else [])
    assert schema.is_mutable == (name in MUTATED)
    assert all(r.alias_info is None for r in schema.returns)
    assert torch.Tag.pt2_compliant_tag in getattr(OPS, name).default.tags


@cache
def calls() -> dict[str, tuple[tuple, dict[str, Any]]]:
    """Arguments of every op, from one small layer's way through all of them."""
    c = case(2, inter=96, bias=True)
    # An expert for each route, so that no row or scale is left as it was allocated.
    c = c.but(ids=torch.arange(6, dtype=torch.int32).view(2, 3))
    (x, w1, w2, weights, ids), o = c.arguments()
    sorting = {"num_experts": 8, "block_m": 32}
    s = rq.moe_sort(ids, weights, **sorting)
    a, a_scales = rq.moe_rotate_quant(x, s)
    b1, b2 = o["w1_bias"], o["w2_bias"]
    between = rq.moe_gemm1(a, w1, o["w1_scale"], s, a_scales=a_scales, bias=b1)
    second = (*between, w2, o["w2_scale"], s.sorted_ids)
    sizes = {"tokens": 2, "topk": 3}
    rows = rq.moe_gemm2(*between, w2, o["w2_scale"], s, tokens=2)
    mask = torch.tensor([1, 0] * 4, dtype=torch.bool)
    masked = {**sorting, "expert_mask": mask, "num_local_experts": 4}
    out, experts, valid = torch.zeros(2, 256), s.sorted_expert_ids, s.num_valid
    return {
        "moe_sort": ((ids, weights), sorting),
        "moe_sort_zero_": ((out.clone(), ids.long(), weights.half()), masked),
        "moe_rotate_quant": ((x, s.sorted_ids, valid, s.reverse_sorted), {"rotation_size": 32}),
        "moe_sort_scales": ((rq.quant(x)[1], s.sorted_ids, valid), {"topk": 3}),
        "moe_gemm1": (
            (a, w1, o["w1_scale"], *s[:4]),
            {"a_scales": a_scales, "topk": 3, "bias": b1, "inter_rotation_size": 32},
        ),
        "moe_gemm2": ((*second, experts, valid), {**sizes, "bias": b2}),
        "moe_gemm2_mxfp4": ((*second, experts, valid), sizes),
        "moe_gemm2_atomic_": ((out, *second, s.sorted_weights, experts, valid), {"topk": 3}),
        "moe_reduce": ((rows, weights, s.reverse_sorted), {"out_dtype": torch.float32}),
        "fused_moe": ((x, w1, w2, weights, ids), {**o, "rotation_size": 64}),
        "_fused_moe": (
            (x, w1, w2, weights, ids),
            {**o, "pipeline": "inline_atomic", "block_m": 16, "num_shared_experts": 1},
        ),
    }


# B41
@pytest.mark.parametrize("name", NAMES)
def test_b41_opcheck(name):
    args, kwargs = calls()[name]
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


def test_an_op_for_every_pipeline_and_a_name_for_every_op():
    public = {name for name in NAMES if not name.startswith("_")}
    schemas = {s.name.removeprefix("rotquant_hip::") for s in torch._C._jit_get_all_schemas()}
    assert {n for n in schemas if n.startswith(("moe_", "fused_moe"))} == public
    assert public <= set(rq.__all__) and public <= set(dir(rq.moe))
    from rotquant_hip import dispatch

    assert tuple(PIPELINES) == dispatch.PIPELINES


# --- fake kernels ---------------------------------------------------------------------------------


@given(routes=st.integers(0, 5000), experts=st.integers(1, 600), block_m=st.sampled_from((16, 128)))
def test_rows_of_a_sorting(routes, experts, block_m):
    expected = reference_moe.max_rows(routes, experts, block_m)
    assert fake_moe.max_rows(routes, experts, block_m) == expected


# B42: the fake had one width, the kernel another.
@settings(max_examples=25)
@given(
    tokens=st.integers(0, 40),
    topk=st.integers(1, 4),
    widths=st.sampled_from(((32, 32), (96, 64), (288, 224))),
    block_m=st.sampled_from((16, 32, 64, 128)),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    local=st.sampled_from((None, 3)),
)
def test_b42_fakes(tokens, topk, widths, block_m, dtype, local):
    c = case(tokens, *widths, 8 if local is None else local, topk, routed=8, dtype=dtype)
    (x, w1, w2, weights, ids), o = c.arguments()
    mask = None if local is None else torch.arange(8) % 3 == 0
    options = {"num_experts": 8, "block_m": block_m, "num_local_experts": local}

    def sort(*tensors: Tensor) -> tuple[Tensor, ...]:
        ids, weights, *mask = tensors
        return rq.moe_sort(ids, weights, expert_mask=mask[0] if mask else None, **options)[:5]

    masks = () if mask is None else (mask,)
    assert_fake_is_real(sort, ids, weights, *masks)
    s = rq.moe_sort(ids, weights, expert_mask=mask, **options)

    def with_sorting(op: Callable) -> Callable:
        """op(sorting, *others) as a function of tensors."""
        return lambda *t: op(rq.MoeSorting(*t[:5], block_m, topk), *t[5:])

    check = partial(assert_fake_is_real)
    check(with_sorting(lambda s, x: rq.moe_rotate_quant(x, s, rotation_size=32)), *s[:5], x)
    natural = rq.quant(x)[1]
    check(with_sorting(lambda s, t: rq.moe_sort_scales(t, s)), *s[:5], natural)
    a, a_scales = rq.moe_rotate_quant(x, s, rotation_size=0)

    def first(s, a, a_scales, w1, w1_scale):
        return rq.moe_gemm1(a, w1, w1_scale, s, a_scales=a_scales)

    operands = (a, a_scales, w1, o["w1_scale"])
    check(with_sorting(first), *s[:5], *operands)
    operands = (*first(s, *operands), w2, o["w2_scale"])
    check(
        with_sorting(lambda s, *t: rq.moe_gemm2(*t, s, tokens=tokens, out_dtype=dtype)),
        *s[:5],
        *operands,
    )
    check(with_sorting(lambda s, *t: rq.moe_gemm2_mxfp4(*t, s, tokens=tokens)), *s[:5], *operands)
    for rows in (
        (rq.moe_gemm2(*operands, s, tokens=tokens, out_dtype=dtype), None),
        rq.moe_gemm2_mxfp4(*operands, s, tokens=tokens),
    ):
        given_rows = [t for t in rows if t is not None]
        check(
            with_sorting(lambda s, w, rows, scales=None: rq.moe_reduce(rows, w, s, scales=scales)),
            *s[:5],
            weights,
            *given_rows,
        )
        if topk == 2:
            check(
                with_sorting(
                    lambda s, rows, scales=None: rq.moe_reduce(rows, None, s, scales=scales)
                ),
                *s[:5],
                *given_rows,
            )

    def whole(x, w1, w2, weights, ids, w1_scale, w2_scale, mask=None):
        scales = {"w1_scale": w1_scale, "w2_scale": w2_scale}
        return rq.fused_moe(x, w1, w2, weights, ids, **scales, expert_mask=mask)

    check(whole, x, w1, w2, weights, ids, o["w1_scale"], o["w2_scale"], *masks)


def test_another_device_is_refused_by_the_fake_too():
    args, kwargs = calls()["fused_moe"]
    with pytest.raises(RuntimeError, match="w2: expected device cpu"):
        OPS.fused_moe(*args[:2], args[2].to("meta"), *args[3:], **kwargs)


# --- torch.compile --------------------------------------------------------------------------------


def by_hand(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, o: dict) -> Tensor:
    """The ops one by one, those that write into an argument too."""
    out = torch.ones_like(x)
    s = rq.moe_sort_zero_(out, ids, weights, num_experts=8, block_m=32)
    a, a_scales = rq.moe_rotate_quant(x, s, rotation_size=64)
    between = rq.moe_gemm1(a, w1, o["w1_scale"], s, a_scales=a_scales)
    rq.moe_gemm2_atomic_(out, *between, w2, o["w2_scale"], s)
    rows = rq.moe_gemm2(*between, w2, o["w2_scale"], s, tokens=x.shape[0])
    return out + rq.moe_reduce(rows, weights, s)


def test_compile_every_op_with_dynamic_tokens():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    (x, w1, w2, weights, ids), o = case(65).arguments()
    compiled = torch.compile(by_hand, fullgraph=True, backend=counter)
    for tokens in (7, 2, 65):
        routed = [t[:tokens].clone() for t in (x, weights, ids)]
        for t in routed:
            torch._dynamo.mark_dynamic(t, 0)
        arguments = (routed[0], w1, w2, *routed[1:], o)
        actual, expected = compiled(*arguments), by_hand(*arguments)
        assert torch.equal(actual, expected) and form(actual) == form(expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()
