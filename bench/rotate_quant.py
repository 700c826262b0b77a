# SPDX-License-Identifier: MIT
"""Speed of rotate_quant (Hadamard, shuffled scales) on one device, each line beside

  copy      a copy on the device that moves as many bytes: half of them read, half written
  eager     the same three passes in plain torch: block Hadamard as a float32 matrix product,
            quantise, shuffle the scales
  compile   those three passes through torch.compile

All of a line is timed in one run, taking turns, and the medians are shown. First the bytes of the
three passes are compared with the op's and must be equal. (Neither has a bf16 intermediate. x lies
on a grid of 1/16, so that sums are exact in whatever order a matrix product makes them.)

On a GPU each is captured in a graph and events time its replays: launching costs nothing, which
flatters eager torch. Calls go through several inputs, more than caches hold unless M is small.

  us, gb_s       the op; bytes of x read and of codes and scales written, over its time
  of_copy        the copy's time over the op's: 100 % is as fast as memory lets it be
  over_eager     eager's time over the op's; over_compile likewise
"""

from __future__ import annotations

import argparse
import itertools

import common
import torch
from rich.progress import track
from torch import Tensor

import rotquant_hip as rq

INPUT_BYTES = 512 << 20  # of all inputs of a line together
MAX_INPUTS = 64


# --- the three passes, as one would write them in plain torch -------------------------------------

# A code is the number of midpoints below |value|; a tie goes up where the upper code is even.
MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
MIDPOINTS[[1, 3, 5]] = MIDPOINTS[[1, 3, 5]].nextafter(torch.tensor(0.0))


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of +-1, float32 [size, size]."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def rotate(x: Tensor, matrix: Tensor) -> Tensor:
    """[M, K] to float32 [M, K / 32, 32]."""
    y = x.float().view(-1, len(matrix)) @ matrix
    return y.mul_(len(matrix) ** -0.5).view(len(x), -1, 32)


def quantise(y: Tensor, midpoints: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, K / 2] and scales [M, K / 32], mode round_up."""
    low, high = torch.aminmax(y, dim=-1)
    amax = torch.maximum(-low, high)
    # Smallest power of two >= amax / 6: a mantissa above 1.5 carries into the exponent.
    byte = ((amax.view(torch.int32) + 0x3FFFFF >> 23) - 2).clamp_min_(0)
    t = y * (254 - byte << 23).view(torch.float32).unsqueeze(-1)
    codes = torch.bucketize(t.abs(), midpoints, out_int32=True).to(torch.uint8)
    codes |= torch.signbit(t).to(torch.uint8) << 3
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    finite = amax < torch.inf
    packed *= (finite & (amax > 0)).unsqueeze(-1)
    return packed.flatten(1), torch.where(finite, byte, 255).to(torch.uint8)


def shuffle(scales: Tensor) -> Tensor:
    """[M, G] to the GEMM's order [ceil256(M), ceil8(G)], see rotquant_hip/layouts.py."""
    m, groups = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -groups % 8, 0, -m % 256))
    tiles = padded.view(len(padded) // 32, 2, 16, -1, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(padded.shape)


def three_passes(x: Tensor, matrix: Tensor, midpoints: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantise(rotate(x, matrix), midpoints)
    return codes, shuffle(scales)


# --- a line ---------------------------------------------------------------------------------------


def measure(rs: int, m: int, args: argparse.Namespace) -> dict[str, float]:
    """One line of the table, by column."""
    device = args.device
    midpoints, matrix = MIDPOINTS.to(device), hadamard(rs).to(device)
    grid = torch.randn(m, args.k, device=device).mul_(16).round_().clamp_(-127, 127).div_(16)
    first = grid.to(getattr(torch, args.dtype))

    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return rq.rotate_quant(x, rotation_size=rs, shuffle_scales=True)

    torch.compiler.reset()
    baselines = {"eager": three_passes}
    if args.compile:
        baselines["compile"] = torch.compile(three_passes, dynamic=False)
    results = op(first)
    for name, passes in baselines.items():
        for mine, theirs in zip(results, passes(first, matrix, midpoints), strict=True):
            assert torch.equal(mine, theirs), f"RS {rs}, M {m}: not the bytes of {name}"

    traffic = sum(t.nbytes for t in (first, *results))
    del grid, results
    inputs = [first.clone() for _ in range(max(1, min(MAX_INPUTS, INPUT_BYTES // traffic)))]
    copied = [torch.ones(traffic // 2, dtype=torch.uint8, device=device) for _ in inputs]
    samplers = {"op": common.sampler(device, op, inputs)}
    samplers["copy"] = common.sampler(device, lambda x: torch.empty_like(x).copy_(x), copied)
    for name, passes in baselines.items():
        samplers[name] = common.sampler(device, lambda x, f=passes: f(x, matrix, midpoints), inputs)

    us = common.medians(samplers, args.seconds)
    line = {"K": args.k, "RS": rs, "M": m, "us": us["op"], "gb_s": traffic / us["op"] / 1e3}
    line |= {"copy_us": us["copy"], "of_copy": us["copy"] / us["op"]}
    for name in baselines:
        line |= {f"{name}_us": us[name], f"over_{name}": us[name] / us["op"]}
    return line


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--rs", type=int, nargs="+", default=[64, 32, 128])
    parser.add_argument("--m", type=int, nargs="+", default=[1, 32, 256, 1024, 4096, 16384])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = common.parse(parser)

    shapes = list(itertools.product(args.rs, args.m))
    lines = [measure(rs, m, args) for rs, m in track(shapes, "measuring", transient=True)]
    console = common.report("rotate_quant", lines, args)
    for line in lines:
        if (line["K"], line["RS"], line["M"]) == (4096, 64, 4096):
            ratio, share = line["over_eager"], line["of_copy"]
            console.print(f"K 4096, RS 64, M 4096: {ratio:.1f}x eager torch, {share:.0%} of a copy")


if __name__ == "__main__":
    main()
