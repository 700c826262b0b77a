# SPDX-License-Identifier: MIT
"""bench/fused_moe.py: small layers through all of it, and rows that dispatch reads."""

from __future__ import annotations

import argparse
import sys

import pytest
import torch
from gfx950_build import ROOT

from rotquant_hip import dispatch

sys.path.append(str(ROOT / "bench"))
import fused_moe as bench  # noqa: E402

SMALL = bench.Model(experts=4, hidden=128, inter=128, topk=2)
ARGS = argparse.Namespace(
    device=torch.device("cpu"), dtype="bfloat16", seconds=0.0, commit="none", fp4=False
)


@pytest.fixture
def samples_are_short(monkeypatch):
    monkeypatch.setattr(bench.common, "SAMPLE_SECONDS", 0.0)


def test_candidates_are_all_that_dispatch_takes():
    """Each names a row that a table may hold, and no configuration is forgotten."""
    found = list(bench.candidates())
    assert len(set(found)) == len(found)
    for each in found:
        key = ("gfx950", "1", "128", "128", "4", "2", "any")
        row = [*key, each.pipeline, str(each.block_m), each.gemm1, each.gemm2, "rule", "", ""]
        dispatch._parse(row, "here")
    assert {each.pipeline for each in found} == set(dispatch.PIPELINES)
    assert {each.gemm2 for each in found} == set(bench.rq.moe_gemm2_configs())
    narrow = {
        name
        for name in bench.rq.moe_gemm1_configs()
        if dispatch._tile(name)[2] // 2 < bench.INTER_ROTATION
    }
    assert {each.gemm1 for each in found} == set(bench.rq.moe_gemm1_configs()) - narrow


def test_times_and_tuned_rows(samples_are_short, monkeypatch, tmp_path):
    layer = bench.Layer(SMALL, torch.bfloat16, ARGS.device)
    line = bench.measure(layer, 5, SMALL, ARGS)  # compares the results
    assert line["pipeline"] == "staged_reduce"
    assert line["over_eager_low"] <= line["over_eager"] <= line["over_eager_high"]

    timed = bench.measure_pipelines(layer, 5, SMALL, ARGS)
    assert [t["us"] for t in timed] == sorted(t["us"] for t in timed)
    monkeypatch.setattr(dispatch, "_CPU", "gfx950")
    path = tmp_path / "tuned.csv"
    bench.write_tuned(path, timed, SMALL, ARGS)
    ((shape, tokens, plan),) = dispatch.read_table(path)
    assert shape == ("gfx950", 128, 128, 4, 2, "any") and tokens == 5
    fastest = next(t for t in timed if "fp4" not in t["pipeline"])
    assert (plan.pipeline, plan.block_m) == (fastest["pipeline"], fastest["block_m"])
    assert (plan.gemm1, plan.gemm2) == (fastest["gemm1"], fastest["gemm2"])
    assert plan.source == "measured"


def test_errors_are_those_of_mxfp4(monkeypatch):
    """The layer is what it says, rotation helps where there are outliers, MXFP4 rows lose."""
    monkeypatch.setattr(bench, "ACCURACY_MODEL", bench.Model(2, 256, 128, 2))
    monkeypatch.setattr(bench, "ACCURACY_TOKENS", 160)
    monkeypatch.setattr(bench, "ROTATIONS", ((0, 0), (64, 64)))
    lines = dict(bench.errors("outliers in x", 0))
    for (_, _, _, rows), line in lines.items():
        if rows == "float32":
            assert line["same_err"] < 1e-3
        else:
            assert 0.1 < line["same_err"] < 0.13
        assert line["same_err"] < line["float_err"] < line["all_err"]
    plain, rotated = (lines["outliers in x", rs, rs, "float32"] for rs in (0, 64))
    assert rotated["float_err"] < 0.85 * plain["float_err"]
