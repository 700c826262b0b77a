# SPDX-License-Identifier: MIT
"""Reads the assembly that CMake's target gfx950 writes: registers and basic blocks per kernel."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

DTYPES = ("bf16", "fp16", "fp32")
LANES = 64


@dataclass
class Block:
    """A straight run of instructions and the blocks that can follow it."""

    instructions: list[str] = field(default_factory=list)  # mnemonic and operands
    successors: list[str] = field(default_factory=list)


@dataclass
class Kernel:
    symbol: str
    metadata: dict
    blocks: dict[str, Block]  # by label, in order; the entry is ""

    @property
    def instructions(self) -> list[str]:
        return [i for block in self.blocks.values() for i in block.instructions]

    @property
    def mnemonics(self) -> set[str]:
        return {instruction.split()[0] for instruction in self.instructions}

    @property
    def name(self) -> str:
        """Readable: op, input dtype, RS, mse where the kernel has that variant; a GEMM's tile."""
        stem = re.match(r"_ZN8rotquant3hip\d+([a-z_0-9]+?)_kernel", self.symbol).group(1)
        if config := re.search(
            r"DTypeE(\d)ELi(\d+)E(?:Li(\d+)ELi(\d+)EEE)?(?:LNS_13ElementFormatE4ELb([01])E)?",
            self.symbol,
        ):
            dtype, size, tiles, waves, mse = config.groups()
            stem += f" {DTYPES[int(dtype)]} RS {size}"
            stem += f" {tiles}x{waves}" if tiles else ""  # token tiles of a wave, waves
            stem += " mse" if mse == "1" else ""
        if tile := re.search(r"TileI((?:Li\d+E)+)E", self.symbol):
            stem += "".join(f" {number}" for number in re.findall(r"\d+", tile[1]))
        return stem

    @property
    def waves_per_simd(self) -> int:
        """Occupancy by vector registers: 512 a lane, allocated in eights, at most 8 waves."""
        allocated = -(-max(self.metadata[".vgpr_count"], 1) // 8) * 8
        return min(8, 512 // allocated)

    def least_path(self, through: Callable[[str], bool], weight: Callable[[str], int]) -> int:
        """Least total weight of a run from entry to end that executes such an instruction.

        For these kernels that is the full-tile path: every other one (tails, prescale, an explicit
        normalisation) only adds instructions.
        """
        weights = {label: sum(map(weight, b.instructions)) for label, b in self.blocks.items()}
        start = self._distances("", {k: b.successors for k, b in self.blocks.items()}, weights)
        backwards: dict[str, list[str]] = {label: [] for label in self.blocks}
        for label, block in self.blocks.items():
            for successor in block.successors:
                backwards[successor].append(label)
        ends = [k for k, b in self.blocks.items() if any(i == "s_endpgm" for i in b.instructions)]
        to_end: dict[str, int] = {}
        for end in ends:
            for label, distance in self._distances(end, backwards, weights).items():
                to_end[label] = min(distance, to_end.get(label, distance))
        passing = [k for k, b in self.blocks.items() if any(map(through, b.instructions))]
        return min(start[k] + to_end[k] - weights[k] for k in passing if k in start and k in to_end)

    @staticmethod
    def _distances(
        origin: str, edges: dict[str, list[str]], weights: dict[str, int]
    ) -> dict[str, int]:
        distances: dict[str, int] = {}
        queue = [(weights[origin], origin)]
        while queue:
            distance, label = heapq.heappop(queue)
            if label in distances:
                continue
            distances[label] = distance
            for successor in edges[label]:
                heapq.heappush(queue, (distance + weights[successor], successor))
        return distances


def read_kernels(path: Path) -> list[Kernel]:
    text = path.read_text()
    metadata = yaml.safe_load(
        re.search(r"\.amdgpu_metadata\n(.*?)\n\s*\.end_amdgpu_metadata", text, re.S)[1]
    )
    return [
        Kernel(entry[".name"], entry, _blocks(_body(text, entry[".name"])))
        for entry in metadata["amdhsa.kernels"]
    ]


def _body(text: str, symbol: str) -> list[str]:
    body = text[text.index(f"\n{symbol}:") :]
    body = body[: re.search(r"^\.Lfunc_end\d+:", body, re.M).start()]
    return [line.split(";")[0].rstrip() for line in body.splitlines()[2:]]


def _blocks(lines: list[str]) -> dict[str, Block]:
    blocks = {"": Block()}
    label, falls_through = "", True
    for line in lines:
        if match := re.match(r"(\.LBB\w+):", line):
            if falls_through:
                blocks[label].successors.append(match[1])
            label, falls_through = match[1], True
            blocks[label] = Block()
        elif re.match(r"\s+[a-z]+_", line):
            if not falls_through:  # a new block that nothing labels: after a conditional branch
                raise ValueError(f"unreachable instruction after {label}: {line}")
            instruction = line.strip()
            blocks[label].instructions.append(instruction)
            if target := re.match(r"s_c?branch\w*\s+(\.LBB\w+)", instruction):
                blocks[label].successors.append(target[1])
                if instruction.startswith("s_branch"):
                    falls_through = False
                else:
                    fresh = f"{label}+{len(blocks)}"
                    blocks[label].successors.append(fresh)
                    label = fresh
                    blocks[label] = Block()
            elif instruction == "s_endpgm":
                falls_through = False
    return blocks
