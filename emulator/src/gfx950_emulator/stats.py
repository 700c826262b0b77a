# SPDX-License-Identifier: MIT
"""Counts of one run, and lower bounds on its time derived from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from . import decode


@dataclass(frozen=True)
class Chip:
    """Peak figures of one chip (vendor data sheets; see README)."""

    cus: int
    clock_ghz: float
    hbm_tb_s: float
    l2_bytes_per_clock: int  # all channels: 8 dies x 16 channels x 128 B
    lds_bytes_per_clock_cu: int


CHIPS = {
    "mi355x": Chip(256, 2.4, 8.0, 8 * 16 * 128, 256),
    "mi350x": Chip(256, 2.2, 8.0, 8 * 16 * 128, 256),
}
_SIMDS, _CLOCKS_PER_PASS, _CLOCKS_PER_VALU = 4, 4, 4
_TRANS = ("v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_")

_MEMORY_COUNTS = (
    "lds_accesses", "lds_cycles", "lds_least_cycles", "lds_bytes", "lds_underaligned",
    "vmem_accesses", "vmem_bytes", "lines", "least_lines", "atomics",
)  # fmt: skip

# Passes of 4 clocks: {mnemonic stem: passes}; f8f6f4 depends on its formats.
_PASSES = {"16x16x32": 4, "32x32x16": 8, "16x16x64": 4, "32x32x32": 8, "16x16x16": 4, "32x32x8": 8,
           "32x32x2": 16, "16x16x4": 8, "32x32x4": 16, "16x16x128": 4, "32x32x64": 8}  # fmt: skip


def mfma_passes(name: str, cbsz: int, blgp: int) -> int:
    """Passes of one matrix instruction; 0 when it is not known."""
    if "f8f6f4" in name:
        return (4 if "16x16x128" in name else 8) * (2 if cbsz < 2 or blgp < 2 else 1)
    for shape, passes in _PASSES.items():
        if f"_{shape}_" in name:
            return passes
    return 0


@dataclass(frozen=True)
class Floor:
    """Lower bound per resource in microseconds. A bound, not a timing: nothing overlaps less than
    perfectly."""

    chip: str
    us: dict[str, float]
    note: str = "lower bound per resource at peak rate and full occupancy; not a timing"

    @property
    def bound(self) -> str:
        """The resource with the largest floor."""
        return max(self.us, key=lambda k: self.us[k])


@dataclass
class Stats:
    """Counts of executed instructions (per wave) and of memory traffic.

    mnemonics, classes: Counter of executed wave instructions. mfma_passes: passes of 4 clocks.
    lds_cycles / lds_least_cycles: LDS clocks with bank conflicts / with none. lines / least_lines:
    128-byte
    lines touched per vector access, summed / the least that their bytes could fill.
    unique_read_bytes,
    unique_written_bytes: distinct bytes of the arguments. The memory counts are None when not
    counted.
    """

    mnemonics: Counter = field(default_factory=Counter)
    classes: Counter = field(default_factory=Counter)

    def __init__(self, decoded: decode.Decoded, out: dict, touched: tuple[int, int] | None) -> None:
        counts = np.asarray(out["counts"])
        executed = np.nonzero(counts)[0]
        self.mnemonics, self.classes = Counter(), Counter()
        self.mfma_passes = self.mfma_unknown = 0
        self._valu_clocks = 0
        names, kinds = decoded.column("name"), decoded.column("kind")
        cbsz, blgp = decoded.column("cbsz"), decoded.column("blgp")
        for i in executed:
            n, name, kind = int(counts[i]), decoded.names[names[i]], int(kinds[i])
            self.mnemonics[name] += n
            self.classes[decode.KIND_NAMES[kind]] += n
            if kind == decode.MFMA:
                passes = mfma_passes(name, int(cbsz[i]), int(blgp[i]))
                self.mfma_passes += n * passes
                self.mfma_unknown += n if passes == 0 else 0
            if kind in (decode.VALU, decode.VOP3P):
                slow = 4 if name.startswith(_TRANS) else 1
                self._valu_clocks += n * _CLOCKS_PER_VALU * slow
        self.instructions = sum(self.mnemonics.values())
        self.counted = touched is not None
        for key in ("waves", "barriers", "workgroups"):
            setattr(self, key, out[key])
        for key in _MEMORY_COUNTS:
            setattr(self, key, out[key] if self.counted else None)
        self.unique_read_bytes, self.unique_written_bytes = touched if touched else (None, None)

    def resource_floor(self, chip: str = "mi355x") -> Floor:
        """Lower bounds in microseconds for HBM, L2, LDS, VALU issue and MFMA on one chip."""
        if chip not in CHIPS:
            raise ValueError(f"chip: expected one of {sorted(CHIPS)}, got {chip!r}")
        if not self.counted:
            raise ValueError("resource_floor needs a run with count=True")
        c = CHIPS[chip]
        clocks_us = c.clock_ghz * 1e3
        hbm = (self.unique_read_bytes + self.unique_written_bytes) / (c.hbm_tb_s * 1e6)
        us = {
            "hbm": hbm,
            "l2": self.lines * 128 / c.l2_bytes_per_clock / clocks_us,
            "lds": self.lds_cycles / c.cus / clocks_us,
            "valu": self._valu_clocks / (_SIMDS * c.cus) / clocks_us,
            "mfma": self.mfma_passes * _CLOCKS_PER_PASS / (_SIMDS * c.cus) / clocks_us,
        }
        return Floor(chip, us)

    def __repr__(self) -> str:
        keys = [
            k for k in vars(self) if not k.startswith("_") and k not in ("mnemonics", "classes")
        ]
        body = ", ".join(f"{k}={getattr(self, k)}" for k in keys)
        return f"Stats({body}, classes={dict(self.classes)})"
