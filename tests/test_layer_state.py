# SPDX-License-Identifier: MIT
"""Both layers: what may be loaded, saved, given and exported. A refusal changes nothing."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as dcp

import rotquant_hip as rq
from rotquant_hip import RotQuantLinear, RotQuantMoE

K, N, EXPERTS, INTER = 128, 20, 4, 64
BYTE_DTYPES = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.int8)


def orthogonal(size: int) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(1)))[0]


def linear(n: int = N, **options: Any) -> RotQuantLinear:
    torch.manual_seed(0)
    bias = options.pop("bias", True)
    return RotQuantLinear.from_linear(nn.Linear(K, n, bias).requires_grad_(False), **options)


def moe(**options: Any) -> RotQuantMoE:
    torch.manual_seed(0)
    w1, w2 = torch.randn(EXPERTS, 2 * INTER, K), torch.randn(EXPERTS, K, INTER)
    if options.pop("bias", True):
        options |= {"w1_bias": torch.randn(EXPERTS, 2 * INTER), "w2_bias": torch.randn(EXPERTS, K)}
    return RotQuantMoE.from_weights(w1, w2, **options)


PRESCALE = torch.linspace(0.5, 2, K)
CONFIGURATIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "linear without bias": lambda: linear(bias=False),
    "linear not rotated": lambda: linear(rotation=None),
    "linear prescaled": lambda: linear(prescale=PRESCALE, rotation_size=32),
    "linear with a matrix": lambda: linear(rotation=orthogonal(32), scale_mode="even"),
    "linear with matrices": lambda: linear(rotation=orthogonal(64).expand(2, 64, 64)),
    "moe": moe,
    "moe without bias": lambda: moe(bias=False),
    "moe not rotated": lambda: moe(rotation=None, activation="gelu"),
    "moe with matrices": lambda: moe(
        rotation=orthogonal(32), inter_rotation=orthogonal(16), inter_prescale=torch.ones(INTER)
    ),
    "moe interleaved": lambda: moe(gate_mode="interleave", activation="swiglu", limit=7.0),
    "moe of a rank": lambda: moe(
        expert_mask=torch.tensor([1, 1, 0, 1, 1]), prescale=PRESCALE, num_shared_experts=0
    ),
}
configurations = pytest.mark.parametrize("name", CONFIGURATIONS)


def inputs(layer: nn.Module, tokens: int = 6) -> tuple[Tensor, ...]:
    if isinstance(layer, RotQuantLinear):
        return (torch.randn(tokens, layer.in_features),)
    x = torch.randn(tokens, layer.hidden)
    experts = EXPERTS if layer.expert_mask is None else len(layer.expert_mask)
    return (x, *rq.route(torch.randn(tokens, experts), 2))


def empty(layer: nn.Module, **changed: Any) -> nn.Module:
    """A layer made with the same options, or with some others."""
    if isinstance(layer, RotQuantLinear):
        kind, size, prescaled, mode, _ = layer.recipe
        options = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "rotation": kind,
            "rotation_size": size or 64,
            "prescale": prescaled,
            "scale_mode": mode,
        }
        return RotQuantLinear(**options | changed)
    options = {
        "num_experts": layer.num_experts,
        "hidden": layer.hidden,
        "inter": layer.inter,
        "bias": layer.w1_bias is not None,
        "activation": layer.activation,
        "limit": layer.limit,
        "alpha": layer.alpha,
        "rotation": layer.rotation_kind,
        "rotation_size": layer.rotation_size or 64,
        "prescale": layer.prescale is not None,
        "inter_rotation": layer.inter_rotation_kind,
        "inter_rotation_size": layer.inter_rotation_size or 64,
        "inter_prescale": layer.inter_prescale is not None,
        "scale_mode": layer.scale_mode,
        "gate_mode": layer.gate_mode,
        "num_shared_experts": layer.num_shared_experts,
        "shared_weight": layer.shared_weight,
        "apply_weight_on_input": layer.apply_weight_on_input,
        "all_experts": None if layer.expert_mask is None else len(layer.expert_mask),
    }
    return RotQuantMoE(**options | changed)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    of_a, of_b = a.state_dict(), b.state_dict()
    assert of_a.keys() == of_b.keys()
    for name, value in of_a.items():
        assert value.dtype == of_b[name].dtype and torch.equal(value, of_b[name]), name
    if getattr(a, "expert_mask", None) is None or a.expert_mask.any():  # not just made
        x = inputs(a)
        assert torch.equal(a(*x), b(*x))


# --- loading --------------------------------------------------------------------------------------


@configurations
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", BYTE_DTYPES, ids=str)
def test_bytes_are_loaded_as_bytes(name, assign, dtype):
    """torch would copy the values: 2^(byte - 127) as an integer is 0 for nearly every scale."""
    layer = CONFIGURATIONS[name]()
    state = layer.state_dict()
    for key, value in state.items():
        if value.dtype == torch.uint8 and key != "_extra_state":
            state[key] = value.view(dtype)
    again = empty(layer)
    again.load_state_dict(state, assign=assign)
    assert_same(again, layer)


@configurations
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused_by_name(name, dtype):
    layer = CONFIGURATIONS[name]()
    again, before = empty(layer), empty(layer)
    for key, value in layer.state_dict().items():
        if value.dtype != torch.uint8 or key == "_extra_state":
            continue
        state = layer.state_dict() | {key: value.to(dtype)}
        for options in ({}, {"strict": False}, {"assign": True}):
            with pytest.raises(RuntimeError, match=f"{key}: expected dtype uint8 .*, got {dtype}"):
                again.load_state_dict(state, **options)
            assert_same(again, before)


def test_numbers_keep_the_dtype_of_the_layer():
    layer = linear(rotation=orthogonal(32), prescale=PRESCALE)
    state = layer.state_dict()
    for key in ("rotation", "prescale", "bias"):
        state[key] = state[key].double()
    for assign in (False, True):
        again = empty(layer)
        again.load_state_dict(state, assign=assign)
        assert_same(again, layer)
    for key in ("rotation", "prescale", "bias"):
        with pytest.raises(RuntimeError, match=f"{key}: expected a floating-point dtype"):
            again.load_state_dict(layer.state_dict() | {key: state[key].int()})


DIFFERENT = {
    "linear without bias": [
        {"out_features": 24},  # rounded up to 16 rows it is as tall
        {"out_features": 32},
        {"in_features": 96, "rotation_size": 32},
        {"rotation_size": 32},
        {"rotation": "none"},
        {"rotation": "matrix"},
        {"prescale": True},
        {"scale_mode": "even"},
        {"bias": True},
    ],
    "linear with a matrix": [{"scale_mode": "floor"}, {"rotation": "hadamard"}],
    "moe": [
        {"bias": False},
        {"num_experts": 5},
        {"hidden": 64},
        {"inter": 32},
        {"activation": "gelu"},
        {"limit": 7.0},
        {"alpha": 1.0},
        {"rotation": "none"},
        {"rotation_size": 32},
        {"prescale": True},
        {"inter_rotation": "hadamard"},
        {"scale_mode": "ceil"},
        {"gate_mode": "interleave"},
        {"num_shared_experts": 1},
        {"shared_weight": 2.0},
        {"apply_weight_on_input": True},
        {"all_experts": 4},
    ],
}


@pytest.mark.parametrize(
    ("name", "changed"), [(name, change) for name, all_ in DIFFERENT.items() for change in all_]
)
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
def test_a_layer_of_another_meaning_refuses_and_stays(name, changed, options):
    layer = CONFIGURATIONS[name]()
    other, before = empty(layer, **changed), empty(layer, **changed)
    with pytest.raises(RuntimeError, match="_extra_state: expected "):
        other.load_state_dict(layer.state_dict(), **options)
    assert_same(other, before)


@configurations
def test_a_file_that_lacks_or_adds_something_changes_nothing(name):
    layer = CONFIGURATIONS[name]()
    other, before = empty(layer), empty(layer)
    for key in layer.state_dict():
        state = layer.state_dict()
        del state[key]
        with pytest.raises(RuntimeError, match=rf"missing are \['{key}'\]"):
            other.load_state_dict(state)
        assert_same(other, before)
        # A file may hold a part of a layer: what is there is loaded.
        part = empty(layer)
        part.load_state_dict(state, strict=False)
        for kept, value in state.items():
            assert torch.equal(part.state_dict()[kept], value)
    with pytest.raises(RuntimeError, match=r"unknown are \['weight_zero_points'\]"):
        other.load_state_dict(layer.state_dict() | {"weight_zero_points": torch.zeros(3)})
    for shape in ((1, 2, 3), ()):
        for key in layer.state_dict().keys() - {"_extra_state"}:
            wrong = torch.zeros(shape, dtype=layer.state_dict()[key].dtype)
            for strict in (False, True):
                with pytest.raises(RuntimeError, match=f"{key}: expected shape"):
                    other.load_state_dict(layer.state_dict() | {key: wrong}, strict=strict)
    assert_same(other, before)


@pytest.mark.parametrize(
    "form",
    [b"", b"[]", b"{}", b"{", b"\xff", b'{"version": 3}', b'{"version": null}'],
    ids=repr,
)
def test_a_broken_format_is_one_sentence(form):
    layer = linear()
    state = layer.state_dict() | {"_extra_state": torch.tensor(list(form), dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="_extra_state: expected .*version"):
        empty(layer).load_state_dict(state)


def test_names_are_stored():
    form = json.loads(bytes(linear(scale_mode="ceil").state_dict()["_extra_state"].tolist()))
    assert (form["rotation"], form["scale_mode"], form["out_features"]) == ("hadamard", "ceil", N)
    form = json.loads(bytes(moe(activation="gelu_tanh").state_dict()["_extra_state"].tolist()))
    assert (form["activation"], form["gate_mode"]) == ("gelu_tanh", "separated")


# --- files of the first format version ------------------------------------------------------------


def test_a_linear_layer_saved_by_the_first_version_loads():
    layer = linear(rotation_size=32, scale_mode="even")
    state = layer.state_dict()
    del state["_extra_state"]
    # Version, rotation, bits of its size, scale mode.
    state["input_format"] = torch.tensor([1, 1, 6, 2], dtype=torch.uint8)
    again = empty(layer)
    again.load_state_dict(dict(state))
    assert_same(again, layer)
    for wrong in ([1, 0, 0, 2], [1, 1, 7, 2], [1, 1, 6, 0]):
        state["input_format"] = torch.tensor(wrong, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="_extra_state: expected"):
            empty(layer).load_state_dict(dict(state))
    state["input_format"] = torch.tensor([1, 9, 6, 2], dtype=torch.uint8)
    with pytest.raises(
        RuntimeError, match="input_format: expected the numbers of format version 1"
    ):
        empty(layer).load_state_dict(dict(state))


def test_a_moe_layer_saved_by_the_first_version_loads():
    layer = moe(activation="swiglu", limit=7.0, gate_mode="interleave", rotation_size=32)
    state = layer.state_dict()
    del state["_extra_state"]
    # Version, rotation and bits of its size, the same of the intermediate, scale mode, gate mode,
    # activation, shared experts, weight on input, limit, alpha, shared weight.
    numbers = [1, 1, 6, 0, 0, 0, 1, 1, 0, 0, 7.0, 1.702, 1.0]
    state["moe_format"] = torch.tensor(numbers, dtype=torch.float64)
    again = empty(layer)
    again.load_state_dict(dict(state))
    assert_same(again, layer)
    numbers[10] = -1.0
    state["moe_format"] = torch.tensor(numbers, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="_extra_state: expected limit 7.0, .*, got None"):
        empty(layer).load_state_dict(dict(state))


# --- other ways to save ---------------------------------------------------------------------------


class Model(nn.Module):
    """A layer inside something."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(K), layer

    def forward(self, x: Tensor, *routed: Tensor) -> Tensor:
        return self.layer(self.norm(x), *routed)


@configurations
def test_distributed_checkpoints(name, tmp_path):
    model = Model(CONFIGURATIONS[name]())
    checkpoint.save(dcp.get_model_state_dict(model), checkpoint_id=tmp_path)
    again = Model(empty(model.layer))
    state = dcp.get_model_state_dict(again)
    checkpoint.load(state, checkpoint_id=tmp_path)
    dcp.set_model_state_dict(again, state)
    assert_same(again.layer, model.layer)


@configurations
def test_files(name, tmp_path):
    layer = CONFIGURATIONS[name]()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(value, Tensor) for value in state.values())  # safetensors holds no other
    with torch.device("meta"):
        again = empty(layer)
    again.load_state_dict(state, assign=True)
    assert_same(again, layer)
    assert_same(copy.deepcopy(layer), layer)


# --- arguments ------------------------------------------------------------------------------------


CODES, SCALES = rq.quant(torch.randn(N, K))
SIGNS = torch.kron(torch.tensor([[1, 1], [1, -1]]), torch.ones(16, 16)).to(torch.int8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codes": CODES.int()}, "codes: expected dtype uint8 .*, got torch.int32"),
        ({"codes": CODES.float()}, "codes: expected dtype uint8 .*, got torch.float32"),
        ({"codes": CODES[0]}, r"codes: expected shape \[N, K / 2\]"),
        ({"codes": CODES[:, :0], "scales": SCALES[:, :0]}, r"codes: expected shape \[N, K / 2\]"),
        ({"codes": CODES[:0], "scales": SCALES[:0]}, "out_features: expected an integer, at least"),
        ({"codes": [1, 2]}, "codes: expected a tensor"),
        ({"scales": SCALES.int()}, "scales: expected dtype uint8 .*, got torch.int32"),
        ({"scales": torch.exp2(SCALES.float() - 127)}, "scales: expected dtype uint8"),
        ({"scales": SCALES.to("meta")}, "scales: expected device cpu, got meta"),
        ({"scales": SCALES[:, :3]}, r"scales: expected \[20, 4\] in natural order"),
        ({"bias": torch.ones(N).int()}, "bias: expected a floating-point dtype"),
        ({"bias": torch.ones(N + 4)}, r"bias: expected \[20\], got \[24\]"),
        ({"bias": torch.ones(N, device="meta")}, "bias: expected device cpu"),
        ({"input_rotation": SIGNS}, "input_rotation: expected a Hadamard matrix"),
        ({"input_rotation": SIGNS * 2}, "input_rotation: expected a Hadamard matrix"),
        ({"input_rotation": torch.eye(32).int()}, "input_rotation: expected a Hadamard matrix"),
        ({"input_rotation": torch.ones(32, 32) > 0}, "input_rotation: expected a Hadamard matrix"),
        ({"input_rotation": torch.ones(())}, r"input_rotation: expected \[RS, RS\]"),
        ({"input_rotation": torch.ones(0, 0)}, r"input_rotation: expected \[RS, RS\]"),
        ({"input_rotation": torch.eye(32) * torch.nan}, "input_rotation: expected finite"),
        ({"input_rotation": torch.eye(32, dtype=torch.complex64)}, "input_rotation: expected real"),
        ({"input_rotation": torch.eye(32, device="meta")}, "input_rotation: expected device cpu"),
        ({"input_rotation": "learned"}, "input_rotation: expected one of"),
        ({"input_rotation": 64}, "input_rotation: expected one of"),
        ({"input_prescale": PRESCALE.long()}, "input_prescale: expected a floating-point dtype"),
        ({"input_prescale": PRESCALE[1:]}, r"input_prescale: expected \[128\]"),
        ({"input_prescale": PRESCALE / 0}, "input_prescale: expected finite numbers"),
        ({"rotation_size": 48, "input_rotation": "hadamard"}, "rotation_size: expected one of"),
        ({"scale_mode": "up"}, "scale_mode: expected one of"),
    ],
)
def test_from_quantized_refuses_by_the_name_that_was_used(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        RotQuantLinear.from_quantized(**{"codes": CODES, "scales": SCALES} | arguments)


def test_byte_wide_dtypes_are_the_bytes():
    expected = RotQuantLinear.from_quantized(CODES, SCALES)
    for codes in (torch.int8, torch.float4_e2m1fn_x2):
        for scales in (torch.int8, torch.float8_e8m0fnu):
            given = RotQuantLinear.from_quantized(CODES.view(codes), SCALES.view(scales))
            assert_same(given, expected)


def test_blocks_as_gpt_oss_has_them():
    assert_same(
        RotQuantLinear.from_quantized(CODES.unflatten(-1, (-1, 16)), SCALES),
        RotQuantLinear.from_quantized(CODES, SCALES),
    )
    (c1, s1), (c2, s2) = (
        rq.quant(torch.randn(EXPERTS, rows, k)) for rows, k in ((2 * INTER, K), (K, INTER))
    )
    options = {"gate_rows": "alternating", "activation": "swiglu", "limit": 7.0}
    blocks = (c.unflatten(-1, (-1, 16)) for c in (c1, c2))
    given = [each for pair in zip(blocks, (s1, s2), strict=True) for each in pair]
    assert_same(
        RotQuantMoE.from_quantized(*given, **options),
        RotQuantMoE.from_quantized(c1, s1, c2, s2, **options),
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prescale": torch.zeros(K)}, "prescale: expected numbers other than 0"),
        ({"prescale": PRESCALE * torch.nan}, "prescale: expected finite numbers"),
        ({"prescale": PRESCALE / 0}, "prescale: expected finite numbers"),
        ({"prescale": PRESCALE.int()}, "prescale: expected a floating-point dtype"),
        ({"prescale": 2.0}, "prescale: expected a tensor"),
        ({"rotation": torch.eye(32) / 0}, "rotation: expected finite numbers"),
    ],
)
def test_both_layers_refuse_what_would_fail_later(options, message):
    for make in (linear, moe):
        with pytest.raises(ValueError, match=f"^{message}"):
            make(**options)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    original = nn.Linear(K, N).requires_grad_(False)
    original.weight[3, 5] = bad
    with pytest.raises(ValueError, match="^linear.weight: expected finite numbers"):
        RotQuantLinear.from_linear(original)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": -1}, "limit: expected a finite positive number, got -1"),
        ({"limit": 0}, "limit: expected a finite positive number, got 0"),
        ({"limit": torch.nan}, "limit: expected a finite positive number, got nan"),
        ({"limit": "7"}, "limit: expected a finite positive number, got '7'"),
        ({"alpha": torch.inf}, "alpha: expected a finite number, got inf"),
        ({"shared_weight": torch.nan}, "shared_weight: expected a finite number, got nan"),
        ({"num_shared_experts": -1}, "num_shared_experts: expected an integer, 0 to 4, got -1"),
    ],
)
def test_parameters_are_checked_where_they_are_given(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        moe(**options)
    with pytest.raises(ValueError, match=f"^{message}"):
        RotQuantMoE(EXPERTS, K, INTER, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_experts": 0}, "num_experts: expected an integer, 1 to 1024, got 0"),
        ({"num_experts": 1025}, "num_experts: expected an integer, 1 to 1024, got 1025"),
        ({"num_experts": 4.0}, "num_experts: expected an integer"),
        ({"all_experts": 0}, "all_experts: expected an integer, 4 to 1024, got 0"),
        ({"all_experts": 3}, "all_experts: expected an integer, 4 to 1024, got 3"),
        ({"hidden": -32}, "hidden: expected a multiple of 32"),
    ],
)
def test_moe_sizes(sizes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        RotQuantMoE(**{"num_experts": EXPERTS, "hidden": K, "inter": INTER} | sizes)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.tensor([0, 1, 2, 3, -1]), r"expert_mask: .*expert_map"),  # a map
        (torch.tensor([1, 1, 1, 0, 0]), "expert_mask: expected 4 ones"),
        (torch.tensor([1, 1, 1, 1, 1]), "expert_mask: expected 4 ones"),
        (torch.ones(5), "expert_mask: expected bool or integers"),
        (torch.ones(1, 4).bool(), "expert_mask: expected bool or integers of one dimension"),
    ],
)
def test_masks(mask, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        moe(expert_mask=mask)


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 64), (2, 64, 2), (512,), (0, 64), ()])
def test_a_linear_layer_blames_x(shape):
    with pytest.raises(ValueError, match=r"^x: expected last dimension in_features 128, got"):
        linear()(torch.randn(shape))
    with pytest.raises(ValueError, match=r"^x: expected last dimension in_features 128, got"):
        linear().quantize_input(torch.randn(shape))


def test_a_quantised_input_of_another_width_is_refused():
    quantised = RotQuantLinear(64, N).quantize_input(torch.randn(3, 64))
    with pytest.raises(ValueError, match="^x: expected an input of in_features 128 channels"):
        linear()(quantised)


@pytest.mark.parametrize(
    ("x", "routes", "argument"),
    [
        ((8, K // 2), (4, 2), "x"),  # as many elements
        ((2, 2 * K), (4, 2), "x"),
        ((), (4, 2), "x"),
        ((2, 3, K), (3, 2, 2), "topk_ids"),
        ((6, K), (2, 3, 2), "topk_ids"),
        ((6, K), (12,), "topk_ids"),  # B39
        ((6, K), (5, 2), "topk_ids"),
    ],
)
def test_a_moe_layer_takes_no_other_shape(x, routes, argument):
    ids = torch.zeros(routes, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        moe()(torch.randn(x), torch.rand(routes), ids)


def test_weights_and_shared_have_the_shapes_of_the_others():
    x, ids = torch.randn(6, K), torch.zeros(6, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="^topk_weights: expected"):
        moe()(x, torch.rand(3, 4), ids)
    for shape in ((3, 2 * K), (2, 3, K), (6, 1)):
        with pytest.raises(ValueError, match="^shared: expected"):
            moe()(x, torch.rand(6, 2), ids, shared=torch.randn(shape))


# --- export ---------------------------------------------------------------------------------------


@configurations
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_export(name, strict, wrapped):
    layer = CONFIGURATIONS[name]()
    model, x = Model(layer) if wrapped else layer, inputs(layer)
    exported = torch.export.export(model, x, strict=strict)
    assert torch.equal(exported.module()(*x), model(*x))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(*x), model(*x))
