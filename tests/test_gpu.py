# SPDX-License-Identifier: MIT
"""The GPU's bytes against those of the CPU ops: every kernel instance, its edges, its launch.

What the ops compute is tested elsewhere, on each device that there is. Here are the sizes and
conditions that only a GPU has: waves that are partly idle, grids that stride, streams and graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from compare import assert_bytes_equal
from strategies import to_float32
from tensors import PLACEMENTS, POISON, assert_values_equal, place, poisoned_allocations, to_array
from torch import Tensor

import rotquant_hip as rq

_HAS_KERNELS = torch._C._dispatch_has_kernel_for_dispatch_key("rotquant_hip::quant", "CUDA")
_MISSING = (
    "this build has no GPU kernels" if not _HAS_KERNELS else "torch sees no GPU on this machine"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (_HAS_KERNELS and torch.cuda.is_available()), reason=_MISSING),
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (0, *rq.ROTATION_SIZES)  # 0 is quant
ROWS = (1, 3, 31, 32, 33, 257)
CHANNELS = (32, 96, 256, 288, 576, 768, 2048, 4096 + 32, 4096 + 256)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16", "fp32"))
by_size = pytest.mark.parametrize("size", SIZES)
by_mode = pytest.mark.parametrize("mode", rq.SCALE_MODES)

Op = Callable[..., Tensor | tuple[Tensor, ...]]


def activation(dtype: torch.dtype, *shape: int) -> Tensor:
    """Groups of many magnitudes; a few are zeros, ties, subnormals, or have a NaN or an Inf."""
    groups = torch.randn(*shape).reshape(-1, 32)
    kind = torch.randint(64, (len(groups),))
    groups *= torch.exp2(torch.randint(-10, 4, (len(groups), 1)).float())
    groups[kind < 8] = torch.randint(-8, 9, (int((kind < 8).sum()), 32)).float()
    groups[kind == 8] *= 0
    groups[kind == 9] *= 2.0**-20 if dtype == torch.float16 else 2.0**-128
    groups[kind == 10, 5] = torch.nan
    groups[kind == 11, 30] = -torch.inf
    return groups.reshape(shape).to(dtype)


def fused(size: int, **options) -> Op:
    """rotate_quant, or quant for size 0."""
    return (
        partial(rq.rotate_quant, rotation_size=size, **options)
        if size
        else partial(rq.quant, **options)
    )


def assert_same(op: Op, *tensors: Tensor, what: object = "") -> None:
    """op(GPU copies of the tensors), into poisoned memory, equals op(tensors)."""
    expected = op(*tensors)
    with poisoned_allocations():
        actual = op(*(t.cuda() for t in tensors))
    assert_results_equal(actual, expected, what)


def assert_results_equal(actual: object, expected: object, what: object = "") -> None:
    if isinstance(expected, Tensor):
        actual, expected = (actual,), (expected,)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.is_contiguous() and one.dtype == other.dtype
        if not other.dtype.is_floating_point:
            assert_bytes_equal(to_array(one), to_array(other), f"output {index} of {what}")
        else:
            assert_values_equal(one, to_float32(to_array(other)), f"output {index} of {what}")


def tails(size: int) -> Iterator[tuple[int, int]]:
    return ((m, k) for k in CHANNELS if k % max(size, 1) == 0 for m in ROWS)


# --- every instance, at shapes that leave lanes, waves and tiles partly idle --------------------


@by_mode
@by_size
@by_dtype
def test_rotate_quant(dtype, size, mode):
    for index, (m, k) in enumerate(tails(size)):
        x = activation(dtype, m, k)
        for shuffled in (False, True):
            options = {"scale_mode": mode, "shuffle_scales": shuffled}
            if size:  # the two take turns, so that each meets every edge in either layout
                options["bf16_intermediate"] = bool((index + shuffled) % 2)
            assert_same(fused(size, **options), x, what=(m, k, options))


@pytest.mark.parametrize("size", rq.ROTATION_SIZES)
@by_dtype
def test_prescale(dtype, size):
    for m, k in tails(size):
        x, s = activation(dtype, m, k), torch.randn(k)
        for shuffled in (False, True):
            for via_bf16 in (False, True):
                options = {"shuffle_scales": shuffled, "bf16_intermediate": via_bf16}
                op = fused(size, **options)
                assert_same(lambda x, s, op=op: op(x, prescale=s), x, s, what=(m, k, options))
        op = partial(rq.rotate, rotation_size=size)
        assert_same(lambda x, s, op=op: op(x, prescale=s), x, s, what=("rotate", m, k))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=("to_bf16", "to_fp16", "to_fp32"))
@pytest.mark.parametrize("size", rq.ROTATION_SIZES)
@by_dtype
def test_rotate(dtype, size, out_dtype):
    for m, k in tails(size):
        op = partial(rq.rotate, rotation_size=size, out_dtype=out_dtype)
        assert_same(op, activation(dtype, m, k), what=(m, k))


@pytest.mark.parametrize("shuffled", [False, True])
@by_dtype
def test_dequant(dtype, shuffled):
    op = partial(rq.dequant, dtype=dtype, shuffled_scales=shuffled)
    for m, k in tails(0):
        codes = torch.randint(256, (m, k // 2), dtype=torch.uint8)
        scales = torch.randint(256, (m, k // 32), dtype=torch.uint8)
        assert_same(op, codes, rq.shuffle_scales(scales) if shuffled else scales, what=(m, k))


@pytest.mark.parametrize("gate_mode", rq.GATE_MODES)
def test_shuffles(gate_mode):
    for shape in ((32, 3), (96, 8), (1, 288, 9), (5, 64, 130), (2, 4096, 64)):
        t = torch.randint(1, 256, shape, dtype=torch.uint8)
        assert_same(partial(rq.shuffle_scales, gate_mode=gate_mode), t, what=shape)
        rows = shape[-2] if gate_mode == "interleave" else t[..., 0].numel()
        back = partial(rq.unshuffle_scales, rows=rows, groups=shape[-1], gate_mode=gate_mode)
        assert_same(back, rq.shuffle_scales(t, gate_mode=gate_mode), what=("back", shape))
        weight = torch.randint(256, (*shape[:-1], 16 * shape[-1]), dtype=torch.uint8)
        for op in (rq.shuffle_weight, rq.unshuffle_weight):
            assert_same(partial(op, gate_mode=gate_mode), weight, what=(op, shape))


@pytest.mark.skipif(torch.version.hip is None, reason="needs gfx950's MFMA")
def test_a_matrix_is_a_product_of_bf16():
    x = torch.randn(33, 256, dtype=torch.bfloat16)
    for matrix in (torch.randn(64, 64) / 8, torch.randn(4, 64, 64) / 8):
        on_gpu = (x.cuda(), matrix.cuda())
        y = rq.rotate(*on_gpu, out_dtype=torch.float32)
        exact = x.double().reshape(33, 4, 1, 64) @ matrix.bfloat16().double()
        torch.testing.assert_close(y.cpu().double(), exact.reshape(33, 256), rtol=0, atol=2e-5)
        assert_results_equal(rq.rotate_quant(*on_gpu), rq.quant(y), "its quantisation")


# --- memory -----------------------------------------------------------------------------------


def test_poison_reaches_the_gpu():
    with poisoned_allocations():
        assert torch.empty(1000, dtype=torch.uint8, device="cuda").eq(POISON).all()


@pytest.mark.parametrize("placement", PLACEMENTS)
@by_dtype
def test_placements(dtype, placement):
    for size in (0, 16, 64, 256):
        for shape in ((33, 768), (2, 17, 256)) if placement != "overlapping" else ((33, 768),):
            x = place(activation(dtype, *shape), placement)
            on_gpu = place(x.cuda(), placement)
            if placement == "overlapping":  # windows of other memory: compare with what they show
                x = on_gpu.cpu()
            ops = [fused(size, shuffle_scales=shuffled) for shuffled in (False, True)]
            ops += [partial(rq.rotate, rotation_size=size)] if size else []
            for op in ops:
                assert_results_equal(op(on_gpu), op(x), (placement, shape, op))


@by_dtype
def test_every_alignment(dtype):
    for offset in range(16):
        x = torch.empty(33 * 4096 + offset, dtype=dtype, device="cuda")[offset:].view(33, 4096)
        x.copy_(activation(dtype, 33, 4096))
        for op in (rq.quant, rq.rotate_quant, rq.rotate):
            assert_results_equal(op(x), op(x.cpu()), (op, offset))
    codes = torch.randint(256, (33 * 256 + 16,), dtype=torch.uint8, device="cuda")
    scales = torch.randint(1, 250, (33 * 16 + 16,), dtype=torch.uint8, device="cuda")
    for offset in range(16):
        c, s = codes[offset:][: 33 * 256].view(33, 256), scales[offset:][: 33 * 16].view(33, 16)
        op = partial(rq.dequant, dtype=dtype)
        assert_results_equal(op(c, s), op(c.cpu(), s.cpu()), ("dequant", offset))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 256)])
@by_dtype
def test_no_rows(dtype, shape):
    x = torch.empty(shape, dtype=dtype, device="cuda")
    for shuffled in (False, True):
        for op in (fused(0, shuffle_scales=shuffled), fused(64, shuffle_scales=shuffled)):
            assert_results_equal(op(x), op(x.cpu()), op)
    assert rq.rotate(x).shape == x.shape
    assert rq.dequant(*rq.quant(x), dtype=dtype).shape == x.shape


@pytest.mark.parametrize("size", [0, 64])
def test_more_tiles_than_workgroups(size):
    """The grid is clamped to 65535 workgroups a dimension: each makes several tiles, in turn."""
    rows, k = 3 * 65535 * 32 + 100, 64
    x = activation(torch.bfloat16, 4096, k).repeat(rows // 4096 + 1, 1)[:rows]
    op = fused(size, shuffle_scales=True)
    actual, expected = op(x.cuda()), op(x)
    assert all(torch.equal(a.cpu(), e) for a, e in zip(actual, expected, strict=True))
    # A stride between rows, so that they are not cut anew.
    actual, expected = fused(size)(torch.nn.functional.pad(x.cuda(), (0, 8))[:, :k]), fused(size)(x)
    assert all(torch.equal(a.cpu(), e) for a, e in zip(actual, expected, strict=True))


def needs_memory(gib: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib:.0f} GiB of GPU memory, {free:.0f} are free")


# B24: a grid computed in 32 bits fails at exactly 2^31 elements in a row.
@pytest.mark.parametrize("count", [2**31 - 4096, 2**31, 2**31 + 4096])
def test_b24_one_row_of_2_to_31_elements(count):
    needs_memory(8)
    x = torch.empty(count, dtype=torch.bfloat16, device="cuda").normal_()
    codes, scales = rq.rotate_quant(x)
    tail = rq.rotate_quant(x[-8192:].cpu())
    assert_results_equal((codes[-4096:], scales[-256:]), tail, "the last elements")


# B26: offsets in 32 bits, which show in the last rows only. Codes, x and y all pass 2^31 bytes
# there, and x has more than 2^32 elements.
@pytest.mark.parametrize("padding", [0, 40])
def test_b26_last_rows_past_32_bits(padding):
    k, rows = 4096, 2**20 + 33
    needs_memory(40)
    x = torch.empty(rows, k + padding, dtype=torch.bfloat16, device="cuda")[:, :k].normal_()
    assert x.numel() > 2**32
    start = (rows - 1) // 256 * 256  # where the last padded tile row of scales begins
    tail = x[start:].cpu()
    for op in (rq.quant, rq.rotate_quant):
        codes, scales = op(x)
        assert_results_equal((codes[start:], scales[start:]), op(tail), op)
        assert codes[: 2**19].any(dim=-1).all()
        y = rq.dequant(codes, scales)
        assert_results_equal(y[start:], rq.dequant(*op(tail)), "dequant")
        del codes, scales, y
        codes, scales = op(x, shuffle_scales=True)
        band = scales.view(-1)[start * scales.shape[1] :].view(256, -1)
        assert_results_equal((codes[start:], band), op(tail, shuffle_scales=True), op)
        unshuffled = rq.unshuffle_scales(scales, rows=rows, groups=k // 32)
        assert_results_equal(unshuffled[start:], op(tail)[1], "unshuffle_scales")
        assert torch.equal(rq.shuffle_scales(unshuffled), scales)
        del codes, scales, band, unshuffled
    y = rq.rotate(x, out_dtype=torch.float32)
    assert_results_equal(y[start:], rq.rotate(tail, out_dtype=torch.float32), "rotate")


# --- launch -----------------------------------------------------------------------------------


def every_op(x: Tensor) -> list[Tensor]:
    """Results of one call of each op, all of which depend on x alone. K % 64 must be 0."""
    codes, scales = rq.quant(x)
    fused_codes, shuffled = rq.rotate_quant(x, shuffle_scales=True, scale_mode="mse")
    y = rq.rotate(x, out_dtype=torch.float32)
    weight = rq.shuffle_weight(codes)
    rows, groups = scales.shape
    natural = rq.unshuffle_scales(shuffled, rows=rows, groups=groups)
    values = rq.dequant(codes, rq.shuffle_scales(scales), shuffled_scales=True)
    return [
        codes,
        scales,
        fused_codes,
        shuffled,
        y,
        weight,
        rq.unshuffle_weight(weight),
        natural,
        values,
        *every_moe_op(x),
    ]


def every_moe_op(x: Tensor) -> list[Tensor]:
    """Of those without matrix instructions; routes and weights are made of x."""
    finite = torch.nan_to_num(x.float(), nan=0.0, posinf=8.0, neginf=-8.0).clamp(-8, 8)
    ids = (finite[:, :4].abs() * 1000).long() % 16
    weights = finite[:, 4:8]
    sorting = rq.moe_sort(ids, weights, num_experts=16, block_m=16)
    sorted_scales = rq.moe_sort_scales(rq.quant(x)[1], sorting)
    rows = finite.to(x.dtype).repeat_interleave(4, 0)
    return [
        *sorting[:5],
        *rq.moe_rotate_quant(x, sorting),
        sorted_scales,
        rq.moe_reduce(rows, weights, sorting),
    ]


def test_graph_capture():
    first, second = activation(torch.bfloat16, 96, 2048), activation(torch.bfloat16, 96, 2048)
    x = first.cuda()
    every_op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = every_op(x)
    for values in (second, first):
        x.copy_(values)
        for output in outputs:
            output.fill_(77)
        graph.replay()
        assert_results_equal(outputs, every_op(values), "replay")


# B45: launches on the default stream while the caller uses its own.
def test_b45_current_stream():
    values = activation(torch.bfloat16, 96, 2048)
    x = torch.zeros(values.shape, dtype=values.dtype, device="cuda")
    fresh = values.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # x is still zeros for whoever does not wait
        x.copy_(fresh)
        outputs = every_op(x)
    stream.synchronize()
    assert_results_equal(outputs, every_op(values), "current stream")


def test_many_streams_under_load():
    inputs = [activation(torch.bfloat16, 256, 4096) for _ in range(8)]
    on_gpu = [x.cuda() for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, Tensor]]] = [[] for _ in inputs]
    for _ in range(20):
        for x, stream, result in zip(on_gpu, streams, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(rq.rotate_quant(x, shuffle_scales=True))
    torch.cuda.synchronize()
    for x, result in zip(inputs, results, strict=True):
        expected = rq.rotate_quant(x, shuffle_scales=True)
        for actual in result:
            assert_results_equal(actual, expected, "a stream's")


# B44: a launch on the current device instead of the tensor's.
def test_b44_device_of_the_tensor():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    values = activation(torch.bfloat16, 96, 2048)
    outputs = every_op(values.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(output.device.index == 1 for output in outputs)
    assert_results_equal(outputs, every_op(values), "second device")
    with pytest.raises(RuntimeError, match="prescale: expected device cuda:1"):
        rq.rotate(values.to("cuda:1"), prescale=torch.ones(2048, device="cuda:0"))


def test_another_device_is_refused_before_anything_runs():
    x = torch.randn(4, 64, device="cuda")
    with pytest.raises(RuntimeError, match="prescale: expected device cuda:0"):
        rq.rotate_quant(x, prescale=torch.ones(64))
    codes, scales = rq.quant(x)
    with pytest.raises(RuntimeError, match="scales: expected device cuda:0"):
        rq.dequant(codes, scales.cpu())
