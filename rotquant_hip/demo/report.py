# SPDX-License-Identifier: MIT
"""The demo's tables and closing sentence, for a terminal of 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from rotquant_hip.demo.quantize import fitting_rotation_size
from rotquant_hip.demo.results import Conditions, Results, percent, table

LEGEND = (
    "Outlier ratio: largest magnitude / rms of a group. Clipped: beyond the largest code (never "
    "with round_up or ceil). Zeroed: rounded to 0. Error: |x - q(x)| / |x| of a token. Means; "
    "demo.json has every block size."
)


def print_report(results: Results, console: Console) -> None:
    console.print()
    console.print(_perplexities(results))
    console.print(where(results.conditions), highlight=False)
    for sentence in _halved(results):
        console.print(sentence, highlight=False)
    console.print()
    console.print(_groups(results))
    console.print(LEGEND, highlight=False)
    console.print()
    console.print(verdict(results), highlight=False)


def where(conditions: Conditions) -> str:
    """The sentence that has to stand beside the numbers."""
    return (
        f"{conditions.model}, {conditions.tokens} tokens of {conditions.text}; "
        f"scale mode {conditions.scale_mode}; seed {conditions.seed}. "
        f"Accuracy only, measured on {conditions.device}, torch {conditions.torch}, "
        f"model in {conditions.dtype}."
    )


def verdict(results: Results) -> str:
    """One sentence: what rotation did to the perplexity."""
    plain = results.plain.perplexity
    if failed := results.not_better:
        found = ", ".join(
            f"{results.rotated[recipe].perplexity:.2f} with blocks of {recipe.rotation_size}"
            for recipe in failed
        )
        return f"Rotation did not lower the perplexity: {plain:.2f} without it, {found}."
    best = results.best
    return (
        f"Rotated in blocks of {best.rotation_size}, perplexity is "
        f"{results.rotated[best].perplexity:.2f} instead of {plain:.2f}: "
        f"{percent(results.share(best))} of the log-perplexity lost by quantising came back."
    )


def _perplexities(results: Results) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, title="Perplexity, W4A4", title_justify="left")
    grid.add_column("")
    for heading in ("perplexity", "loss, nats", "came back", "vs. MXFP4, nats"):
        grid.add_column(heading, justify="right")
    for row in table(results):
        lost, share = row["lost_by_quantising"], row["share_recovered"]
        change, deviation = row["change_by_rotation"], row["standard_error"]
        grid.add_row(
            str(row["configuration"]),
            f"{row['perplexity']:.2f}",
            "" if lost is None else f"{lost:+.3f}",
            "" if share is None else percent(share),
            ("" if change is None else f"{change:+.3f}")
            + ("" if deviation is None else f" ± {deviation:.3f}"),
        )
    return grid


def _halved(results: Results) -> list[str]:
    """Where a block size does not divide a width, what was used instead."""
    widths = sorted({activation.values.shape[-1] for activation in results.activations})
    sizes = [recipe.rotation_size for recipe in results.rotated]
    return [
        f"{size} does not divide {width} channels: {fitting_rotation_size(width, size)} there."
        for size in sizes
        for width in widths
        if width % size
    ]


def _groups(results: Results) -> Table:
    size = results.best.rotation_size
    grid = Table(
        box=box.SIMPLE_HEAD,
        title=f"Groups of 32 activations: not rotated → rotated in blocks of {size}",
        title_justify="left",
    )
    for heading in ("layer", "input of"):
        grid.add_column(heading)
    for heading in ("outlier ratio", "clipped %", "zeroed %", "error %"):
        grid.add_column(heading, justify="right")
    layer = None
    for before, after in results.before_after:
        grid.add_row(
            "" if before.layer == layer else str(before.layer),
            before.site,
            f"{before.outlier_ratio:.2f} → {after.outlier_ratio:.2f}",
            f"{100 * before.clipped:.1f} → {100 * after.clipped:4.1f}",
            f"{100 * before.zeroed:.1f} → {100 * after.zeroed:4.1f}",
            f"{100 * before.error:.1f} → {100 * after.error:4.1f}",
        )
        layer = before.layer
    return grid
