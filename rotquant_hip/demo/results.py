# SPDX-License-Identifier: MIT
"""What a run of the demo found, and the files that hold it."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from rotquant_hip.demo.groups import Activation, GroupStats
from rotquant_hip.demo.perplexity import Losses, share_recovered
from rotquant_hip.demo.quantize import Recipe


@dataclass(frozen=True)
class Conditions:
    """Everything that the numbers depend on, and where they were measured."""

    model: str
    model_sha256: str
    text: str
    tokens: int
    seed: int
    scale_mode: str
    dtype: str
    device: str  # in words, with the number of threads if it is the CPU
    torch: str


@dataclass(frozen=True)
class Results:
    conditions: Conditions
    reference: Losses  # not quantised
    plain: Losses  # quantised, not rotated
    rotated: dict[Recipe, Losses]
    groups: list[GroupStats]
    activations: list[Activation]  # that `groups` describes; for the picture

    @property
    def best(self) -> Recipe:
        """The rotation with the lowest perplexity."""
        return min(self.rotated, key=lambda recipe: self.rotated[recipe].mean)

    @property
    def not_better(self) -> list[Recipe]:
        """Rotations that do not lower the perplexity."""
        return [recipe for recipe, loss in self.rotated.items() if loss.mean >= self.plain.mean]

    @property
    def before_after(self) -> list[tuple[GroupStats, GroupStats]]:
        """Per recorded activation: not rotated, and with the best rotation."""
        before = [entry for entry in self.groups if entry.rotation_size is None]
        after = [entry for entry in self.groups if entry.rotation_size == self.best.rotation_size]
        return list(zip(before, after, strict=True))

    def share(self, recipe: Recipe) -> float:
        """Of the loss by quantising, the part that `recipe` wins back."""
        return share_recovered(self.reference, self.plain, self.rotated[recipe])


def percent(share: float) -> str:
    return "n/a" if math.isnan(share) else f"{100 * share:.1f} %"


def table(results: Results) -> list[dict[str, object]]:
    """One row per configuration; None where a column does not apply."""
    reference, plain = results.reference, results.plain
    rows: list[dict[str, object]] = [
        _row(results.conditions.dtype, None, reference, None, None, None),
        _row("MXFP4", None, plain, plain.mean - reference.mean, None, None),
    ]
    for recipe, losses in results.rotated.items():
        rows.append(
            _row(
                recipe.label,
                recipe.rotation_size,
                losses,
                losses.mean - reference.mean,
                losses.change_from(plain),
                results.share(recipe),
            )
        )
    return rows


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value


def _row(
    name: str,
    rotation_size: int | None,
    losses: Losses,
    lost: float | None,
    change: tuple[float, float] | None,
    share: float | None,
) -> dict[str, object]:
    return {
        "configuration": name,
        "rotation_size": rotation_size,
        "perplexity": losses.perplexity,
        "log_perplexity": losses.mean,
        "lost_by_quantising": lost,
        "change_by_rotation": change[0] if change else None,
        "standard_error": _known(change[1]) if change else None,
        "share_recovered": _known(share) if share is not None else None,
    }


def save(results: Results, folder: Path) -> None:
    """Writes demo.json (everything) and demo.csv (the perplexity table)."""
    rows = table(results)
    everything = {
        "conditions": asdict(results.conditions),
        "perplexity": rows,
        "groups": [asdict(stats) for stats in results.groups],
    }
    (folder / "demo.json").write_text(json.dumps(everything, indent=2) + "\n")
    with (folder / "demo.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
