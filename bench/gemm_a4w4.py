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

SAMPLE_SECONDS = 0.01  # shorter calls are repeated to fill one sample
DTYPES = ("bfloat16", "float16", "float32")

Sampler = Callable[[], float]  # runs a few calls, returns the seconds that one took


# --- timing ---------------------------------------------------------------------------------------


def cpu_sampler(call: Callable[[], object]) -> Sampler:
    def sample(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    sample(1)  # starts threads
    count = max(1, round(SAMPLE_SECONDS / sample(1)))
    return lambda: sample(count)


def gpu_sampler(call: Callable[[], object]) -> Sampler:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(count: int) -> float:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    sample(1)
    count = max(1, round(SAMPLE_SECONDS / sample(1)))
    return lambda: sample(count)


def medians(samplers: dict[str, Sampler], seconds: float) -> dict[str, float]:
    """Microseconds of each; they take turns for about `seconds` in all, at least three times."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["op"]) < 3:
        for name, sample in samplers.items():
            samples[name].append(sample() * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


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
    sampler = gpu_sampler if device.type == "cuda" else cpu_sampler
    us = medians({name: sampler(call) for name, call in calls.items()}, args.seconds)
    line = {"N": n, "K": k, "M": m, "us": us["op"], "gmac_s": m * n * k / us["op"] / 1e3}
    for name in ("float32", "bfloat16", "dequant"):
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
        capability = torch.backends.cpu.get_cpu_capability()
        threads = torch.get_num_threads()
        device = f"{cpu.partition(':')[2].strip()}, {capability}, {threads} threads"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or git.stdout.strip() or "unknown",
        "device": device,
        "torch": torch.__version__,
        "dtype": args.dtype,
    }


def _shape(text: str) -> tuple[int, int]:
    n, k = text.split("x")
    return int(n), int(k)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default_device)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the result")
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
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    parser.add_argument("--seconds", type=float, default=2.0, help="a line, after warming up")
    parser.add_argument("--commit", help="for the CSV, where this is no git checkout")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    shapes = list(itertools.product(args.nk, args.m))
    lines = [measure(n, k, m, args) for (n, k), m in track(shapes, "measuring", transient=True)]
    about = conditions(args)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in lines[0]:
        table.add_column(column.replace("_", "\n"), justify="right")
    for line in lines:
        table.add_row(*(f"{v:.0f}" if v >= 100 else f"{v:.3g}" for v in line.values()))
    Console().print("gemm_a4w4:", *(f"{name} {value};" for name, value in about.items()), table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*about, *lines[0]])
            writer.writeheader()
            writer.writerows(about | line for line in lines)


if __name__ == "__main__":
    main()
