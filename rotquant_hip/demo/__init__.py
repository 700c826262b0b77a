# SPDX-License-Identifier: MIT
"""The main job: what MXFP4 costs a real language model, and what rotation wins back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rotquant_hip.demo import groups, model, perplexity, text
from rotquant_hip.demo.packages import DemoError, check_packages
from rotquant_hip.demo.quantize import Recipe, encode, quantized
from rotquant_hip.demo.results import Conditions, Results, save

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["DemoError", "DemoOptions", "measure", "run"]


@dataclass(frozen=True)
class DemoOptions:
    """As on the command line."""

    tokens: int
    rotation_sizes: list[int]
    scale_mode: str
    device: str
    dtype: str
    seed: int
    out: Path


def run(options: DemoOptions) -> int:
    """Measures, prints and saves. 0: every rotation lowered the perplexity, 1: one did not.

    Raises DemoError for what the user can put right: missing packages, device, text.
    """
    check_packages()
    from rich.console import Console

    from rotquant_hip.demo.figure import draw
    from rotquant_hip.demo.report import print_report

    device = _checked_device(options.device)
    dtype = _chosen_dtype(options.dtype, device)
    _make_folder(options.out)
    console = Console()
    with console.status(f"Loading {model.NAME}"):
        loaded = model.load(dtype, device)
        windows = text.load_windows(loaded.tokenizer, options.tokens, options.seed)
    conditions = Conditions(
        model=loaded.name,
        model_sha256=loaded.sha256,
        text=text.NAME,
        tokens=options.tokens,
        seed=options.seed,
        scale_mode=options.scale_mode,
        dtype=str(dtype).removeprefix("torch."),
        device=_device_in_words(device),
        torch=torch.__version__,
    )
    results = measure(loaded.model, windows, options.rotation_sizes, conditions, console)
    print_report(results, console)
    save(results, options.out)
    draw(results, options.out / "demo.png")
    console.print(f"Wrote {options.out}/demo.png, demo.json, demo.csv", highlight=False)
    return 1 if results.not_better else 0


def measure(
    llama: torch.nn.Module,
    windows: list[list[int]],
    rotation_sizes: list[int],
    conditions: Conditions,
    console: Console,
) -> Results:
    """Losses of the model as it is, quantised, and quantised after each rotation."""
    from rich import progress

    plain = Recipe(None, conditions.scale_mode)
    rotated = [Recipe(size, conditions.scale_mode) for size in dict.fromkeys(rotation_sizes)]
    recipes = [plain, *rotated]
    losses: dict[Recipe, perplexity.Losses] = {}

    with progress.Progress(
        progress.TextColumn("{task.description:<20}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        console=console,
    ) as bar:
        total = sum(map(len, windows)) * (1 + len(recipes))
        task = bar.add_task(conditions.dtype, total=total)

        def advance(done: int) -> None:
            bar.advance(task, done)

        layers = groups.middle_layers(len(llama.model.layers))
        with groups.recorded(llama, layers) as activations:
            reference = perplexity.evaluate(llama, windows, advance)
        for recipe in recipes:
            bar.update(task, description=recipe.label)
            with quantized(llama, recipe):
                losses[recipe] = perplexity.evaluate(llama, windows, advance)

    return Results(
        conditions=conditions,
        reference=reference,
        plain=losses[plain],
        rotated={recipe: losses[recipe] for recipe in rotated},
        groups=[groups.measure(found, recipe) for found in activations for recipe in recipes],
        activations=activations,
    )


def _checked_device(name: str) -> torch.device:
    """The device, after one tiny op has run there."""
    try:
        device = torch.device(name)
        encode(torch.zeros(32, device=device), Recipe(None))
    # torch has no common class for these: AssertionError is "not compiled with CUDA enabled".
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DemoError(f"--device {name}: rotquant_hip does not run there ({reason})") from error
    return device


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {path}: cannot be made a folder ({error.strerror})") from error


def _chosen_dtype(name: str, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu":
        return torch.bfloat16
    # Without it torch multiplies bfloat16 several times slower than float32 (AVX2: 5 times).
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _device_in_words(device: torch.device) -> str:
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"the CPU ({capability}, {torch.get_num_threads()} torch threads)"
    return torch.cuda.get_device_name(device)
