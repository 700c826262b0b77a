# SPDX-License-Identifier: MIT
"""Speed of fused_moe (Hadamard 64 of x and of the intermediate) on one device, each line beside

  eager      the layer one writes in plain torch, not quantised: weights in --dtype, a loop over
             experts of index_select, linear, SiLU, linear, index_add
  separate   the same MXFP4 layer of this package's dense ops, each on its own: rotate, quant; then
             for every expert gather, shuffle_scales, gemm_a4w4, SiLU, rotate, quant, gemm_a4w4,
             index_add

All of a line is timed in one run, taking turns. Which token goes to which expert is found before
timing for both baselines, but inside fused_moe: that flatters them, and on a GPU lets them be
captured. Calls go through several inputs with routings of their own, so that weights come from
memory and not from a cache: --experts makes a layer small, and then they may.

On a GPU each is captured in a graph and events time its replays: launching costs nothing, which
flatters both baselines again.

  us, low, high      fused_moe: median and quartiles
  over_eager, ...    eager's time over fused_moe's, turn by turn: median and quartiles; likewise
                     over_separate. Above 1 fused_moe is faster
  cosine             of fused_moe with eager: what MXFP4 loses on these weights (normal values)

--pipelines, on by default on a GPU, times every pipeline with every configuration that fits it and
shows the best of each block_m; --tuned writes the fastest as rows of a tuned table.

--accuracy measures errors on a CPU instead: fused_moe (x bf16, out float32, weights "mse") against
float32 layers, as cosine and as |difference| / |expected|, means over seeds (+-: their deviation).

  data             normal; 1 of 100 channels of x 20 times the others; the same in x and, by w1's
                   rows, in the intermediate
  R, R4            Hadamard sizes of x and of the intermediate, 0 for none
  rows             gemm2's; MXFP4 with fp4_intermediate=True
  same             of the dequantised weights, x and the intermediate quantised as fused_moe does
  float            of the dequantised weights, with nothing else quantised
  all              of the weights before they were quantised: what W4A4 loses in all
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import common
import torch
from rich.progress import track
from torch import Tensor
from torch.nn.functional import cosine_similarity, linear, silu

import rotquant_hip as rq
from rotquant_hip import dispatch

ROTATION, INTER_ROTATION = 64, 64
MAX_INPUTS = 32


@dataclass(frozen=True)
class Model:
    """Of one rank; shared experts among the others."""

    experts: int
    hidden: int
    inter: int
    topk: int


MODELS = {
    "qwen3-30b-a3b-tp4": Model(128, 2048, 192, 8),
    "qwen3-30b-a3b": Model(128, 2048, 768, 8),
    "kimi-k2.5-tp4": Model(385, 7168, 512, 9),
    "minimax-m2.5": Model(256, 3072, 384, 8),
}


# --- the layer, three times -----------------------------------------------------------------------

Experts = dict[int, tuple[Tensor, Tensor]]  # tokens of an expert and their weights [tokens, 1]


@dataclass
class Tokens:
    x: Tensor
    weights: Tensor
    ids: Tensor
    by_expert: Experts  # the same, for the baselines


def tokens(m: int, model: Model, dtype: torch.dtype, device: torch.device) -> Tokens:
    x = torch.randn(m, model.hidden, device=device).to(dtype)
    logits = torch.randn(m, model.experts, device=device)
    weights, ids = rq.route(logits, model.topk)
    by_expert = {}
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        by_expert[expert] = token, weights[token, slot, None].to(dtype)
    return Tokens(x, weights, ids, by_expert)


class Layer:
    """Normal weights, and the calls that are compared."""

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device) -> None:
        e, h, i = model.experts, model.hidden, model.inter
        self.w1 = torch.empty(e, 2 * i, h, dtype=dtype, device=device)
        self.w2 = torch.empty(e, h, i, dtype=dtype, device=device)
        for weight in itertools.chain(self.w1, self.w2):
            weight.normal_().mul_(weight.shape[-1] ** -0.5)
        self.codes1, scales1 = self._quantised(self.w1, ROTATION)
        self.codes2, scales2 = self._quantised(self.w2, INTER_ROTATION)
        self.options = {
            "rotation_size": ROTATION,
            "inter_rotation_size": INTER_ROTATION,
            "w1_scale": rq.shuffle_scales(scales1),
            "w2_scale": rq.shuffle_scales(scales2),
        }
        self.scales1 = [rq.shuffle_scales(scales) for scales in scales1]
        self.scales2 = [rq.shuffle_scales(scales) for scales in scales2]

    @staticmethod
    def _quantised(weights: Tensor, rs: int) -> tuple[Tensor, Tensor]:
        """Codes, shuffled, and natural scales, expert by expert."""
        pairs = (rq.rotate_quant(w, rotation_size=rs) for w in weights)
        codes, scales = zip(*((rq.shuffle_weight(c), s) for c, s in pairs), strict=True)
        return torch.stack(codes), torch.stack(scales)

    def fused(self, t: Tokens) -> Tensor:
        return rq.fused_moe(t.x, self.codes1, self.codes2, t.weights, t.ids, **self.options)

    def pipeline(self, t: Tokens, choice: Candidate) -> Tensor:
        return torch.ops.rotquant_hip._fused_moe(
            t.x,
            self.codes1,
            self.codes2,
            t.weights,
            t.ids,
            **self.options,
            pipeline=choice.pipeline,
            block_m=choice.block_m,
            gemm1_config=rq.moe_gemm1_configs().index(choice.gemm1),
            gemm2_config=rq.moe_gemm2_configs().index(choice.gemm2),
        )

    def eager(self, t: Tokens) -> Tensor:
        out = torch.zeros_like(t.x)
        for expert, (token, weight) in t.by_expert.items():
            gate, up = linear(t.x.index_select(0, token), self.w1[expert]).chunk(2, -1)
            out.index_add_(0, token, linear(silu(gate) * up, self.w2[expert]) * weight)
        return out

    def separate(self, t: Tokens) -> Tensor:
        out = torch.zeros_like(t.x)
        options = {"out_dtype": t.x.dtype}
        codes, scales = rq.quant(rq.rotate(t.x, rotation_size=ROTATION))
        for expert, (token, weight) in t.by_expert.items():
            a = codes.index_select(0, token)
            a_scales = rq.shuffle_scales(scales.index_select(0, token))
            first = rq.gemm_a4w4(a, self.codes1[expert], a_scales, self.scales1[expert], **options)
            gate, up = first.chunk(2, -1)
            h = rq.rotate(silu(gate) * up, rotation_size=INTER_ROTATION)
            h, h_scales = rq.quant(h, shuffle_scales=True)
            rows = rq.gemm_a4w4(h, self.codes2[expert], h_scales, self.scales2[expert], **options)
            out.index_add_(0, token, rows * weight)
        return out


# --- time -----------------------------------------------------------------------------------------


def cosine(actual: Tensor, expected: Tensor) -> float:
    return cosine_similarity(actual.flatten().double(), expected.flatten().double(), dim=0).item()


def make_inputs(m: int, model: Model, args: argparse.Namespace) -> list[Tokens]:
    """As many as give every expert some tokens twice over, but at least two."""
    count = min(MAX_INPUTS, max(2, -(-2 * model.experts // (m * model.topk))))
    dtype = getattr(torch, args.dtype)
    return [tokens(m, model, dtype, args.device) for _ in range(count)]


def measure(layer: Layer, m: int, model: Model, args: argparse.Namespace) -> common.Line:
    """One line of the table, by column."""
    inputs = make_inputs(m, model, args)
    fused, separate, eager = (f(inputs[0]) for f in (layer.fused, layer.separate, layer.eager))
    # They differ where `separate` rounds to the dtype between its ops, which moves a few codes.
    assert cosine(fused, separate) > 0.99, f"M {m}: not the layer of the separate ops"
    calls = {"op": layer.fused, "eager": layer.eager, "separate": layer.separate}
    samplers = {name: common.sampler(args.device, call, inputs) for name, call in calls.items()}
    us = common.samples(samplers, args.seconds)

    plan = dispatch.explain(
        gfx=dispatch.gfx_of(args.device),
        tokens=m,
        quantise_first=args.dtype == "float32",
        inter_rotation_size=INTER_ROTATION,
        **asdict(model),
    )
    line = {"M": m, "routes_each": m * model.topk / model.experts, "pipeline": plan.pipeline}
    line |= {"us": statistics.median(us["op"])}
    line |= dict(zip(("low", "high"), common.quartiles(us["op"]), strict=True))
    for name in ("eager", "separate"):
        ratios = [theirs / mine for mine, theirs in zip(us["op"], us[name], strict=True)]
        names = (f"over_{name}_low", f"over_{name}_high")
        line |= {f"{name}_us": statistics.median(us[name])}
        line |= {f"over_{name}": statistics.median(ratios)}
        line |= dict(zip(names, common.quartiles(ratios), strict=True))
    return line | {"cosine": cosine(fused, eager)}


# --- pipelines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    pipeline: str
    block_m: int
    gemm1: str
    gemm2: str


def candidates() -> Iterator[Candidate]:
    """Every pipeline with every pair of configurations that it takes."""
    for pipeline, gemm1, gemm2 in itertools.product(
        dispatch.PIPELINES, rq.moe_gemm1_configs(), rq.moe_gemm2_configs()
    ):
        kind, block_m, columns = dispatch._tile(gemm1)
        fits = block_m == dispatch._tile(gemm2)[1] and columns // 2 >= INTER_ROTATION
        if fits and (kind == "inline") == pipeline.startswith("inline"):
            yield Candidate(pipeline, block_m, gemm1, gemm2)


def measure_pipelines(
    layer: Layer, m: int, model: Model, args: argparse.Namespace
) -> list[common.Line]:
    """The best configurations of every pipeline and block_m, the fastest first."""
    inputs = make_inputs(m, model, args)
    expected = layer.fused(inputs[0])
    best: dict[tuple[str, int], tuple[float, Candidate]] = {}
    for choice in candidates():
        if choice.pipeline.startswith("inline") and args.dtype == "float32":
            continue

        def call(t: Tokens, choice: Candidate = choice) -> Tensor:
            return layer.pipeline(t, choice)

        near = 0.98 if "fp4" in choice.pipeline else 0.999
        assert cosine(call(inputs[0]), expected) > near, f"M {m}, {choice}: wrong"
        # One after the other: graphs of all of them at once might not fit.
        sampler = common.sampler(args.device, call, inputs)
        us = common.medians({"": sampler}, args.seconds / 40)[""]
        key = choice.pipeline, choice.block_m
        best[key] = min(best.get(key, (us, choice)), (us, choice), key=lambda timed: timed[0])
    return [
        {"M": m, "pipeline": c.pipeline, "block_m": c.block_m, "us": us}
        | {"gemm1": c.gemm1, "gemm2": c.gemm2}
        for us, c in sorted(best.values(), key=lambda timed: timed[0])
    ]


def write_tuned(path: Path, lines: list[common.Line], model: Model, args: argparse.Namespace):
    """The fastest pipeline of each M, as dispatch reads it (ROTQUANT_HIP_TUNED, or tuned/)."""
    about = common.conditions(args)
    fastest: dict[int, common.Line] = {}
    for line in lines:
        if args.fp4 or "fp4" not in line["pipeline"]:
            fastest.setdefault(line["M"], line)
    shape = (model.hidden, model.inter, model.experts, model.topk, "any")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.write(f"# {'; '.join(f'{key} {value}' for key, value in about.items())}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(dispatch.COLUMNS)
        for m, line in sorted(fastest.items()):
            choice = (line[key] for key in ("pipeline", "block_m", "gemm1", "gemm2"))
            key = (dispatch.gfx_of(args.device), m, *shape)
            writer.writerow((*key, *choice, "measured", f"{line['us']:.1f}", about["date"]))


# --- accuracy -------------------------------------------------------------------------------------

ACCURACY_MODEL = Model(experts=4, hidden=2048, inter=768, topk=2)
ACCURACY_TOKENS = 384  # 192 routes an expert: fp4_intermediate=True makes gemm2's rows MXFP4
DATA = ("normal", "outliers in x", "outliers in both")
ROTATIONS = ((0, 0), (32, 0), (64, 0), (128, 0), (32, 32), (64, 64), (128, 128))

Routing = tuple[Tensor, Tensor]


def outliers(t: Tensor, dim: int) -> Tensor:
    """t with 1 of 100 of its channels 20 times as large."""
    scale = torch.ones(t.shape[dim])
    scale[7::100] = 20
    return t * scale.view(-1, *[1] * (t.dim() - 1 - dim))


def draw(data: str, seed: int) -> tuple[Tensor, Tensor, Tensor, Routing]:
    """x, w1 and w2 in float32, and a routing."""
    generator = torch.Generator().manual_seed(seed)
    e, h, i, topk = astuple(ACCURACY_MODEL)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, routing = randn(ACCURACY_TOKENS, h), rq.route(randn(ACCURACY_TOKENS, e), topk)
    gate, up, w2 = (randn(e, rows, k) * k**-0.5 for rows, k in ((i, h), (i, h), (h, i)))
    if data != "normal":
        x = outliers(x, 1)
        x /= x.square().mean().sqrt()  # gates are of the size that they have without outliers
    if data == "outliers in both":
        up = outliers(up, 1)
    return x.bfloat16().float(), torch.cat((gate, up), 1), w2, routing


def float_layer(
    x: Tensor, w1: Tensor, w2: Tensor, routing: Routing, between: Callable[[Tensor], Tensor]
) -> Tensor:
    """float32; what lies between the GEMMs goes through `between`."""
    out = torch.zeros_like(x)
    weights, ids = routing
    for expert in range(len(w1)):
        token, slot = torch.where(ids == expert)
        gate, up = linear(x[token], w1[expert]).chunk(2, -1)
        rows = linear(between(silu(gate) * up), w2[expert])
        out.index_add_(0, token, rows * weights[token, slot, None])
    return out


def turned(t: Tensor, rs: int) -> Tensor:
    return rq.rotate(t, rotation_size=rs) if rs else t


def rounded(t: Tensor, rs: int) -> Tensor:
    return rq.dequant(*rq.quant(turned(t, rs)), dtype=torch.float32)


def errors(data: str, seed: int) -> Iterator[tuple[tuple, dict[str, float]]]:
    """Columns by (data, R, R4, gemm2's rows)."""
    x, w1, w2, routing = draw(data, seed)
    original = float_layer(x, w1, w2, routing, lambda t: t)
    for rs, rs4 in ROTATIONS:
        quantised = [
            rq.quant(turned(w, size), scale_mode="mse") for w, size in ((w1, rs), (w2, rs4))
        ]
        values = [rq.dequant(*w, dtype=torch.float32) for w in quantised]
        expected = {
            "same": float_layer(rounded(x, rs), *values, routing, lambda t, n=rs4: rounded(t, n)),
            "float": float_layer(turned(x, rs), *values, routing, lambda t, n=rs4: turned(t, n)),
            "all": original,
        }
        for fp4 in (False, True):
            out = rq.fused_moe(
                x.bfloat16(),
                *(rq.shuffle_weight(codes) for codes, _ in quantised),
                *routing,
                w1_scale=rq.shuffle_scales(quantised[0][1]),
                w2_scale=rq.shuffle_scales(quantised[1][1]),
                rotation_size=rs,
                inter_rotation_size=rs4,
                fp4_intermediate=fp4,
                out_dtype=torch.float32,
            )
            columns = {}
            for name, value in expected.items():
                columns[f"{name}_cos"] = cosine(out, value)
                columns[f"{name}_err"] = ((out - value).norm() / value.norm()).item()
            yield (data, rs, rs4, "MXFP4" if fp4 else "float32"), columns


def accuracy_lines(seeds: int) -> list[common.Line]:
    """Means over seeds; of errors also the standard deviation."""
    found: dict[tuple, list[dict[str, float]]] = {}
    work = list(itertools.product(DATA, range(seeds)))
    for data, seed in track(work, "measuring", transient=True):
        for key, columns in errors(data, seed):
            found.setdefault(key, []).append(columns)
    lines = []
    for key, drawn in found.items():
        line = dict(zip(("data", "R", "R4", "rows"), key, strict=True))
        for name in drawn[0]:
            values = [columns[name] for columns in drawn]
            line[name] = statistics.mean(values)
            if name.endswith("err"):
                line[f"{name}_+-"] = statistics.stdev(values) if seeds > 1 else 0.0
        lines.append(line)
    return lines


# --- output ---------------------------------------------------------------------------------------


def chart(lines: list[common.Line], path: Path, title: str) -> None:
    """Ratios by tokens, with quartiles."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in ("eager", "separate"):
        middle, low, high = (
            [line[f"over_{name}{end}"] for line in lines] for end in ("", "_low", "_high")
        )
        spread = [
            [m - v for m, v in zip(middle, low, strict=True)],
            [v - m for m, v in zip(middle, high, strict=True)],
        ]
        axes.errorbar([line["M"] for line in lines], middle, spread, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time over fused_moe's")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend()
    axes.set_title(title, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b-tp4")
    parser.add_argument("--experts", type=int, help="fewer than the model has")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--chart", type=Path, help="PNG file to write (needs matplotlib)")
    parser.add_argument(
        "--pipelines", action=argparse.BooleanOptionalAction, help="default: on a GPU"
    )
    parser.add_argument("--tuned", type=Path, help="CSV file of tuned rows to write")
    parser.add_argument("--fp4", action="store_true", help="let --tuned choose staged_fp4_reduce")
    parser.add_argument("--accuracy", action="store_true", help="errors instead of times, on a CPU")
    parser.add_argument("--seeds", type=int, default=5, help="of --accuracy")
    args = common.parse(parser)
    torch.manual_seed(0)
    if args.tuned and not dispatch.gfx_of(args.device).startswith("gfx"):
        parser.error("--tuned: a table has rows for AMD GPUs only")

    if args.accuracy:
        args.device, args.dtype = torch.device("cpu"), "bfloat16"
        common.report("fused_moe, errors", accuracy_lines(args.seeds), args)
        return
    known = MODELS[args.model]
    model = Model(args.experts or known.experts, known.hidden, known.inter, known.topk)
    name = f"fused_moe {args.model}, {model.experts} experts"
    layer = Layer(model, getattr(torch, args.dtype), args.device)
    work = track(args.m, "measuring", transient=True)
    lines = [measure(layer, m, model, args) for m in work]
    common.report(name, lines, args)
    if args.chart:
        chart(lines, args.chart, f"{name}\n{common.conditions(args)['device']}")
    wanted = args.device.type == "cuda" if args.pipelines is None else args.pipelines
    if wanted or args.tuned:
        work = track(args.m, "measuring pipelines", transient=True)
        timed = [line for m in work for line in measure_pipelines(layer, m, model, args)]
        args.out = args.out and args.out.with_stem(f"{args.out.stem}_pipelines")
        common.report(f"{name}, pipelines", timed, args)
        if args.tuned:
            write_tuned(args.tuned, timed, model, args)


if __name__ == "__main__":
    main()
