# SPDX-License-Identifier: MIT
"""The main job: what MXFP4 costs a real language model, and what rotation wins back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from rotquant_hip.demo import groups, model, perplexity, text
from rotquant_hip.demo.packages import DemoError, check_packages
from rotquant_hip.demo.quantize import Recipe, encode, quantized
from rotquant_hip.demo.results import Conditions, Results, save

OUTPUTS = ("demo.png", "demo.json", "demo.csv")

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

    Raises DemoError for what the user can put right: missing packages, device, text, folder. All
    that can be checked is checked before the model is loaded.
    """
    check_packages()
    from rich.console import Console

    from rotquant_hip.demo.figure import draw
    from rotquant_hip.demo.report import print_report

    device = _checked_device(options.device)
    dtype = _chosen_dtype(options.dtype, device)
    with _output(options.out):
        pass  # to see that it can be written
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
    try:
        results = measure(loaded.model, windows, options.rotation_sizes, conditions, console)
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().splitlines()[0]
        raise DemoError(f"--device {options.device}: out of memory ({reason})") from error
    try:
        with _output(options.out) as folder:
            save(results, folder)
            draw(results, folder / "demo.png")
    finally:  # what was measured is not lost with the files, nor these with the terminal
        print_report(results, console)
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
        codes, _ = encode(torch.zeros(32, device=device), Recipe(None))
        codes.cpu()  # meta has no values; a GPU may report a fault only now
    # torch has no common class for these: AssertionError is "not compiled with CUDA enabled".
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DemoError(f"--device {name}: rotquant_hip does not run there ({reason})") from error
    return device


@contextmanager
def _output(folder: Path) -> Iterator[Path]:
    """A folder inside `folder` whose files are moved there in the end, or removed after an error.

    Folders that had to be made are removed again when nothing was put there.
    """
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for name in OUTPUTS:
            if (folder / name).is_dir():
                raise DemoError(f"--out {folder}: {name} in it is a folder")
        with TemporaryDirectory(prefix=".demo-", dir=folder) as temporary:
            yield Path(temporary)
            for file in Path(temporary).iterdir():
                os.replace(file, folder / file.name)
    except OSError as error:
        raise DemoError(f"--out {folder}: cannot be written ({error.strerror})") from error
    finally:
        for each in made:
            with suppress(OSError):  # it holds files, or was never made
                each.rmdir()


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
