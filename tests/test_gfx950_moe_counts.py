# SPDX-License-Identifier: MIT
"""What a layer of experts executes on gfx950, and the generic way beside it (see bench/)."""

from __future__ import annotations

import sys

import pytest
from gfx950_build import ROOT

pytest.importorskip("triton", reason="Triton compiles the passes: requirements/emulator.txt")
sys.path.append(str(ROOT / "bench"))
import gfx950_moe_counts as counts  # noqa: E402

MODEL = counts.Model("small", experts=8, hidden=1024, inter=512, topk=4)
FEW, MANY = counts.Case(MODEL, 4, 1, 16), counts.Case(MODEL, 40, 1, 64)


@pytest.fixture(scope="module", params=[FEW, MANY], ids=["few tokens", "many tokens"])
def measured(request) -> tuple[counts.Case, list[counts.Line], list[counts.Line]]:
    """gfx950_moe_counts compares every result with numpy, or else counts a wrong kernel."""
    return request.param, *counts.measure(request.param)


def test_weights_are_read_once_by_a_block(measured) -> None:
    gemms = [line for line in measured[1] if line["blocks_an_expert"]]
    assert gemms
    for line in gemms:
        # Derived from requested bytes; a narrow tile's ids and weights of routes are an eighth.
        reads = pytest.approx(line["blocks_an_expert"], rel=0.15)
        assert line["weight_reads"] == reads, line["kernel"]
        assert line["of_least_bytes"] < 1.05, line["kernel"]


def test_no_bank_conflicts(measured) -> None:
    for line in measured[1]:
        if line["kernel"].startswith("gemm"):
            assert line["lds_clocks"] > 0
            assert line["lds_conflict_clocks"] == 0, line["kernel"]


def test_fused_is_less_than_the_generic_way(measured, capsys) -> None:
    case, _, (*ours, generic) = measured
    assert generic["pipeline"] == counts.GENERIC and generic["launches"] == 13
    with capsys.disabled():
        print(f"\n{case.tokens} tokens, counted (emulator), generic over ours:", end=" ")
        for line in ours:
            ratios = (f"{generic[k] / line[k]:.2f}" for k in ("launches", "instructions", "bytes"))
            print(f"{line['pipeline']} {' '.join(ratios)}", end="; ")
    for line in ours:
        assert line["launches"] <= 5
        assert line["bytes"] < generic["bytes"]
        # Quantising inside is repeated by every workgroup of a block: few tokens can afford that.
        if line["pipeline"] != "inline_atomic":
            assert line["instructions"] < generic["instructions"]
        assert line["us"] < generic["us"]


def test_grid_is_bounded_tightly() -> None:
    """Blocks of a whole layer: what a routing uses, our grid, the bound that peers launch for."""
    for case in counts.CASES:
        blocks = counts.whole_layer_blocks(case)
        used, grid, loose = (blocks[f"blocks_{name}"] for name in ("used", "grid", "loose"))
        assert used <= grid <= loose
        routes = case.tokens * case.model.topk
        assert grid <= min(case.model.experts, routes) + routes // case.block_m
