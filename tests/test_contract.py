# SPDX-License-Identifier: MIT
"""What callers rely on beside the numbers: errors, memory, extreme sizes and values, defaults.

Several tests are the smallest form of a fault that was reported of a comparable library; the
number in the name is its number in our list of such reports.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import assert_bytes_equal
from tensors import (
    TORCH_DTYPES,
    poisoned_allocations,
    to_array,
    to_tensor,
)
from torch import Tensor

import rotquant_hip as rq
from rotquant_hip import reference as ref

ROOT = Path(__file__).resolve().parents[1]
OPS = torch.ops.rotquant_hip


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def u8(*shape: int) -> Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


# --- errors: "<argument>: expected <what>, got <value>" ---------------------------------------

FLOATS, BYTES = "dtype bfloat16, float16 or float32", "dtype uint8"
MODES = "one of 'round_up', 'floor', 'even', 'ceil', 'mse'"
X = bf16(4, 128)
# Argument, what is expected, what comes, and a call that is wrong in this only.
ERRORS: list[tuple[str, str, str, Callable]] = []


def wrong(argument: str, expected: str, got: str, op: Callable, *args, **kwargs) -> None:
    ERRORS.append((argument, expected, got, partial(op, *args, **kwargs)))


for _op in (rq.quant, rq.rotate, rq.rotate_quant):
    wrong("x", FLOATS, "Double", _op, X.double())
    wrong("x", FLOATS, "Int", _op, X.int())
    wrong("x", FLOATS, "Byte", _op, X.byte())
    wrong("x", "at least 1 dimension", "a scalar", _op, bf16())
    wrong("x", "last dimension divisible by 32", "shape [4, 100]", _op, bf16(4, 100))
    wrong("x", "last dimension divisible by 32", "shape [2, 4, 48]", _op, bf16(2, 4, 48))
for _op in (rq.quant, rq.rotate_quant):
    wrong("scale_mode", MODES, "'up'", _op, X, scale_mode="up")
    wrong("scale_mode", MODES, "''", _op, X, scale_mode="")
for _op in (rq.rotate, rq.rotate_quant):
    wrong("x", "divisible by 32", "shape [16]", _op, bf16(16), rotation_size=16)
    wrong("x", "divisible by rotation_size 64", "shape [4, 96]", _op, bf16(4, 96))
    wrong("x", "divisible by rotation_size 256", "shape [4, 128]", _op, X, rotation_size=256)
    wrong("x", "divisible by rotation_size 128", "shape [192]", _op, bf16(192), torch.eye(128))
    wrong(
        "rotation_size", "32, the size of `rotation`", "64", _op, X, torch.eye(32), rotation_size=64
    )
    wrong("rotation", "a floating-point dtype", "Int", _op, X, torch.eye(64).int())
    wrong("rotation", "shape [RS, RS] or [K / RS, RS, RS]", "[64]", _op, X, torch.ones(64))
    wrong("rotation", "shape [RS, RS]", "[64, 32]", _op, X, torch.ones(64, 32))
    wrong("rotation", "shape [RS, RS]", "[1, 2, 64, 64]", _op, X, torch.ones(1, 2, 64, 64))
    wrong("rotation", "2 (K / rotation_size)", "[3, 64, 64]", _op, X, torch.ones(3, 64, 64))
    wrong("prescale", "a floating-point dtype", "Long", _op, X, prescale=torch.ones(128).long())
    wrong("prescale", "shape [128]", "shape [64]", _op, X, prescale=torch.ones(64))
    wrong("prescale", "shape [128]", "shape [1, 128]", _op, X, prescale=torch.ones(1, 128))
wrong("out_dtype", FLOATS, "Double", rq.rotate, X, out_dtype=torch.float64)
wrong("out_dtype", FLOATS, "Byte", rq.rotate, X, out_dtype=torch.uint8)

wrong("codes", BYTES, "Char", rq.dequant, u8(4, 64).char(), u8(4, 4))
wrong("codes", "divisible by 16", "shape [4, 24]", rq.dequant, u8(4, 24), u8(4, 1))
wrong("codes", "divisible by 16", "shape []", rq.dequant, u8(), u8(1))
wrong("scales", BYTES, "Float", rq.dequant, u8(4, 64), torch.ones(4, 4))
wrong("scales", "shape [4, 4]", "shape [4, 8]", rq.dequant, u8(4, 64), u8(4, 8))
wrong("scales", "shape [2, 2, 4]", "shape [4, 4]", rq.dequant, u8(2, 2, 64), u8(4, 4))
# The bytes do not tell which layout it is, but the shapes do unless M % 256 = G % 8 = 0.
wrong("scales", "[256, 8]", "[4, 4]", rq.dequant, u8(4, 64), u8(4, 4), shuffled_scales=True)
wrong("scales", "[4, 4]", "[256, 8]", rq.dequant, u8(4, 64), u8(256, 8))
wrong("dtype", FLOATS, "Double", rq.dequant, u8(4, 64), u8(4, 4), dtype=torch.float64)

SHAPES = "shape [M, K / 32] or [E, N, K / 32]"
INTERLEAVE = {"gate_mode": "interleave"}
wrong("scales", BYTES, "Short", rq.shuffle_scales, u8(4, 4).short())
wrong("scales", SHAPES, "shape [4]", rq.shuffle_scales, u8(4))
wrong("scales", SHAPES, "shape [1, 1, 32, 4]", rq.shuffle_scales, u8(1, 1, 32, 4), **INTERLEAVE)
wrong("scales", "N divisible by 32", "shape [2, 48, 4]", rq.shuffle_scales, u8(2, 48, 4))
wrong("scales", "I divisible by 16", "48 rows", rq.shuffle_scales, u8(48, 4), **INTERLEAVE)

_unshuffle = partial(rq.unshuffle_scales, u8(256, 8))
wrong("scales", BYTES, "Float", rq.unshuffle_scales, torch.ones(256, 8), rows=4, groups=4)
wrong("rows", "a count", "-1", _unshuffle, rows=-1, groups=4)
wrong("groups", "a count", "-8", _unshuffle, rows=4, groups=-8)
wrong("scales", "shape [512, 8]", "shape [256, 8]", _unshuffle, rows=257, groups=8)
wrong("scales", "shape [256, 16]", "shape [256, 8]", _unshuffle, rows=256, groups=9)
wrong("rows", "I divisible by 16", "48 rows", _unshuffle, rows=48, groups=3, **INTERLEAVE)
wrong("scales", "shape [64, 8] or a stack", "[256, 8]", _unshuffle, rows=64, groups=3, **INTERLEAVE)
_unshuffle = partial(rq.unshuffle_scales, u8(1, 256, 8))
wrong("scales", "shape [256, 8]", "shape [1, 256, 8]", _unshuffle, rows=4, groups=4)

for _op in (rq.shuffle_weight, rq.unshuffle_weight):
    wrong("weight", BYTES, "Half", _op, X.half())
    wrong("weight", "shape [N, K / 2] or [E, N, K / 2]", "[16]", _op, u8(16))
    wrong("weight", "shape [N, K / 2]", "[1, 1, 16, 16]", _op, u8(1, 1, 16, 16))
    wrong("weight", "N divisible by 16", "shape [24, 16]", _op, u8(24, 16))
    wrong("weight", "K / 2 divisible by 16", "shape [16, 24]", _op, u8(16, 24))
    # The rule does not depend on there being anything to move.
    for _bytes in (16, 0):
        wrong("weight", "I divisible by 16", "48 rows", _op, u8(48, _bytes), **INTERLEAVE)
for _op in (
    partial(rq.shuffle_scales, u8(32, 8)),
    partial(rq.unshuffle_scales, u8(256, 8), rows=32, groups=8),
    partial(rq.shuffle_weight, u8(32, 16)),
    partial(rq.unshuffle_weight, u8(32, 16)),
):
    wrong("gate_mode", "'separated' or 'interleave'", "'gguu'", _op, gate_mode="gguu")


@pytest.mark.parametrize(
    ("argument", "expected", "got", "call"),
    ERRORS,
    ids=[f"{call.func.__name__}-{argument}-{got}" for argument, _, got, call in ERRORS],
)
def test_errors_name_argument_expectation_and_value(argument, expected, got, call):
    result = None
    with pytest.raises(RuntimeError) as error:
        result = call()
    assert result is None
    message = str(error.value).splitlines()[0]
    form = rf"{argument}: expected .*{re.escape(expected)}.*, got .*{re.escape(got)}.*"
    assert re.fullmatch(form, message), message


# B14: sizes that a library would have to pad to; a truncated Hadamard is not orthogonal.
@pytest.mark.parametrize(
    "size", [-(2**32) + 64, -64, -1, 0, 1, 8, 12, 20, 24, 28, 40, 48, 96, 192, 512, 2**32 + 64]
)
@pytest.mark.parametrize("k", [0, 960])
def test_b14_other_rotation_sizes_are_refused(size, k):
    form = rf"rotation_size: expected 16, 32, 64, 128 or 256, got {size}$"
    for op in (rq.rotate, rq.rotate_quant):
        with pytest.raises(RuntimeError, match=form):
            op(bf16(4, k), rotation_size=size)
        if size in (12, 512):
            with pytest.raises(RuntimeError, match=form):
                op(bf16(4, k), torch.eye(size))


# B14: and so is a last block that would need padding.
@pytest.mark.parametrize(("k", "size"), [(96, 64), (32, 64), (192, 128), (128, 256)])
def test_b14_nothing_is_padded_to_a_block(k, size):
    for op in (rq.rotate, rq.rotate_quant):
        with pytest.raises(
            RuntimeError, match=rf"^x: .* rotation_size {size}, got shape \[4, {k}\]"
        ):
            op(bf16(4, k), rotation_size=size)


def test_tensors_of_another_device_are_refused():
    x, codes = torch.randn(4, 64), u8(4, 32)
    cases = [
        ("rotation", lambda d: rq.rotate(x, torch.eye(64, device=d))),
        ("rotation", lambda d: rq.rotate_quant(x, torch.eye(64, device=d))),
        ("prescale", lambda d: rq.rotate(x, prescale=torch.ones(64, device=d))),
        ("prescale", lambda d: rq.rotate_quant(x, prescale=torch.ones(64, device=d))),
        ("scales", lambda d: rq.dequant(codes, u8(4, 2).to(d))),
    ]
    for device in ["meta"] + ["cuda"] * torch.cuda.is_available():
        for argument, call in cases:
            with pytest.raises(RuntimeError, match=rf"^{argument}: expected device cpu.*{device}"):
                call(device)


# --- memory -----------------------------------------------------------------------------------


def every_op(x: Tensor) -> dict[str, tuple[list[Tensor], Callable]]:
    """Each op with tensors made of x [.., K], K % 64 == 0: the tensors it gets, and the call."""
    codes, scales = rq.quant(x)
    flat = scales.reshape(-1, scales.shape[-1])
    shuffled, rows = rq.shuffle_scales(flat), flat.shape[0]
    weight = u8(64, 32).to(x.device)
    matrix, scale = torch.randn(64, 64).to(x.device), torch.rand(x.shape[-1]).to(x.device)
    options = {"rows": rows, "groups": flat.shape[1]}
    return {
        "quant": ([x], rq.quant),
        "quant shuffled": ([x], partial(rq.quant, shuffle_scales=True)),
        "rotate": ([x], rq.rotate),
        "rotate by a matrix": ([x, matrix], rq.rotate),
        "rotate prescaled": ([x, scale], lambda x, s: rq.rotate(x, prescale=s)),
        "rotate_quant": ([x], rq.rotate_quant),
        "rotate_quant by a matrix": ([x, matrix], rq.rotate_quant),
        "rotate_quant shuffled": ([x], partial(rq.rotate_quant, shuffle_scales=True)),
        "dequant": ([codes, scales], rq.dequant),
        "shuffle_scales": ([flat], rq.shuffle_scales),
        "shuffle_scales of whole tiles": ([shuffled], rq.shuffle_scales),
        "unshuffle_scales": ([shuffled], partial(rq.unshuffle_scales, **options)),
        "shuffle_weight": ([weight], rq.shuffle_weight),
        "unshuffle_weight": ([weight], rq.unshuffle_weight),
    }


def results(value: Tensor | tuple) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


EVERY_OP = tuple(every_op(torch.ones(1, 64)))


# B20: an op that returned its own input.
@pytest.mark.parametrize("name", EVERY_OP)
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
def test_b20_results_have_memory_of_their_own(device, name, dtype):
    inputs, op = every_op(torch.randn(256, 256, device=device).to(dtype))[name]
    before = [t.clone() for t in inputs]
    out = results(op(*inputs))
    memory = [t.untyped_storage().data_ptr() for t in (*inputs, *out)]
    assert len(set(memory)) == len(memory)
    for tensor, copy in zip(inputs, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


def column_major(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


# B16: outputs that took over the strides of the input while the kernel wrote row after row.
@pytest.mark.parametrize("name", EVERY_OP)
@pytest.mark.parametrize(
    "strided",
    [
        lambda: torch.randn(64, 128).t(),
        lambda: torch.randn(3, 4, 64).transpose(0, 1),
        lambda: torch.randn(2, 8, 3, 64).to(memory_format=torch.channels_last),
        lambda: torch.randn(1, 64).expand(5, 64),
        lambda: torch.randn(6, 192)[::2, 64:128],
    ],
    ids=["transposed", "permuted", "channels_last", "expanded", "sliced"],
)
def test_b16_results_are_contiguous(device, name, strided):
    x = strided().to(device)
    natural, op = every_op(x.contiguous())[name]
    inputs = [x if t.shape == x.shape else column_major(t) for t in natural]
    out, expected = results(op(*inputs)), results(op(*natural))
    for tensor, contiguous in zip(out, expected, strict=True):
        assert tensor.is_contiguous() and tensor.storage_offset() == 0
        assert torch.equal(tensor, contiguous)


def aten_calls(op: Callable) -> set[str]:
    """Names of the ops that ran inside."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op()
    return {event.key for event in profile.key_averages()}


COPIES = {"aten::copy_", "aten::clone", "aten::contiguous", "aten::to"}


# B17: a slice of a wider tensor was refused deep inside. It is taken as it is, without a copy.
@pytest.mark.parametrize("op", [rq.quant, rq.rotate, rq.rotate_quant])
def test_b17_row_strided_input_is_not_copied(device, op):
    x = torch.randn(8, 512, device=device).bfloat16()
    strided = [
        x[:, :256],
        x[:, 128:384],
        x[::3],
        x[:1].expand(4, 512),
        x.view(2, 4, 512)[..., :64],
        x.view(2, 2, 2, 512)[..., 1:65],
    ]
    for part in strided:
        assert not COPIES & aten_calls(lambda: op(part))  # noqa: B023
        for tensor, expected in zip(results(op(part)), results(op(part.clone())), strict=True):
            assert torch.equal(tensor, expected)
    # The profiler does tell, where there is no one stride between rows.
    for part in (x.view(2, 4, 512)[:, :3], column_major(x)):
        assert "aten::copy_" in aten_calls(lambda: op(part))  # noqa: B023


# B18: scales with strides (1, M). In the square case a transpose has the right shape.
@pytest.mark.parametrize("rotation_size", [None, 64])
def test_b18_scales_are_row_major(device, rotation_size):
    x = np.exp2(np.arange(64)[:, None] - np.arange(64 * 32) // 32 / 2)
    x = (x * random(0, 64, 2048)).astype(np.float32)
    op = rq.quant if rotation_size is None else rq.rotate_quant
    codes, scales = op(to_tensor(x, device))
    assert scales.shape == (64, 64) and scales.stride() == (64, 1)
    expected = ref.quant(x) if rotation_size is None else ref.rotate_quant(x)
    assert (expected[1] != expected[1].T).mean() > 0.9
    memory = scales.cpu().untyped_storage().tolist()
    assert_bytes_equal(np.array(memory, np.uint8), expected[1].ravel(), "scales in memory")
    # Whoever passes them on with other strides gets the same values.
    twisted = scales.mT.contiguous().mT
    assert torch.equal(rq.shuffle_scales(twisted), rq.shuffle_scales(scales))
    assert torch.equal(rq.dequant(codes, twisted), rq.dequant(codes, scales))


# --- sizes ------------------------------------------------------------------------------------


# B26: the LAST row's offset passes 2^31. Of the 4 GiB only the pages of the rows are touched.
@pytest.mark.parametrize("op", [rq.quant, rq.rotate, rq.rotate_quant])
def test_b26_input_offsets_beyond_32_bits(device, op):
    stride, k = 2**30 + 64, 512
    storage = torch.empty(2 * stride + k, dtype=torch.bfloat16, device=device)
    x = storage.as_strided((3, k), (stride, 1))
    values = torch.randn(3, k, device=device).bfloat16()
    x.copy_(values)
    assert 2 * stride > 2**31
    for tensor, expected in zip(results(op(x)), results(op(values)), strict=True):
        assert torch.equal(tensor, expected)


# B26: more than 2^31 bytes of codes, of 2^32 elements that are one row again and again.
def test_b26_output_offsets_beyond_32_bits(device):
    row = torch.randn(4096, device=device).bfloat16()
    codes, scales = rq.quant(row.expand(2**20 + 5, 4096))
    assert codes.numel() > 2**31
    row_codes, row_scales = rq.quant(row)
    for index in (slice(0, 5), slice(2**19 - 2, 2**19 + 2), slice(-7, None)):
        assert torch.equal(codes[index], row_codes.expand_as(codes[index]))
        assert torch.equal(scales[index], row_scales.expand_as(scales[index]))


PLAN = """
#include "hip/device/tile_plan.h"
extern "C" void plan(int64_t k, int64_t rows, bool shuffle, int wave_size, int64_t* out) {
  const auto p = rotquant::device::plan_tiles(k, rows, shuffle, wave_size);
  const int64_t fields[] = {p.log2_groups, p.threads, p.row_tiles, p.group_tiles, p.grid_rows,
                            p.grid_groups};
  for (int i = 0; i < 6; ++i) out[i] = fields[i];
}
"""


@pytest.fixture(scope="session")
def plan_tiles(tmp_path_factory) -> Callable[..., dict[str, int]]:
    """The launch arithmetic of the GPU kernels, compiled for the host."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "plan.cpp").write_text(PLAN)
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'csrc'}", str(folder / "plan.cpp"), "-o", str(folder / "plan.so")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "plan.so"))
    names = ("log2_groups", "threads", "row_tiles", "group_tiles", "grid_rows", "grid_groups")

    def plan(k: int, rows: int, shuffle: bool, wave_size: int) -> dict[str, int]:
        out = (ctypes.c_int64 * 6)()
        library.plan(ctypes.c_int64(k), ctypes.c_int64(rows), shuffle, wave_size, out)
        return dict(zip(names, out, strict=True))

    return plan


def check_launch(plan: dict[str, int], k: int, rows: int, shuffle: bool, wave_size: int):
    groups = k // 32
    wave_groups = 1 << plan["log2_groups"]
    tile_rows = plan["threads"] // wave_groups
    # Whole waves, and a workgroup that the kernels are compiled for.
    assert 0 < plan["threads"] <= 256 and plan["threads"] % wave_size == 0
    assert 8 <= wave_groups <= wave_size
    # The tiles cover everything, and none lies outside. (The kernel strides over them.)
    assert (plan["row_tiles"] - 1) * tile_rows < rows <= plan["row_tiles"] * tile_rows
    assert (plan["group_tiles"] - 1) * wave_groups < groups <= plan["group_tiles"] * wave_groups
    # No empty dimension, no workgroup without a tile.
    assert 1 <= plan["grid_rows"] <= plan["row_tiles"]
    assert 1 <= plan["grid_groups"] <= plan["group_tiles"]
    # What HIP accepts: y below 2^16, and the number of threads in 32 bits.
    assert plan["grid_rows"] < 2**16
    assert plan["grid_rows"] * plan["grid_groups"] * plan["threads"] < 2**32
    if shuffle:  # a workgroup writes one tile of 32 x 8 scales
        assert (tile_rows, wave_groups) == (32, 8)


# B24: a grid in 32 bits; 2^31 elements gave "invalid configuration", 2^31 - 65536 worked.
@pytest.mark.parametrize("wave_size", [32, 64])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("elements", [2**30, 2**31 - 65536, 2**31, 2**31 + 32, 2**33, 2**40])
def test_b24_launch_of_huge_tensors(plan_tiles, elements, shuffle, wave_size):
    for k in (32, 256, 288, 2048, 4096, 2**20, 2**31, elements // 32 * 32):
        rows = -(-elements // k)
        if shuffle:
            rows = -(-rows // 256) * 256
        check_launch(plan_tiles(k, rows, shuffle, wave_size), k, rows, shuffle, wave_size)


@pytest.mark.parametrize("wave_size", [32, 64])
@pytest.mark.parametrize("shuffle", [False, True])
def test_b24_launches_of_ordinary_tensors(plan_tiles, shuffle, wave_size):
    for k in (*range(32, 2500, 32), 4096, 5120, 7168, 12288, 53248):
        for rows in (1, 2, 3, 7, 8, 31, 32, 33, 96, 255, 256, 257, 4096, 65535, 65536, 10**6):
            if shuffle and rows % 256:
                continue  # padding rows are counted
            check_launch(plan_tiles(k, rows, shuffle, wave_size), k, rows, shuffle, wave_size)


# B36: no tokens, as an idle data-parallel rank has.
@pytest.mark.parametrize("leading", [(0,), (3, 0), (0, 3), (2, 0, 5)])
@pytest.mark.parametrize("k", [64, 4096])
def test_b36_no_rows(device, leading, k):
    x = torch.empty(*leading, k, dtype=torch.bfloat16, device=device)
    groups = k // 32
    for op in (
        rq.quant,
        rq.rotate_quant,
        partial(rq.rotate_quant, rotation=torch.eye(64).to(device)),
    ):
        codes, scales = op(x)
        assert codes.shape == (*leading, k // 2) and scales.shape == (*leading, groups)
        codes, shuffled = op(x, shuffle_scales=True)
        assert codes.shape == (*leading, k // 2) and shuffled.shape == (0, -(-groups // 8) * 8)
        assert codes.dtype == scales.dtype == shuffled.dtype == torch.uint8
    assert rq.rotate(x).shape == x.shape
    assert rq.rotate(x, out_dtype=torch.float32).dtype == torch.float32
    assert rq.dequant(codes, scales).shape == x.shape
    assert rq.dequant(codes, shuffled, shuffled_scales=True).shape == x.shape
    flat = scales.reshape(0, groups)
    assert rq.shuffle_scales(flat).shape == shuffled.shape
    assert rq.unshuffle_scales(shuffled, rows=0, groups=groups).shape == flat.shape


# K = 0 is a multiple of everything; M is still what the leading dimensions say.
def test_no_channels(device):
    x = torch.empty(4, 3, 0, device=device)
    with poisoned_allocations():
        codes, scales = rq.quant(x)
        assert codes.shape == scales.shape == (4, 3, 0)
        assert rq.quant(x, shuffle_scales=True)[1].shape == (256, 0)
        assert rq.rotate_quant(x, shuffle_scales=True)[1].shape == (256, 0)
        assert rq.rotate(x).shape == x.shape
        assert rq.dequant(codes, scales).shape == x.shape
        assert (
            rq.dequant(codes, rq.shuffle_scales(scales.reshape(12, 0)), shuffled_scales=True).shape
            == x.shape
        )


# --- values -----------------------------------------------------------------------------------


# B27: groups of tiny numbers; the scale underflowed to 0, its reciprocal was Inf, the codes NaN.
@pytest.mark.parametrize("mode", rq.SCALE_MODES)
@pytest.mark.parametrize("size", [1e-35, 1e-37, 1e-38, 1e-39, 1e-40, 1e-44, 1e-45])
def test_b27_tiny_groups(device, size, mode):
    x = (random(0, 1, 64) * size).astype(np.float32)
    for op, oracle in ((rq.quant, ref.quant), (rq.rotate_quant, ref.rotate_quant)):
        codes, scales = op(to_tensor(x, device), scale_mode=mode)
        values = rq.dequant(codes, scales, dtype=torch.float32)
        assert values.isfinite().all() and values.abs().max() <= 8 * size + 2.0**-126
        assert (scales <= 20).all()
        expected = oracle(x, scale_mode=mode)
        assert_bytes_equal(to_array(codes), expected[0], "codes")
        assert_bytes_equal(to_array(scales), expected[1], "scales")
    if size <= 1e-40:  # below half a step of 2^-127
        assert not rq.quant(to_tensor(x, device), scale_mode=mode)[1].any()


# B29: zeros became NaN, 0 / 0.
@pytest.mark.parametrize("mode", rq.SCALE_MODES)
@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
def test_b29_zeros(device, dtype, mode):
    x = torch.zeros(1, 64, dtype=dtype, device=device)
    for value in (x, -x):
        for op in (rq.quant, rq.rotate_quant, partial(rq.rotate_quant, bf16_intermediate=True)):
            codes, scales = op(value, scale_mode=mode)
            assert not codes.any() and not scales.any()
            assert not rq.dequant(codes, scales).any()


# B30: the exponent was taken of amax rounded to bf16, where 1.9990 becomes 2.0.
def test_b30_exponent_of_the_float32_amax(device):
    x = torch.full((1, 64), 0.5, device=device)
    x[0, 5] = x[0, 37] = 2 - 2**-10  # 1.99902, and sums of it are exact in float32
    assert x.bfloat16()[0, 5] == 2
    assert rq.quant(x, scale_mode="floor")[1].tolist() == [[125, 125]]
    assert rq.quant(x.bfloat16(), scale_mode="floor")[1].tolist() == [[126, 126]]
    # And so where the amax is that of the rotated values: the Hadamard is its own inverse.
    spread = rq.rotate(x)
    assert torch.equal(rq.rotate(spread), x)
    options = {"scale_mode": "floor", "rotation_size": 64}
    assert rq.rotate_quant(spread, **options)[1].tolist() == [[125, 125]]
    through_bf16 = rq.rotate_quant(spread, **options, bf16_intermediate=True)
    assert through_bf16[1].tolist() == [[126, 126]]


# B31: the default rule was another one in each implementation.
def test_b31_one_default_everywhere(device):
    for name in ("quant", "rotate_quant"):
        schema = {a.name: a for a in getattr(OPS, name).default._schema.arguments}
        defaults = {
            schema["scale_mode"].default_value,
            inspect.signature(getattr(rq, name)).parameters["scale_mode"].default,
            inspect.signature(getattr(ref, name)).parameters["scale_mode"].default,
        }
        assert defaults == {"round_up"}
    assert rq.SCALE_MODES == ref.SCALE_MODES
    for amax, scale in ((5.0, 127), (6.0, 127), (7.0, 128)):
        x = torch.full((32,), amax, device=device)
        assert rq.quant(x)[1].tolist() == [scale]
        impulse = torch.zeros(64, device=device)
        impulse[0] = 8 * amax
        assert rq.rotate_quant(impulse)[1].tolist() == [scale, scale]
        by_matrix = rq.rotate_quant(x.repeat(2), torch.eye(64, device=device))
        assert by_matrix[1].tolist() == [scale, scale]


def test_defaults_of_the_wrappers_are_those_of_the_schemas():
    for name in rq.__all__:
        if not hasattr(OPS, name):
            continue
        parameters = inspect.signature(getattr(rq, name)).parameters
        for argument in getattr(OPS, name).default._schema.arguments:
            # The wrappers take what moe_sort returns as one argument.
            if "sorting" in parameters and argument.name not in parameters:
                continue
            default = parameters[argument.name].default
            if not argument.has_default_value():
                assert default is inspect.Parameter.empty, (name, argument.name)
            elif isinstance(default, torch.dtype):
                assert rq.dequant(u8(1, 16), u8(1, 1)).dtype == default
                assert OPS.dequant(u8(1, 16), u8(1, 1)).dtype == default
            else:
                assert default == argument.default_value, (name, argument.name)


# B32: values on the midpoints of e2m1, and the fused op where the separate ones are.
@pytest.mark.parametrize("via_bf16", [False, True])
def test_b32_midpoints(device, via_bf16):
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor(midpoints * 8, device=device) * torch.tensor([1, -1] * 32, device=device)
    codes, scales = rq.quant(x)
    values = [0, 1, 1, 2, 2, 4, 4, 6]
    signed = [v * s for v, s in zip(values, [1, -1] * 4, strict=True)]
    assert rq.dequant(codes, scales).tolist() == signed * 8
    fused = rq.rotate_quant(rq.rotate(x), bf16_intermediate=via_bf16)  # x again, exactly
    assert torch.equal(fused[0], codes) and torch.equal(fused[1], scales)


CONFORMANCE = json.loads((ROOT / "tests" / "conformance.json").read_text())
CONFORMANCE_CASES = [(row, mode) for row in CONFORMANCE for mode in row["modes"]]


def pattern(values: list) -> np.ndarray:
    """Repeated to a group or two; strings are hexadecimal floats, "nan" or "inf"."""
    floats = [float.fromhex(v) if isinstance(v, str) else v for v in values]
    with np.errstate(all="ignore"):
        return np.resize(np.array(floats, np.float64).astype(np.float32), 64)


# B33: "which result is golden?" tests/conformance.json is the published table: it was worked out by
# hand from the rules it names, and the numpy reference and the op both have to agree with it.
@pytest.mark.parametrize(
    ("row", "mode"),
    CONFORMANCE_CASES,
    ids=[f"{row['rule']}-{mode}" for row, mode in CONFORMANCE_CASES],
)
def test_b33_conformance(device, row, mode):
    x = pattern(row["x"])
    codes = ref.pack_nibbles(np.resize(np.array(row["codes"], np.uint8), 64))
    scales = np.full(2, row["scale"], np.uint8)
    options = {"scale_mode": mode}
    op, oracle = rq.quant, ref.quant
    if "rotation_size" in row:
        op, oracle = rq.rotate_quant, ref.rotate_quant
        options["rotation_size"] = row["rotation_size"]
    for who, (got_codes, got_scales) in {
        "numpy": oracle(x, **options),
        "op": map(to_array, op(to_tensor(x, device), **options)),
    }.items():
        assert_bytes_equal(got_codes, codes, f"codes of {who}")
        assert_bytes_equal(got_scales, scales, f"scales of {who}")


def test_b33_the_table_has_every_mode_and_code():
    assert {mode for row in CONFORMANCE for mode in row["modes"]} == set(rq.SCALE_MODES)
    assert {code for row in CONFORMANCE for code in row["codes"]} == set(range(16)) - {1 + 8, 13}


# --- the ops of torch.ops are those of the package --------------------------------------------


def test_wrappers_and_ops_are_the_same(device):
    x = torch.randn(3, 128, device=device)
    for name in ("quant", "rotate", "rotate_quant"):
        pairs = zip(results(getattr(rq, name)(x)), results(getattr(OPS, name)(x)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
