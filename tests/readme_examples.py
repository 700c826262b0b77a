# SPDX-License-Identifier: MIT
"""Runs the README's Python, with what it leaves out. Needs rotquant_hip and nothing of the tests.

python tests/readme_examples.py
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import rotquant_hip as rq

M, K, RS, EXPERTS, INTER = 5, 512, 64, 8, 128
TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def e2m1_round_to_nearest_even(values: torch.Tensor) -> torch.Tensor:
    """What the README leaves out. Values are divided by their scale, so that now it is 1."""
    codes, scales = rq.quant(values)
    assert (scales == 127).all()
    return codes


def run() -> None:
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


if __name__ == "__main__":
    run()
