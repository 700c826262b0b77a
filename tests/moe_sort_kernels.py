# SPDX-License-Identifier: MIT
"""Launches moe_sort's kernels in the emulator, as the host code would."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import gfx950_emulator as emu
import gfx950_kernels as kernels
import numpy as np
from gfx950_build import host_library
from moe_routing import Routing
from numpy.typing import NDArray

from rotquant_hip.reference_moe import Sorting, max_rows

STEM = "moe_sort-kernel"
THREADS = 1024


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
    'extern "C" long token(unsigned route, int topk) {\n'
    "  return moe_sort_token(route, moe_sort_reciprocal(topk)); }\n"
)


@cache
def host() -> ctypes.CDLL:
    library = host_library("moe_sort_plan", PLAN_CODE)
    for function in (library.rows, library.workspace, library.token):
        function.restype = ctypes.c_long
    return library


def plan(routes: int, rows: int, zero_bytes: int = 0) -> Plan:
    """How the host code cuts the sort; compiled from the project's own header."""
    result = Plan()
    host().plan(*map(ctypes.c_long, (routes, rows, zero_bytes)), ctypes.byref(result))
    return result


@dataclass(frozen=True)
class Launch:
    symbol: str
    stats: emu.Stats


def run(
    r: Routing,
    way: Plan | None = None,
    zero: NDArray | None = None,
    mask_ones: int = -1,
    **options,
) -> tuple[Sorting, list[Launch]]:
    """moe_sort, cut as the host code does or in another `way`; the same launches clear `zero`."""
    routes, block_m = r.tokens * r.topk, r.options["block_m"]
    rows = max_rows(routes, r.local_experts, block_m)
    zero_bytes = 0 if zero is None else zero.nbytes
    way = plan(routes, rows, zero_bytes) if way is None else way
    sizes = (rows, rows, rows // block_m, 2, routes)
    out = [
        kernels.poisoned((size,), np.float32 if i == 1 else np.int32)
        for i, size in enumerate(sizes)
    ]
    columns = -(-r.local_experts // 64) * 64
    workspace = None if way.alone else kernels.poisoned(((way.groups + 1) * columns,), np.int32)
    grid = way.groups + way.fill_groups
    arguments = (
        *(r.topk_ids, r.topk_weights, r.options["expert_mask"], r.options["expert_map"]),
        *(r.tokens, r.topk, r.options["num_experts"], r.local_experts, mask_ones, block_m, rows),
        *(*out, zero, zero_bytes, workspace),
        *(way.groups, way.routes_per_group, grid, block_m.bit_length() - 1),
        *(max(r.local_experts - 1, 1).bit_length(), -(-(2**32) // r.topk) if r.topk else 0),
    )
    # What the first launch reads before it wrote it is noticed; later ones read poison.
    written = [a for a in (*out, workspace) if a is not None]
    unwritten = [emu.Uninitialized(a) if any(a is w for w in written) else a for a in arguments]
    launches = (("alone", grid),)
    if not way.alone:
        launches = (("count", grid), ("sum", columns // 64), ("place", way.groups))
    done: list[Launch] = []
    for name, workgroups in launches:
        if workgroups == 0:
            continue
        obj, symbol = kernels.kernel(STEM, f"moe_sort_{name}_kernel")
        args = emu.Struct("PPPPqiiiiiqPPPPPPqPiiiiiq", *(arguments if done else unwritten))
        stats = obj.run(symbol, grid=workgroups, block=THREADS, args=[args], **options)
        done.append(Launch(symbol, stats))
    return Sorting(*out), done
