# SPDX-License-Identifier: MIT
"""moe_sort's gfx950 machine code, executed by the emulator with all its checks on.

Results are unwritten memory to begin with and compared exactly; both ways to sort run: alone (one
launch, one workgroup sorts) and apart (three launches, any number of workgroups).
"""

from __future__ import annotations

import ctypes
import re
from functools import cache

import gfx950_emulator as emu
import gfx950_kernels as kernels
import moe_routing as routing
import numpy as np
import pytest
from compare import assert_bytes_equal
from gfx950_asm import Kernel, read_kernels
from gfx950_build import code_objects, host_library
from moe_routing import Routing
from numpy.typing import NDArray

from rotquant_hip.reference_moe import Sorting, max_rows

STEM = "moe_sort-kernel"
THREADS, TILE = 1024, 4096

#: Mnemonics executed so far; test_every_instruction_was_executed reads it.
executed: set[str] = set()


class Plan(ctypes.Structure):
    """rotquant::MoeSortPlan."""

    _fields_ = [
        ("alone", ctypes.c_bool),
        ("groups", ctypes.c_int64),
        ("routes_per_group", ctypes.c_int64),
        ("fill_groups", ctypes.c_int64),
    ]


PLAN_CODE = (
    '#include "core/moe_sort_plan.h"\n'
    "using namespace rotquant;\n"
    'extern "C" void plan(long routes, long rows, long zero_bytes, MoeSortPlan* out) {\n'
    "  *out = plan_moe_sort(routes, rows, zero_bytes); }\n"
    'extern "C" long rows(long routes, long experts, long block_m) {\n'
    "  return moe_max_rows(routes, experts, block_m); }\n"
    'extern "C" long workspace(long routes, long rows, int local_experts) {\n'
    "  MoeSortParams p{}; p.tokens = routes; p.topk = 1; p.max_rows = rows;\n"
    "  p.local_experts = local_experts; return moe_sort_workspace_bytes(p); }\n"
)


@cache
def host() -> ctypes.CDLL:
    library = host_library("moe_sort_plan", PLAN_CODE)
    for function in (library.plan, library.rows, library.workspace):
        function.restype = ctypes.c_long
    return library


def plan(routes: int, rows: int, zero_bytes: int = 0) -> Plan:
    """How the host code cuts the sort; compiled from the project's own header."""
    result = Plan()
    host().plan(*map(ctypes.c_long, (routes, rows, zero_bytes)), ctypes.byref(result))
    return result


def run(
    r: Routing, alone: bool, zero: NDArray | None = None, groups: int = 3, **options
) -> tuple[Sorting, list[emu.Stats]]:
    """Launches as moe_sort() of hip/moe_sort would, but with `groups` and the way that is asked."""
    routes = r.tokens * r.topk
    rows = max_rows(routes, r.local_experts, r.options["block_m"])
    sizes = (rows, rows, rows // r.options["block_m"], 2, routes)
    out = [
        kernels.poisoned((size,), np.float32 if i == 1 else np.int32)
        for i, size in enumerate(sizes)
    ]
    groups = 1 if alone else groups
    routes_per_group = -(-max(routes, 1) // groups // THREADS) * THREADS
    columns = -(-r.local_experts // 64) * 64
    workspace = kernels.poisoned(((groups + 1) * columns,), np.int32)
    fill_groups = 2 if zero is not None or not alone else 0
    grid = groups + fill_groups
    arguments = (
        *(r.topk_ids, r.topk_weights, r.options["expert_mask"]),
        *(r.tokens, r.topk, r.options["num_experts"], r.local_experts, r.options["block_m"], rows),
        *(*out, zero, 0 if zero is None else zero.nbytes, workspace),
        *(groups, routes_per_group, grid),
    )
    # What the first launch reads before it wrote it is noticed; later ones read poison.
    unwritten = [
        emu.Uninitialized(a) if any(a is o for o in (*out, workspace)) else a for a in arguments
    ]
    launches = (("alone", grid),)
    if not alone:
        launches = (("count", grid), ("sum", columns // 64), ("place", groups))
    stats = []
    for name, blocks in launches:
        if blocks == 0:
            continue
        obj, symbol = kernels.kernel(STEM, f"moe_sort_{name}_kernel")
        args = emu.Struct("PPPqiiiiqPPPPPPqPiii", *(arguments if stats else unwritten))
        stats.append(obj.run(symbol, grid=blocks, block=THREADS, args=[args], **options))
        executed.update(stats[-1].mnemonics)
    return Sorting(*out), stats


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
    *((450, 9, 385, 32, {}), (256, 16, 64, 16, {})),  # the largest tile, a route less
    *((200, 5, 32, 16, {"kind": kind}) for kind in routing.KINDS),
    *((90, 6, 130, 16, {"mask": mask, "kind": "garbage"}) for mask in routing.MASKS),
    (50, 6, 100, 32, {"mask": "half", "local_experts": 11}),
    (50, 6, 100, 32, {"local_experts": 70}),
    (50, 6, 100, 32, {"local_experts": 0}),
    (3, 4, 8, 16, {"kind": "none"}),
)


@WAYS
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_against_the_reference(index: int, alone: bool) -> None:
    *sizes, options = SHAPES[index]
    check(routing.make(*sizes, seed=index, **options), alone)
