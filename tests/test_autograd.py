# SPDX-License-Identifier: MIT
"""Gradients: of the ops, straight-through ones of the layers, and what is refused.

Expected values are float64 autograd of the same formula in plain torch, on dequantised weights.
What is compared was summed in float32, in sums of no more than 300 terms, up to five of which
follow on each other: that changes a tensor by less than FLOAT32 of its norm. Rounding a result to
bf16 changes it by up to 2^-9 of each element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from moe_cases import Case, activate, case
from test_moe_registration import calls
from test_registration import ARGUMENTS
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

import rotquant_hip as rq
from rotquant_hip import RotQuantLinear, RotQuantMoE, reference

OPS = torch.ops.rotquant_hip
FLOAT32, BF16 = 2e-5, 2**-9 + 2e-5

# op -> arguments with a gradient; all others that can require one are refused.
MOE = "w1_bias w2_bias rotation prescale inter_rotation inter_prescale shared"
DIFFERENTIABLE = {
    "rotate": "x rotation prescale",
    "fake_quant": "x",
    "gemm_a4w4": "bias",
    "_linear_a4w4": "x bias rotation prescale",
    "moe_gemm2": "bias",
    "moe_reduce": "rows topk_weights shared",
    "fused_moe": f"x topk_weights {MOE}",
}
INTEGERS = (
    "topk_ids sorted_ids sorted_expert_ids num_valid reverse_sorted expert_mask expert_map".split()
)


def assert_close(actual: Tensor, expected: Tensor, bound: float, what: str = "") -> None:
    assert actual is not None, what
    assert actual.shape == expected.shape, what
    error = (actual.double() - expected).norm() / expected.norm()
    assert error <= bound, f"{what}: {error:.3g} of the norm"


def leaves(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Copies that require grad."""

    def leaf(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.detach().to(dtype, copy=True).requires_grad_()

    return [leaf(t) for t in tensors]


def hadamard(size: int) -> Tensor:
    return torch.from_numpy(reference.hadamard(np.eye(size), size)).double() * size**-0.5


def rotated(
    x: Tensor, rotation: Tensor | None, size: int, prescale: Tensor | None = None
) -> Tensor:
    """The formula, in the dtype of x."""
    x = x if prescale is None else x * prescale
    if rotation is None and size == 0:
        return x
    matrix = hadamard(size).to(x.dtype) if rotation is None else rotation
    size = matrix.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    matrix = matrix.expand(blocks.shape[-2], -1, -1)
    return torch.einsum("...bi,bij->...bj", blocks, matrix).flatten(-2)


# --- nothing is silent ----------------------------------------------------------------------------


def _arguments_of_ops() -> list[tuple[str, str]]:
    """Every tensor argument of every op that autograd sees."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("rotquant_hip::")
        if name != schema.name and not name.endswith("_backward"):
            found += [(name, a.name) for a in schema.arguments if "Tensor" in str(a.type)]
    return sorted(found)


def differentiable(op: str, argument: str) -> bool:
    return argument in DIFFERENTIABLE.get(op, "").split()


REFUSED = [
    (op, argument)
    for op, argument in _arguments_of_ops()
    if argument not in INTEGERS and not differentiable(op, argument)
]


@pytest.mark.parametrize(("op", "argument"), REFUSED)
def test_what_has_no_gradient_is_refused_by_name(op, argument):
    given = {}
    for a in getattr(OPS, op).default._schema.arguments:
        if not a.has_default_value():
            kinds = {"int": 32, "SymInt": 32, "str": "x"}
            given[a.name] = kinds.get(str(a.type), torch.ones(2, 64))
    given[argument] = torch.ones(2, 64, requires_grad=True)
    message = f"^{argument}: expected a tensor that does not require grad, as rotquant_hip::{op} "
    with pytest.raises(RuntimeError, match=message):
        getattr(OPS, op)(**given)
    with torch.no_grad():  # then it is another argument that does not fit, or nothing
        try:
            getattr(OPS, op)(**given)
        except RuntimeError as error:
            assert "require grad" not in str(error)


def test_bytes_that_pass_for_floats_are_refused_too():
    (a, b, a_scales, b_scales), options = ARGUMENTS["gemm_a4w4"][1:]
    floats = b_scales.view(torch.float8_e8m0fnu).requires_grad_()
    with pytest.raises(RuntimeError, match="^b_scales: expected a tensor that does not require"):
        rq.gemm_a4w4(a, b, a_scales, floats, **options)


def _differentiable_calls() -> dict[str, tuple[tuple, dict[str, Any]]]:
    c = case(9, 64, 32, 4, 2, dtype=torch.float32, bias=True, shared=torch.randn(9, 64))
    c = c.but(
        rotation=torch.randn(32, 32),
        prescale=torch.rand(64),
        inter_rotation=torch.randn(16, 16),
        inter_prescale=torch.rand(32),
    )
    gemm, gemm2, reduce = ARGUMENTS["gemm_a4w4"], calls()["moe_gemm2"], calls()["moe_reduce"]
    codes = torch.randint(0, 256, (5, 48), dtype=torch.uint8)
    return {
        "rotate": ((torch.randn(5, 64), torch.randn(2, 32, 32)), {"prescale": torch.rand(64)}),
        "fake_quant": ((torch.randn(5, 64),), {}),
        "gemm_a4w4": ((codes, *gemm[1][1:], torch.randn(30)), gemm[2]),
        "_linear_a4w4": (
            (torch.randn(2, 5, 96), *gemm[1][1::2], torch.randn(30), torch.randn(3, 32, 32)),
            {"rotation_size": 32, "prescale": torch.rand(96), "n": 30},
        ),
        "moe_gemm2": gemm2,
        "moe_reduce": (reduce[0], reduce[1] | {"shared": torch.randn(2, 256)}),
        "fused_moe": c.arguments(),
    }


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_every_differentiable_argument_gets_a_gradient(op):
    positional, options = _differentiable_calls()[op]
    names = [a.name for a in getattr(OPS, op).default._schema.arguments]
    arguments = dict(zip(names, positional, strict=False)) | options
    for name in DIFFERENTIABLE[op].split():  # alone, so that no other's makes it
        leaf = arguments[name].clone().requires_grad_()
        out = getattr(OPS, op)(**arguments | {name: leaf})
        assert torch.equal(out, getattr(OPS, op)(**arguments)), name
        out.float().square().sum().backward()
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype
        assert leaf.grad.isfinite().all() and leaf.grad.norm() > 0, name


def test_where_nothing_is_recorded_nothing_is_said():
    x = torch.randn(4, 64, requires_grad=True)
    expected = rq.rotate_quant(x.detach())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert all(map(torch.equal, rq.rotate_quant(x), expected))
            assert not rq.rotate(x).requires_grad
    assert not rq.rotate(x.detach()).requires_grad


def test_other_ways_to_differentiate_are_refused():
    x = torch.randn(4, 64)
    with forward_ad.dual_level():
        for op in (rq.rotate, rq.quant, rq.fake_quant):
            with pytest.raises((RuntimeError, NotImplementedError)):
                op(forward_ad.make_dual(x, x))
    layer = RotQuantLinear.from_linear(nn.Linear(64, 16))
    for op in (rq.rotate, layer, rq.quant):
        with pytest.raises(RuntimeError):
            torch.func.vjp(op, x)


def test_what_an_op_overwrites_is_missed_by_the_backward_pass():
    arguments, options = calls()["moe_gemm2_atomic_"]
    out = torch.zeros_like(arguments[0])
    x = torch.ones_like(out, requires_grad=True)
    y = x * out
    OPS.moe_gemm2_atomic_(out, *arguments[1:], **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = x * out
    OPS.moe_sort_zero_(out, *calls()["moe_sort"][0], **calls()["moe_sort"][1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- ops ------------------------------------------------------------------------------------------

ROTATIONS = {
    "hadamard 16": (None, 16),
    "hadamard 128": (None, 128),
    "matrix": (torch.randn(32, 32), 32),
    "matrices": (torch.randn(4, 64, 64), 64),
}


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotate(kind, dtype, prescaled):
    matrix, size = ROTATIONS[kind]
    given_tensors = torch.randn(2, 3, 256).to(dtype), matrix, torch.rand(256) if prescaled else None
    x, r, s = leaves(*given_tensors)
    x64, r64, s64 = leaves(*given_tensors, dtype=torch.float64)
    grad = torch.randn(2, 3, 256).to(dtype)
    rq.rotate(x, r, rotation_size=size, prescale=s).backward(grad)
    rotated(x64, r64, size, s64).backward(grad.double())
    for name, t, expected in (("x", x, x64), ("rotation", r, r64), ("prescale", s, s64)):
        if t is not None:
            assert_close(t.grad, expected.grad, BF16 if t.dtype == dtype else FLOAT32, name)


@pytest.mark.filterwarnings("ignore:Input #.*double precision")
@pytest.mark.parametrize("shape", [(32,), (3, 32), (0, 32)])
def test_rotate_by_gradcheck(shape):
    """In float32: it is linear in each argument, so that steps can be of the order of 1."""
    arguments = leaves(torch.randn(shape), torch.randn(2, 16, 16), torch.rand(32))

    def op(x, rotation, prescale):
        return rq.rotate(x, rotation, prescale=prescale)

    steps = {"eps": 0.5, "atol": 1e-3, "rtol": 1e-4, "fast_mode": True}
    assert torch.autograd.gradcheck(op, arguments, **steps)
    assert torch.autograd.gradgradcheck(op, arguments, **steps)
    assert torch.autograd.gradcheck(lambda x: rq.rotate(x, rotation_size=16), arguments[0], **steps)


def test_bias_of_gemm_a4w4():
    (_, b, _, b_scales), options = ARGUMENTS["gemm_a4w4"][1:]
    a, a_scales = rq.quant(torch.randn(2, 5, 96), shuffle_scales=True)
    (bias,) = leaves(torch.randn(30))
    grad = torch.randn(2, 5, 30).bfloat16()
    rq.gemm_a4w4(a, b, a_scales, b_scales, bias, **options).backward(grad)
    assert_close(bias.grad, grad.double().sum((0, 1)), FLOAT32)


def _dropping(tokens: int = 20, topk: int = 3) -> tuple[Case, rq.MoeSorting, Tensor]:
    """A routing with dropped routes, and the expert of every route."""
    c = case(tokens, 64, 32, 8, topk, dtype=torch.float32)
    ids = c.ids.masked_fill(torch.rand(c.ids.shape) < 0.3, -1)
    sorting = rq.moe_sort(ids, c.weights, num_experts=8, block_m=16)
    return c.but(ids=ids), sorting, ids.flatten().long()


def test_bias_of_moe_gemm2():
    c, sorting, experts = _dropping()
    (_, _, w2, *_), o = c.arguments()
    rows = len(sorting.sorted_ids)
    a = torch.zeros(rows, 16, dtype=torch.uint8), torch.zeros(-(-rows // 32) * 32, 8).byte()
    (bias,) = leaves(torch.randn(8, 64))
    out = rq.moe_gemm2(
        *a, w2, o["w2_scale"], sorting, tokens=20, bias=bias, out_dtype=torch.float32
    )
    grad = torch.randn(out.shape)
    expected = torch.zeros(8, 64).double()
    expected.index_add_(0, experts[experts >= 0], grad.double()[experts >= 0])
    out.backward(grad.masked_fill((experts < 0)[:, None], torch.nan))  # nobody reads those rows
    assert_close(bias.grad, expected, FLOAT32)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("fp4", [False, True])
def test_moe_reduce(fp4, weighted):
    c, sorting, experts = _dropping()
    dropped = (experts < 0)[:, None]
    values = torch.randn(60, 64)
    scales = None
    if fp4:
        values, scales = rq.quant(values)
    else:
        (values,) = leaves(values.masked_fill(dropped, torch.nan))  # as if never written
    weights, shared = leaves(c.weights if weighted else None, torch.randn(20, 64))
    out = rq.moe_reduce(values, weights, sorting, scales=scales, shared=shared)
    grad = torch.randn(20, 64)
    out.backward(grad)

    exact = rq.dequant(values, scales, dtype=torch.float32) if fp4 else values
    exact = exact.detach().masked_fill(dropped, 0)
    exact64, weights64, shared64 = leaves(exact, weights, shared, dtype=torch.float64)
    kept = exact64.masked_fill(dropped, 0).view(20, 3, 64)
    rows = kept * weights64[..., None] if weighted else kept
    (rows.sum(1) + shared64).backward(grad.double())
    assert_close(shared.grad, shared64.grad, FLOAT32, "shared")
    if weighted:
        assert_close(weights.grad, weights64.grad, FLOAT32, "topk_weights")
        assert not weights.grad.flatten()[experts < 0].any()
    if not fp4:
        assert_close(values.grad, exact64.grad, FLOAT32, "rows")
        assert not values.grad[experts < 0].any()


def test_moe_reduce_of_no_tokens():
    _, sorting, _ = _dropping(0)
    rows, weights = leaves(torch.zeros(0, 64), torch.zeros(0, 3))
    rq.moe_reduce(rows, weights, sorting).sum().backward()
    assert rows.grad.shape == (0, 64) and weights.grad.shape == (0, 3)


def test_fake_quant():
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    y = rq.fake_quant(x, scale_mode="even")
    assert torch.equal(y, rq.dequant(*rq.quant(x.detach(), scale_mode="even")))
    grad = torch.randn(3, 64).bfloat16()
    y.backward(grad)
    assert torch.equal(x.grad, grad)
    # What calibration does: the rotation that loses least.
    r = torch.eye(64, requires_grad=True)
    turned = rq.rotate(x.detach(), r)
    (rq.fake_quant(turned) * grad).sum().backward()
    assert_close(r.grad, x.detach().double().T @ grad.double(), BF16)


# --- the linear layer -----------------------------------------------------------------------------

LINEARS: dict[str, dict[str, Any]] = {
    "hadamard": {},
    "none": {"rotation": None},
    "none, prescaled": {"rotation": None, "prescale": torch.rand(128) + 0.5},
    "matrix, prescaled": {
        "rotation": torch.linalg.qr(torch.randn(32, 32))[0],
        "prescale": torch.rand(128) + 0.5,
    },
    "matrices": {"rotation": torch.linalg.qr(torch.randn(2, 64, 64))[0]},
}


def dequantised(layer: RotQuantLinear) -> Tensor:
    codes = rq.unshuffle_weight(layer.weight_codes)
    rows, groups = codes.shape[0], layer.in_features // 32
    scales = rq.unshuffle_scales(layer.weight_scales, rows=rows, groups=groups)
    return rq.dequant(codes, scales, dtype=torch.float32).double()[: layer.out_features]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LINEARS)
def test_linear(kind, dtype):
    layer = RotQuantLinear.from_linear(nn.Linear(128, 20), **LINEARS[kind])
    present = [t for t in (layer.rotation, layer.prescale, layer.bias) if t is not None]
    for t in present:
        t.requires_grad_()
    (x,) = leaves(torch.randn(2, 3, 128).to(dtype))
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(y, layer(x))
    grad = torch.randn(2, 3, 20).to(dtype)
    (x.sum() + (y * grad).sum()).backward()

    x64, r64, s64, b64 = leaves(x, layer.rotation, layer.prescale, layer.bias, dtype=torch.float64)
    turned = rotated(x64, r64, layer.recipe.rotation_size, s64)
    y64 = turned @ dequantised(layer).T + b64
    (x64.sum() + (y64 * grad.double()).sum()).backward()
    for name, mine, expected in (
        ("x", x, x64),
        ("rotation", layer.rotation, r64),
        ("prescale", layer.prescale, s64),
        ("bias", layer.bias, b64),
    ):
        if mine is not None:
            bound = BF16 if mine.dtype == torch.bfloat16 else FLOAT32
            assert_close(mine.grad, expected.grad, bound, name)


def test_linear_of_a_quantised_input():
    layer = RotQuantLinear.from_linear(nn.Linear(64, 20))
    layer.bias.requires_grad_()
    (x,) = leaves(torch.randn(3, 64))
    with pytest.raises(RuntimeError, match="^x: expected a tensor that does not require grad"):
        layer.quantize_input(x)
    layer(layer.quantize_input(x.detach())).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((20,), 3.0))
    assert not layer.bias.requires_grad_(False).requires_grad
    assert not layer(x.detach()).requires_grad


def test_linear_with_only_its_own_to_learn():
    options = LINEARS["matrix, prescaled"]
    x = torch.randn(3, 128)
    for name in ("rotation", "prescale", "bias"):
        layer = RotQuantLinear.from_linear(nn.Linear(128, 20), **options)
        getattr(layer, name).requires_grad_()
        layer(x).square().sum().backward()
        assert getattr(layer, name).grad.norm() > 0, name


def test_linear_can_be_differentiated_twice():
    layer = RotQuantLinear.from_linear(nn.Linear(64, 20))
    x, v = leaves(torch.randn(3, 64), torch.randn(3, 20))
    (d_x,) = torch.autograd.grad(layer(x), x, v, create_graph=True)
    u = torch.randn(3, 64)
    (d_x * u).sum().backward()
    turned = rotated(u.double(), None, 64)
    assert_close(v.grad, turned @ dequantised(layer).T, FLOAT32)


def test_linear_notices_weights_that_changed_before_the_backward_pass():
    layer = RotQuantLinear.from_linear(nn.Linear(64, 20))
    (x,) = leaves(torch.randn(3, 64))
    y = layer(x).sum()
    layer.load_state_dict(RotQuantLinear.from_linear(nn.Linear(64, 20)).state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# --- mixture of experts ---------------------------------------------------------------------------


def straight_through(c: Case) -> Tensor:
    """fused_moe with its activations unquantised, route by route, in float64."""
    o = c.options
    w1, w2 = (rq.dequant(*w, dtype=torch.float32).double() for w in (c.w1, c.w2))
    experts, shared = len(w1), o.get("num_shared_experts", 0)
    mask = o.get("expert_mask")
    here = list(range(experts - shared)) if mask is None else mask.nonzero().flatten().tolist()
    h = rotated(c.x, o.get("rotation"), o.get("rotation_size", 0), o.get("prescale"))
    rows = []
    for token, ids in enumerate(c.ids.tolist()):
        routes = [
            (here.index(e), w) for e, w in zip(ids, c.weights[token], strict=True) if e in here
        ]
        routes += [(e, o.get("shared_weight", 1.0)) for e in range(experts - shared, experts)]
        row = torch.zeros_like(c.x[0]) if o.get("shared") is None else o["shared"][token]
        for e, weight in routes:
            on_input = o.get("apply_weight_on_input")
            first = w1[e] @ h[token] * (weight if on_input else 1)
            first = first if o.get("w1_bias") is None else first + o["w1_bias"][e]
            between = activate(
                first, o.get("activation", "silu"), o.get("limit"), o.get("alpha", 1.702)
            )
            size = o.get("inter_rotation_size", 0)
            turned = rotated(between, o.get("inter_rotation"), size, o.get("inter_prescale"))
            out = w2[e] @ turned
            out = out if o.get("w2_bias") is None else out + o["w2_bias"][e]
            row = row + out * (1 if on_input else weight)
        rows.append(row)
    return torch.stack(rows)


MOES: dict[str, dict[str, Any]] = {
    "silu": {},
    "swiglu, limit, biases, hadamard twice": {
        "activation": "swiglu",
        "limit": 0.7,
        "bias": True,
        "rotation_size": 32,
        "inter_rotation_size": 16,
    },
    "gelu, weight on input, biases": {
        "activation": "gelu",
        "apply_weight_on_input": True,
        "bias": True,
        "limit": 1.0,
    },
    "gelu_tanh, interleaved, shared experts and output": {
        "activation": "gelu_tanh",
        "gate_mode": "interleave",
        "num_shared_experts": 2,
        "shared_weight": 0.5,
        "shared": torch.randn(9, 64),
    },
    "masked, a shared expert, weight on input": {
        "routed": 8,
        "expert_mask": torch.tensor([0, 1, 1, 0, 1, 0, 0, 1]),
        "experts": 5,
        "num_shared_experts": 1,
        "apply_weight_on_input": True,
    },
    "matrices, prescales, fp4 rows": {
        "rotation": torch.randn(2, 32, 32) / 4,
        "prescale": torch.rand(64) + 0.5,
        "inter_rotation": torch.randn(16, 16) / 3,
        "inter_prescale": torch.rand(96) + 0.5,
        "fp4_intermediate": True,
    },
}


def moe(kind: str, dtype: torch.dtype = torch.float32) -> Case:
    options = {"experts": 6, **MOES[kind]}
    options.setdefault("routed", options["experts"] - options.get("num_shared_experts", 0))
    c = case(9, 64, 96, topk=3, dtype=dtype, **options)
    c.ids[2] = torch.tensor([-1, 99, 1])  # dropped routes
    c.ids[3] = -1
    if "shared" in c.options:
        c.options["shared"] = c.options["shared"].to(dtype)
    return c


def floating(c: Case) -> dict[str, Tensor]:
    tensors = {"x": c.x, "weights": c.weights} | c.options
    return {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point()}


@pytest.mark.parametrize("kind", MOES)
def test_fused_moe(kind):
    c = moe(kind)
    c = c.but(**{name: leaves(t)[0] for name, t in floating(c).items()})
    exact = c.but(**{name: leaves(t, dtype=torch.float64)[0] for name, t in floating(c).items()})
    y = c.run(deterministic=True)
    with torch.no_grad():
        assert torch.equal(y, c.run(deterministic=True))
    grad = torch.randn(y.shape)
    y.backward(grad)
    straight_through(exact).backward(grad.double())
    for name, t in floating(c).items():
        assert_close(t.grad, floating(exact)[name].grad, FLOAT32, name)
    assert not c.weights.grad[3].any()


def test_fused_moe_in_bf16():
    c = moe("gelu_tanh, interleaved, shared experts and output", torch.bfloat16)
    c = c.but(**{name: leaves(t)[0] for name, t in floating(c).items()})
    exact = c.but(**{name: leaves(t, dtype=torch.float64)[0] for name, t in floating(c).items()})
    grad = torch.randn(9, 64).bfloat16()
    c.run().backward(grad)
    straight_through(exact).backward(grad.double())
    for name, t in floating(c).items():
        assert t.grad.dtype == t.dtype
        bound = BF16 if t.dtype == torch.bfloat16 else FLOAT32
        assert_close(t.grad, floating(exact)[name].grad, bound, name)


def test_fused_moe_of_no_tokens_and_of_no_routes():
    c = moe("silu")
    for tokens, ids in ((0, c.ids[:0]), (9, torch.full_like(c.ids, -1))):
        x, weights = leaves(c.x[:tokens], c.weights[:tokens])
        c.but(x=x, weights=weights, ids=ids).run().sum().backward()
        assert x.grad.shape == x.shape and not x.grad.any() and not weights.grad.any()


def test_a_token_with_a_nan_keeps_its_gradient_to_itself():
    c = moe("silu")
    clean, spoilt = leaves(c.x, c.x)
    with torch.no_grad():
        spoilt[1, 5] = torch.nan
    for x in (clean, spoilt):
        c.but(x=x).run()[torch.arange(9) != 1].sum().backward()
    others = torch.arange(9) != 1
    torch.testing.assert_close(spoilt.grad[others], clean.grad[others], rtol=1e-5, atol=1e-6)


def test_a_map_is_a_mask_in_any_order():
    """As `fused_moe` numbers the experts of this rank: -1 is another rank's, and so is past E."""
    ids = torch.tensor([[0, 3, -1], [2, 1, 99]], dtype=torch.int32)
    mask, by_order = torch.tensor([1, 0, 1, 1]), torch.tensor([0, -1, 1, 2])
    expected = torch.tensor([[0, 2, -1, 3], [1, -1, -1, 3]])
    local = rq.autograd._local_experts
    assert torch.equal(local(ids, 4, mask, None, 1), expected)
    assert torch.equal(local(ids, 4, None, by_order.int(), 1), expected)
    moved = torch.tensor([[2, 0, -1, 3], [-1, -1, -1, 3]])
    assert torch.equal(local(ids, 4, None, torch.tensor([2, -1, 3, 0]), 1), moved)


def test_scales_in_their_other_shape_and_dtype():
    c = moe("silu")
    (_, w1, w2, weights, ids), o = c.arguments()
    e8m0 = {name: o[name].view(torch.float8_e8m0fnu) for name in ("w1_scale", "w2_scale")}
    flat = {"w1_scale": o["w1_scale"][: 6 * 192].view(6, 192, 8)}
    grads = []
    for scales in ({}, e8m0, flat):
        (x,) = leaves(c.x)
        codes = [w if scales is flat else w.view(torch.float4_e2m1fn_x2) for w in (w1, w2)]
        rq.fused_moe(x, *codes, weights, ids, **o | scales).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_moe_layer():
    layer = RotQuantMoE.from_weights(torch.randn(4, 64, 64) / 8, torch.randn(4, 64, 32) / 6)
    x, logits = leaves(torch.randn(2, 5, 64), torch.randn(2, 5, 4))
    weights, ids = rq.route(logits, 2)
    y = layer(x, weights, ids)
    y.square().sum().backward()
    assert x.grad.norm() > 0 and logits.grad.norm() > 0


def test_fused_moe_has_no_second_derivative():
    c = moe("silu")
    (x,) = leaves(c.x)
    y = c.but(x=x).run().square().sum()
    with pytest.raises(RuntimeError, match="^fused_moe: expected no second derivative"):
        torch.autograd.grad(y, x, create_graph=True)


# --- as torch.compile sees them -------------------------------------------------------------------


class Model(nn.Module):
    """A trainable rotation and router around layers that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = RotQuantLinear.from_linear(nn.Linear(64, 64))
        self.router = nn.Linear(64, 4)
        self.experts = RotQuantMoE.from_weights(
            torch.randn(4, 64, 64) / 8, torch.randn(4, 64, 32) / 6, rotation_size=32
        )
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(32, 32))[0])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(functional.relu(x))
        x = x + self.experts(x, *rq.route(self.router(x), 2))
        return rq.rotate(x, self.rotation)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_a_training_step(backend):
    torch._dynamo.reset()
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (5, 8):
        grads = []
        for f in (model, compiled):
            model.zero_grad()
            (x,) = leaves(torch.linspace(-2, 2, tokens * 64).view(tokens, 64))
            f(x).square().sum().backward()
            grads.append([x.grad, *(p.grad for p in model.parameters())])
        for mine, expected in zip(*grads, strict=True):
            assert_close(mine, expected.double(), FLOAT32)
        with torch.no_grad():
            assert not compiled(x).requires_grad


# HF's models are exported as they are: embeddings that require grad, and grad mode on.
@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_model_that_trains(strict):
    model = nn.Sequential(nn.Linear(64, 64), Model())
    x = torch.randn(5, 64)
    program = torch.export.export(model, (x,), strict=strict).run_decompositions()
    with torch.no_grad():
        assert torch.equal(program.module()(x), model(x))
    assert torch.equal(program.module()(x), model(x))


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_opcheck_with_gradients(op):
    positional, options = _differentiable_calls()[op]
    names = [a.name for a in getattr(OPS, op).default._schema.arguments]

    def leaf(name: str, value: Any) -> Any:
        return leaves(value)[0] if differentiable(op, name) else value

    arguments = tuple(leaf(name, value) for name, value in zip(names, positional, strict=False))
    options = {name: leaf(name, value) for name, value in options.items()}
    torch.library.opcheck(getattr(OPS, op).default, arguments, options)


def test_opcheck_of_the_backward_op():
    c = moe("masked, a shared expert, weight on input")
    tensors, options = c.arguments()
    needs = ["x", "topk_weights"]
    arguments = (torch.randn(9, 64), needs, *tensors)
    torch.library.opcheck(OPS._fused_moe_backward.default, arguments, options)
