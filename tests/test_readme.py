# SPDX-License-Identifier: MIT
"""The README's Python runs, and prints what the README says that it prints."""

from __future__ import annotations

import re

import torch
from gfx950_build import ROOT

import rotquant_hip as rq
from rotquant_hip import dispatch

M, K, RS, EXPERTS, INTER = 5, 512, 64, 8, 128
TEXT = (ROOT / "README.md").read_text()


def e2m1_round_to_nearest_even(values: torch.Tensor) -> torch.Tensor:
    """What the README leaves out. Values are divided by their scale, so that now it is 1."""
    codes, scales = rq.quant(values)
    assert (scales == 127).all()
    return codes


def test_the_python_runs(capsys, monkeypatch) -> None:
    for name in (dispatch.TUNED, dispatch.RECORD):
        monkeypatch.delenv(name, raising=False)
    dispatch.reload()
    torch.manual_seed(0)
    x = torch.randn(M, K)
    names = {
        "linear": torch.nn.Linear(K, 64),
        "x": x,
        "w": torch.randn(64, K),
        "w1": torch.randn(EXPERTS, 2 * INTER, K) * K**-0.5,
        "w2": torch.randn(EXPERTS, K, INTER) * INTER**-0.5,
        "router_logits": torch.randn(M, EXPERTS),
        "M": M,
        "K": K,
        "RS": RS,
        "R": rq.rotate(torch.eye(RS), rotation_size=RS),
        "e2m1_round_to_nearest_even": e2m1_round_to_nearest_even,
    }
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
        if "fused_moe" in block:
            layer = names["moe"](x, names["topk_weights"], names["topk_ids"])
            assert torch.equal(names["y"], layer), "by hand and by the layer"
        if "e2m1_round" in block:
            codes, scales = rq.rotate_quant(x, rotation_size=RS)
            assert torch.equal(names["codes"].flatten(1), codes)
            assert torch.equal(names["scales"], scales)

    printed = capsys.readouterr().out.split()
    assert printed and " ".join(printed) in " ".join(TEXT.split())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(#([\w-]+)\)", TEXT):
        headings = [h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.M)]
        assert target in headings
    for path in re.findall(r"`((?:tests|bench|emulator|rotquant_hip)/[\w./]+)`", TEXT):
        assert list(ROOT.glob(path)), path
