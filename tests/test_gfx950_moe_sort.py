# SPDX-License-Identifier: MIT
"""moe_sort's gfx950 machine code, executed by the emulator with all its checks on.

Results are unwritten memory to begin with and compared exactly; both ways to sort run: alone (one
launch, one workgroup sorts) and apart (three launches, any number of workgroups).
"""

from __future__ import annotations

import ctypes

import gfx950_emulator as emu
import gfx950_kernels as kernels
import moe_routing as routing
import moe_sort_kernels as sort_kernels
import numpy as np
import pytest
from compare import assert_bytes_equal
from gfx950_asm import Kernel, read_kernels
from gfx950_build import code_objects
from moe_routing import Routing
from moe_sort_kernels import STEM, THREADS, Plan, host, plan
from numpy.typing import NDArray

from rotquant_hip.reference_moe import BLOCK_M, Sorting, max_rows

TILE = 4096

#: Mnemonics executed so far; test_every_instruction_was_executed reads it.
executed: set[str] = set()


def run(
    r: Routing, alone: bool, zero: NDArray | None = None, groups: int = 3, **options
) -> tuple[Sorting, list[emu.Stats]]:
    """The way that is asked, with `groups`."""
    groups = 1 if alone else groups
    routes_per_group = -(-r.tokens * r.topk // groups)  # of the host code a multiple of THREADS
    way = Plan(alone, groups, routes_per_group, 2 if zero is not None or not alone else 0)
    sorting, launches = sort_kernels.run(r, way, zero, **options)
    stats = [launch.stats for launch in launches]
    for one in stats:
        executed.update(one.mnemonics)
    return sorting, stats


def check(r: Routing, alone: bool, **options) -> None:
    actual, _ = run(r, alone, **options)
    for name, got, want in zip(Sorting._fields, actual, r.sorting(), strict=True):
        assert_bytes_equal(got, want, f"{name}, {'alone' if alone else 'apart'}")


WAYS = pytest.mark.parametrize("alone", [True, False], ids=["alone", "apart"])

# tokens, topk, experts, block_m, and what else `routing.make` takes.
SHAPES = (
    *((1, 8, 256, 16, {}), (1, 1, 1, 128, {}), (0, 8, 16, 32, {}), (5, 0, 16, 32, {})),
    *((8, 16, 16, 16, {}), (63, 1, 2, 32, {}), (65, 1, 3, 64, {})),
    *((255, 4, 127, 16, {}), (256, 4, 128, 32, {}), (257, 4, 129, 16, {})),  # B38
    *((130, 8, 257, 32, {}), (131, 9, 385, 16, {}), (40, 16, 513, 16, {}), (48, 8, 1024, 16, {})),
    *((450, 9, 385, 32, {}), (256, 16, 64, 16, {})),  # the most for one workgroup
    *((200, 5, 32, 16, {"kind": kind}) for kind in routing.KINDS),
    *((90, 6, 130, 16, {"mask": mask, "kind": "garbage"}) for mask in routing.MASKS),
    (50, 6, 100, 32, {"mask": "half", "local_experts": 11}),
    (50, 6, 100, 32, {"local_experts": 70}),
    (50, 6, 100, 32, {"local_experts": 0}),
    (3, 4, 8, 16, {"kind": "none"}),
)


@pytest.fixture(scope="module")
def code() -> list[Kernel]:
    return read_kernels(code_objects() / f"{STEM}.s")


@WAYS
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_against_the_reference(index: int, alone: bool) -> None:
    *sizes, options = SHAPES[index]
    check(routing.make(*sizes, seed=index, **options), alone)


def test_tiles_and_groups() -> None:
    """More routes than a workgroup takes at a time, groups without routes, all tokens to one
    expert in several workgroups."""
    for tokens, groups in ((1300, 1), (1300, 2), (513, 3), (1, 5), (150, 33), (90, 256)):
        for kind in ("random", "last", "garbage"):
            check(routing.make(tokens, 8, 40, 16, kind=kind), False, groups=groups)


@WAYS
def test_the_same_bytes_in_any_order(alone: bool) -> None:
    """Seeds shuffle the order of workgroups and waves."""
    r = routing.make(400, 8, 30, 16, mask="half", seed=1)
    for seed in range(4):
        check(r, alone, seed=seed)


@WAYS
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4096, 70001])
def test_zeroing(size: int, alone: bool) -> None:
    """Of a poisoned buffer, of any size, by whichever workgroups there are."""
    r = routing.make(20, 4, 16)
    zero = kernels.poisoned((size,))
    for name, got, want in zip(Sorting._fields, run(r, alone, zero)[0], r.sorting(), strict=True):
        assert_bytes_equal(got, want, name)
    assert not zero.any()


# --- how a sort is cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("routes", [0, 1, 1024, 4096, 4097, 9 * 16384, 16 * (2**24 - 1)])
@pytest.mark.parametrize("rows", [0, 4096, 32768, 32784, 2**28])
def test_plan(routes: int, rows: int) -> None:
    p = plan(routes, rows, 12345)
    assert p.alone == (routes <= TILE and rows <= 32768)
    assert 1 <= p.groups <= (1 if p.alone else 256) and 1 <= p.fill_groups <= 2048
    assert p.routes_per_group % THREADS == 0
    assert p.groups * p.routes_per_group >= routes
    assert (p.groups - 1) * p.routes_per_group <= max(routes - 1, 0)
    assert p.groups * p.routes_per_group < 2**31
    words = 0 if p.alone else (p.groups + 1) * 448
    assert host().workspace(*map(ctypes.c_long, (routes, rows)), 385) == 4 * words


@pytest.mark.parametrize("block_m", BLOCK_M)
def test_the_bound_on_rows_is_the_references(block_m: int) -> None:
    for routes in (0, 1, 15, 16, 17, 127, 128, 129, 9 * 16384, 16 * (2**24 - 1)):
        for experts in (0, 1, 8, 128, 1024):
            rows = host().rows(*map(ctypes.c_long, (routes, experts, block_m)))
            assert rows == max_rows(routes, experts, block_m)


def test_tokens_of_routes() -> None:
    """The product in place of a division, where it is most likely to be off by one."""
    for topk in range(1, 17):
        tokens = np.array([0, 1, 2, 1023, 2**16 + 1, 2**24 - 2])
        for route in (tokens[:, None] * topk + [0, topk - 1]).ravel().tolist():
            assert host().token(route, topk) == route // topk, (route, topk)


@WAYS
def test_maps(alone):
    """Any order, numbers of no expert among them, and two of one."""
    rng = np.random.default_rng(0)
    for local, experts in ((1, 1), (7, 41), (24, 40), (300, 1024)):
        r = routing.make(300, 4, experts, 16, local_experts=local)
        r.options["expert_map"] = rng.integers(-3, local + 3, experts).astype(np.int32)
        check(r, alone)


@WAYS
@pytest.mark.parametrize("wrong", ["a number", "too few", "too many"])
def test_a_mask_that_is_none_leaves_no_weight(alone, wrong):
    r = routing.make(200, 4, 40, 16, mask="half", local_experts=40)
    mask = r.options["expert_mask"]
    ones = int(mask.sum())
    if wrong == "a number":
        mask[np.flatnonzero(mask == 0)[-1]] = -1
        ones += 1  # which is not 0
    else:
        ones += 1 if wrong == "too few" else -1
    actual, _ = run(r, alone, mask_ones=ones)
    assert (actual.reverse_sorted == -2).all()
    used = actual.sorted_ids != (r.topk << 24 | r.tokens)
    assert used.any() and np.isnan(actual.sorted_weights[used]).all()
    assert not actual.sorted_weights[~used].any()


# --- the code object ------------------------------------------------------------------------------


def test_registers_and_lds(code: list[Kernel], capsys) -> None:
    lines = [f"{'gfx950 kernel':16} VGPR SGPR    LDS"]
    for kernel in code:
        meta = kernel.metadata
        for key in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
            assert meta[key] == 0, f"{kernel.name}: {key} {meta[key]}"
        assert not any(m.startswith(("scratch_", "flat_")) for m in kernel.mnemonics), kernel.name
        # Two workgroups of 16 waves on a compute unit.
        assert kernel.waves_per_simd == 8, f"{kernel.name}: {meta['.vgpr_count']} VGPRs"
        assert meta[".group_segment_fixed_size"] <= (160 << 10) // 2, kernel.name
        lines.append(
            f"{kernel.name:16} {meta['.vgpr_count']:4} {meta['.sgpr_count']:4}"
            f" {meta['.group_segment_fixed_size']:6}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_counts_of_a_decode_step(capsys) -> None:
    """What the comment in core/moe_sort_plan.h builds on."""
    valu, lines = {}, []
    for tokens in (1, 16, 128, 256, 384, 512):
        _, (stats,) = run(routing.make(tokens, 8, 256, 32), True)
        valu[tokens] = stats.classes["valu"] / 16
        lines.append(f"M {tokens:3}: {valu[tokens]:5.1f} vector instructions a wave")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert valu[512] - valu[384] < 135 and valu[1] < 95


# --- wrong kernels are caught -------------------------------------------------------------------

# kernel: {name: (what is replaced, by what, how many of the matches: 0 is all)}
CHANGES = {
    "alone": {
        "a rank that misses half of the lanes": (r"v_mbcnt_hi_u32_b32", "v_mbcnt_lo_u32_b32", 1),
        "a count that is not advanced": (r"ds_write_b16 (v\d+), v\d+$", r"s_nop 0", 0),
        "a step of the sum over lanes": (r"row_shr:4", "row_shr:3", 0),
        "the sum of the lower half of a wave": (r"row_bcast:31", "row_bcast:15", 0),
        "the barriers": (r"\ts_barrier", "\ts_nop 0", 0),
        "the last lane of a wave": (r"(v_readlane_b32 s\d+, v\d+), 63", r"\1, 62", 1),
        "the share of a workgroup that zeroes": (r"(s_add_i32 s\d+, s2), -1$", r"\1, 0", 1),
    },
    "count": {"a count that is lost": (r"ds_add_u32", "ds_max_u32", 0)},
    "sum": {"the barrier": (r"\ts_barrier", "\ts_nop 0", 0)},
    "place": {"the barriers": (r"\ts_barrier", "\ts_nop 0", 0)},
}
CASES = [(name, change) for name, changes in CHANGES.items() for change in changes]


def run_all(name: str) -> None:
    for experts in (12, 300):
        check(routing.make(300, 8, experts, 16, mask="half"), name == "alone", seed=5)
    zero = kernels.poisoned((30000,))
    run(routing.make(3, 2, 16), name == "alone", zero)
    assert not zero.any()


@pytest.mark.parametrize("name, change", CASES)
def test_a_wrong_kernel_is_caught(name: str, change: str, capsys) -> None:
    code = kernels.assembly_of(STEM, f"moe_sort_{name}_kernel")
    wrong = kernels.changed(*code, CHANGES[name][change])
    how = kernels.assert_caught(STEM, wrong, lambda: run_all(name))
    with capsys.disabled():
        print(f"\n{name}, {change}: {how}")


def test_the_unchanged_kernels_pass() -> None:
    with kernels.replaced(STEM, (code_objects() / f"{STEM}.s").read_text()):
        run_all("alone")
        run_all("place")


def test_every_instruction_was_executed(capsys) -> None:
    """Runs last: each mnemonic in the code object has been executed by a test above."""
    line = kernels.assert_all_executed(STEM, executed)
    with capsys.disabled():
        print(f"\n{line}")
