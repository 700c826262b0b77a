# SPDX-License-Identifier: MIT
"""RotQuantLinear: numbers, saving and moving, sharing of a quantised input, compilation."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from strategies import DTYPES
from tensors import TORCH_DTYPES
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

import rotquant_hip as rq
from rotquant_hip import RotQuantLinear

K, N = 256, 100
dtypes = pytest.mark.parametrize("dtype", [TORCH_DTYPES[name] for name in DTYPES], ids=str)


def orthogonal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.linalg.qr(torch.randn(shape, generator=generator))[0]


def linear(n: int = N, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(K, n, bias).requires_grad_(False)


PRESCALE = torch.linspace(0.5, 2, K)
KINDS: dict[str, dict[str, Any]] = {
    "hadamard": {},
    "hadamard 32 prescaled": {"rotation_size": 32, "prescale": PRESCALE},
    "none": {"rotation": None},
    "none prescaled": {"rotation": "none", "prescale": PRESCALE},
    "matrix": {"rotation": orthogonal(64, 64)},
    "matrix prescaled": {"rotation": orthogonal(16, 16), "prescale": PRESCALE},
    "matrices": {"rotation": orthogonal(2, 128, 128)},
}
kinds = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, device: torch.device | str = "cpu", seed: int = 0, **options) -> RotQuantLinear:
    arguments = KINDS[kind] | options
    for name, value in arguments.items():
        arguments[name] = value.to(device) if isinstance(value, Tensor) else value
    return RotQuantLinear.from_linear(linear(seed=seed).to(device), **arguments)


def empty_like(layer: RotQuantLinear, device: str | None = None) -> RotQuantLinear:
    kind, size, prescaled, scale_mode, _ = layer.recipe
    return RotQuantLinear(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        rotation=kind,
        rotation_size=size or 64,
        prescale=prescaled,
        scale_mode=scale_mode,
        device=device,
    )


class Count(TorchDispatchMode):
    """How often each of our ops runs."""

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith("rotquant_hip::"):
            name = name.removeprefix("rotquant_hip::")
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


# --- numbers ----------------------------------------------------------------------------------


@kinds
@dtypes
def test_is_the_product_of_the_quantised_operands(device, kind, dtype):
    original = linear().to(device)
    layer = made(kind, device)
    x = torch.randn(2, 3, K, dtype=dtype, device=device)
    y = layer(x)
    assert (y.dtype, y.shape) == (dtype, (2, 3, N))

    # By hand, in float64; what is quantised is the op's business.
    quantised = layer.quantize_input(x)
    a = rq.dequant(
        quantised.codes.flatten(0, 1), quantised.scales, dtype=torch.float32, shuffled_scales=True
    )
    rows = layer.weight_codes.shape[0]
    w = rq.dequant(
        rq.unshuffle_weight(layer.weight_codes),
        rq.unshuffle_scales(layer.weight_scales, rows=rows, groups=K // 32),
        dtype=torch.float32,
    )
    by_hand = a.double() @ w[:N].double().T + original.bias
    torch.testing.assert_close(y.flatten(0, 1).double(), by_hand, rtol=2**-8, atol=1e-5)
    assert not w[N:].any()

    exact = original(x.float())
    assert 0 < (y.float() - exact).norm() / exact.norm() < 0.25  # two errors of 12 %


@pytest.mark.parametrize("kind", ["hadamard", "none"])
def test_without_rounding_the_rotation_cancels(kind):
    """MXFP4 holds what goes in, rotated or not, so that only the rotation could change it."""
    base = nn.Linear(K, 16, bias=False).requires_grad_(False)
    size = 64
    block = torch.zeros(size)
    block[5] = 8.0  # rotated: all +-1
    base.weight.copy_(block.repeat(16, K // size))
    x = block.repeat(3, K // size)
    assert torch.equal(RotQuantLinear.from_linear(base, **KINDS[kind])(x), base(x))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_any_width(device, n, bias):
    original = linear(n, bias).to(device)
    layer = RotQuantLinear.from_linear(original)
    assert layer.weight_codes.shape == (-(-n // 16) * 16, K // 2)
    x = torch.randn(5, K, device=device)
    exact = original(x)
    assert layer(x).shape == (5, n)
    assert (layer(x) - exact).norm() / exact.norm() < 0.3
    assert layer(x[:0]).shape == (0, n)
    assert torch.equal(layer(x[0]), layer(x)[0])


def test_weights_of_any_dtype():
    original = linear()
    in_bf16 = copy.deepcopy(original).bfloat16()
    rounded = copy.deepcopy(in_bf16).float()
    x = torch.randn(4, K)
    of_bf16, of_float = (RotQuantLinear.from_linear(layer)(x) for layer in (in_bf16, rounded))
    assert torch.equal(of_bf16, of_float)


def test_scale_modes():
    x, original = torch.randn(64, K), linear()
    for mode in rq.SCALE_MODES:
        layer = RotQuantLinear.from_linear(original, scale_mode=mode, weight_scale_mode="floor")
        codes, scales = rq.rotate_quant(original.weight, rotation_size=64, scale_mode="floor")
        assert torch.equal(rq.unshuffle_scales(layer.weight_scales, rows=N, groups=8), scales)
        assert torch.equal(rq.unshuffle_weight(layer.weight_codes)[:N], codes)
        assert torch.equal(layer.quantize_input(x).codes, rq.rotate_quant(x, scale_mode=mode)[0])


def test_prescale_folds_into_the_weight():
    """With outlier channels, dividing them out of x and into W is better than not."""
    torch.manual_seed(0)
    original = linear()
    x = torch.randn(64, K)
    loud = torch.ones(K)
    loud[::50] = 100
    exact = original(x * loud)
    errors = [
        (RotQuantLinear.from_linear(original, prescale=s)(x * loud) - exact).norm()
        for s in (None, 1 / loud.sqrt())
    ]
    assert errors[1] < errors[0]


# --- from_quantized -----------------------------------------------------------------------------


def sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


@pytest.mark.parametrize("as_torch_dtypes", [False, True])
def test_from_quantized_hadamard(as_torch_dtypes):
    original, x = linear(), torch.randn(5, K)
    codes, scales = rq.rotate_quant(original.weight, rotation_size=64, scale_mode="mse")
    expected = RotQuantLinear.from_linear(original)(x)
    if as_torch_dtypes:
        codes, scales = codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)
    signs = sylvester(64)
    for rotation in ("hadamard", signs.to(torch.int8), signs > 0):
        layer = RotQuantLinear.from_quantized(
            codes, scales, bias=original.bias, input_rotation=rotation
        )
        assert layer.recipe.rotation == "hadamard" and layer.rotation is None
        assert torch.equal(layer(x), expected)


def test_from_quantized_other_signs_are_a_matrix():
    signs = sylvester(32).to(torch.int8)
    signs[:, 3] *= -1  # no longer symmetric
    original, x = linear(bias=False), torch.randn(5, K)
    matrix = signs.float() / 32**0.5
    w = (original.weight.unflatten(-1, (-1, 32)) @ matrix).flatten(-2)
    layer = RotQuantLinear.from_quantized(*rq.quant(w, scale_mode="mse"), input_rotation=signs)
    assert layer.recipe[:2] == ("matrix", 32)
    rotated = RotQuantLinear.from_linear(original, rotation=matrix)
    error = (layer(x) - original(x)).norm() / original(x).norm()
    assert error < 0.25 and (layer(x) - rotated(x)).norm() / original(x).norm() < 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_from_quantized_learned_with_prescale(dtype):
    original, x = linear(), torch.randn(5, K)
    matrix, prescale = orthogonal(64, 64).to(dtype), PRESCALE.half()
    w = original.weight / prescale.float()
    w = (w.unflatten(-1, (-1, 64)) @ matrix.float()).flatten(-2)
    layer = RotQuantLinear.from_quantized(
        *rq.quant(w),
        bias=original.bias.half(),
        input_rotation=matrix,
        input_prescale=prescale,
        scale_mode="even",
    )
    assert (layer(x) - original(x)).norm() / original(x).norm() < 0.25


def test_from_quantized_without_rotation():
    original, x = linear(), torch.randn(5, K)
    layer = RotQuantLinear.from_quantized(
        *rq.quant(original.weight, scale_mode="mse"), bias=original.bias
    )
    assert torch.equal(layer(x), RotQuantLinear.from_linear(original, rotation=None)(x))


# --- selective rotation and errors --------------------------------------------------------------


def test_rotation_is_chosen_layer_by_layer():
    x, original = torch.randn(5, K), linear()
    on = RotQuantLinear.from_linear(original, rotation="hadamard")
    off = RotQuantLinear.from_linear(original, rotation="none")
    with Count() as count:
        on(x), off(x)
    assert count.calls == {"rotate_quant": 1, "quant": 1, "gemm_a4w4": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotation": "learned"}, "rotation: expected one of"),
        ({"rotation_size": 48}, "rotation_size: expected one of"),
        ({"rotation": torch.eye(48)}, "rotation_size: expected one of"),
        ({"rotation": torch.eye(64)[:32]}, "rotation: expected .RS, RS. or"),
        ({"rotation": torch.eye(64).expand(3, 64, 64)}, "rotation: expected .RS, RS. or"),
        ({"rotation": torch.ones(64, 64)}, "rotation: expected an orthogonal matrix"),
        ({"prescale": torch.ones(3)}, "prescale: expected .256., got"),
        ({"scale_mode": "up"}, "scale_mode: expected one of"),
        ({"weight_scale_mode": "up"}, "weight_scale_mode: expected one of"),
    ],
)
def test_from_linear_errors(options, message):
    with pytest.raises(ValueError, match=message):
        RotQuantLinear.from_linear(linear(), **options)


def test_size_errors():
    with pytest.raises(ValueError, match="in_features: expected a multiple of 32, .*, got 40"):
        RotQuantLinear(40, 8)
    with pytest.raises(
        ValueError, match=r"divisor of in_features 96 \(one of \[16, 32\]\), got 64"
    ):
        RotQuantLinear(96, 8)
    codes, scales = rq.quant(torch.randn(8, 64))
    with pytest.raises(ValueError, match=r"codes: expected shape \[N, K / 2\]"):
        RotQuantLinear.from_quantized(codes[:, :20], scales)
    with pytest.raises(ValueError, match=r"scales: expected \[8, 2\] in natural order"):
        RotQuantLinear.from_quantized(codes, rq.shuffle_scales(scales))
    with pytest.raises(ValueError, match=r"bias: expected \[8\]"):
        RotQuantLinear.from_quantized(codes, scales, bias=torch.ones(7))


# --- one input for several layers ---------------------------------------------------------------


@kinds
def test_a_quantised_input_serves_several_layers(kind):
    q, k, v = (made(kind, seed=seed) for seed in range(3))
    x = torch.randn(2, 7, K, dtype=torch.bfloat16)
    with Count() as count:
        quantised = q.quantize_input(x)
        outputs = [layer(quantised) for layer in (q, k, v)]
    assert sum(count.calls.values()) == 4
    for layer, y in zip((q, k, v), outputs, strict=True):
        assert torch.equal(y, layer(x))


def test_a_quantised_input_for_another_rotation_is_refused():
    x = torch.randn(3, K)
    quantised = made("hadamard").quantize_input(x)
    for other in ("hadamard 32 prescaled", "none", "matrix"):
        with pytest.raises(ValueError, match="x: expected an input quantised as"):
            made(other)(quantised)


def test_a_quantised_input_for_other_values_is_refused():
    x = torch.randn(3, K)
    layer, turned = made("matrix"), made("matrix", rotation=orthogonal(64, 64).flip(0))
    scaled = made("hadamard 32 prescaled", prescale=PRESCALE * 2)
    for one, other in ((layer, turned), (scaled, made("hadamard 32 prescaled"))):
        with pytest.raises(ValueError, match="x: expected an input quantised as"):
            other(one.quantize_input(x))
    # What the layers hold counts, not how it came there.
    turned.load_state_dict(layer.state_dict())
    assert torch.equal(turned(layer.quantize_input(x)), layer(x))
    turned.load_state_dict(made("matrix", rotation=orthogonal(64, 64).flip(0)).state_dict())
    with pytest.raises(ValueError, match="x: expected an input quantised as"):
        turned(layer.quantize_input(x))
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.half()):
        assert torch.equal(again(layer.quantize_input(x)), layer(x))
    before = layer.quantize_input(x)
    layer.rotation.mul_(-1)
    with pytest.raises(ValueError, match="x: expected an input quantised as"):
        copy.deepcopy(turned)(layer.quantize_input(x))
    assert layer.quantize_input(x).recipe != before.recipe


# --- saving and moving --------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("device_of_new", [None, "meta"])
def test_state_dict_round_trip(kind, device_of_new):
    layer, x = made(kind), torch.randn(5, K)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(value, Tensor) for value in state.values())  # safetensors takes no other
    new = empty_like(layer, device_of_new)
    new.load_state_dict(state, strict=True, assign=device_of_new == "meta")
    assert torch.equal(new(x), layer(x))
    assert new.state_dict().keys() == state.keys()


def test_state_dict_inside_a_model():
    def model(make) -> nn.Module:
        return nn.Sequential(make("hadamard"), nn.ReLU())

    trained, x = model(made), torch.randn(5, K)
    fresh = model(lambda kind: empty_like(made(kind), "meta")).to_empty(device="cpu")
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(x), trained(x))


def test_state_dict_of_another_rotation_is_refused():
    state = made("hadamard").state_dict()
    with pytest.raises(RuntimeError, match="_extra_state: expected rotation 'none'"):
        empty_like(made("none")).load_state_dict(state)
    other_size = RotQuantLinear(K, N, rotation_size=32)
    with pytest.raises(RuntimeError, match="_extra_state: expected rotation_size 32"):
        other_size.load_state_dict(state)
    del state["_extra_state"]
    with pytest.raises(RuntimeError, match=r"state_dict: .* missing are \['_extra_state'\]"):
        empty_like(made("hadamard")).load_state_dict(state)
    empty_like(made("hadamard")).load_state_dict(state, strict=False)


@kinds
@pytest.mark.parametrize("move", ["half", "bfloat16", "double", "to meta and back"])
def test_moving_changes_no_buffer(kind, move):
    layer, x = made(kind), torch.randn(5, K)
    expected, state = layer(x), layer.state_dict()
    if move == "to meta and back":
        layer.to("meta")
        assert layer(x.to("meta")).shape == expected.shape
        layer.to_empty(device="cpu").load_state_dict(state)
    else:
        getattr(layer, move)()
        layer.to(torch.float16)
    assert torch.equal(layer(x), expected)
    for name, value in layer.state_dict().items():
        assert value.dtype == state[name].dtype and torch.equal(value, state[name])


@kinds
def test_copies(kind):
    layer, x = made(kind), torch.randn(5, K)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(again(x), layer(x))
        assert again.weight_codes.data_ptr() != layer.weight_codes.data_ptr()
        assert repr(again) == repr(layer)


@kinds
def test_meta(kind):
    layer = empty_like(made(kind), "meta")
    x = torch.empty(2, 3, K, dtype=torch.float16, device="meta")
    y = layer(x)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, N), torch.float16, "meta")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("hadamard", ["in_features=256", "out_features=100", "bias=True", "a4w4", "=hadamard 64"]),
        ("none", ["rotation=none", "prescale=False", "scale_mode=round_up"]),
        ("matrix prescaled", ["rotation=matrix 16", "prescale=True"]),
        ("matrices", ["rotation=matrices 128"]),
    ],
)
def test_repr_says_what_it_runs(kind, words):
    for word in words:
        assert word in repr(made(kind))


# --- torch.compile and captured graphs ----------------------------------------------------------


@kinds
def test_compile(device, kind):
    layer, x = made(kind, device), torch.randn(5, K, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


class Attention(nn.Module):
    def __init__(self, *layers: RotQuantLinear):
        super().__init__()
        self.q, self.k, self.v = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) * self.v(x)


class QuantisesOnce(Attention):
    def forward(self, x: Tensor) -> Tensor:
        quantised = self.q.quantize_input(x)
        return self.q(quantised) + self.k(quantised) * self.v(quantised)


@pytest.mark.parametrize("kind", ["hadamard", "matrix prescaled"])
@pytest.mark.parametrize(("block", "quantised"), [(Attention, 3), (QuantisesOnce, 1)])
def test_compiled_block(kind, block, quantised):
    attention = block(*(made(kind, seed=seed) for seed in range(3)))
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    y, (code,) = run_and_get_code(compiled, x := torch.randn(3, K))
    torch.testing.assert_close(y, attention(x))
    # NOTE: the compiler does not merge equal calls of an op, so plain tensors are quantised thrice.
    assert code.count("rotquant_hip.rotate_quant.default(") == quantised
    assert code.count("rotquant_hip.gemm_a4w4.default(") == 3
    for m in (5, 40):
        x = torch.randn(m, K)
        torch.testing.assert_close(compiled(x), attention(x))


def test_a_quantised_activation_crosses_graphs():
    layer, x = made("hadamard"), torch.randn(5, K)
    quantise = torch.compile(layer.quantize_input, fullgraph=True, backend="aot_eager")
    multiply = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(multiply(quantise(x)), layer(x))


@pytest.mark.gpu
def test_captured_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    layer = made("hadamard", "cuda")
    x = torch.randn(5, K, device="cuda", dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, layer(x))


# --- end to end ---------------------------------------------------------------------------------


def activations_of_the_model() -> list[tuple[str, Tensor, Tensor]]:
    """(site, x [M, K], w [N, K]) of three layers of the demo's model."""
    from rotquant_hip.demo import groups, model, perplexity, text
    from rotquant_hip.demo.packages import DemoError, check_packages

    try:
        check_packages()
    except DemoError as error:
        print(f"synthetic activations: {error}")
        return synthetic_activations()
    loaded = model.load(torch.float32, torch.device("cpu"))
    windows = text.load_windows(loaded.tokenizer, 512, 0)
    with groups.recorded(loaded.model, groups.middle_layers(len(loaded.model.model.layers))) as xs:
        perplexity.evaluate(loaded.model, windows)
    names = {site: name for name, site in groups.SITES.items()}
    return [
        (
            f"layer {x.layer} {x.site}",
            x.values,
            loaded.model.model.layers[x.layer].get_submodule(names[x.site]).weight.detach(),
        )
        for x in xs
    ]


def synthetic_activations() -> list[tuple[str, Tensor, Tensor]]:
    """Normal values and a few loud channels, as in the inputs of a decoder's linears."""
    rng = np.random.default_rng(0)
    loud = np.exp2(np.maximum(rng.standard_normal(576) * 2, 0))
    x = torch.from_numpy((rng.standard_normal((512, 576)) * loud).astype(np.float32))
    return [("synthetic", x, torch.randn(300, 576) / 24)]


def test_end_to_end_rotation_brings_the_product_closer():
    """rotate_quant, then gemm_a4w4, is closer to x @ w.T than the same without rotation."""
    ratios = []
    for site, x, w in activations_of_the_model():
        exact, errors = x @ w.T, []
        padded = nn.functional.pad(w, (0, 0, 0, -len(w) % 16))
        for rotated in (False, True):
            encode = rq.rotate_quant if rotated else rq.quant
            options = {"rotation_size": 64} if rotated else {}
            a, a_scales = encode(x, shuffle_scales=True, **options)
            b, b_scales = encode(padded, scale_mode="mse", **options)
            y = rq.gemm_a4w4(
                a,
                rq.shuffle_weight(b),
                a_scales,
                rq.shuffle_scales(b_scales),
                n=len(w),
                out_dtype=torch.float32,
            )
            errors.append(((y - exact).norm() / exact.norm()).item())
        print(f"{site}: error {errors[0]:.3f} without, {errors[1]:.3f} with rotation")
        ratios.append(errors[1] / errors[0])
    assert np.exp(np.mean(np.log(ratios))) < 0.95
    assert np.mean(np.array(ratios) < 1) >= 0.75
