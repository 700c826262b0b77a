# SPDX-License-Identifier: MIT
"""Results do not depend on the float mode that torch.set_flush_denormal() leaves in threads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rotquant_hip as rq

# Threads have something to do only above a grain.
TOKENS, HIDDEN, INTER, EXPERTS, TOPK = 128, 1024, 96, 4, 2
ACTIVATIONS = ("silu", "swiglu", "gelu", "gelu_tanh")


def inputs() -> dict[str, Tensor]:
    """Values about the smallest normal ones of float32, bf16 and fp16. To be made before the mode
    is changed."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def codes(*shape: int) -> Tensor:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)

    def scales(*shape: int, low: int = 0, high: int = 6) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)

    x = randn(TOKENS, HIDDEN)
    half = 120  # the scales of a product, less than which 2^-126 is soon reached
    return {
        "fp32": x * 2.0**-127,
        "bf16": (x * 2.0**-127).bfloat16(),
        "fp16": (x * 2.0**-15).half(),
        "prescale": randn(HIDDEN).double() * 2.0**-10,
        "tiny_prescale": randn(HIDDEN).double() * 2.0**-127,
        "rotation": randn(64, 64) * 2.0**-3,
        "tiny_rotation": randn(64, 64).double() * 2.0**-128,
        "ones": torch.ones(TOKENS, HIDDEN),
        "codes": codes(TOKENS, HIDDEN // 2),
        "scales": scales(TOKENS, HIDDEN // 32),
        "middle": scales(TOKENS, HIDDEN // 32, low=half - 64, high=half - 50),
        "w": codes(96, HIDDEN // 2),
        "w_scale": scales(96, HIDDEN // 32, low=half - 64, high=half - 50),
        "bias": randn(96).double() * 2.0**-128,
        "ids": torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK)[1],
        "route_weights": randn(TOKENS, TOPK).double() * 2.0**-128,
        "w1": codes(EXPERTS, 2 * INTER, HIDDEN // 2),
        "w1_scale": scales(EXPERTS, 2 * INTER, HIDDEN // 32, low=half - 64, high=half - 55),
        "w1_bias": randn(EXPERTS, 2 * INTER).double() * 2.0**-127,
        "w2": codes(EXPERTS, HIDDEN, INTER // 2),
        "w2_scale": scales(EXPERTS, HIDDEN, INTER // 32, low=120, high=127),
        "w2_bias": randn(EXPERTS, HIDDEN).double() * 2.0**-128,
        "rows": randn(TOKENS * TOPK, HIDDEN) * 2.0**-127,
        "shared": randn(TOKENS, HIDDEN) * 2.0**-127,
    }


def results(i: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every op that computes with floats, by name."""

    def all_of(name: str, made: Tensor | tuple[Tensor, ...]) -> Iterator[tuple[str, Tensor]]:
        for part, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
            yield f"{name} [{part}]", tensor

    for dtype in ("fp32", "bf16", "fp16"):
        x = i[dtype]
        for mode in rq.SCALE_MODES:
            yield from all_of(f"quant {dtype} {mode}", rq.quant(x, scale_mode=mode))
        for size in rq.ROTATION_SIZES:
            yield from all_of(f"rotate {dtype} {size}", rq.rotate(x, rotation_size=size))
            made = rq.rotate_quant(x, rotation_size=size, prescale=i["prescale"])
            yield from all_of(f"rotate_quant {dtype} {size}", made)
            made = rq.rotate_quant(x, rotation_size=size, bf16_intermediate=True)
            yield from all_of(f"rotate_quant {dtype} {size} via bf16", made)
        yield from all_of(f"rotate {dtype} by a matrix", rq.rotate(x, i["rotation"]))
        yield f"dequant to {dtype}", rq.dequant(i["codes"], i["scales"], dtype=x.dtype)
    yield "a tiny rotation", rq.rotate(i["ones"], i["tiny_rotation"])
    yield "a tiny prescale", rq.rotate(i["ones"], prescale=i["tiny_prescale"])

    weight = rq.shuffle_weight(i["w"]), rq.shuffle_scales(i["middle"])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        args = i["codes"], *weight, rq.shuffle_scales(i["w_scale"]), i["bias"]
        yield f"gemm_a4w4 to {dtype}", rq.gemm_a4w4(*args, out_dtype=dtype)

    s = rq.moe_sort(i["ids"], i["route_weights"], num_experts=EXPERTS, block_m=32)
    yield "moe_sort", s.sorted_weights
    yield from all_of("moe_rotate_quant", rq.moe_rotate_quant(i["fp32"], s))
    w1 = rq.shuffle_weight(i["w1"]), rq.shuffle_scales(i["w1_scale"])
    w2 = rq.shuffle_weight(i["w2"]), rq.shuffle_scales(i["w2_scale"])
    a_scales = rq.moe_sort_scales(i["middle"], s)
    for activation in ACTIVATIONS:
        a, a_s = rq.moe_gemm1(
            i["codes"],
            *(*w1, s),
            a_scales=a_scales,
            bias=i["w1_bias"],
            activation=activation,
            limit=7.0,
            inter_rotation_size=32,
        )
        rows = slice(0, int(s.num_valid[0]) // 256 * 256)  # past them nothing is written
        yield from all_of(f"moe_gemm1 {activation}", (a[rows], a_s[rows]))
    tiny = rq.quant(i["fp32"][: s.sorted_ids.numel() % TOKENS or TOKENS, :INTER].contiguous())
    repeats = -(-s.sorted_ids.numel() // len(tiny[0]))
    a, a_scale = (part.repeat(repeats, 1)[: s.sorted_ids.numel()] for part in tiny)
    a_scale = rq.shuffle_scales(a_scale)[: -(-s.sorted_ids.numel() // 32) * 32]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made = rq.moe_gemm2(
            a, *(a_scale, *w2, s), tokens=TOKENS, bias=i["w2_bias"], out_dtype=dtype
        )
        yield f"moe_gemm2 to {dtype}", made
        out = torch.zeros(TOKENS, HIDDEN, dtype=dtype)
        rq.moe_gemm2_atomic_(out, a, a_scale, *w2, s, bias=i["w2_bias"])
        yield f"moe_gemm2_atomic_ to {dtype}", out
    made = rq.moe_gemm2_mxfp4(a, a_scale, *w2, s, tokens=TOKENS, bias=i["w2_bias"])
    yield from all_of("moe_gemm2_mxfp4", made)
    even = torch.full((TOKENS, TOPK), 0.75)
    args = i["rows"], even, s
    yield "moe_reduce", rq.moe_reduce(*args, shared=i["shared"])
    few = rq.quant(i["rows"])
    yield "moe_reduce of MXFP4", rq.moe_reduce(few[0], even, s, scales=few[1])
    made = rq.fused_moe(
        *(i["fp32"], w1[0], w2[0], even, i["ids"]),
        w1_scale=w1[1],
        w2_scale=w2[1],
        rotation_size=64,
    )
    yield "fused_moe", made


def flushes(elements: int) -> bool:
    """Whether torch's own arithmetic, on all threads that it takes, flushes subnormals."""
    tiny = torch.full((elements,), 1, dtype=torch.int32).view(torch.float32)
    return not (tiny * 1).view(torch.int32).any()


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no mode that flushes subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def differing(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert got.keys() == expected.keys()
    same = {k: torch.equal(got[k].view(torch.uint8), expected[k].view(torch.uint8)) for k in got}
    return [name for name, equal in same.items() if not equal]


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    made = dict(results(inputs()))
    # Or the test would show nothing.
    for name in ("rotate fp32 64 [0]", "moe_reduce", "moe_gemm2 to torch.float32"):
        assert ((made[name] != 0) & (made[name].abs() < 2.0**-126)).any(), name
    return made


def test_flushing_in_the_calling_thread(expected, request) -> None:
    given = inputs()
    request.getfixturevalue("flushing")
    got = {}
    for name, tensor in results(given):
        got[name] = tensor
        assert flushes(1), f"{name}: the caller's mode was not restored"
    assert differing(got, expected) == []


def test_the_mode_stays_off(expected) -> None:
    for name, _ in results(inputs()):
        assert not flushes(1), name


def test_flushing_in_worker_threads(expected, tmp_path: Path) -> None:
    """In a process whose worker threads are started while the mode is on."""
    out = tmp_path / "results.pt"
    done = subprocess.run([sys.executable, __file__, str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert differing(torch.load(out), expected) == []


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepared = inputs()
    torch.set_flush_denormal(True)
    torch.set_num_threads(2)
    if not flushes(1 << 20):
        raise SystemExit("the worker threads do not flush")
    torch.save(dict(results(prepared)), sys.argv[1])
