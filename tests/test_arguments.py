# SPDX-License-Identifier: MIT
"""Any arguments to any public function: a result that is right, or one sentence that names one.

A call that is right is drawn, and then one or two of its arguments are replaced. The contracts of
op_contracts.py say whether what comes is an error. An error has to be of an expected class, name an
argument and leave every tensor as it was; a result has to equal that of the same values in plain
contiguous memory (whose bytes are the subject of the other tests), and a call on meta tensors has
to end as on the CPU.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import op_contracts as contracts
import pytest
import torch
from hypothesis import given, note, register_random, settings
from hypothesis import strategies as st
from tensors import poisoned_allocations
from torch import Tensor

import rotquant_hip as rq

Arguments = dict[str, Any]

DTYPES = (
    *contracts.FLOATS,
    *contracts.BYTES,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
MUTATED = {"moe_sort_zero_": "zero", "moe_gemm2_atomic_": "out"}  # the argument that is written to


class TorchRandom:
    """torch's generator, which hypothesis seeds before every example: a failure can be repeated."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps a weak reference
register_random(TORCH_RANDOM)

# --- calls that are right -------------------------------------------------------------------------

few = st.integers(0, 3)
float_types = st.sampled_from(contracts.FLOATS)
scale_modes = st.sampled_from(contracts.SCALE_MODES)
gate_modes = st.sampled_from(("separated", "interleave"))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def scales(*shape: int) -> Tensor:
    return torch.randint(120, 132, shape, dtype=torch.uint8)


@st.composite
def activations(draw) -> Tensor:
    leading = draw(st.lists(few, max_size=2))
    return random(*leading, 32 * draw(st.sampled_from((1, 2, 4, 6))), dtype=draw(float_types))


@st.composite
def rotation_of(draw, k: int, zero: bool = False, largest: int = 256) -> Arguments:
    """rotation, rotation_size, prescale."""
    size = draw(st.sampled_from([s for s in (16, 32, 64, 128) if k % s == 0 and s <= largest]))
    kind = draw(st.sampled_from(("hadamard", "matrix", "matrices", *["none"] * zero)))
    if kind == "none":
        return {"rotation": None, "rotation_size": 0, "prescale": None}
    shape = {"hadamard": None, "matrix": (size, size), "matrices": (k // size, size, size)}[kind]
    return {
        "rotation": None if shape is None else random(*shape) / 8,
        "rotation_size": size,
        "prescale": draw(st.sampled_from((None, torch.rand(k) + 0.5))),
    }


@st.composite
def quant(draw) -> Arguments:
    return {
        "x": draw(activations()),
        "scale_mode": draw(scale_modes),
        "shuffle_scales": draw(st.booleans()),
    }


@st.composite
def rotate(draw) -> Arguments:
    x = draw(activations())
    return {"x": x, **draw(rotation_of(x.shape[-1])), "out_dtype": draw(st.none() | float_types)}


@st.composite
def rotate_quant(draw) -> Arguments:
    options = draw(quant())
    return options | draw(rotation_of(options["x"].shape[-1])) | {"bf16_intermediate": False}


@st.composite
def dequant(draw) -> Arguments:
    shuffled = draw(st.booleans())
    c, s = rq.quant(draw(activations()), shuffle_scales=shuffled)
    return {"codes": c, "scales": s, "dtype": draw(float_types), "shuffled_scales": shuffled}


@st.composite
def shuffle_scales(draw) -> Arguments:
    stack = draw(st.lists(few, max_size=1))
    shape = (*stack, 32 * draw(few), draw(st.sampled_from((1, 3, 8, 9))))
    return {"scales": scales(*shape), "gate_mode": draw(gate_modes)}


@st.composite
def unshuffle_scales(draw) -> Arguments:
    given_ = draw(shuffle_scales())
    *stack, rows, groups = given_["scales"].shape
    if given_["gate_mode"] == "separated" and stack:
        rows *= stack[0]
    shuffled = rq.shuffle_scales(**given_)
    return {
        "scales": shuffled,
        "rows": rows,
        "groups": groups,
        "gate_mode": given_["gate_mode"],
    }


@st.composite
def shuffle_weight(draw) -> Arguments:
    shape = (*draw(st.lists(few, max_size=1)), 32 * draw(few), 16 * draw(few))
    return {"weight": codes(*shape), "gate_mode": draw(gate_modes)}


@st.composite
def gemm_a4w4(draw) -> Arguments:
    m, n, k = draw(few), draw(st.integers(1, 40)), 32 * draw(st.integers(1, 5))
    rows = contracts.up(n, 16)
    return {
        "a": codes(m, k // 2),
        "b": codes(rows, k // 2),
        "a_scales": rq.shuffle_scales(scales(m, k // 32)),
        "b_scales": rq.shuffle_scales(scales(rows, k // 32)),
        "bias": draw(st.sampled_from((None, random(n)))),
        "n": n,
        "out_dtype": draw(float_types),
        "config": draw(st.integers(-1, 1)),
    }


@st.composite
def routed(draw, experts: int) -> Arguments:
    """topk_ids, topk_weights of 0 to 5 tokens; ids can be out of range."""
    tokens, topk = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    ids = torch.randint(-1, experts + 2, (tokens, topk))
    return {
        "topk_ids": ids.to(draw(st.sampled_from((torch.int32, torch.int64)))),
        "topk_weights": torch.rand(tokens, topk),
    }


@st.composite
def owned(draw, local: int) -> tuple[int, Arguments]:
    """Experts of all ranks, and a mask or a map of the `local` ones of this rank."""
    kind = draw(st.sampled_from(("all", "mask", "map")))
    if kind == "all":
        return local, {"expert_mask": None, "expert_map": None}
    everywhere = local + draw(few)
    mine = torch.randperm(everywhere)[:local].sort().values
    if kind == "mask":
        mask = torch.zeros(everywhere, dtype=draw(st.sampled_from((torch.bool, torch.int32))))
        mask[mine] = 1
        return everywhere, {"expert_mask": mask, "expert_map": None}
    index = torch.full((everywhere,), -1, dtype=torch.int32)
    index[mine] = torch.randperm(local, dtype=torch.int32)
    return everywhere, {"expert_mask": None, "expert_map": index}


@st.composite
def moe_sort(draw) -> Arguments:
    local = draw(st.integers(1, 4))
    everywhere, ownership = draw(owned(local))
    return {
        **draw(routed(everywhere)),
        "num_experts": everywhere,
        "block_m": draw(st.sampled_from(contracts.BLOCK_M)),
        **ownership,
        "num_local_experts": local,
    }


@st.composite
def moe_sort_zero_(draw) -> Arguments:
    return {"zero": random(*draw(st.lists(few, max_size=2))), **draw(moe_sort())}


@st.composite
def sorted_routes(draw, experts: int, block_m: int | None = None) -> rq.MoeSorting:
    return rq.moe_sort(
        **draw(routed(experts)),
        num_experts=experts,
        block_m=draw(st.sampled_from(contracts.BLOCK_M)) if block_m is None else block_m,
    )


def tokens_of(sorting: rq.MoeSorting) -> int:
    return sorting.reverse_sorted.numel() // sorting.topk


@st.composite
def moe_rotate_quant(draw) -> Arguments:
    sorting, k = draw(sorted_routes(3)), 32 * draw(st.sampled_from((1, 2, 4)))
    return {
        "x": random(tokens_of(sorting), k, dtype=draw(float_types)),
        "sorting": sorting,
        **draw(rotation_of(k, zero=True)),
        "scale_mode": draw(scale_modes),
        "bf16_intermediate": draw(st.booleans()),
    }


@st.composite
def moe_sort_scales(draw) -> Arguments:
    sorting, by_route = draw(sorted_routes(3)), draw(st.booleans())
    rows = tokens_of(sorting) * (sorting.topk if by_route else 1)
    return {
        "scales": scales(rows, draw(st.integers(1, 9))),
        "sorting": sorting,
        "by_route": by_route,
    }


def stacked(experts: int, rows: int, k: int, name: str, mode: str = "separated") -> Arguments:
    return {
        name: rq.shuffle_weight(codes(experts, rows, k // 2), gate_mode=mode),
        f"{name}_scale": rq.shuffle_scales(scales(experts, rows, k // 32), gate_mode=mode),
    }


@st.composite
def gates(draw) -> Arguments:
    name = draw(st.sampled_from(contracts.ACTIVATIONS))
    return {
        "activation": name,
        "limit": draw(st.sampled_from((7.0,) if name == "swiglu" else (None, 1.5))),
        "alpha": 1.702,
        "gate_mode": draw(gate_modes),
    }


@st.composite
def inter_rotation_of(draw, inter: int) -> Arguments:
    return {f"inter_{k}": v for k, v in draw(rotation_of(inter, True, 128)).items()}


@st.composite
def moe_gemm1(draw) -> Arguments:
    experts, inter, k = draw(st.integers(1, 3)), 32 * draw(st.integers(1, 2)), 64
    inside = draw(st.booleans())
    sorting, options = draw(sorted_routes(experts, 16 if inside else None)), draw(gates())
    x, sizes = random(tokens_of(sorting), k, dtype=torch.bfloat16), draw(rotation_of(k, zero=True))
    if inside:
        options |= {"a": x, "a_scales": None, **sizes}
    else:
        a, a_scales = rq.moe_rotate_quant(x, sorting, rotation_size=0)
        options |= {"a": a, "a_scales": a_scales, "rotation": None, "rotation_size": 0}
        options |= {"prescale": None}
    return {
        "sorting": sorting,
        **stacked(experts, 2 * inter, k, "w1", options["gate_mode"]),
        "bias": draw(st.sampled_from((None, random(experts, 2 * inter)))),
        "apply_weight": draw(st.booleans()),
        **draw(inter_rotation_of(inter)),
        "scale_mode": draw(scale_modes.filter("mse".__ne__)),
        "config": -1,
    } | options


@st.composite
def moe_gemm2(draw) -> Arguments:
    experts, hidden, inter = draw(st.integers(1, 3)), 32 * draw(st.integers(1, 3)), 64
    sorting = draw(sorted_routes(experts))
    rows = sorting.sorted_ids.numel()
    return {
        "a": codes(rows, inter // 2),
        "a_scales": scales(contracts.up(rows, 32), contracts.up(inter // 32, 8)),
        **stacked(experts, hidden, inter, "w2"),
        "sorting": sorting,
        "tokens": tokens_of(sorting),
        "bias": draw(st.sampled_from((None, random(experts, hidden)))),
        "out_dtype": draw(float_types),
        "config": -1,
    }


@st.composite
def moe_gemm2_mxfp4(draw) -> Arguments:
    options = draw(moe_gemm2())
    del options["out_dtype"]
    return options


@st.composite
def moe_gemm2_atomic_(draw) -> Arguments:
    options = draw(moe_gemm2())
    tokens, dtype = options.pop("tokens"), options.pop("out_dtype")
    out = random(tokens, options["w2"].shape[1], dtype=dtype)
    return {"out": out, **options, "apply_weight": draw(st.booleans())}


@st.composite
def moe_reduce(draw) -> Arguments:
    sorting, hidden = draw(sorted_routes(3)), 32 * draw(st.integers(1, 3))
    tokens, routes, dtype = tokens_of(sorting), sorting.reverse_sorted.numel(), draw(float_types)
    quantized = draw(st.booleans())
    out = draw(st.none() | float_types)
    shared_dtype = out or (torch.bfloat16 if quantized else dtype)
    return {
        "rows": codes(routes, hidden // 2) if quantized else random(routes, hidden, dtype=dtype),
        "topk_weights": draw(st.sampled_from((None, torch.rand(tokens, sorting.topk)))),
        "sorting": sorting,
        "scales": scales(routes, hidden // 32) if quantized else None,
        "shared": draw(st.sampled_from((None, random(tokens, hidden, dtype=shared_dtype)))),
        "out_dtype": out,
    }


@st.composite
def fused_moe(draw) -> Arguments:
    local, shared_experts = draw(st.integers(1, 3)), draw(st.integers(0, 1))
    everywhere, ownership = draw(owned(local))
    routes, hidden, inter = draw(routed(everywhere)), 64, 32 * draw(st.integers(1, 2))
    experts, options = local + shared_experts, draw(gates())
    x = random(len(routes["topk_ids"]), hidden, dtype=draw(float_types))
    return {
        "x": x,
        **stacked(experts, 2 * inter, hidden, "w1", options["gate_mode"]),
        **stacked(experts, hidden, inter, "w2"),
        **routes,
        "w1_bias": draw(st.sampled_from((None, random(experts, 2 * inter)))),
        "w2_bias": draw(st.sampled_from((None, random(experts, hidden)))),
        **options,
        **draw(rotation_of(hidden, zero=True)),
        **draw(inter_rotation_of(inter)),
        "scale_mode": draw(scale_modes.filter("mse".__ne__)),
        **ownership,
        "apply_weight_on_input": draw(st.booleans()),
        "num_shared_experts": shared_experts,
        "shared_weight": 0.5,
        "shared": draw(st.sampled_from((None, random(*x.shape, dtype=x.dtype)))),
        "deterministic": draw(st.booleans()),
        "fp4_intermediate": draw(st.booleans()),
        "out_dtype": draw(st.none() | float_types),
    }


# --- arguments that are replaced ------------------------------------------------------------------


def as_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.itemsize == 1 and not dtype.is_complex and t.dtype.itemsize == 1:
        return t.view(dtype)
    if dtype == torch.float4_e2m1fn_x2:
        return t.to(torch.uint8).view(dtype)
    return t.to(dtype)


def doubled(t: Tensor, dim: int) -> Tensor:
    return torch.cat((t, t), dim)


@st.composite
def other_tensor(draw, t: Tensor) -> Tensor:
    """The same in another dtype, shape, memory layout or device."""
    kind = draw(st.sampled_from(("dtype", "shape", "memory", "memory", "meta")))
    if kind == "dtype":
        return as_dtype(t, draw(st.sampled_from(DTYPES)))
    if kind == "meta":
        return t.to("meta")
    if kind == "memory":
        if t.dim() == 0:
            return t
        padded = torch.zeros((*t.shape[:-1], t.shape[-1] + 3), dtype=t.dtype)
        padded[..., 1:-2] = t
        layouts = [padded[..., 1:-2], t.mT.contiguous().mT if t.dim() > 1 else t]
        layouts.append(t[:1].expand(t.shape) if t.shape[0] else t)
        return draw(st.sampled_from(layouts))
    shapes = [t[None], torch.zeros((), dtype=t.dtype), t.reshape(-1)]
    if t.dim():
        shapes += [t[..., :0], t[:0], t[..., :-1], t[:-1], doubled(t, 0), doubled(t, -1)]
        shapes += [t[0]] if t.shape[0] else []
        shapes += [t.reshape(1, -1), t[..., : t.shape[-1] // 2]]
    if t.dim() > 1:
        shapes += [t.mT, t[..., :-32], t.reshape(-1, 2) if t.numel() % 2 == 0 else t]
    return draw(st.sampled_from(shapes))


WHOLE = (-(2**40), -1, 0, 1, 3, 16, 17, 24, 33, 48, 64, 256, 1025, 2**31, 2**40)
REAL = (0.0, -0.0, -1.0, 1e-45, 1e38, 1e300, float("nan"), float("inf"), -float("inf"))


@st.composite
def other_sorting(draw, sorting: rq.MoeSorting) -> rq.MoeSorting:
    name = draw(st.sampled_from(sorting._fields))
    value = getattr(sorting, name)
    if isinstance(value, Tensor):
        return sorting._replace(**{name: draw(other_tensor(value))})
    return sorting._replace(**{name: draw(st.sampled_from(WHOLE))})


def other(value: Any) -> st.SearchStrategy:
    """What might be passed in place of a value that is right."""
    match value:
        case rq.MoeSorting():
            return other_sorting(value)
        case Tensor():
            return other_tensor(value)
        case bool():
            return st.just(not value)
        case int():
            return st.sampled_from(WHOLE) | st.integers(-2, 40)
        case float():
            return st.sampled_from(REAL)
        case str():
            return st.sampled_from(("", "none", "interleaved", value + " ", value.upper()))
        case torch.dtype():
            return st.sampled_from(DTYPES)
    raise TypeError(value)


def other_than_none(annotation: str) -> st.SearchStrategy:
    """NOTE: of the kind that is asked for. torch takes a tensor of one element for any number."""
    if "Tensor" in annotation:
        tensors = (torch.ones(()), torch.ones(64), random(64, 64), codes(4, 4), torch.ones(0))
        return st.sampled_from(tensors)
    return st.sampled_from(DTYPES if "dtype" in annotation else (*REAL, *WHOLE))


@st.composite
def with_others(draw, call: Callable, right: st.SearchStrategy) -> Arguments:
    """A call that is right, with up to two of its arguments replaced."""
    arguments = draw(right)
    parameters = inspect.signature(call).parameters
    names = st.sampled_from(sorted(arguments))
    for name in draw(st.lists(names, max_size=2, unique=True)):
        if arguments[name] is not None:
            arguments[name] = draw(other(arguments[name]))
        elif name in parameters:
            arguments[name] = draw(other_than_none(str(parameters[name].annotation)))
    return arguments


EXAMPLES = 60

# --- the test -------------------------------------------------------------------------------------

# Classes of errors that a caller may get. torch's own schema check raises the first two.
EXPECTED = (RuntimeError, TypeError, ValueError)
OURS = re.compile(r"[\w.]+(, [\w.]+)*: expected .+, got .+")
SCHEMA = re.compile(
    r"(for|on) argument '?\w+|Missing value for argument '?\w+|argument '\w+'|\w+\(\)"
)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in tensors_in(each)] if isinstance(value, tuple) else []


def raw(t: Tensor) -> Tensor:
    """Every byte that a tensor's memory holds, its gaps included."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone()


def same(a: Tensor, b: Tensor) -> bool:
    form = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
    if not form or a.is_meta:
        return form
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def plain(value: Any) -> Any:
    """The same values in memory of their own, row after row."""
    if isinstance(value, Tensor):
        return value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, rq.MoeSorting):
        return rq.MoeSorting(*map(plain, value))
    return value


def on_meta(value: Any) -> Any:
    if isinstance(value, rq.MoeSorting):
        return rq.MoeSorting(*map(on_meta, value))
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def outcome(call: Callable, arguments: Arguments) -> tuple[Tensor, ...] | Exception:
    try:
        with poisoned_allocations():  # rows that no route has are not written, and compared as well
            result = call(**arguments)
    except EXPECTED as error:
        return error
    return tuple(tensors_in(result))


def is_clear(error: Exception, names: list[str]) -> bool:
    text = str(error)
    line = text.splitlines()[0] if text else ""
    ours = OURS.fullmatch(line) and any(re.search(rf"\b{name}\b", line) for name in names)
    if "can't allocate memory" in text:  # by torch, for a layer that is larger than the machine
        return True
    of_torch = SCHEMA.search(text) and any(re.search(rf"\b{name}\b", text) for name in names)
    return bool(ours or of_torch)


OPS = {
    "quant": quant(),
    "rotate": rotate(),
    "rotate_quant": rotate_quant(),
    "dequant": dequant(),
    "shuffle_scales": shuffle_scales(),
    "unshuffle_scales": unshuffle_scales(),
    "shuffle_weight": shuffle_weight(),
    "unshuffle_weight": shuffle_weight(),
    "gemm_a4w4": gemm_a4w4(),
    "moe_sort": moe_sort(),
    "moe_sort_zero_": moe_sort_zero_(),
    "moe_rotate_quant": moe_rotate_quant(),
    "moe_sort_scales": moe_sort_scales(),
    "moe_gemm1": moe_gemm1(),
    "moe_gemm2": moe_gemm2(),
    "moe_gemm2_mxfp4": moe_gemm2_mxfp4(),
    "moe_gemm2_atomic_": moe_gemm2_atomic_(),
    "moe_reduce": moe_reduce(),
    "fused_moe": fused_moe(),
}


@pytest.mark.parametrize("name", OPS)
def test_an_op_is_right_or_says_what_is_wrong(name):
    # Not @given on the test itself: it would print every tensor that st.data() draws.
    @settings(max_examples=EXAMPLES)
    @given(with_others(getattr(rq, name), OPS[name]))
    def check(arguments):
        check_call(name, arguments)

    check()


def check_call(name: str, arguments: Arguments) -> None:
    call, contract = getattr(rq, name), getattr(contracts, name)
    on_cpu = not any(t.is_meta for v in arguments.values() for t in tensors_in(v))

    held = [t for v in arguments.values() for t in tensors_in(v) if not t.is_meta]
    before = [raw(t) for t in held]
    written = arguments.get(MUTATED.get(name))
    inputs = {k: plain(v) for k, v in arguments.items()}
    actual = outcome(call, arguments)
    failed = isinstance(actual, Exception)
    note(f"{type(actual).__name__}: {actual}" if failed else "a result")

    by_type = failed and SCHEMA.search(str(actual)) and not OURS.match(str(actual))
    try:
        contract(**arguments)
        refused = False
    except contracts.Refused:
        refused = True
    except (TypeError, AttributeError, RuntimeError):  # a type that the schema refuses
        refused = True
    assert failed == refused, f"the contract says {'error' if refused else 'no error'}"

    for t, bytes_ in zip(held, before, strict=True):
        if failed or t is not written:
            assert torch.equal(raw(t), bytes_), "an argument was written to"
    if failed:
        assert is_clear(actual, [*inspect.signature(call).parameters, *rq.MoeSorting._fields]), (
            actual
        )
    elif on_cpu:
        expected = outcome(call, inputs)
        assert not isinstance(expected, Exception), expected
        results = zip(actual, expected, strict=True)
        assert all(same(a, b) for a, b in results), "strided arguments give another result"
        if isinstance(written, Tensor):
            assert same(plain(written), inputs[MUTATED[name]])
    if on_cpu and not by_type:
        meta = outcome(call, {k: on_meta(v) for k, v in arguments.items()})
        of_both = [failed and OURS.match(str(error)) for error in (actual, meta)]
        if all(of_both):
            assert str(meta).splitlines()[0] == str(actual).splitlines()[0]
        elif not failed:
            assert not isinstance(meta, Exception), meta
            for a, b in zip(actual, meta, strict=True):
                assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


# --- what is not an op ----------------------------------------------------------------------------
# Classes and functions of Python: bare errors and what depends on memory layout are found here;
# what they must refuse is in test_layer_state.py, test_moe_layer.py and test_dispatch.py.


def optional(value: Any) -> st.SearchStrategy:
    return st.sampled_from((None, value))


@st.composite
def fake_quant(draw) -> Arguments:
    return {"x": draw(activations()), "scale_mode": draw(scale_modes)}


@st.composite
def route(draw) -> Arguments:
    experts = draw(st.integers(1, 9))
    return {
        "router_logits": random(*draw(st.lists(few, max_size=2)), experts),
        "top_k": draw(st.integers(1, experts)),
        "renormalize": draw(st.booleans()),
        "scoring": draw(st.sampled_from(("softmax", "sigmoid"))),
    }


@st.composite
def explain(draw) -> Arguments:
    return {
        "tokens": draw(st.integers(0, 5000)),
        "hidden": 32 * draw(st.integers(1, 9)),
        "inter": 32 * draw(st.integers(1, 9)),
        "experts": draw(st.integers(1, 40)),
        "topk": draw(st.integers(1, 8)),
        "activation": draw(st.sampled_from(contracts.ACTIVATIONS)),
        "gfx": draw(st.sampled_from(("gfx950", "cpu"))),
        "deterministic": draw(st.booleans()),
        "inter_rotation_size": draw(st.sampled_from((0, 16, 64))),
    }


@st.composite
def empty_linear(draw) -> Arguments:
    return {
        "in_features": 64 * draw(st.integers(1, 3)),
        "out_features": draw(st.integers(1, 40)),
        "bias": draw(st.booleans()),
        "rotation": draw(st.sampled_from(("none", "hadamard", "matrix", "matrices"))),
        "rotation_size": draw(st.sampled_from((16, 32, 64))),
        "prescale": draw(st.booleans()),
        "scale_mode": draw(scale_modes),
    }


@st.composite
def rotations(draw, k: int) -> Tensor | str | None:
    size = draw(st.sampled_from([s for s in (16, 32, 64) if k % s == 0]))
    matrix = torch.linalg.qr(random(size, size))[0]
    signs = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    for _ in range(size.bit_length() - 2):
        signs = torch.kron(signs, torch.tensor([[1, 1], [1, -1]], dtype=torch.int8))
    return draw(st.sampled_from((None, "hadamard", matrix, signs, signs > 0)))


@st.composite
def quantized_linear(draw) -> Arguments:
    rows, k = draw(st.integers(1, 40)), 32 * draw(st.integers(1, 4))
    return {
        "codes": codes(rows, k // 2),
        "scales": scales(rows, k // 32),
        "bias": draw(optional(random(rows))),
        "input_rotation": draw(rotations(k)),
        "rotation_size": 32,
        "input_prescale": draw(optional(torch.rand(k) + 0.5)),
        "scale_mode": draw(scale_modes),
    }


@st.composite
def empty_moe(draw) -> Arguments:
    return {
        "num_experts": draw(st.integers(1, 4)),
        "hidden": 64,
        "inter": 32 * draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        **draw(gates()),
        "rotation": draw(st.sampled_from(("none", "hadamard", "matrix"))),
        "rotation_size": draw(st.sampled_from((16, 64))),
        "inter_rotation": draw(st.sampled_from(("none", "hadamard"))),
        "inter_rotation_size": draw(st.sampled_from((16, 32))),
        "num_shared_experts": draw(st.integers(0, 1)),
        "shared_weight": 0.5,
        "all_experts": draw(optional(8)),
        "expert_map": draw(st.booleans()),
    }


@st.composite
def quantized_moe(draw) -> Arguments:
    experts, hidden, inter = draw(st.integers(1, 3)), 64, 32 * draw(st.integers(1, 2))
    biased = draw(st.booleans())
    return {
        "w1": codes(experts, 2 * inter, hidden // 2),
        "w1_scale": scales(experts, 2 * inter, hidden // 32),
        "w2": codes(experts, hidden, inter // 2),
        "w2_scale": scales(experts, hidden, inter // 32),
        "w1_bias": random(experts, 2 * inter) if biased else None,
        "w2_bias": random(experts, hidden) if biased else None,
        "gate_rows": draw(st.sampled_from(("separated", "alternating"))),
        "input_rotation": draw(rotations(hidden)),
        "inter_rotation": draw(rotations(inter)),
        "inter_rotation_size": 32,
        "expert_map": draw(optional(torch.arange(experts))),
    }


@st.composite
def weights_of_moe(draw) -> Arguments:
    experts, hidden, inter = draw(st.integers(1, 3)), 64, 32 * draw(st.integers(1, 2))
    return {
        "w1": random(experts, 2 * inter, hidden),
        "w2": random(experts, hidden, inter),
        "rotation": draw(st.sampled_from((None, "hadamard"))),
        "rotation_size": 32,
        "prescale": draw(optional(torch.rand(hidden) + 0.5)),
        "inter_rotation": draw(st.sampled_from((None, "hadamard"))),
        "inter_rotation_size": 32,
        "expert_mask": draw(optional(torch.ones(experts, dtype=torch.int32))),
        "weight_scale_mode": draw(scale_modes),
    }


OTHERS = {
    "fake_quant": (rq.fake_quant, fake_quant()),
    "route": (rq.route, route()),
    "dispatch.explain": (rq.dispatch.explain, explain()),
    "RotQuantLinear": (rq.RotQuantLinear, empty_linear()),
    "RotQuantLinear.from_quantized": (rq.RotQuantLinear.from_quantized, quantized_linear()),
    "RotQuantMoE": (rq.RotQuantMoE, empty_moe()),
    "RotQuantMoE.from_quantized": (rq.RotQuantMoE.from_quantized, quantized_moe()),
    "RotQuantMoE.from_weights": (rq.RotQuantMoE.from_weights, weights_of_moe()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_function_gives_a_result_or_one_sentence(name):
    call, arguments = OTHERS[name]

    @settings(max_examples=EXAMPLES)
    @given(with_others(call, arguments))
    def check(given_):
        held = [t for v in given_.values() for t in tensors_in(v) if not t.is_meta]
        before = [raw(t) for t in held]
        results = []
        for each in (given_, {k: plain(v) for k, v in given_.items()}):
            try:
                results.append(call(**each))
            except EXPECTED as error:
                results.append(error)
        first, again = results
        for t, bytes_ in zip(held, before, strict=True):
            assert torch.equal(raw(t), bytes_), "an argument was written to"
        if isinstance(first, Exception):
            assert is_clear(first, list(inspect.signature(call).parameters)), repr(first)
        elif isinstance(first, torch.nn.Module):
            of_first, of_again = first.state_dict(), again.state_dict()
            assert of_first.keys() == of_again.keys()
            assert all(same(of_first[k], of_again[k]) for k in of_first)
        else:
            first, again = (r if isinstance(r, tuple) else (r,) for r in (first, again))
            for a, b in zip(first, again, strict=True):
                assert same(a, b) if isinstance(a, Tensor) else a == b

    check()


def test_every_public_function_is_drawn():
    drawn = {*OPS, *(name.split(".")[0] for name in OTHERS)}
    plain_names = {name for name in rq.__all__ if callable(getattr(rq, name))}
    # Lists of names, and values that functions return.
    values = {"gemm_configs", "moe_gemm1_configs", "moe_gemm2_configs"}
    values |= {"MoeSorting", "QuantizedActivation"}
    assert plain_names - drawn == values
