# SPDX-License-Identifier: MIT
"""What gfx950 executes for a layer of experts, counted in the emulator: each kernel, the pipelines
made of them, and the same layer the generic way, one kernel for each step.

The generic way takes 13 launches: sort; rotate, quantise (Triton); sort scales; gather codes by
sorted row (Triton); a grouped GEMM that writes gate and up in bf16; activate, rotate, quantise
(Triton); sort scales; gather; a grouped GEMM of rows; weighted sum. Its GEMMs are moe_gemm2's
kernel, its sorts and sum ours, so that what differs is the fusion. All results are compared with
numpy's.

Thinned: a layer of E experts and M tokens is executed with E / f experts and M / f tokens, so that
an expert has as many tokens as in the whole; H, I and top-k are the model's, and so are the
configurations. Times f, counts are about those of the whole layer (M = 1: exactly those; experts
without tokens are left out). Columns are counted (emulator), read from the code object (VGPRs) or
modelled (us: peak rates of an MI355X, a lower bound and no timing, launches not included).

  groups, idle  workgroups launched, and those of the GEMMs that find no block to do
  MFMA          issue slots of 4 clocks that matrix instructions take, of the whole kernel
  MB, of least  distinct bytes read and written, over those that must be (an expert's weights once)
  w reads       times that codes of active experts' weights are requested (derived: requested bytes
                without those of tokens, scales and results) / blocks that such an expert has
  lines         128-byte lines touched by vector accesses over the fewest that hold their bytes
  LDS +         LDS clocks lost to bank conflicts, over all of its clocks
  hbm .. mfma   us by resource; bound us: the largest, of pipelines each launch's largest added up
  blocks        of sorted rows of the whole layer: used by a routing; in the grid (moe_max_rows());
                in one by the bound M * topk + E * (block_m - 1)

    pip install . ./emulator -r requirements/emulator.txt -r requirements/test.txt
    python bench/gfx950_moe_counts.py [--quick] [--out counts.csv] [--chart counts.png]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import counted
import numpy as np
import triton_passes
from counted import FLOORS, OURS, Launch, Line
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import interval  # noqa: E402
import moe_check as check  # noqa: E402
import moe_gemm2_kernels as gemm2_kernels  # noqa: E402
import moe_gemm_kernels as gemm1_kernels  # noqa: E402
import moe_launch as moe  # noqa: E402
from moe_launch import GROUP, Layer, Routing  # noqa: E402

from rotquant_hip import reference  # noqa: E402
from rotquant_hip.reference_moe import moe_sort  # noqa: E402

GENERIC = "generic"
ROTATION = 64  # of the tokens and of the intermediate
COUNTED = {"check": False, "count": True}


@dataclass(frozen=True)
class Model:
    name: str
    experts: int
    hidden: int
    inter: int
    topk: int


@dataclass(frozen=True)
class Case:
    """A layer for `tokens` of the model, thinned by `thin`."""

    model: Model
    tokens: int
    thin: int
    block_m: int

    @property
    def experts_run(self) -> int:
        m = self.model
        return m.topk if self.tokens == 1 else max(m.topk, m.experts // self.thin)

    @property
    def tokens_run(self) -> int:
        return self.tokens // self.thin

    def full_blocks(self) -> int:
        """That a launch for the whole layer would cover."""
        m = self.model
        return moe.grid_rows(self.tokens * m.topk, m.experts, self.block_m) // self.block_m


KIMI = Model("Kimi-K2.5 TP4", 385, 7168, 512, 9)
QWEN = Model("Qwen3-30B-A3B TP1", 128, 2048, 768, 8)
CASES = [
    *(Case(KIMI, *case) for case in ((1, 1, 16), (16, 4, 16), (64, 8, 16), (256, 16, 16))),
    *(Case(KIMI, *case) for case in ((1024, 32, 32), (4096, 40, 128))),
    *(Case(QWEN, *case) for case in ((1, 1, 16), (16, 4, 16), (64, 8, 16), (256, 16, 16))),
    *(Case(QWEN, *case) for case in ((1024, 16, 64), (4096, 16, 128))),
]
QUICK = [Case(QWEN, 16, 16, 16), Case(replace(QWEN, inter=256), 512, 16, 64)]


def route(experts: int, topk: int, tokens: int, block_m: int, seed: int = 0) -> Routing:
    """Random distinct experts for every token."""
    rng = np.random.default_rng((seed, experts, tokens))
    ids = np.argsort(rng.random((tokens, experts)), 1)[:, :topk].astype(np.int32)
    weights = rng.uniform(0.2, 1.8, ids.shape).astype(np.float32) / topk
    return Routing(ids, weights, experts, block_m)


@dataclass
class Step:
    """One kernel: its launches and the bytes that it must move."""

    kernel: str
    launches: list[Launch]
    least: int
    idle: int = 0  # workgroups without a block
    weight_reads: float = 0.0
    blocks: float = 0.0  # of sorted rows, of an expert that has any


def _launches(*done: moe.Launched) -> list[Launch]:
    return [counted.ours(d.info, d.stats, d.threads) for d in done]


class Runner:
    """Runs the kernels of a case, each once, and holds every result against numpy."""

    def __init__(self, case: Case) -> None:
        m, self.case = case.model, case
        rng = np.random.default_rng((m.hidden, m.inter, case.tokens))
        self.layer: Layer = moe.make_layer(rng, case.experts_run, m.hidden, m.inter)
        # On a grid, so that Triton's bf16 products of the rotation are exact in any order.
        shape = (case.tokens_run, m.hidden)
        x = (rng.standard_normal(shape) * 16).round().clip(-127, 127).astype(np.float32) / 128
        self.x, self.x_values = reference.float32_to_bf16(x), x
        unsorted = route(case.experts_run, m.topk, case.tokens_run, case.block_m)
        self.zeroed = np.full(shape, 0xA5A5, np.uint16)
        sorting, done = moe.sort(unsorted, **COUNTED)
        check.sorting(sorting, unsorted)
        self.r = replace(unsorted, sorting=sorting)
        self.sample = check.sample(self.r, 4)
        made = sum(array.nbytes for array in sorting)
        self.sort = Step("sort", _launches(*done), 2 * unsorted.ids.nbytes + made)
        again, done = moe.sort(unsorted, zero=self.zeroed, **COUNTED)
        check.sorting(again, unsorted)
        assert not self.zeroed.any(), "moe_sort: the output is not zeroed"
        least = self.sort.least + self.zeroed.nbytes
        self.sort_zero = Step("sort, zero the output", _launches(*done), least)
        self.used_rows = self.r.rows
        self.routes = unsorted.ids.size
        self.sorting_bytes = sorting.sorted_ids[: self.used_rows].nbytes

    # --- ours -----------------------------------------------------------------------------------

    def rotate_quant(self) -> Step:
        codes, scales, done = moe.rotate_quant(self.x, self.r, ROTATION, **COUNTED)
        want = reference.rotate_quant(self.x_values, rotation_size=ROTATION)
        assert (codes == want[0]).all(), "moe_rotate_quant: codes"
        assert (scales == moe.sorted_scales(want[1], self.r)).all(), "moe_rotate_quant: scales"
        self.a, self.natural_a = (codes, scales), want
        least = self.x.nbytes + codes.nbytes + scales.nbytes + 4 * self.routes + self.sorting_bytes
        return Step("rotate, quantise, sort scales", _launches(done), least)

    def _gemm(self, done: moe.Launched, name: str, n: int, k: int, config, rest: int) -> Step:
        """n: weight rows; rest: bytes besides weights that must be moved."""
        r, stats, blocks = self.r, done.stats, self.used_rows // self.r.block_m
        busy = blocks * -(-n // config.tile_n)
        active = np.unique(r.sorting.sorted_expert_ids[:blocks]).size
        weights = active * n * (k // 2 + -(-k // 256) * 8)
        others = busy * _besides_weights(config, k, r.block_m)
        others += 4 * stats.atomics or stats.unique_written_bytes
        reads = (stats.vmem_bytes - others) / (active * n * k // 2)
        idle, least = stats.workgroups - busy, weights + rest
        return Step(name, _launches(done), least, idle, reads, blocks / active)

    def gemm1(self, *, inside: bool) -> Step:
        layer, r = self.layer, self.r
        blocks = self.case.full_blocks()
        config = gemm1_kernels.choose(blocks, r.block_m, layer.inter, inside, ROTATION)
        chosen = gemm1_kernels.configs()[config]
        given = {"x": self.x, "rotation_size": ROTATION} if inside else {"a": self.a}
        out = moe.gemm1(layer, r, config, inter_rotation=ROTATION, **given, **COUNTED)
        codes, scales, done = out
        check.gemm1(layer, r, self.sample, self.natural_a, (codes, scales), ROTATION)
        self.inter = codes, scales
        made = self.used_rows * (layer.inter // 2 + -(-layer.inter // 256) * 8)
        tokens = self.x.nbytes if inside else self.a[0].nbytes
        # Sorted scales: of routes; padding is read with them, but must not be.
        scale_bytes = 0 if inside else self.routes * layer.hidden // GROUP
        rest = made + tokens + scale_bytes + self.sorting_bytes
        sizes = 2 * layer.inter, layer.hidden, chosen
        return self._gemm(done, f"gemm1 {chosen.name}", *sizes, rest)

    def gemm2(self, finish: str) -> Step:
        layer, r, s = self.layer, self.r, self.sample
        config = gemm2_kernels.chosen(self.case.full_blocks(), r.block_m, layer.hidden)
        chosen = gemm2_kernels.configs()[config]
        out = np.zeros_like(self.zeroed) if finish == "atomic" else None
        weights = layer.w2, layer.w2_scale, layer.bias2
        made, done = moe.gemm2(*weights, r, config, *self.inter, finish, out=out, **COUNTED)
        if finish == "atomic":
            check.atomic(layer, r, s, self.inter, out)
        elif finish == "rows":
            check.rows(layer, r, s, self.inter, made[0])
        else:
            check.mxfp4(layer, r, s, self.inter, made)
        self.rows = made[0] if finish == "rows" else made
        written = sum(a.nbytes for a in made) * (2 if finish == "atomic" else 1)
        rest = self.routes * (layer.inter // 2 + layer.inter // GROUP) + written
        rest += self.sorting_bytes
        sizes = layer.hidden, layer.inter, chosen
        return self._gemm(done, f"gemm2 {finish} {chosen.name}", *sizes, rest)

    def reduce(self, name: str) -> Step:
        out, done = moe.reduce(self.rows, self.r, **COUNTED)
        check.reduce(self.rows, self.r, out)
        rows = self.rows if isinstance(self.rows, tuple) else (self.rows,)
        least = sum(a.nbytes for a in rows) + out.nbytes + 8 * self.routes
        return Step(name, _launches(done), least)

    def pipelines(self) -> dict[str, list[Step]]:
        rotate_quant = self.rotate_quant()
        found = {}
        if self.case.block_m == 16:
            inside = self.gemm1(inside=True)
            found["inline_atomic"] = [self.sort_zero, inside, self.gemm2("atomic")]
        gemm1 = self.gemm1(inside=False)
        staged = [rotate_quant, gemm1]
        found["staged_atomic"] = [self.sort_zero, *staged, self.gemm2("atomic")]
        rows = self.gemm2("rows")
        found["staged_reduce"] = [self.sort, *staged, rows, self.reduce("reduce")]
        mxfp4 = self.gemm2("mxfp4")
        found["staged_fp4_reduce"] = [self.sort, *staged, mxfp4, self.reduce("reduce of mxfp4")]
        return found

    # --- the generic way --------------------------------------------------------------------------

    def generic(self) -> list[Step]:
        """Steps; each reads and writes memory, and what it must move is what it does."""
        layer, r, case = self.layer, self.r, self.case
        steps = [self.sort]

        def step(kernel: str, *launches: Launch) -> None:
            steps.append(Step(kernel, list(launches), counted.moved(launches)))

        def quantised(x: NDArray, what: str) -> tuple[NDArray, NDArray]:
            matrix = reference.float32_to_bf16(reference.hadamard(np.eye(ROTATION), ROTATION))
            factor = ROTATION**-0.5
            codes, scales, passes = triton_passes.rotate_quant(x, matrix, factor, shuffle=False)
            for name, launch in passes.items():
                step(f"{name} {what}", launch)
            return codes, scales

        def sorted_operand(codes, scales, what: str, by_route: bool) -> tuple[NDArray, NDArray]:
            shuffled, done = moe.sort_scales(scales, r, by_route=by_route, **COUNTED)
            assert (shuffled == moe.sorted_scales(scales, r, by_route=by_route)).all(), what
            step(f"sort scales of {what}", *_launches(done))
            ids = r.sorting.sorted_ids
            sizes = self.used_rows, r.tokens, r.topk
            gathered, launch = triton_passes.gather(codes, ids, *sizes, by_route=by_route)
            at = ids[~r.padding] & moe.TOKEN_MASK
            at = at * r.topk + (ids[~r.padding] >> 24) if by_route else at
            assert (gathered[~r.padding] == codes[at]).all(), f"gather of {what}"
            step(f"gather {what}", launch)
            return gathered, shuffled

        def product(a, weights: tuple, n: int, what: str, check_weights) -> NDArray:
            config = gemm2_kernels.chosen(case.full_blocks(), r.block_m, n)
            (rows,), done = moe.gemm2(*weights, r, config, *a, "rows", **COUNTED)
            check.rows(check_weights, r, self.sample, a, rows)
            step(f"{what} {gemm2_kernels.configs()[config].name}", *_launches(done))
            return rows

        codes, scales = quantised(self.x, "x")
        want = reference.rotate_quant(self.x_values, rotation_size=ROTATION, bf16_intermediate=True)
        check.assert_bytes_equal(codes, want[0], "Triton: codes of x")
        check.assert_bytes_equal(scales, want[1], "Triton: scales of x")
        a = sorted_operand(codes, scales, "x", False)
        weights = layer.w1, layer.w1_scale, None
        natural = *layer.natural_w1(self.sample.experts), None
        h = product(a, weights, 2 * layer.inter, "gemm, gate and up in bf16", natural)
        y, launch = triton_passes.activate(h)
        step("silu(gate) * up", launch)
        _check_activated(h, y)
        codes, scales = quantised(y, "intermediate")
        _check_rotated(y, codes, scales)
        a = sorted_operand(codes, scales, "intermediate", True)
        self.rows = product(a, (layer.w2, layer.w2_scale, None), layer.hidden, "gemm", layer)
        steps.append(self.reduce("weighted sum"))
        return steps


def _besides_weights(config, k: int, block_m: int) -> int:
    """Bytes that a workgroup requests to multiply its tile, without codes of weights: tokens, by
    each of its waves along n unless they share them in LDS, and scales."""
    steps = -(-k // 256)
    _, _, *waves = (int(size) for size in re.findall(r"Li(\d+)E", config.symbol))
    weight_scales = 8 * config.tile_n
    if "inline" in config.name:  # bf16; each wave along k loads a step that it has no use for
        return 512 * block_m * waves[0] * (steps + waves[1]) + weight_scales * steps
    if "direct" in config.name:
        tokens = 128 * block_m + 256 * -(-block_m // 32)
        return (tokens * waves[0] + weight_scales) * steps
    # Steps go in pairs, and a wave loads four bands of scales, which may be copies.
    return 2 * -(-steps // 2) * (128 * block_m + 1024 * waves[0] * waves[1])


def _check_activated(h: NDArray, y: NDArray) -> None:
    gate, up = np.split(gemm2_kernels.to_float64(h), 2, axis=1)
    exact = gate / (1 + np.exp(-gate)) * up
    bound = np.abs(exact) * (2.0**-8 + (12 + 2 * np.abs(gate)) * 2.0**-23) + 2.0**-125
    wrong = np.count_nonzero(~(np.abs(gemm2_kernels.to_float64(y) - exact) <= bound))
    assert not wrong, f"Triton: {wrong} of {y.size} activated values are off"


def _check_rotated(y: NDArray, codes: NDArray, scales: NDArray) -> None:
    hadamard = reference.hadamard(np.eye(ROTATION), ROTATION)  # ROTATION**-0.5 is a power of two
    values = interval.product(reference.bf16_to_float32(y), hadamard)
    scaled = interval.Values(values.exact * ROTATION**-0.5, values.bound * ROTATION**-0.5)
    what = "Triton: rotated intermediate"
    interval.assert_quantised(codes, scales, interval.through_bf16(scaled), "round_up", what)


# --- the tables -----------------------------------------------------------------------------------


def kernel_line(about: Line, step: Step) -> Line:
    launches = step.launches
    return about | {
        "kernel": step.kernel,
        "launches": len(launches),
        "workgroups": counted.total(launches, "workgroups"),
        "idle_workgroups": step.idle,
        "instructions": counted.total(launches, "instructions"),
        "bytes": counted.moved(launches),
        "least_bytes": step.least,
        "weight_reads": step.weight_reads,
        "blocks_an_expert": step.blocks,
        "lds_clocks": counted.total(launches, "lds_cycles"),
        "atomics": counted.total(launches, "atomics"),
        **counted.quality(launches, step.least),
        **counted.modelled(launches),
    }


def pipeline_line(about: Line, name: str, steps: Sequence[Step], blocks: Line) -> Line:
    launches = [launch for step in steps for launch in step.launches]
    return about | {
        "pipeline": name,
        "launches": len(launches),
        "workgroups": counted.total(launches, "workgroups"),
        "instructions": counted.total(launches, "instructions"),
        "valu": counted.instructions(launches, "valu", "packed"),
        "mfma": counted.instructions(launches, "mfma"),
        "bytes": counted.moved(launches),
        "atomics": counted.total(launches, "atomics"),
        **blocks,
        **counted.modelled(launches),
    }


def whole_layer_blocks(case: Case) -> Line:
    """Blocks of the whole layer, by a routing as random as the thinned one; exact, not executed."""
    m, block_m = case.model, case.block_m
    r = route(m.experts, m.topk, case.tokens, block_m, seed=1)
    rows = moe_sort(r.ids, r.weights, num_experts=m.experts, block_m=block_m).num_valid[0]
    loose = -(-(case.tokens * m.topk + m.experts * (block_m - 1)) // block_m)
    return {
        "blocks_used": int(rows) // block_m,
        "blocks_grid": case.full_blocks(),
        "blocks_loose": loose,
    }


def measure(case: Case) -> tuple[list[Line], list[Line]]:
    """Lines of kernels and of pipelines; the generic way is the last pipeline."""
    m = case.model
    about: Line = {
        "model": m.name,
        "tokens": case.tokens,
        "run": f"{case.tokens_run} tokens, {case.experts_run} experts",
        "block_m": case.block_m,
    }
    runner = Runner(case)
    ways = runner.pipelines() | {GENERIC: runner.generic()}
    kernel_lines: dict[str, Line] = {}
    for name, steps in ways.items():
        for step in steps:
            way = GENERIC if name == GENERIC else OURS
            kernel_lines.setdefault(step.kernel, kernel_line(about | {"way": way}, step))
    blocks = whole_layer_blocks(case)
    lines = [pipeline_line(about, name, steps, blocks) for name, steps in ways.items()]
    return list(kernel_lines.values()), lines


def kernel_table(lines: Sequence[Line]):
    from rich import box
    from rich.table import Table

    note = "counted (emulator); us: modelled (peak rates, MI355X), a bound, not a timing"
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=note)
    header = "kernel|groups|idle|MFMA|MB|of\nleast|w\nreads|lines|LDS +|atomics|VGPR|waves"
    for i, name in enumerate((*header.split("|"), *FLOORS, "bound us")):
        shown.add_column(name, no_wrap=True, justify="right" if i else "left")
    last = None
    for line in lines:
        title = f"{line['model']}, M {line['tokens']}: {line['run']}, block_m {line['block_m']}"
        if title != last:
            shown.add_section()
            shown.add_row(f"[bold]{title}")
        last = title
        extra = line["lds_conflict_clocks"] / max(1, line["lds_clocks"])
        name = line["kernel"] if line["way"] == OURS else f"[dim]{GENERIC}:[/] {line['kernel']}"
        shown.add_row(
            name,
            *(str(line[key]) for key in ("workgroups", "idle_workgroups")),
            f"{line['mfma_share']:.0%}",
            f"{line['bytes'] / 1e6:.3g}",
            f"{line['of_least_bytes']:.2f}",
            f"{line['weight_reads']:.2f}/{line['blocks_an_expert']:.2f}"
            if line["blocks_an_expert"]
            else "",
            f"{line['of_least_lines']:.2f}",
            f"{extra:.1%}",
            *(str(line[key]) for key in ("atomics", "vgprs", "waves")),
            *(f"{line[f'{name}_us']:.3f}" for name in FLOORS),
            f"{line['us']:.3f}",
        )
    return shown


def pipeline_table(lines: Sequence[Line]):
    """In brackets how many times a pipeline of ours the generic way is."""
    from rich import box
    from rich.table import Table

    note = "counted (emulator); us: modelled (MI355X, no launches), a bound; (generic / ours)"
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=note)
    header = (
        "model, tokens|pipeline|launches|instructions|MB|atomics|bound us|blocks used, grid, loose"
    )
    for i, name in enumerate(header.split("|")):
        shown.add_column(name, no_wrap=True, justify="right" if i > 1 else "left")
    generic = {
        (line["model"], line["tokens"]): line for line in lines if line["pipeline"] == GENERIC
    }
    for line in lines:
        other = generic[line["model"], line["tokens"]]

        def ratio(key: str, text: str, line=line, other=other) -> str:
            return text if line is other else f"{text} ({other[key] / line[key]:.2f}x)"

        blocks = (str(line[f"blocks_{name}"]) for name in ("used", "grid", "loose"))
        shown.add_row(
            f"{line['model']}, M {line['tokens']}",
            line["pipeline"],
            ratio("launches", str(line["launches"])),
            ratio("instructions", f"{line['instructions'] / 1e3:.0f}k"),
            ratio("bytes", f"{line['bytes'] / 1e6:.3g}"),
            str(line["atomics"]),
            ratio("us", f"{line['us']:.3g}"),
            ", ".join(blocks) if line is other else "",
        )
        if line is other:
            shown.add_section()
    return shown


def chart(lines: Sequence[Line], path: Path) -> None:
    """Bars: the generic way's launches, instructions, bytes and bound over ours."""
    import matplotlib.pyplot as plt

    mine = [line for line in lines if line["pipeline"] != GENERIC]
    other = {(line["model"], line["tokens"]): line for line in lines if line["pipeline"] == GENERIC}
    labels = [f"{a['model']}, M {a['tokens']}\n{a['pipeline']}" for a in mine]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.5 * len(labels)), layout="constrained")
    keys = {
        "launches": "launches (counted)",
        "instructions": "instructions (counted)",
        "bytes": "bytes (counted)",
        "us": "bound (modelled)",
    }
    for i, (key, label) in enumerate(keys.items()):
        ratios = [other[a["model"], a["tokens"]][key] / a[key] for a in mine]
        axes.barh(np.arange(len(labels)) + (i - 1.5) * 0.21, ratios, 0.2, label=label)
    axes.set_yticks(np.arange(len(labels)), labels, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.legend(title="The generic way over rotquant_hip")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    from rich.console import Console
    from rich.progress import track

    args = counted.arguments(__doc__)
    work = track(
        QUICK if args.quick else CASES, "executing gfx950 code", console=Console(stderr=True)
    )
    measured = [measure(case) for case in work]
    kernel_lines, lines = (
        [line for part in parts for line in part] for parts in zip(*measured, strict=True)
    )
    console = Console(width=200)
    console.print(kernel_table(kernel_lines))
    console.print(pipeline_table(lines))
    if args.out:
        counted.write(kernel_lines, args.out)
        counted.write(lines, args.out.with_stem(f"{args.out.stem}_pipelines"))
    if args.chart:
        chart(lines, args.chart)


if __name__ == "__main__":
    main()
