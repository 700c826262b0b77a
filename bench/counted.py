# SPDX-License-Identifier: MIT
"""What the benchmarks that count in the emulator share: launches added up, options, the CSV."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gfx950_emulator as emu

CHIP, OURS, TRITON = "mi355x", "rotquant_hip", "Triton"
FLOORS = ("hbm", "l2", "lds", "valu", "mfma")
Line = dict[str, str | float]


@dataclass
class Launch:
    """Counts of one run and what bounds the occupancy of its kernel."""

    stats: emu.Stats
    vgprs: int  # allocated to a lane, accumulators included
    lds_bytes: int
    threads: int

    @property
    def waves_per_simd(self) -> int:
        """By 512 registers a lane, at most 8; by 160 KiB of LDS for the 4 SIMDs."""
        workgroups = (160 << 10) // max(self.lds_bytes, 1)
        return min(8, 512 // self.vgprs, max(1, workgroups * self.threads // 64 // 4))


def ours(info: emu.elf.KernelInfo, stats: emu.Stats, threads: int) -> Launch:
    return Launch(stats, info.arch_vgprs + info.acc_vgprs, info.lds_bytes, threads)


def total(launches: Sequence[Launch], key: str) -> int:
    """A count of all launches."""
    return sum(getattr(launch.stats, key) for launch in launches)


def instructions(launches: Sequence[Launch], *kinds: str) -> int:
    """Wave instructions of some classes."""
    return sum(launch.stats.classes[kind] for launch in launches for kind in kinds)


def moved(launches: Sequence[Launch]) -> int:
    """Distinct bytes that each launch reads and writes."""
    return total(launches, "unique_read_bytes") + total(launches, "unique_written_bytes")


def quality(launches: Sequence[Launch], least: int) -> Line:
    """Columns of what does not depend on a unit. least: bytes that must be moved."""
    other = total(launches, "instructions") - instructions(launches, "mfma")
    passes, lines = total(launches, "mfma_passes"), total(launches, "lines")
    return {
        "mfma_share": passes / (passes + other),
        "of_least_bytes": moved(launches) / least,
        "of_least_lines": lines / total(launches, "least_lines"),
        "lds_conflict_clocks": total(launches, "lds_cycles") - total(launches, "lds_least_cycles"),
        "vgprs": max(launch.vgprs for launch in launches),
        "waves": min(launch.waves_per_simd for launch in launches),
    }


def modelled(launches: Sequence[Launch]) -> Line:
    """Microseconds by resource, launches added up; us: each launch's largest, added up."""
    floors = [launch.stats.resource_floor(CHIP).us for launch in launches]
    return {
        **{f"{name}_us": sum(floor[name] for floor in floors) for name in FLOORS},
        "us": sum(max(floor.values()) for floor in floors),
    }


def arguments(description: str) -> argparse.Namespace:
    """The options that every such benchmark has."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="a few small shapes")
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--chart", type=Path, help="PNG file to write (needs matplotlib)")
    return parser.parse_args()


def write(lines: Sequence[Line], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
