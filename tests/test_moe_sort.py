# SPDX-License-Identifier: MIT
"""moe_sort and moe_sort_zero_ against the reference: all five results, every element.

Results are allocated poisoned, so that an element nobody wrote is noticed.
"""

from __future__ import annotations

import re
from functools import partial

import moe_routing as routing
import numpy as np
import pytest
import torch
from compare import assert_bytes_equal
from hypothesis import given
from hypothesis import strategies as st
from moe_routing import Routing
from strategies import seeds
from tensors import poisoned_allocations, runs_cpu_code, to_array, to_tensor
from torch import Tensor

from rotquant_hip.reference_moe import BLOCK_M, Sorting, max_rows

OPS = torch.ops.rotquant_hip


def run(r: Routing, device: torch.device, zero: Tensor | None = None) -> Sorting:
    options = dict(r.options)
    if options["expert_mask"] is not None:
        options["expert_mask"] = to_tensor(options["expert_mask"], device)
    args = [to_tensor(r.topk_ids, device), to_tensor(r.topk_weights, device)]
    with poisoned_allocations():
        if zero is None:
            results = OPS.moe_sort(*args, **options)
        else:
            results = OPS.moe_sort_zero_(zero, *args, **options)
    return Sorting(*(to_array(t) for t in results))


def assert_equal(actual: Sorting, expected: Sorting) -> None:
    for name, got, want in zip(Sorting._fields, actual, expected, strict=True):
        assert_bytes_equal(got, want, name)


def check(r: Routing, device: torch.device) -> Sorting:
    actual = run(r, device)
    assert_equal(actual, r.sorting())
    return actual


@given(r=routing.routings())
def test_against_the_reference(device, r):
    check(r, device)


# B38: correct up to 256 tokens, rows overlapped above it; a scan was wrong above 128 experts.
@pytest.mark.parametrize("experts", [127, 128, 129, 257, 385, 513, 1024])
@pytest.mark.parametrize("tokens", [255, 256, 257])
def test_b38_around_round_sizes(device, tokens, experts):
    other = routing.KINDS[(tokens + experts) % len(routing.KINDS)]
    for block_m, kind in ((16, "random"), (64, other)):
        check(routing.make(tokens, 3, experts, block_m, kind=kind, seed=experts), device)


@pytest.mark.parametrize("kind", routing.KINDS)
@pytest.mark.parametrize("block_m", BLOCK_M)
def test_every_kind_and_block(device, kind, block_m):
    for tokens, topk, experts in ((1, 8, 256), (1, 1, 1), (70, 1, 16), (70, 16, 24), (333, 8, 33)):
        check(routing.make(tokens, topk, experts, block_m, kind=kind), device)


@pytest.mark.parametrize("mask", routing.MASKS)
@pytest.mark.parametrize("local_experts", [None, 0, 5, 100])
def test_masks(device, mask, local_experts):
    for kind in ("random", "garbage", "last"):
        options = {"kind": kind, "mask": mask, "local_experts": local_experts}
        check(routing.make(40, 6, 100, 16, **options), device)


# B36: no token at all on an idle rank; and no route.
@pytest.mark.parametrize("tokens, topk", [(0, 8), (0, 0), (5, 0)])
def test_b36_nothing_to_sort(device, tokens, topk):
    zero = torch.full((7, 3), 9.0, device=device)
    actual = run(routing.make(tokens, topk, 16), device, zero)
    assert [a.shape for a in actual] == [(0,), (0,), (0,), (2,), (0,)]
    assert actual.num_valid.tolist() == [0, tokens]
    assert not zero.any()


# B34: rows of NaN under a graph made the router emit ids that are no expert.
def test_b34_garbage_ids_do_not_touch_other_routes(device):
    clean = routing.make(64, 8, 32, 16)
    ids = clean.topk_ids.copy()
    bad = np.arange(64) % 3 == 1
    ids[bad] = np.array([-1, 32, 0x7FC00000, routing.INT32_MIN, 33, -2, 1024, routing.INT32_MAX])
    actual = check(Routing(ids, clean.topk_weights, clean.options), device)
    rows = actual.reverse_sorted.reshape(64, 8)
    assert (rows[bad] == -1).all() and (rows[~bad] >= 0).all()
    dropped = clean.topk_ids.copy()
    dropped[bad] = -1
    assert_equal(actual, Routing(dropped, clean.topk_weights, clean.options).sorting())


# B35: a token whose experts are all on other ranks has no route, and its row of `zero` stays 0.
def test_b35_experts_of_other_ranks_are_dropped(device):
    r = routing.make(32, 2, 16, 16)
    r.options["expert_mask"] = (np.arange(16) >= 8).astype(np.int32)
    r.options["num_local_experts"] = 8
    away = (r.topk_ids < 8).all(1)
    assert away.any()
    zero = torch.full((32, 4), torch.nan, dtype=torch.bfloat16, device=device)
    actual = run(r, device, zero)
    assert_equal(actual, r.sorting())
    assert (actual.reverse_sorted.reshape(32, 2)[away] == -1).all()
    assert actual.sorted_expert_ids.max() == 7
    assert not to_array(zero).any()


# B37: all tokens to one expert overran a buffer. The bound is reached, and never exceeded.
@pytest.mark.parametrize("block_m", BLOCK_M)
@pytest.mark.parametrize("experts", [1, 8, 129])
@pytest.mark.parametrize("tokens", [1, 17, 150])
def test_b37_the_bound_on_rows_is_reached(device, tokens, experts, block_m):
    for topk in (1, 3):
        actual = check(routing.make(tokens, topk, experts, block_m, kind="worst"), device)
        assert len(actual.sorted_ids) == actual.num_valid[0]
        check(routing.make(tokens, topk, experts, block_m, kind="last"), device)


@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=40),
    idle=st.integers(0, 40),
    block_m=st.sampled_from(BLOCK_M),
)
def test_b37_the_bound_on_rows_suffices(counts, idle, block_m):
    used = sum(-(-n // block_m) * block_m for n in counts)
    assert used <= max_rows(sum(counts), len(counts) + idle, block_m)


def test_tokens_ascend_inside_an_expert(device):
    """What `deterministic` means, said without the reference."""
    r = routing.make(500, 4, 9, 16)
    actual = run(r, device)
    rows = actual.reverse_sorted.reshape(500, 4)
    for expert in range(9):
        assert (np.diff(rows[r.topk_ids == expert]) == 1).all()
    route = np.arange(500 * 4)
    assert (actual.sorted_ids[rows.ravel()] == (route % 4 << 24 | route // 4)).all()


# Work is cut for the threads of a CPU from 2^14 routes on, for workgroups of a GPU from 2^12 on.
def test_many_routes_on_any_number_of_threads(device):
    r = routing.make(6000, 7, 60, 128, kind="garbage", mask="half", seed=3)
    expected = r.sorting()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3) if runs_cpu_code(device) else (before,):
            torch.set_num_threads(threads)
            assert_equal(run(r, device), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens, topk", [(24, 8), (1100, 4)])
def test_zeroing(device, tokens, topk):
    """Any dtype, size and alignment; nothing beside it, and the sorting is the same."""
    r = routing.make(tokens, topk, 24)
    expected = r.sorting()
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.bool, torch.int64):
        zero = torch.ones((tokens, 13), dtype=dtype, device=device)
        assert_equal(run(r, device, zero), expected)
        assert not zero.any(), dtype
    for offset, size in ((1, 30), (3, 5), (16, 15), (15, 1), (7, 0), (9, 70001)):
        memory = torch.full((size + 40,), 77, dtype=torch.uint8, device=device)
        run(r, device, memory[offset : offset + size])
        around = torch.cat((memory[:offset], memory[offset + size :]))
        assert not memory[offset : offset + size].any() and (around == 77).all(), (offset, size)


# --- dtypes and strides of the arguments --------------------------------------------------------


@given(r=routing.routings(max_tokens=20, max_experts=40), seed=seeds)
def test_int64_ids_are_narrowed_not_wrapped(device, r, seed):
    """An id that int32 cannot hold would wrap into the range of experts."""
    wraps = np.random.default_rng(seed).integers(-3, 4, r.topk_ids.shape) << 32
    wide = r.topk_ids.astype(np.int64) + wraps
    expected = Routing(np.where(wraps == 0, r.topk_ids, -1), r.topk_weights, r.options)
    assert_equal(run(Routing(wide, r.topk_weights, r.options), device), expected.sorting())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_dtypes(device, dtype):
    r = routing.make(20, 4, 8)
    weights = to_tensor(r.topk_weights, device).to(dtype)
    results = OPS.moe_sort(to_tensor(r.topk_ids, device), weights, **r.options)
    rounded = Routing(r.topk_ids, to_array(weights.float()), r.options)
    assert_equal(Sorting(*map(to_array, results)), rounded.sorting())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_masks_of_other_dtypes(device, dtype):
    r = routing.make(20, 4, 30, mask="half")
    mask = to_tensor(r.options["expert_mask"] != 0, device).to(dtype)
    args = to_tensor(r.topk_ids, device), to_tensor(r.topk_weights, device)
    results = OPS.moe_sort(*args, **{**r.options, "expert_mask": mask})
    assert_equal(Sorting(*map(to_array, results)), r.sorting())


def test_strided_arguments(device):
    r = routing.make(37, 5, 12, mask="half")
    ids = to_tensor(r.topk_ids.T, device).T
    weights = torch.full((37, 10), torch.nan, device=device)
    weights[:, ::2] = to_tensor(r.topk_weights, device)
    mask = torch.full((36,), 7, dtype=torch.int32, device=device)
    mask[::3] = to_tensor(r.options["expert_mask"], device)
    options = {**r.options, "expert_mask": mask[::3]}
    results = OPS.moe_sort(ids, weights[:, ::2], **options)
    assert_equal(Sorting(*map(to_array, results)), r.sorting())


# --- errors: "<argument>: expected <what>, got <value>" -----------------------------------------

IDS, WEIGHTS = torch.zeros((4, 2), dtype=torch.int32), torch.ones((4, 2))
EXPERTS = {"num_experts": 8, "block_m": 32}
_sort = partial(OPS.moe_sort, IDS, WEIGHTS)
_ids = partial(OPS.moe_sort, topk_weights=WEIGHTS, **EXPERTS)
_weights = partial(OPS.moe_sort, IDS, **EXPERTS)
_mask = partial(_sort, **EXPERTS)
ERRORS = [
    # B39: flat ids were read as one expert a token.
    ("topk_ids", "shape [M, topk]", "shape [8]", partial(_ids, IDS.flatten())),
    ("topk_ids", "shape [M, topk]", "shape [1, 4, 2]", partial(_ids, IDS[None])),
    ("topk_ids", "int32 or int64", "Float", partial(_ids, IDS.float())),
    ("topk_ids", "int32 or int64", "Short", partial(_ids, IDS.short())),
    ("topk_ids", "topk of at most 16", "17", partial(_ids, IDS.new_zeros(4, 17))),
    (
        "topk_ids",
        "less than 16777216 tokens",
        "16777216",
        lambda: OPS.moe_sort(IDS[:1, :1].expand(2**24, 1), WEIGHTS, **EXPERTS),
    ),
    ("topk_weights", "shape [4, 2]", "shape [8]", partial(_weights, WEIGHTS.flatten())),
    ("topk_weights", "shape [4, 2]", "shape [2, 4]", partial(_weights, WEIGHTS.T)),
    ("topk_weights", "a floating-point dtype", "Int", partial(_weights, IDS)),
    ("num_experts", "1 to 1024", "0", partial(_sort, num_experts=0, block_m=32)),
    ("num_experts", "1 to 1024", "1025", partial(_sort, num_experts=1025, block_m=32)),
    ("block_m", "one of 16, 32, 64, 128", "48", partial(_sort, num_experts=8, block_m=48)),
    ("num_local_experts", "0 to num_experts 8", "9", partial(_mask, num_local_experts=9)),
    ("num_local_experts", "0 to num_experts 8", "-1", partial(_mask, num_local_experts=-1)),
    ("expert_mask", "shape [8]", "shape [7]", partial(_mask, expert_mask=IDS.new_ones(7))),
    ("expert_mask", "shape [8]", "shape [4, 2]", partial(_mask, expert_mask=IDS)),
    ("expert_mask", "integer dtype", "Float", partial(_mask, expert_mask=torch.ones(8))),
    (
        "zero",
        "a contiguous tensor",
        "strides [1, 3]",
        partial(OPS.moe_sort_zero_, torch.ones(2, 3).T, IDS, WEIGHTS, **EXPERTS),
    ),
]


@pytest.mark.parametrize("argument, expected, got, call", ERRORS, ids=lambda v: str(v)[:30])
def test_errors_name_the_argument(argument, expected, got, call):
    pattern = f"{argument}: expected .*{re.escape(expected)}.*, got .*{re.escape(got)}"
    with pytest.raises(RuntimeError, match=pattern):
        call()


def test_a_refused_call_zeroes_nothing():
    zero = torch.ones(5)
    with pytest.raises(RuntimeError, match="topk_ids"):
        OPS.moe_sort_zero_(zero, IDS.flatten(), WEIGHTS, **EXPERTS)
    assert zero.all()
