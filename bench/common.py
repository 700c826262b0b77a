# SPDX-License-Identifier: MIT
"""What the benchmarks share: samples that take turns, the conditions, the table and the CSV."""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

SAMPLE_SECONDS = 0.01  # shorter calls are repeated to fill one sample
DTYPES = ("bfloat16", "float16", "float32")
Line = dict[str, Any]  # of a table, by column
Sampler = Callable[[], float]  # runs a few calls, returns the seconds that one took


def sampler(device: torch.device, call: Callable[..., object], inputs: Sequence[Any]) -> Sampler:
    """Samples of call(input), going through the inputs in turn."""
    return (_gpu_sampler if device.type == "cuda" else _cpu_sampler)(call, inputs)


def _cpu_sampler(call: Callable[..., object], inputs: Sequence[Any]) -> Sampler:
    turns = itertools.cycle(inputs)
    # On one thread CPU time is the same, but for what others do on a busy machine.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def sample(count: int) -> float:
        start = clock()
        for _ in range(count):
            call(next(turns))
        return (clock() - start) / count

    sample(1)  # compiles, starts threads
    count = max(1, round(SAMPLE_SECONDS / sample(1)))
    return lambda: sample(count)


def _gpu_sampler(call: Callable[..., object], inputs: Sequence[Any]) -> Sampler:
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


def samples(samplers: dict[str, Sampler], seconds: float) -> dict[str, list[float]]:
    """Microseconds of each; they take turns for about `seconds` in all, at least three times."""
    taken: dict[str, list[float]] = {name: [] for name in samplers}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, taken.values())) < 3:
        for name, sample in samplers.items():
            taken[name].append(sample() * 1e6)
    return taken


def medians(samplers: dict[str, Sampler], seconds: float) -> dict[str, float]:
    """The median of each one's `samples`."""
    taken = samples(samplers, seconds)
    return {name: statistics.median(values) for name, values in taken.items()}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=device)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    parser.add_argument("--threads", type=int, help="default: torch's; of 1 CPU time is taken")
    parser.add_argument("--seconds", type=float, default=2.0, help="a line, after warming up")
    parser.add_argument("--commit", help="for the CSV, where this is no git checkout")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


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


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def report(name: str, lines: list[Line], args: argparse.Namespace) -> Console:
    """Prints the table, writes the CSV where one is asked for."""
    about = conditions(args)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in lines[0]:
        table.add_column(column.replace("_", "\n"), justify="right")
    for line in lines:
        table.add_row(*map(_cell, line.values()))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file has room for every column
    console.print(f"{name}:", *(f"{key} {value};" for key, value in about.items()))
    console.print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*about, *lines[0]])
            writer.writeheader()
            writer.writerows(about | line for line in lines)
    return console
