# SPDX-License-Identifier: MIT
"""Which experts are on a rank: masks, maps and shared experts; what is none of them."""

from __future__ import annotations

import pytest
import torch
from tensors import runs_cpu_code
from torch import Tensor

import rotquant_hip as rq
from rotquant_hip import RotQuantMoE

EXPERTS, TOKENS, HIDDEN, INTER = 8, 12, 64, 32


def layer(experts: list[int], **options) -> RotQuantMoE:
    """These of ten experts that every call makes alike."""
    generator = torch.Generator().manual_seed(0)
    w1 = torch.randn(10, 2 * INTER, HIDDEN, generator=generator) / 8
    w2 = torch.randn(10, HIDDEN, INTER, generator=generator) / 6
    return RotQuantMoE.from_weights(w1[experts], w2[experts], **options)


def call(moe: RotQuantMoE, x: Tensor, weights: Tensor, ids: Tensor, **changes) -> Tensor:
    """The op, without what the layer checks."""
    names = ("w1", "w2", "w1_scale", "w2_scale", "rotation_size", "expert_mask", "expert_map")
    names += ("num_shared_experts", "shared_weight")
    arguments = {name: getattr(moe, name) for name in names} | changes
    for name, value in arguments.items():
        arguments[name] = value.to(x.device) if isinstance(value, Tensor) else value
    return rq.fused_moe(x=x, topk_weights=weights, topk_ids=ids, **arguments)


@pytest.fixture
def routed(device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    return tuple(t.to(device) for t in (x, *rq.route(logits, 2)))


# vLLM and SGLang hand over maps; as a mask, [0, 1, 2, 3, -1, ...] names the wrong experts.
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "ranks", [[[0, 1, 2, 3], [4, 5, 6, 7]], [[6, 0, 3], [1], [7, 5, 2, 4]]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_map_says_where_the_experts_are(routed, deterministic, ranks, dtype):
    x = routed[0]
    whole = call(layer(list(range(EXPERTS))), *routed, deterministic=deterministic)
    total = torch.zeros_like(x)
    for experts in ranks:
        expert_map = torch.full((EXPERTS,), -1, dtype=dtype)
        expert_map[experts] = torch.arange(len(experts), dtype=dtype)
        rank = layer(experts, expert_map=expert_map)
        assert torch.equal(rank.expert_map, expert_map.int())
        total += call(rank, *routed, deterministic=deterministic)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


def test_numbers_outside_the_rank_are_dropped(routed):
    x, weights, ids = routed
    expert_map = torch.tensor([0, 1, 2, 2**30, -7, -1, 3, 99])
    y = call(layer([0, 1, 2]), *routed, expert_map=expert_map)
    kept = torch.where(ids < 3, ids, -1)
    assert torch.equal(y, call(layer([0, 1, 2]), x, weights, kept))


def test_two_numbers_of_one_expert(routed):
    x, weights, ids = routed
    y = call(layer([5, 2]), *routed, expert_map=torch.tensor([0, 1] * 4), deterministic=True)
    assert torch.equal(y, call(layer([5, 2]), x, weights, ids % 2, deterministic=True))


@pytest.mark.parametrize("owned", ["all", "mask", "map"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_no_id_names_a_shared_expert(routed, owned, deterministic):
    """The number of routed experts is a usual padding value."""
    x, weights, ids = routed
    experts = list(range(EXPERTS)) if owned == "all" else [1, 4, 6]
    options = {}
    if owned == "mask":
        options["expert_mask"] = torch.tensor([e in experts for e in range(EXPERTS)])
    elif owned == "map":
        options["expert_map"] = torch.full((EXPERTS,), -1)
        options["expert_map"][experts] = torch.arange(3)
    moe = layer([*experts, 8, 9], num_shared_experts=2, shared_weight=0.5, **options)
    for outside in (EXPERTS, EXPERTS + 1, EXPERTS + 2, 2**30):
        wrong, dropped = ids.clone(), ids.clone()
        wrong[::2, 0], dropped[::2, 0] = outside, -1
        results = [call(moe, x, weights, i, deterministic=deterministic) for i in (wrong, dropped)]
        if deterministic or runs_cpu_code(x.device):
            assert torch.equal(*results)
        else:  # atomic sums, in any order
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    # And the shared experts are added, with their weight.
    nothing = torch.full_like(ids, -1)
    both = torch.tensor([[0, 1]] * TOKENS, device=x.device)
    alone = call(layer([8, 9]), x, torch.full_like(weights, 0.5), both)
    y = call(moe, x, weights, nothing, deterministic=deterministic)
    torch.testing.assert_close(y, alone, rtol=1e-5, atol=1e-5)


def test_a_map_does_not_reach_a_shared_expert(routed):
    x, weights, ids = routed
    moe = layer([0, 1, 9], num_shared_experts=1)
    y = call(moe, *routed, expert_map=torch.tensor([0, 1, 2, 2, -1, -1, -1, -1]))
    kept = torch.where(ids < 2, ids, -1)
    assert torch.equal(y, call(moe, x, weights, kept))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([0, 1, 2, 3, -1, -1, -1, -1], "1 for .* and 0 .*expert_map"),  # a map
        ([3, 2, 1, 0, -1, -1, -1, -1], "1 for .* and 0 .*expert_map"),
        ([1, 1, 1, 1, -1, 0, 0, 0], "1 for .* and 0 .*expert_map"),
        ([1, 1, 1, 0, 0, 0, 0, 0], "4 ones, .*, got 3"),
        ([1, 1, 1, 1, 1, 0, 0, 0], "4 ones, .*, got 5"),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_mask_that_is_none_is_told(routed, device, mask, message, deterministic, shared, dtype):
    x, weights, _ = routed
    moe = layer([0, 1, 2, 3, *[9] * shared], num_shared_experts=shared)
    ids = torch.tensor([[1, 2]] * TOKENS, device=device)  # here by all of these masks
    options = {"expert_mask": torch.tensor(mask, dtype=dtype), "deterministic": deterministic}
    if runs_cpu_code(device):
        with pytest.raises(RuntimeError, match=f"^expert_mask: expected {message}"):
            call(moe, x, weights, ids, **options)
    else:  # nothing is read back
        assert call(moe, x, weights, ids, **options).isnan().all()


X, W, IDS = torch.zeros(3, HIDDEN), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_mask": torch.ones(0).int()}, "expert_mask: expected 1 to 1024 experts"),
        ({"expert_mask": torch.ones(2).int()}, "expert_mask: expected at least as many .*, 4, got"),
        ({"expert_mask": torch.ones(4)}, "expert_mask: expected an integer dtype or bool"),
        ({"expert_map": torch.ones(4)}, "expert_map: expected dtype int32 or int64"),
        ({"expert_map": torch.ones(4).bool()}, "expert_map: expected dtype int32 or int64"),
        ({"expert_map": torch.ones(2, 2).int()}, r"expert_map: expected shape \[routed experts"),
        ({"expert_map": torch.ones(0).int()}, "expert_map: expected 1 to 1024 experts"),
        (
            {"expert_map": torch.ones(4).int(), "expert_mask": torch.ones(4).int()},
            "expert_map: expected None beside an expert_mask",
        ),
        ({"num_shared_experts": 5}, "num_shared_experts: expected 0 to 4"),
        ({"shared_weight": torch.nan}, "shared_weight: expected a finite number"),
        ({"alpha": torch.inf}, "alpha: expected a finite number"),
    ],
)
def test_one_sentence(device, changes, message):
    with pytest.raises(RuntimeError, match=f"^{message}"):
        call(layer([0, 1, 2, 3]), *(t.to(device) for t in (X, W, IDS)), **changes)


def test_topk_and_shared_experts_together(device):
    ids = torch.zeros(3, 16, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="num_shared_experts: expected at most 0 beside a topk"):
        call(
            layer([0, 9], num_shared_experts=1),
            *(t.to(device) for t in (X, torch.ones(3, 16), ids)),
        )
