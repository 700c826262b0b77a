# SPDX-License-Identifier: MIT
"""The ops as torch sees them: schemas, fake kernels, torch.compile, torch.export."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import rotation_sizes
from tensors import PLACEMENTS, place
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import rotquant_hip as rq
from rotquant_hip import layouts

OPS = torch.ops.rotquant_hip
NAMES = (
    "quant",
    "rotate",
    "rotate_quant",
    "dequant",
    "fake_quant",
    "shuffle_scales",
    "unshuffle_scales",
    "shuffle_weight",
    "unshuffle_weight",
    "gemm_a4w4",
)


def u8(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


# --- schemas ----------------------------------------------------------------------------------


def test_the_package_has_every_public_op():
    registered = {
        schema.name.removeprefix("rotquant_hip::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("rotquant_hip::")
    }
    public = {name for name in registered if not name.startswith("_")}
    assert {name for name in public if "moe" not in name} == set(NAMES)  # see test_moe_registration
    assert set(NAMES) <= set(rq.__all__)


# B41: an op registered as mutating whatever it gets.
@pytest.mark.parametrize("name", NAMES)
def test_b41_nothing_is_mutated_or_aliased(name):
    schema = getattr(OPS, name).default._schema
    assert not schema.is_mutable
    assert all(a.alias_info is None for a in (*schema.arguments, *schema.returns))
    assert torch.Tag.pt2_compliant_tag in getattr(OPS, name).default.tags


ARGUMENTS: dict[str, tuple[str, tuple, dict[str, Any]]] = {
    "quant": ("quant", (bf16(5, 96),), {}),
    "quant 1-D": ("quant", (bf16(64),), {"scale_mode": "mse"}),
    "quant 4-D strided": ("quant", (torch.randn(2, 3, 4, 80)[..., :64],), {"scale_mode": "floor"}),
    "quant shuffled": ("quant", (bf16(2, 3, 288),), {"shuffle_scales": True}),
    "quant fp16, M = 0": ("quant", (torch.empty(0, 64).half(),), {"shuffle_scales": True}),
    "rotate": ("rotate", (bf16(5, 128),), {}),
    "rotate columns": ("rotate", (torch.randn(64, 5).t(),), {"out_dtype": torch.float16}),
    "rotate by a matrix": ("rotate", (bf16(5, 64), torch.randn(32, 32)), {"rotation_size": 32}),
    "rotate prescaled": (
        "rotate",
        (bf16(3, 2, 64),),
        {"rotation_size": 16, "prescale": torch.rand(64)},
    ),
    "rotate_quant": ("rotate_quant", (bf16(5, 128),), {}),
    "rotate_quant shuffled": (
        "rotate_quant",
        (bf16(5, 256),),
        {"rotation_size": 256, "shuffle_scales": True, "bf16_intermediate": True},
    ),
    "rotate_quant by matrices": (
        "rotate_quant",
        (bf16(3, 96), torch.randn(3, 32, 32, dtype=torch.float64)),
        {"prescale": torch.rand(96).half(), "scale_mode": "even"},
    ),
    "dequant": ("dequant", (u8(5, 48), u8(5, 3)), {}),
    "dequant shuffled": (
        "dequant",
        (u8(2, 5, 48), u8(256, 8)),
        {"dtype": torch.float32, "shuffled_scales": True},
    ),
    "fake_quant": ("fake_quant", (torch.randn(64, 5).t(),), {"scale_mode": "even"}),
    "shuffle_scales": ("shuffle_scales", (u8(5, 3),), {}),
    "shuffle_scales of experts": ("shuffle_scales", (u8(3, 96, 8),), {}),
    "shuffle_scales interleaved": (
        "shuffle_scales",
        (u8(3, 64, 9),),
        {"gate_mode": "interleave"},
    ),
    "unshuffle_scales": ("unshuffle_scales", (u8(256, 8),), {"rows": 5, "groups": 3}),
    "unshuffle_scales interleaved": (
        "unshuffle_scales",
        (u8(3, 64, 16),),
        {"rows": 64, "groups": 9, "gate_mode": "interleave"},
    ),
    "shuffle_weight": ("shuffle_weight", (u8(48, 32),), {}),
    "shuffle_weight strided": ("shuffle_weight", (u8(32, 48).t(),), {}),
    "unshuffle_weight interleaved": (
        "unshuffle_weight",
        (u8(2, 64, 32),),
        {"gate_mode": "interleave"},
    ),
    "gemm_a4w4": (
        "gemm_a4w4",
        (u8(2, 5, 48), u8(32, 48), *torch.full((2, 256, 8), 127, dtype=torch.uint8)),
        {"n": 30},
    ),
}


# B41
@pytest.mark.parametrize(("name", "args", "kwargs"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_b41_opcheck(name, args, kwargs):
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


# --- fake kernels -----------------------------------------------------------------------------


def form(value: Tensor | tuple) -> list[tuple]:
    tensors = [value] if isinstance(value, Tensor) else value
    return [(tuple(t.shape), t.stride(), t.dtype, t.storage_offset()) for t in tensors]


def assert_fake_is_real(op: Callable, *tensors: Tensor) -> None:
    """Same shape, strides and dtype from the real op, on fake tensors and on meta tensors."""
    real = op(*tensors)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(t) for t in tensors))
    meta = op(*(t.to("meta") for t in tensors))
    assert form(fake) == form(real)
    assert form(meta) == form(real)
    for made_up in (meta,) if isinstance(meta, Tensor) else meta:
        assert made_up.device.type == "meta"


@st.composite
def inputs(draw, step: int = 32) -> Tensor:
    leading = draw(st.lists(st.integers(0, 6), max_size=3))
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
    k = step * draw(st.integers(0 if step == 32 else 1, 12))
    return torch.zeros(*leading, k, dtype=dtype)


def placed(x: Tensor, placement: str) -> Tensor:
    return place(x, placement) if x.shape[-1] else x


# B42: the fake had the padded width, the kernel returned the other.
@given(x=inputs(), placement=st.sampled_from(PLACEMENTS), shuffled=st.booleans())
def test_b42_fake_quant(x, placement, shuffled):
    x = placed(x, placement)
    assert_fake_is_real(partial(rq.quant, shuffle_scales=shuffled), x)


@given(data=st.data(), size=rotation_sizes, shuffled=st.booleans(), scaled=st.booleans())
def test_b42_fake_rotations(data, size, shuffled, scaled):
    x = data.draw(inputs(max(size, 32)))
    x = placed(x, data.draw(st.sampled_from(PLACEMENTS)))
    out = data.draw(st.sampled_from((None, torch.bfloat16, torch.float16, torch.float32)))
    factors = [torch.eye(size), torch.ones(x.shape[-1]) if scaled else None]
    given_factors = [t for t in factors if t is not None]

    def rotate(x, matrix, prescale=None):
        return rq.rotate(x, matrix, prescale=prescale, out_dtype=out)

    def rotate_quant(x, matrix, prescale=None):
        return rq.rotate_quant(x, matrix, prescale=prescale, shuffle_scales=shuffled)

    for op in (rotate, rotate_quant):
        assert_fake_is_real(op, x, *given_factors)
    assert_fake_is_real(partial(rq.rotate, rotation_size=size, out_dtype=out), x)
    assert_fake_is_real(partial(rq.rotate_quant, rotation_size=size, shuffle_scales=shuffled), x)


@given(
    leading=st.lists(st.integers(0, 6), max_size=3),
    groups=st.integers(0, 20),
    shuffled=st.booleans(),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
)
def test_b42_fake_dequant(leading, groups, shuffled, dtype):
    shape = (*leading, groups)
    if shuffled:
        shape = layouts.padded_rows(prod(leading)), layouts.padded_groups(groups)
    op = partial(rq.dequant, dtype=dtype, shuffled_scales=shuffled)
    assert_fake_is_real(op, u8(*leading, 16 * groups), u8(*shape))
    if dtype == torch.bfloat16:  # the default
        op = partial(rq.dequant, shuffled_scales=shuffled)
        assert_fake_is_real(op, u8(*leading, 16 * groups), u8(*shape))


@given(
    experts=st.sampled_from(((), (0,), (3,))),
    tiles=st.integers(0, 9),
    rows=st.integers(0, 600),
    groups=st.integers(0, 20),
)
def test_b42_fake_layouts(experts, tiles, rows, groups):
    plain, stack = u8(rows, groups), u8(*experts, 32 * tiles, groups)
    interleave = {"gate_mode": "interleave"}
    assert_fake_is_real(rq.shuffle_scales, plain)
    assert_fake_is_real(rq.shuffle_scales, stack)
    assert_fake_is_real(partial(rq.shuffle_scales, **interleave), stack)
    back = partial(rq.unshuffle_scales, groups=groups)
    assert_fake_is_real(partial(back, rows=rows), rq.shuffle_scales(plain))
    shuffled = rq.shuffle_scales(stack, **interleave)
    assert_fake_is_real(partial(back, rows=32 * tiles, **interleave), shuffled)
    weight = u8(*experts, 16 * groups, 32 * tiles).mT  # strided
    for op in (rq.shuffle_weight, rq.unshuffle_weight):
        assert_fake_is_real(op, weight)
        assert_fake_is_real(partial(op, **interleave), weight)


# B42: torch's own check of an op's strides in compiled code, for padded and unpadded results.
@pytest.mark.parametrize(("rows", "k"), [(5, 96), (256, 256)])
def test_b42_compiled_code_finds_the_strides_it_was_promised(rows, k):
    def every_op(x):
        y = rq.rotate(x * 2, rotation_size=32)
        codes, scales = rq.rotate_quant(y.t().contiguous().t(), rotation_size=32)
        shuffled = rq.quant(y, shuffle_scales=True)[1]
        again = rq.shuffle_scales(scales)
        natural = rq.unshuffle_scales(again, rows=rows, groups=k // 32)
        weight = rq.shuffle_weight(codes[: rows // 16 * 16])
        values = rq.dequant(codes, natural) + rq.dequant(codes, again, shuffled_scales=True)
        return values, shuffled + 0, rq.unshuffle_weight(weight) + 0

    x = bf16(rows, k)
    for actual, expected in zip(
        torch.compile(every_op, fullgraph=True)(x), every_op(x), strict=True
    ):
        assert actual.shape == expected.shape and actual.stride() == expected.stride()
        assert torch.equal(actual, expected)


# --- torch.compile ----------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """An activation on its way into a GEMM: a matrix of its own, or the Hadamard."""

    def __init__(self, matrix: bool, shuffle_scales: bool) -> None:
        super().__init__()
        rotation = torch.linalg.qr(torch.randn(64, 64))[0] if matrix else None
        self.register_buffer("rotation", rotation)
        self.shuffle_scales = shuffle_scales

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.nn.functional.silu(x)
        return rq.rotate_quant(x, self.rotation, shuffle_scales=self.shuffle_scales)


def assert_same(actual: tuple, expected: tuple) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# B43: a cached Hadamard matrix was a real tensor among fake ones. Here there is none: the matrix is
# a buffer, or nothing at all.
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("shuffle_scales", [False, True])
def test_b43_compile(matrix, shuffle_scales):
    layer = Layer(matrix, shuffle_scales)
    x = torch.randn(7, 128)
    rq.rotate_quant(x)  # whatever is cached at the first call is there before tracing
    for backend in ("aot_eager", "eager"):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        assert_same(compiled(x), layer(x))


# One graph for every M, and no second compilation.
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("shuffle_scales", [False, True])
def test_compile_with_dynamic_rows(backend, shuffle_scales):
    counter = CompileCounterWithBackend(backend)
    layer = Layer(False, shuffle_scales)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for rows in (7, 2, 256, 300, 31):
        # silu of 64 is 64, whoever rounds how.
        x = torch.where(torch.randn(rows, 128) > 0, 64.0, 0.0)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_compile_notices_by_itself_that_rows_are_dynamic():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rq.rotate_quant, fullgraph=True, backend=counter)
    for rows in (7, 8, 9, 300):
        x = torch.randn(rows, 128)
        assert_same(compiled(x, shuffle_scales=True), rq.rotate_quant(x, shuffle_scales=True))
    assert counter.frame_count == 2  # one for 7, one for any


@pytest.mark.parametrize("rows", [0, 1])
def test_compile_of_few_rows(rows):
    layer = Layer(False, True)
    x = torch.randn(rows, 128)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same(compiled(x), layer(x))


def test_errors_come_through_compiled_code():
    compiled = torch.compile(rq.rotate, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="x: expected last dimension divisible by rotation_size"):
        compiled(torch.randn(4, 96))


# --- torch.export -----------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("shuffle_scales", [False, True])
def test_export_with_dynamic_rows(matrix, shuffle_scales):
    layer = Layer(matrix, shuffle_scales)
    rows = torch.export.Dim("rows", max=4096)
    program = torch.export.export(layer, (torch.randn(7, 128),), dynamic_shapes={"x": {0: rows}})
    targets = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert OPS.rotate_quant.default in targets
    program = program.run_decompositions()
    for count in (2, 7, 300):
        x = torch.randn(count, 128)
        assert_same(program.module()(x), layer(x))
