# SPDX-License-Identifier: MIT
"""The ops whose GPU kernels are matrix products, through torch: judged by bounds that hold for any
order of float32 sums, so that the CPU, the emulated launchers and a GPU face the same tests.

The operands are bf16 values, which the GPU's rounding of operands to bf16 leaves as they are.
"""

from __future__ import annotations

import interval
import numpy as np
import pytest
import torch
from strategies import to_float32
from tensors import to_array

import rotquant_hip as rq
from rotquant_hip import reference


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("per_block", (False, True))
@pytest.mark.parametrize("size", rq.ROTATION_SIZES)
def test_learned_rotation(device: torch.device, size: int, per_block: bool) -> None:
    for rows, k in ((1, 256), (35, 512)):
        x = bf16(rows, k, seed=size)
        matrix = bf16(*((k // size,) if per_block else ()), size, size, seed=1) / size**0.5
        judged = interval.product(to_float32(to_array(x)), to_float32(to_array(matrix)))
        on_device = (x.to(device), matrix.to(device))
        y = rq.rotate(*on_device, out_dtype=torch.float32).cpu().numpy()
        interval.assert_rounded(y, judged, lambda end: end, f"rotate RS {size}")
        for scale_mode in rq.SCALE_MODES:
            codes, scales = rq.rotate_quant(*on_device, scale_mode=scale_mode)
            got = codes.cpu().numpy(), scales.cpu().numpy()
            what = f"rotate_quant RS {size} {scale_mode}"
            share = interval.assert_quantised(*got, judged.ends, scale_mode, what)
            assert share < 0.01, f"{what}: {share:.4f} of the bytes had a choice"
        shuffled = rq.rotate_quant(*on_device, shuffle_scales=True)[1]
        natural = rq.rotate_quant(*on_device)[1]
        assert torch.equal(shuffled, rq.shuffle_scales(natural.reshape(rows, -1)))


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_gemm(device: torch.device, out_dtype: torch.dtype) -> None:
    for m, n, k in ((1, 16, 32), (3, 48, 96), (17, 30, 288), (70, 130, 544), (130, 272, 800)):
        x, w, bias = bf16(m, k, seed=2), bf16(-(-n // 16) * 16, k, seed=3), torch.randn(n)
        a, a_scales = rq.quant(x.to(device), shuffle_scales=True)
        b, b_scales = rq.quant(w.to(device))
        shuffled = rq.shuffle_weight(b), a_scales, rq.shuffle_scales(b_scales)
        y = rq.gemm_a4w4(a, *shuffled, bias.to(device), n=n, out_dtype=out_dtype)

        def decoded(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
            return reference.dequant(codes.cpu().numpy(), scales.cpu().numpy()).astype(np.float64)

        left = decoded(a, rq.unshuffle_scales(a_scales, rows=m, groups=k // 32))
        right = decoded(b, b_scales)[:n]
        exact = left @ right.T + bias.double().numpy()
        sums = np.abs(left) @ np.abs(right).T + bias.abs().double().numpy()
        bound = 2.0**-23 * (k / 32 + 8) * sums + torch.finfo(out_dtype).eps / 2 * np.abs(exact)
        error = np.abs(y.double().cpu().numpy() - exact)
        worst = np.unravel_index(np.argmax(error - bound), error.shape)
        assert (error <= bound).all(), f"{(m, n, k)} at {worst}: {error[worst]} > {bound[worst]}"


def test_rotated_product_is_the_product(device: torch.device) -> None:
    """x R (W R)^T = x W^T, and with outliers closer to it than without R."""
    x, w = bf16(33, 512, seed=4), bf16(64, 512, seed=5)
    x[:, 7::97] *= 40
    exact = x.double() @ w.double().T

    def product(rotate) -> torch.Tensor:
        a, a_scales = rq.quant(rotate(x.to(device)), shuffle_scales=True)
        b, b_scales = rq.quant(rotate(w.to(device)))
        y = rq.gemm_a4w4(a, rq.shuffle_weight(b), a_scales, rq.shuffle_scales(b_scales))
        return (y.double().cpu() - exact).norm() / exact.norm()

    plain, rotated = product(lambda t: t), product(lambda t: rq.rotate(t, rotation_size=64))
    assert rotated < plain, f"relative error {rotated:.3f} rotated, {plain:.3f} plain"
