# SPDX-License-Identifier: MIT
"""demo.png: the perplexities, and what rotation does to the groups behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import torch

from rotquant_hip.demo.quantize import Recipe, fitting_rotation_size, rotate
from rotquant_hip.demo.results import Results, percent

INK, FAINT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
REFERENCE, PLAIN, ROTATED = "#9aa5b1", "#d9534f", "#167d7f"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "ytick.major.size": 0,
}
TOKENS_SHOWN = 48


def draw(results: Results, path: Path) -> None:
    """Writes the picture; needs no display."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = pyplot.figure(figsize=(13, 10), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.05, 1])
        left, middle, right = top.subplots(1, 3, width_ratios=[1.35, 1, 1])
        _perplexities(left, results)
        _before_after(middle, results, "outlier_ratio", 1, "Outliers: largest / rms of a group")
        _before_after(right, results, "error", 100, "Error of an activation, % of its length")
        right.set_yticklabels([])
        _activation(bottom, results)
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        figure.suptitle(_headline(results), fontsize=15, fontweight="bold", x=0.01, ha="left")
        figure.supxlabel(_conditions(results), fontsize=8, color=FAINT, x=0.01, ha="left")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _headline(results: Results) -> str:
    best = results.best
    return (
        f"{results.conditions.model} in MXFP4: rotation in blocks of {best.rotation_size} "
        f"wins back {percent(results.share(best))} of the loss"
    )


def _conditions(results: Results) -> str:
    c = results.conditions
    return (
        f"W4A4, {c.tokens} tokens of {c.text}, seed {c.seed}, scale mode {c.scale_mode}; measured "
        f"on {c.device}, torch {c.torch}, model in {c.dtype}; loss = log-perplexity"
    )


def _perplexities(axes: Any, results: Results) -> None:
    names = [results.conditions.dtype, "MXFP4"]
    values = [results.reference.perplexity, results.plain.perplexity]
    notes = ["", ""]
    for recipe, losses in results.rotated.items():
        names.append(f"MXFP4\nrotated {recipe.rotation_size}")
        values.append(losses.perplexity)
        notes.append(f"{percent(results.share(recipe))}\ncame back")
    colours = [REFERENCE, PLAIN] + [ROTATED] * len(results.rotated)
    bars = axes.bar(range(len(names)), values, color=colours, width=0.68)
    for bar, value, note in zip(bars, values, notes, strict=True):
        middle = bar.get_x() + bar.get_width() / 2
        axes.annotate(
            f"{value:.1f}", (middle, value), (0, 3), textcoords="offset points",
            ha="center", fontweight="bold",
        )  # fmt: skip
        axes.annotate(
            note, (middle, value), (0, -6), textcoords="offset points",
            ha="center", va="top", color="white", fontsize=9,
        )  # fmt: skip
    axes.axhline(values[1], color=PLAIN, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_xticks(range(len(names)), names, color=INK)
    axes.tick_params(axis="x", length=0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(0, 1.08 * max(values))
    axes.set_title("Perplexity (lower is better)")


def _before_after(axes: Any, results: Results, quantity: str, unit: float, title: str) -> None:
    """A dot before and a dot after the best rotation, per recorded activation."""
    pairs = results.before_after
    for row, pair in enumerate(pairs):
        before, after = (unit * getattr(entry, quantity) for entry in pair)
        axes.plot([before, after], [row, row], color=GRID, linewidth=3, zorder=1)
        axes.scatter(before, row, color=PLAIN, s=38, zorder=2)
        axes.scatter(after, row, color=ROTATED, s=38, zorder=2)
        if row == 0:  # the first pair of dots is the legend
            for x, word, colour in ((before, "before", PLAIN), (after, "rotated", ROTATED)):
                axes.annotate(
                    word, (x, 0), (0, 7), textcoords="offset points", ha="center",
                    color=colour, fontsize=9,
                )  # fmt: skip
    axes.set_yticks(range(len(pairs)), [f"layer {e.layer}  {e.site}" for e, _ in pairs], fontsize=9)
    axes.set_ylim(len(pairs) - 0.5, -0.9)
    axes.margins(x=0.12)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(title, fontsize=10)


def _activation(figure: Any, results: Results) -> None:
    """Magnitudes of the activation that suffers most, before and after the best rotation."""
    errors = [before.error for before, _ in results.before_after]
    activation = results.activations[errors.index(max(errors))]
    size = fitting_rotation_size(activation.values.shape[-1], results.best.rotation_size)
    panels = {
        "not rotated: one channel sets the scale of its group": Recipe(None),
        f"rotated in blocks of {size}: it is spread out": results.best,
    }
    # The first token is left out: attention sinks there and its values dwarf all others.
    shown = activation.values[1 : TOKENS_SHOWN + 1]
    rows = figure.subplots(2, 1, sharex=True)
    for axes, (caption, recipe) in zip(rows, panels.items(), strict=True):
        magnitude = rotate(shown, recipe).abs().cpu()
        in_rms = magnitude / magnitude.square().mean(-1, keepdim=True).sqrt()
        image = axes.imshow(
            torch.log2(in_rms.clamp_min(2**-4)).numpy(), aspect="auto", cmap="magma",
            vmin=-2, vmax=4, interpolation="nearest",
        )  # fmt: skip
        axes.set_title(f"Layer {activation.layer}, input of {activation.site}, {caption}")
        axes.set_yticks([])
        axes.set_ylabel("tokens")
        for spine in axes.spines.values():
            spine.set_visible(False)
    rows[-1].set_xlabel("channels")
    bar = figure.colorbar(image, ax=rows, ticks=range(-2, 5), pad=0.01, aspect=30)
    bar.ax.set_yticklabels([f"{2.0**power:g}" for power in range(-2, 5)], fontsize=8)
    bar.set_label("magnitude / rms of the token")
    bar.outline.set_visible(False)
