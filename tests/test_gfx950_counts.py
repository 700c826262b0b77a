# SPDX-License-Identifier: MIT
"""rotate_quant against the separate passes in Triton, both as gfx950 machine code (see bench/)."""

from __future__ import annotations

import sys

import pytest
from gfx950_build import ROOT

pytest.importorskip("triton", reason="Triton compiles the passes: requirements/emulator.txt")
sys.path.append(str(ROOT / "bench"))
import gfx950_counts  # noqa: E402


@pytest.mark.parametrize("learned", [False, True], ids=["hadamard", "learned"])
@pytest.mark.parametrize("rows, shuffle", [(64, False), (256, True)])
def test_fewer_instructions_and_bytes_than_triton(
    learned: bool, rows: int, shuffle: bool, capsys
) -> None:
    """RS 64, K 4096. gfx950_counts compares the outputs of both with numpy, byte for byte.

    Shuffled scales have 256 rows, so that padding does not count as elements.
    """
    mine, triton = gfx950_counts.rotate_quant(rows, 4096, 64, learned=learned, shuffle=shuffle)
    with capsys.disabled():
        print(f"\n{mine['op']}, {mine['shape']}, counted (emulator), ours and Triton's:", end=" ")
        for key in ("valu", "all", "bytes"):
            print(f"{key} {mine[key]:.2f}, {triton[key]:.2f}", end="; ")
        print("an element")
    assert mine["valu"] < triton["valu"]
    assert mine["all"] < triton["all"]
    assert mine["bytes"] < triton["bytes"]
    assert mine["of_least_bytes"] == pytest.approx(1, abs=0.01)
