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
import csv
import datetime
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import rotquant_hip as rq

INPUT_BYTES = 512 << 20  # of all inputs of a line together
MAX_INPUTS = 64
SAMPLE_SECONDS = 0.01  # shorter calls are repeated to fill one sample
DTYPES = ("bfloat16", "float16", "float32")
Sampler = Callable[[], float]  # runs a few calls, returns the seconds that one took


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


# --- timing ---------------------------------------------------------------------------------------


def cpu_sampler(call: Callable[[Tensor], object], inputs: list[Tensor]) -> Sampler:
    turns = itertools.cycle(inputs)

    def sample(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call(next(turns))
        return (time.perf_counter() - start) / count

    sample(1)  # compiles, starts threads
    count = max(1, round(SAMPLE_SECONDS / sample(1)))
    return lambda: sample(count)


def gpu_sampler(call: Callable[[Tensor], object], inputs: list[Tensor]) -> Sampler:
    call(inputs[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in inputs:
            call(x)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(count: int) -> float:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / (count * len(inputs))

    sample(1)
    count = max(1, round(SAMPLE_SECONDS / (sample(1) * len(inputs))))
    return lambda: sample(count)


def medians(samplers: dict[str, Sampler], seconds: float) -> dict[str, float]:
    """Microseconds of each; they take turns for about `seconds` in all, at least three times."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["op"]) < 3:
        for name, sample in samplers.items():
            samples[name].append(sample() * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


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
    sampler = gpu_sampler if device.type == "cuda" else cpu_sampler
    samplers = {"op": sampler(op, inputs)}
    samplers["copy"] = sampler(lambda x: torch.empty_like(x).copy_(x), copied)
    for name, passes in baselines.items():
        samplers[name] = sampler(lambda x, f=passes: f(x, matrix, midpoints), inputs)

    us = medians(samplers, args.seconds)
    line = {"K": args.k, "RS": rs, "M": m, "us": us["op"], "gb_s": traffic / us["op"] / 1e3}
    line |= {"copy_us": us["copy"], "of_copy": us["copy"] / us["op"]}
    for name in baselines:
        line |= {f"{name}_us": us[name], f"over_{name}": us[name] / us["op"]}
    return line


# --- report ---------------------------------------------------------------------------------------


def conditions(args: argparse.Namespace) -> dict[str, str]:
    """What the numbers depend on besides the shape."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    if args.device.type == "cuda":
        device = torch.cuda.get_device_name(args.device)
    else:
        cpu = next((s for s in open("/proc/cpuinfo") if s.startswith("model name")), "")
        device = f"{cpu.partition(':')[2].strip()}, {torch.get_num_threads()} threads"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or git.stdout.strip() or "unknown",
        "device": device,
        "torch": torch.__version__,
        "dtype": args.dtype,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=device)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--rs", type=int, nargs="+", default=[64, 32, 128])
    parser.add_argument("--m", type=int, nargs="+", default=[1, 32, 256, 1024, 4096, 16384])
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    parser.add_argument("--seconds", type=float, default=2.0, help="a line, after warming up")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--commit", help="for the CSV, where this is no git checkout")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    shapes = list(itertools.product(args.rs, args.m))
    lines = [measure(rs, m, args) for rs, m in track(shapes, "measuring", transient=True)]
    about = conditions(args)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in lines[0]:
        table.add_column(column.replace("_", "\n"), justify="right")
    for line in lines:
        table.add_row(*(f"{v:.0f}" if v >= 100 else f"{v:.3g}" for v in line.values()))
    console = Console()
    console.print("rotate_quant:", *(f"{name} {value};" for name, value in about.items()), table)
    for line in lines:
        if (line["K"], line["RS"], line["M"]) == (4096, 64, 4096):
            ratio, share = line["over_eager"], line["of_copy"]
            console.print(f"K 4096, RS 64, M 4096: {ratio:.1f}x eager torch, {share:.0%} of a copy")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*about, *lines[0]])
            writer.writeheader()
            writer.writerows(about | line for line in lines)


if __name__ == "__main__":
    main()
