# SPDX-License-Identifier: MIT
"""MoE layers of real models at full size, as gfx950 machine code in the emulator.

Every expert, the full hidden and intermediate size, all of the emulator's checks; scales of padding
are NaN, outputs and workspaces begin unwritten. Every expert gets a token unless --tokens says
otherwise. moe_sort, moe_rotate_quant and moe_reduce are compared byte for byte, whole; the GEMMs'
padding is compared whole, their values for a sample of tokens with float64 (--sample), each stage
on what the stage before it wrote. Minutes a model; it needs up to 3 GiB of memory.

    python tests/moe_full_shapes.py [--model kimi] [--pipeline staged_reduce] [--tokens N]

  exact     bytes compared exactly
  gemm1     quantised bytes that are not those of the float64 value, of those compared; each is
            that of a value within the stated bound, or the line fails
  all       bytes of codes of all routes that are not those of the model's first pipeline
  gemm2     the same as gemm1 for MXFP4 rows; else the worst error over its bound, most of which is
            half a unit in the last place of bf16 (so near 1 for rows), of each add for atomics
  seconds   of the kernels in the emulator, with all checks; not a time on a GPU
"""

from __future__ import annotations

import argparse
import csv
import resource
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import moe_check as check
import moe_gemm2_kernels as gemm2_kernels
import moe_gemm_kernels as gemm1_kernels
import moe_launch as moe
import numpy as np
from compare import assert_bytes_equal
from moe_launch import Layer, Routing

from rotquant_hip import reference

GPT_OSS = {"bias": True, "gate_mode": "interleave", "activation": "swiglu", "limit": 7.0}


@dataclass(frozen=True)
class Model:
    experts: int
    hidden: int
    inter: int  # of this rank
    topk: int
    shared: bool = False  # the last expert takes every token
    options: dict = field(default_factory=dict)


MODELS = {
    "Qwen3-30B-A3B TP1": Model(128, 2048, 768, 8),
    "Qwen3-30B-A3B TP2": Model(128, 2048, 384, 8),
    "Qwen3-30B-A3B TP4": Model(128, 2048, 192, 8),
    "gpt-oss-120b": Model(128, 2880, 2880, 4, options=GPT_OSS),
    "DeepSeek-R1 TP8": Model(257, 7168, 256, 9, shared=True),
    "Kimi-K2.5 TP4": Model(385, 7168, 512, 9, shared=True),
    "MiniMax-M2.5": Model(256, 3072, 384, 8),
    "Qwen3.5-397B": Model(512, 4096, 256, 10),
}
PIPELINES = {
    "inline_atomic": 16,
    "staged_atomic": 32,
    "staged_reduce": 64,
    "staged_fp4_reduce": 128,
}
ROTATION = 64
Line = dict[str, str]


def route(model: Model, tokens: int | None, block_m: int) -> Routing:
    """Experts in random order, again and again, so that all get as many tokens as any."""
    rng = np.random.default_rng(model.experts)
    routed, slots = model.experts - model.shared, model.topk - model.shared
    tokens = tokens or -(-routed // slots)
    turns = -(-tokens * slots // routed)
    order = np.concatenate([rng.permutation(routed) for _ in range(turns)])[: tokens * slots]
    ids = order.reshape(tokens, slots)
    for row in ids:  # where a turn ends and the next begins, a token may have an expert twice
        again = np.delete(np.arange(slots), np.unique(row, return_index=True)[1])
        others = np.setdiff1d(np.arange(routed), row)
        row[again] = rng.choice(others, len(again), replace=False)
    if model.shared:
        ids = np.c_[ids, np.full(tokens, routed)]
    weights = rng.uniform(0.2, 1.8, ids.shape).astype(np.float32) / model.topk
    return Routing(ids.astype(np.int32), weights, model.experts, block_m)


class Case:
    """A model's layer, tokens, and the oracle of what all pipelines share."""

    def __init__(self, model: Model, args: argparse.Namespace) -> None:
        self.args = args
        rng = np.random.default_rng(7)
        sizes = model.experts, model.hidden, model.inter
        self.layer: Layer = moe.make_layer(rng, *sizes, **model.options)
        self.inter_rotation = max(rs for rs in (128, 64, 32) if model.inter % rs == 0)
        self.routing = route(model, args.tokens, 16)
        shape = (self.routing.tokens, model.hidden)
        # Gate and up are a few units in size then (make_layer): no activation saturates.
        values = rng.standard_normal(shape, np.float32) * np.exp(rng.standard_normal(shape) / 2)
        values = values * np.float32(model.hidden**-0.25)
        self.x = reference.float32_to_bf16(values)
        x = reference.bf16_to_float32(self.x)
        self.a = reference.rotate_quant(x, rotation_size=ROTATION)
        self.values = None  # of gemm1, made once
        self.codes = None  # by route, of the first pipeline

    def run(self, pipeline: str) -> Line:
        layer, args = self.layer, self.args
        unsorted = replace(self.routing, block_m=PIPELINES[pipeline])
        options = {"count": False, "threads": args.threads}
        atomic, inside = "atomic" in pipeline, pipeline.startswith("inline")
        out = np.full((unsorted.tokens, layer.hidden), 0xA5A5, np.uint16) if atomic else None
        seconds = 0.0
        exact = 0

        def timed(call, *given, **more):
            nonlocal seconds
            start = time.perf_counter()
            result = call(*given, **more, **options)
            seconds += time.perf_counter() - start
            return result

        sorting, _ = timed(moe.sort, unsorted, zero=out)
        check.sorting(sorting, unsorted)
        assert out is None or not out.any(), "moe_sort: the output is not zeroed"
        exact += sum(a.nbytes for a in sorting) + (out.nbytes if atomic else 0)
        r = replace(unsorted, sorting=sorting)
        sample = check.sample(r, args.sample)
        blocks = r.max_rows // r.block_m

        given = {"x": self.x, "rotation_size": ROTATION}
        if not inside:
            codes, scales, _ = timed(moe.rotate_quant, self.x, r, ROTATION)
            assert_bytes_equal(codes, self.a[0], "moe_rotate_quant: codes")
            want = moe.sorted_scales(self.a[1], r)
            assert_bytes_equal(scales, want, "moe_rotate_quant: scales")
            exact += codes.nbytes + scales.nbytes
            given = {"a": (codes, moe.poison_padding(scales, r, layer.hidden))}
        rs = self.inter_rotation
        config1 = gemm1_kernels.choose(blocks, r.block_m, layer.inter, inside, rs)
        codes, scales, _ = timed(moe.gemm1, layer, r, config1, inter_rotation=rs, **given)
        # The sample is of the same tokens whatever block_m is, and its rows in the same order.
        worst1, self.values = check.gemm1(
            layer, r, sample, self.a, (codes, scales), rs, self.values
        )
        by_route = codes[sorting.reverse_sorted]
        self.codes = by_route if self.codes is None else self.codes
        others = np.count_nonzero(by_route != self.codes)
        assert others <= 0.001 * codes.size, f"gemm1: {others} codes are not the first pipeline's"

        config2 = gemm2_kernels.chosen(blocks, r.block_m, layer.hidden)
        finish = "atomic" if atomic else "mxfp4" if "fp4" in pipeline else "rows"
        a = codes, moe.poison_padding(scales, r, layer.inter)
        weights = layer.w2, layer.w2_scale, layer.bias2
        outputs, _ = timed(moe.gemm2, *weights, r, config2, *a, finish, out=out)
        if atomic:
            worst2 = check.atomic(layer, r, sample, a, out)
        elif finish == "rows":
            worst2 = check.rows(layer, r, sample, a, outputs[0])
        else:
            worst2 = check.mxfp4(layer, r, sample, a, outputs)
        if not atomic:
            rows = outputs[0] if finish == "rows" else outputs
            out, _ = timed(moe.reduce, rows, r)
            check.reduce(rows, r, out)
            exact += out.nbytes
        names = gemm1_kernels.configs()[config1].name, gemm2_kernels.configs()[config2].name
        used = np.unique(sorting.sorted_expert_ids[sorting.sorted_expert_ids >= 0]).size
        return {
            "pipeline": pipeline,
            "tokens": str(r.tokens),
            "experts": f"{used} of {layer.experts}",
            "blocks": f"{r.rows // r.block_m} of {blocks}",
            "configurations": ", ".join(names),
            "exact": f"{exact / 2**20:.1f} MiB",
            "gemm1": _judged(worst1),
            "all gemm1": f"{others} of {by_route.size}",
            "gemm2": _judged(worst2),
            "seconds": f"{seconds:.1f}",
        }


def _judged(worst: float | tuple[int, int]) -> str:
    return f"{worst:.2f}" if isinstance(worst, float) else f"{worst[0]} of {worst[1]}"


def write(lines: list[Line], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, max(lines, key=len))
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    from rich import box
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", help="part of a name; default: all", default="")
    parser.add_argument("--pipeline", choices=PIPELINES, nargs="+", default=list(PIPELINES))
    parser.add_argument("--tokens", type=int, help="default: as many as give every expert one")
    parser.add_argument("--sample", type=int, default=4, help="tokens compared with float64")
    parser.add_argument("--threads", type=int, help="of the emulator; default: all cores")
    parser.add_argument("--out", type=Path, help="CSV file, a line as soon as it is known")
    args = parser.parse_args()
    chosen = {name: m for name, m in MODELS.items() if args.model.lower() in name.lower()}
    if not chosen:
        parser.error(f"--model: none of {', '.join(MODELS)} contains {args.model!r}")

    lines: list[Line] = []
    failed = 0
    with Progress(console=Console(stderr=True)) as progress:
        steps = progress.add_task("", total=len(chosen) * len(args.pipeline))
        for name, model in chosen.items():
            progress.update(steps, description=f"{name}: weights")
            case = Case(model, args)
            for pipeline in args.pipeline:
                progress.update(steps, description=f"{name}: {pipeline}")
                about = {"model": name, "H x I": f"{model.hidden} x {model.inter}"}
                try:
                    lines.append(about | case.run(pipeline) | {"result": "pass"})
                except (AssertionError, RuntimeError) as error:
                    failed += 1
                    reason = str(error).splitlines()[0]
                    lines.append(about | {"pipeline": pipeline, "result": f"FAIL {reason}"})
                if args.out:
                    write(lines, args.out)
                if "FAIL" in lines[-1]["result"]:
                    progress.console.print(name, pipeline, lines[-1]["result"])
                progress.advance(steps)
            del case

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in max(lines, key=len):
        table.add_column(column)
    for line in lines:
        table.add_row(*(line.get(column, "") for column in max(lines, key=len)))
    console = Console(width=200)
    console.print(table)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(f"{len(lines) - failed} passed, {failed} failed; {memory:.1f} GiB at most")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
