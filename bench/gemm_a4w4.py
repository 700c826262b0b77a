# SPDX-License-Identifier: MIT
"""Speed of gemm_a4w4 on one device, each line beside

  float32     torch's float32 matmul of the same shape
  bfloat16    torch's bfloat16 matmul
  dequant     what one would do without the op: dequantise the weight, then a matmul in --dtype

All of a line is timed in one run, taking turns, and the medians are shown. First the result is
compared with a float64 product of the dequantised operands.

On a GPU each candidate is captured in a graph and events time its replays.

  us, gmac_s     the op; multiply-accumulates over its time
  over_...       that candidate's time over the op's: above 1 the op is faster
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import common
import torch
from rich.progress import track
from torch import Tensor

import rotquant_hip as rq


def check(out: Tensor, a: Tensor, w: Tensor) -> None:
    """Against float64 of the dequantised operands, in a few rows and columns."""
    rows, columns = (torch.arange(0, n, max(1, n // 64), device=a.device) for n in out.shape)
    left, right = a[rows].double(), w[columns].double()
    actual, expected = out[rows][:, columns].double(), left @ right.T
    # Half a unit in the last place of the output, and what float32 sums lose.
    bound = torch.finfo(out.dtype).eps * expected.abs() + 1e-5 * (left.abs() @ right.abs().T)
    assert (actual - expected).abs().le(bound).all(), "the product is wrong"


def measure(n: int, k: int, m: int, args: argparse.Namespace) -> dict[str, float]:
    """One line of the table, by column."""
    device, dtype = args.device, getattr(torch, args.dtype)
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    a, a_scales = rq.quant(x, shuffle_scales=True)
    codes, scales = rq.quant(w)
    b, b_scales = rq.shuffle_weight(codes), rq.shuffle_scales(scales)

    def op() -> Tensor:
        return rq.gemm_a4w4(a, b, a_scales, b_scales, out_dtype=dtype, config=args.config)

    values = rq.dequant(a, a_scales, dtype=torch.float32, shuffled_scales=True)
    check(op(), values, rq.dequant(codes, scales, dtype=torch.float32))
    of_dtype, x16, w16 = values.to(dtype), x.bfloat16(), w.bfloat16()
    calls: dict[str, Callable[[], object]] = {
        "op": op,
        "float32": lambda: x @ w.T,
        "bfloat16": lambda: x16 @ w16.T,
        "dequant": lambda: of_dtype @ rq.dequant(codes, scales, dtype=dtype).T,
    }
    samplers = {
        name: common.sampler(device, lambda _, f=call: f(), [None]) for name, call in calls.items()
    }
    us = common.medians(samplers, args.seconds)
    line = {"N": n, "K": k, "M": m, "us": us["op"], "gmac_s": m * n * k / us["op"] / 1e3}
    for name in ("float32", "bfloat16", "dequant"):
        line |= {f"{name}_us": us[name], f"over_{name}": us[name] / us["op"]}
    return line


def _shape(text: str) -> tuple[int, int]:
    n, k = text.split("x")
    return int(n), int(k)


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument(
        "--nk",
        type=_shape,
        nargs="+",
        metavar="NxK",
        default=[(6144, 4096), (4096, 12288), (1536, 576)],
        help="weights; the defaults are q/k/v and down of Qwen3-8B, gate of SmolLM2-135M",
    )
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 128, 512, 2048])
    parser.add_argument("--config", type=int, default=-1, help="see rotquant_hip.gemm_configs()")
    args = common.parse(parser)

    shapes = list(itertools.product(args.nk, args.m))
    lines = [measure(n, k, m, args) for (n, k), m in track(shapes, "measuring", transient=True)]
    common.report("gemm_a4w4", lines, args)


if __name__ == "__main__":
    main()
