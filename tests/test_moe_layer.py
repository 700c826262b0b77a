# SPDX-License-Identifier: MIT
"""RotQuantMoE: numbers, where the rotation helps, checkpoints, saving and moving."""

from __future__ import annotations

import copy
import io
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_cases import activate
from torch import Tensor

import rotquant_hip as rq
from rotquant_hip import RotQuantMoE, route

EXPERTS, HIDDEN, INTER, TOKENS = 4, 128, 96, 40


def orthogonal(*shape: int) -> Tensor:
    return torch.linalg.qr(torch.randn(shape, generator=torch.Generator().manual_seed(1)))[0]


def weights(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(EXPERTS, 2 * INTER, HIDDEN, generator=generator) * HIDDEN**-0.5
    return w1, torch.randn(EXPERTS, HIDDEN, INTER, generator=generator) * INTER**-0.5


def routing(experts: int = EXPERTS, topk: int = 2) -> tuple[Tensor, Tensor]:
    logits = torch.randn(TOKENS, experts, generator=torch.Generator().manual_seed(2))
    return route(logits, topk)


def exact(x: Tensor, w1: Tensor, w2: Tensor, routed: tuple[Tensor, Tensor], **options) -> Tensor:
    """The layer in float32, nothing quantised."""
    out = torch.zeros_like(x)
    act = {"activation": "silu", "limit": None, "alpha": 1.702} | options
    for topk_weights, ids in zip(*(t.T for t in routed), strict=True):
        first = torch.einsum("tk,tnk->tn", x, w1[ids.long()])
        rows = torch.einsum("tk,tnk->tn", activate(first, **act), w2[ids.long()])
        out += topk_weights[:, None] * rows
    return out


def error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected).norm() / expected.norm()).item()


KINDS: dict[str, dict[str, Any]] = {
    "hadamard": {},
    "none": {"rotation": None},
    "hadamard 32, prescaled": {"rotation_size": 32, "prescale": torch.linspace(0.5, 2, HIDDEN)},
    "matrix": {"rotation": orthogonal(64, 64)},
    "matrices, and one between": {
        "rotation": orthogonal(4, 32, 32),
        "inter_rotation": orthogonal(16, 16),
    },
    "hadamard twice": {
        "inter_rotation": "hadamard",
        "inter_rotation_size": 32,
        "inter_prescale": torch.linspace(0.5, 2, INTER),
    },
    "interleaved": {"gate_mode": "interleave"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, device: torch.device | str = "cpu", **options: Any) -> RotQuantMoE:
    arguments = KINDS[kind] | options
    for name, value in arguments.items():
        arguments[name] = value.to(device) if isinstance(value, Tensor) else value
    return RotQuantMoE.from_weights(*(w.to(device) for w in weights()), **arguments)


def empty_like(kind: str, **options: Any) -> RotQuantMoE:
    """What the constructor makes for `made(kind)`."""
    layer = made(kind)
    return RotQuantMoE(
        EXPERTS,
        HIDDEN,
        INTER,
        rotation=layer.rotation_kind,
        rotation_size=layer.rotation_size,
        prescale=layer.prescale is not None,
        inter_rotation=layer.inter_rotation_kind,
        inter_rotation_size=layer.inter_rotation_size,
        inter_prescale=layer.inter_prescale is not None,
        gate_mode=layer.gate_mode,
        **options,
    )


# --- numbers --------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_is_the_layer_it_was_made_from(device, kind, dtype):
    x, routed = torch.randn(TOKENS, HIDDEN), routing()
    layer = made(kind, device)
    y = layer(x.to(device, dtype), *(t.to(device) for t in routed))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    # Four operands that lose 11.5 % each; a rotation or a layout forgotten would be 100 %.
    assert 0 < error(y.cpu(), exact(x, *weights(), routed)) < 0.32


def in_mxfp4(t: Tensor) -> Tensor:
    """Values that another quantisation leaves alone, so that nothing is lost there."""
    return rq.dequant(*rq.quant(t), dtype=torch.float32)


# The point of it all: R at the input, R4 between the GEMMs.
@pytest.mark.parametrize("name", ["rotation", "inter_rotation"])
def test_rotation_is_better_with_outliers(device, name):
    (w1, w2), routed, x = weights(), routing(), torch.randn(TOKENS, HIDDEN)
    if name == "rotation":
        x[:, ::32] *= 8
    else:
        w1[:, INTER::32] *= 4
        x, w1 = in_mxfp4(x), in_mxfp4(w1)
    expected = exact(x, w1, w2, routed)
    errors = {}
    for kind in ("none", "hadamard"):
        options = {"rotation": "none"} | {name: kind, f"{name}_size": 32}
        layer = RotQuantMoE.from_weights(
            w1.to(device), w2.to(device), weight_scale_mode="round_up", **options
        )
        errors[kind] = error(layer(x.to(device), *(t.to(device) for t in routed)).cpu(), expected)
    assert errors["hadamard"] < 0.85 * errors["none"], errors


def test_gpt_oss(device):
    """Gate and up rows take turns, both GEMMs have a bias, swiglu has a limit."""
    w1, w2 = weights()
    b1, b2 = torch.randn(EXPERTS, 2 * INTER), torch.randn(EXPERTS, HIDDEN)
    taking_turns = [torch.stack(t.chunk(2, 1), 2).flatten(1, 2) for t in (w1, b1)]
    options = {"activation": "swiglu", "limit": 7.0}
    routed, x = routing(), torch.randn(TOKENS, HIDDEN)
    there = [t.to(device) for t in (x, *routed)]
    ours = [
        RotQuantMoE.from_weights(
            first.to(device),
            w2.to(device),
            w1_bias=bias.to(device),
            w2_bias=b2.to(device),
            gate_rows=rows,
            gate_mode=mode,
            **options,
        )(*there)
        for first, bias, rows, mode in (
            (w1, b1, "separated", "separated"),
            (*taking_turns, "alternating", "separated"),
            (*taking_turns, "alternating", "interleave"),
        )
    ]
    assert torch.equal(ours[0], ours[1]) and torch.equal(ours[0], ours[2])
    without = RotQuantMoE.from_weights(w1.to(device), w2.to(device), **options)(*there)
    assert not torch.allclose(without, ours[0], atol=0.1)


def test_shared_experts(device):
    """The last expert for every token, or its output handed in: the same."""
    w1, w2 = (w.to(device) for w in weights())
    x = torch.randn(TOKENS, HIDDEN, device=device)
    topk_weights, ids = (t.to(device) for t in routing(EXPERTS - 1))
    whole = RotQuantMoE.from_weights(w1, w2, num_shared_experts=1, shared_weight=0.5)
    routed_only = RotQuantMoE.from_weights(w1[:-1], w2[:-1])
    alone = RotQuantMoE.from_weights(w1[-1:], w2[-1:])
    always = torch.zeros(TOKENS, 1, dtype=torch.int32, device=device)
    dense = alone(x, torch.full((TOKENS, 1), 0.5, device=device), always)
    y = whole(x, topk_weights, ids)
    torch.testing.assert_close(y, routed_only(x, topk_weights, ids) + dense, rtol=1e-5, atol=1e-5)
    y_added = routed_only(x, topk_weights, ids, shared=dense)
    torch.testing.assert_close(y, y_added, rtol=1e-5, atol=1e-5)


def test_expert_parallel(device):
    x, routed = torch.randn(TOKENS, HIDDEN).to(device), [t.to(device) for t in routing()]
    w1, w2 = (w.to(device) for w in weights())
    total = torch.zeros_like(x)
    for mask in (torch.tensor([1, 0, 0, 1]), torch.tensor([0, 1, 1, 0])):
        local = mask.bool().to(device)
        rank = RotQuantMoE.from_weights(w1[local], w2[local], expert_mask=mask.to(device))
        total += rank(x, *routed)
    whole = RotQuantMoE.from_weights(w1, w2)(x, *routed)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="expert_mask: expected 4 ones, .*, got 2"):
        RotQuantMoE.from_weights(w1, w2, expert_mask=mask)


def test_leading_dimensions(device):
    layer = made("hadamard", device)
    x = torch.randn(TOKENS, HIDDEN, device=device)
    routed = [t.to(device) for t in routing()]
    y = layer(x, *routed)
    split = layer(x.view(5, 8, HIDDEN), *(t.view(5, 8, -1) for t in routed))
    assert torch.equal(split.view(TOKENS, HIDDEN), y)
    assert layer(x[:0], *(t[:0] for t in routed)).shape == (0, HIDDEN)
    with pytest.raises(ValueError, match="topk_ids: expected the leading dimensions of x"):  # B39
        layer(x, routed[0], routed[1].flatten())


# --- checkpoints ----------------------------------------------------------------------------------


@kinds
def test_from_quantized(device, kind):
    """A checkpoint that was rotated and quantised elsewhere, natural order: the same layer."""
    layer = made(kind, device)
    mode = layer.gate_mode
    arguments: dict[str, Any] = {}
    for name, k, gate_mode in (("w1", HIDDEN, mode), ("w2", INTER, "separated")):
        codes = rq.unshuffle_weight(getattr(layer, name), gate_mode=gate_mode)
        rows = codes.shape[1] * (1 if gate_mode == "interleave" else EXPERTS)
        scales = rq.unshuffle_scales(
            getattr(layer, f"{name}_scale"), rows=rows, groups=k // 32, gate_mode=gate_mode
        )
        arguments |= {name: codes, f"{name}_scale": scales.view(EXPERTS, codes.shape[1], k // 32)}
    options = {
        "input_rotation": layer.rotation if layer.rotation is not None else layer.rotation_kind,
        "rotation_size": layer.rotation_size,
        "input_prescale": layer.prescale,
        "inter_rotation": layer.inter_rotation
        if layer.inter_rotation is not None
        else layer.inter_rotation_kind,
        "inter_rotation_size": layer.inter_rotation_size,
        "inter_prescale": layer.inter_prescale,
        "gate_mode": mode,
    }
    again = RotQuantMoE.from_quantized(**arguments, **options)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    # B19: scales that are shuffled already, into a layer that would shuffle them again.
    arguments["w2_scale"] = layer.w2_scale
    with pytest.raises(ValueError, match="w2_scale: expected .* in natural order"):
        RotQuantMoE.from_quantized(**arguments, **options)


@kinds
def test_state_dict(kind):
    layer = made(kind)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = empty_like(kind)
    other.load_state_dict(torch.load(file))
    x, routed = torch.randn(TOKENS, HIDDEN), routing()
    assert torch.equal(other(x, *routed), layer(x, *routed))


# B19: one layout written, another read.
@pytest.mark.parametrize(
    "options", [{"limit": 7.0}, {"activation": "gelu"}, {"num_shared_experts": 1}]
)
def test_b19_a_state_dict_is_refused_by_a_layer_that_reads_it_differently(options):
    with pytest.raises(RuntimeError, match="_extra_state: expected"):
        empty_like("hadamard", **options).load_state_dict(made("hadamard").state_dict())
    with pytest.raises(RuntimeError, match="_extra_state: expected"):
        empty_like("interleaved").load_state_dict(made("hadamard").state_dict(), strict=False)


def test_moving(device):
    layer = made("matrices, and one between", inter_prescale=torch.ones(INTER))
    x, routed = torch.randn(TOKENS, HIDDEN), routing()
    y = layer(x, *routed)
    moved = copy.deepcopy(layer).to(device).half()
    assert {n: t.dtype for n, t in moved.named_buffers()} == {
        n: t.dtype for n, t in layer.named_buffers()
    }
    there = moved(x.to(device), *(t.to(device) for t in routed))
    assert error(there.cpu(), y) < 1e-2
    assert "experts=4, hidden=128, inter=96" in repr(layer)
    assert "inter_rotation=matrix 16" in repr(layer)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inter": 100}, "inter: expected a multiple of 32, at least 32, got 100"),  # B11
        ({"hidden": 0}, "hidden: expected a multiple of 32, at least 32, got 0"),
        ({"rotation_size": 256}, r"rotation_size: expected one of \[16, 32, 64, 128\] for 128"),
        ({"inter_rotation": "hadamard"}, r"inter_rotation_size: expected one of \[16, 32\] for 96"),
        ({"inter_prescale": True}, "inter_prescale: expected none without a rotation"),
        ({"activation": "swiglu"}, "limit: expected a number for swiglu"),
        ({"scale_mode": "mse"}, "scale_mode: expected one of"),
        ({"num_shared_experts": 5}, "num_shared_experts: expected an integer, 0 to 4, got 5"),
    ],
)
def test_refused(options, message):
    sizes = {"hidden": HIDDEN, "inter": INTER} | options
    with pytest.raises(ValueError, match=message):
        RotQuantMoE(EXPERTS, **sizes)


def test_refused_weights():
    w1, w2 = weights()
    for arguments, message in (
        (((w1[:, :INTER], w2), {}), r"w1: expected 2 I = 192 rows"),
        (((w1, w2[:, 1:]), {}), r"w2: expected \[4, 128, I\]"),
        (((w1, w2), {"w1_bias": torch.zeros(EXPERTS, 2 * INTER)}), "expected both or none"),
        (((w1, w2), {"rotation": torch.ones(32, 32)}), "expected an orthogonal matrix"),
    ):
        with pytest.raises(ValueError, match=message):
            RotQuantMoE.from_weights(*arguments[0], **arguments[1])


# --- routing --------------------------------------------------------------------------------------


SCORINGS = ("softmax", "sigmoid")


@pytest.mark.parametrize("scoring", SCORINGS)
def test_route(scoring):
    logits = torch.randn(5, 7, 16, dtype=torch.bfloat16)
    topk_weights, ids = route(logits, 3, scoring=scoring)
    assert topk_weights.shape == ids.shape == (5, 7, 3)
    assert (topk_weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    torch.testing.assert_close(topk_weights.sum(-1), torch.ones(5, 7))
    assert torch.equal(ids.long(), logits.argsort(dim=-1, descending=True, stable=True)[..., :3])
    scores = getattr(logits.float(), scoring)(*((-1,) if scoring == "softmax" else ()))
    raw, _ = route(logits, 3, renormalize=False, scoring=scoring)
    torch.testing.assert_close(raw, scores.gather(-1, ids.long()))


def exact_weights(chosen: list[float], others: list[float], scoring: str, renormalize: bool):
    """Of finite logits, in 50 digits; chosen ones descend. What underflows here is 0 in float32."""
    best, rest = ([Decimal(v) for v in values] for values in (chosen, others))
    if scoring == "softmax":
        terms, more = ([(v - best[0]).exp() for v in values] for values in (best, rest))
        total = sum(terms) + (0 if renormalize else sum(more))
        return [t / total for t in terms]
    shift = min(best[0], Decimal(0)) if renormalize else Decimal(0)  # cancels in the quotient

    def sigmoid(v: Decimal) -> Decimal:  # times exp(-shift)
        return (v - shift).exp() / (1 + v.exp()) if v < 0 else 1 / (1 + (-v).exp())

    terms = [sigmoid(v) for v in best]
    return [t / sum(terms) for t in terms] if renormalize else terms


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SATURATED = st.integers(14, 40).map(float)  # sigmoid is 1 in float32 from 17 on
LOGITS = st.one_of(FLOATS, SATURATED, SATURATED.map(lambda v: -4 * v), st.floats(-9, 9, width=32))


# sigmoid(-100) underflowed and gave 0 / 0; sigmoid(20) and sigmoid(30) were the same 1.
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
@given(data=st.data())
def test_route_decides_as_exact_arithmetic_does(scoring, renormalize, data):
    logits = data.draw(st.lists(LOGITS, min_size=1, max_size=12))
    top_k = data.draw(st.integers(1, len(logits)))
    weights, ids = route(torch.tensor([logits]), top_k, renormalize, scoring)
    order = sorted(range(len(logits)), key=lambda e: (-logits[e], e))
    assert ids.tolist() == [order[:top_k]]
    with localcontext() as context:
        context.prec = 50
        context.Emin = -(10**12)
        expected = exact_weights(
            [logits[e] for e in order[:top_k]],
            [logits[e] for e in order[top_k:]],
            scoring,
            renormalize,
        )
    expected = torch.tensor([[float(w) for w in expected]], dtype=torch.float64)
    torch.testing.assert_close(weights.double(), expected, rtol=2**-23, atol=2**-149)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("logits", "softmax", "normalised_sigmoid"),
    [
        ([-INF, 2, -INF, 0.5], [0.8175745, 0.1824255], [0.5859260, 0.4140740]),
        ([-INF, 2, -INF, -INF], [1, 0], [1, 0]),
        ([-INF] * 4, [0, 0], [0, 0]),
        ([1, INF, 2, 3], [1, 0], [0.5121444, 0.4878556]),
        ([1, INF, 2, INF], [0.5, 0.5], [0.5, 0.5]),
        ([1, NAN, 2, -INF], [NAN, NAN], [NAN, NAN]),
        ([1, NAN, INF, NAN], [NAN, NAN], [NAN, NAN]),
    ],
)
def test_route_of_logits_that_are_not_finite(logits, softmax, normalised_sigmoid):
    for scoring, expected in (("softmax", softmax), ("sigmoid", normalised_sigmoid)):
        weights, ids = route(torch.tensor(logits), 2, scoring=scoring)
        torch.testing.assert_close(weights, torch.tensor(expected).float(), equal_nan=True)
        assert len(set(ids.tolist())) == 2 and all(0 <= e < 4 for e in ids.tolist())
        raw, same = route(torch.tensor(logits), 2, renormalize=False, scoring=scoring)
        assert torch.equal(same, ids) and raw.isnan().tolist() == weights.isnan().tolist()
    # All four +Inf: each has a quarter, but of the two chosen each a half.
    assert route(torch.full((4,), INF), 2, renormalize=False)[0].tolist() == [0.25, 0.25]


def test_route_breaks_ties_by_number():
    logits = torch.zeros(3, 300)
    logits[1, 7::3] = 1
    logits[2] = -0.0
    logits[2, 200:] = 0.0
    for top_k in (1, 8):
        ids = route(logits, top_k)[1]
        assert torch.equal(ids[0], torch.arange(top_k, dtype=torch.int32))
        assert torch.equal(ids[1], 7 + 3 * torch.arange(top_k, dtype=torch.int32))
        assert torch.equal(ids[2], ids[0])


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_route_has_a_gradient(scoring, renormalize):
    logits = torch.tensor([[3.0, 3.0, -1.0, 0.5]], requires_grad=True)  # equals at the top, too
    grad = torch.tensor([[1.0, -2.0, 0.5]])
    route(logits, 3, renormalize, scoring)[0].backward(grad)
    exact = logits.detach().double().requires_grad_()
    scores = exact.softmax(-1) if scoring == "softmax" else exact.sigmoid()
    chosen = scores[:, [0, 1, 3]]
    (chosen / chosen.sum() if renormalize else chosen).backward(grad.double())
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-6, atol=1e-7)


def test_refused_routes():
    logits = torch.randn(3, 8)
    for arguments, message in (
        ((logits, 0), "top_k: expected 1 to 8, the number of experts, got 0"),
        ((logits, 9), "top_k: expected 1 to 8, the number of experts, got 9"),
        ((logits[0, 0], 1), r"router_logits: expected \[..., experts\] .*, got \(\)"),
        ((logits.int(), 1), "router_logits: expected .* floating-point dtype, got .* torch.int32"),
        ((logits, 1, True, "tanh"), r"scoring: expected one of \('softmax', 'sigmoid'\)"),
    ):
        with pytest.raises(ValueError, match=message):
            route(*arguments)


def test_route_compiles():
    torch._dynamo.reset()
    logits = torch.randn(5, 16)
    for scoring in SCORINGS:
        compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
        for actual, expected in zip(
            compiled(logits, 3, scoring=scoring), route(logits, 3, scoring=scoring), strict=True
        ):
            assert torch.equal(actual, expected)
