# SPDX-License-Identifier: MIT
"""What gfx950 executes for an op, counted in the emulator, beside separate passes in plain Triton.

Columns are counted (emulator: instructions, distinct bytes, cache lines, LDS clocks), read from the
code object (registers) or modelled (peak rates: a lower bound in us for a resource, not a timing).
Triton (bench/triton_passes.py) is compiled for gfx950 in the same run and its passes are added up.
The outputs of both are compared with numpy's.

  unit        an element of x; for the GEMM a 16x16x128 product (one matrix instruction)
  VALU, all   instructions a unit. For elements: of one lane, so 64 times the wave's instructions
  MFMA        issue slots of 4 clocks that matrix instructions take, of the whole kernel
  B/unit      distinct bytes that launches read and write; of least: over what the op must move
  lines       128-byte lines touched by vector accesses over the fewest that hold their bytes
  LDS +       LDS clocks lost to bank conflicts
  VGPR, waves the most and the fewest (a SIMD, by registers and LDS) of the launches
  groups      workgroups of the largest launch
  hbm .. mfma us by resource, launches added up; bound us: each launch's largest, added up. Few
              tokens are far from filling the chip, which these bounds do not know.

    pip install . ./emulator -r requirements/emulator.txt -r requirements/test.txt
    python bench/gfx950_counts.py [--quick] [--out counts.csv] [--chart counts.png]
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path

import counted
import numpy as np
import triton_passes
from counted import FLOORS, OURS, TRITON, Launch, Line
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import gemm_kernels as gemm  # noqa: E402
import gfx950_kernels as kernels  # noqa: E402
import matrix_kernels  # noqa: E402

from rotquant_hip import reference  # noqa: E402

LANES = 64


def line(about: Line, way: str, kernel: str, launches: list[Launch], least: int) -> Line:
    """A row of the table. least: bytes that the op must move."""
    lanes = LANES if about["unit"] == "element" else 1
    a_unit = lanes / about["units"]
    return about | {
        "way": way,
        "kernel": kernel,
        "launches": len(launches),
        "workgroups": max(launch.stats.workgroups for launch in launches),
        "valu": counted.instructions(launches, "valu", "packed") * a_unit,
        "all": counted.total(launches, "instructions") * a_unit,
        "bytes": counted.moved(launches) / about["units"],
        **counted.quality(launches, least),
        **counted.modelled(launches),
    }


def same(way: str, got: tuple[NDArray, NDArray], want: tuple[NDArray, NDArray], shuffle: bool):
    """Byte for byte, or the counts are of a wrong kernel."""
    scales = reference.shuffle_scales(want[1]) if shuffle else want[1]
    for what, a, b in (("codes", got[0], want[0]), ("scales", got[1], scales)):
        wrong = np.count_nonzero(a != b)
        assert not wrong, f"{way}: {wrong} of {b.size} bytes of the {what} differ from numpy's"


def rotate_quant(m: int, k: int, rs: int, *, learned: bool, shuffle: bool) -> list[Line]:
    """Ours and Triton's. x and the matrix lie on grids, so that sums are exact in any order."""
    rng = np.random.default_rng((m, k, rs))
    x = (rng.standard_normal((m, k)) * 16).round().clip(-127, 127).astype(np.float32) / 16
    bits = reference.float32_to_bf16(x)
    if learned:
        matrix = rng.integers(-15, 16, (rs, rs)).astype(np.float32) / 64
        fits = (c for c in matrix_kernels.CONFIGS if (c.dtype, c.size) == ("bf16", rs))
        config = [c for c in fits if c.from_tokens <= m][-1]
        codes, scales, stats = matrix_kernels.rotate_quant(config, bits, matrix, shuffle=shuffle)
        parts = ("rotate_matrix_quant_kernel", matrix_kernels.symbol_part(config), "Lb0E")
        kernel, threads = kernels.kernel(matrix_kernels.stem(config), *parts), 64 * config.waves
        options, factor = {"rotation": matrix}, 1.0
    else:
        matrix, factor = reference.hadamard(np.eye(rs), rs), rs**-0.5
        codes, scales, stats = kernels.rotate_quant(bits, rs, shuffle=shuffle)
        parts = ("rotate_quant_kernel", f"ELi{rs}E", "Lb0E")
        kernel = kernels.kernel(kernels.instances(bits), *parts)
        threads = kernels.plan_tiles(k, -(-m // 256) * 256 if shuffle else m, shuffle).threads
        options = {"rotation_size": rs}
    same(OURS, (codes, scales), reference.rotate_quant(x, **options), shuffle)
    least = bits.nbytes + codes.nbytes + scales.nbytes + (2 * rs * rs if learned else 0)
    about: Line = {
        "op": "rotate_quant, learned" if learned else "rotate_quant, Hadamard",
        "shape": f"RS {rs}, {m} x {k}, {'shuffled' if shuffle else 'natural'}",
        "unit": "element",
        "units": x.size,
    }
    mine = counted.ours(kernel[0].kernels[kernel[1]], stats, threads)
    codes, scales, passes = triton_passes.rotate_quant(
        bits, reference.float32_to_bf16(matrix), factor, shuffle=shuffle
    )
    want = reference.rotate_quant(x, bf16_intermediate=True, **options)
    same(TRITON, (codes, scales), want, shuffle)
    return [
        line(about, OURS, "1 launch", [mine], least),
        line(about, TRITON, f"{len(passes)} passes", list(passes.values()), least),
    ]


def gemm_a4w4(
    m: int, n: int, k: int, full: tuple[int, int], tile: tuple[int, int, int], warps: int
) -> list[Line]:
    """bf16 output. The configuration is the one for a product of `full` (M, N), thinned to m, n."""
    problem = gemm.make(m, n, k)
    exact, bound = gemm.expected(problem)
    bound = gemm.output_bound(exact, bound, "bf16")
    chosen = gemm.configs()[config := gemm.plan(*full, k).config]
    raw, stats = gemm.run(problem, config, out_dtype="bf16")
    found = [kernels.kernel(chosen.stem, "gemm_", chosen.symbol)]
    if len(stats) > 1:
        found.append(kernels.kernel("gemm_a4w4-inst-sum", "gemm_sum_kernel"))
    infos = [obj.kernels[name] for obj, name in found]
    mine = list(map(counted.ours, infos, stats, (chosen.threads, 256)))
    operands = (problem.a, problem.b, problem.a_scales, problem.b_scales)
    theirs, passes = triton_passes.gemm(*operands, tile=tile, warps=warps)
    for way, out in ((OURS, raw), (TRITON, theirs)):
        wrong = np.count_nonzero(~(np.abs(gemm.to_float64(out) - exact) <= bound))
        assert not wrong, f"{way}: {wrong} of {exact.size} products are off"
    least = sum(array.nbytes for array in operands) + raw.nbytes
    about: Line = {
        "op": "gemm_a4w4",
        "shape": f"{m} x {n} x {k} of {full[0]} x {full[1]}",
        "unit": "16x16x128",
        "units": m * n * k / (16 * 16 * 128),
    }
    return [
        line(about, OURS, chosen.name, mine, least),
        line(about, TRITON, "x".join(map(str, tile)), list(passes.values()), least),
    ]


def tasks(quick: bool) -> list[partial[list[Line]]]:
    """What to count, in the table's order."""
    found = []
    sizes, rows = ((64,), (64,)) if quick else ((64, 128), (1, 32, 1024))
    for learned, rs, m, shuffle in itertools.product((False, True), sizes, rows, (False, True)):
        found.append(partial(rotate_quant, m, 4096, rs, learned=learned, shuffle=shuffle))
    decode, prefill = ((16, 512), (256, 256)) if quick else ((16, 6144), (512, 512))
    # Few tokens: a wide tile with few instructions, and one with enough workgroups for the chip.
    for tile in ((16, 128, 256), (16, 32, 256)):
        found.append(partial(gemm_a4w4, *decode, 4096, (16, 6144), tile, 2))
    found.append(partial(gemm_a4w4, *prefill, 4096, (16384, 6144), (256, 256, 256), 8))
    return found


def table(lines: list[Line]):
    """Pairs of rows; in brackets how many times ours Triton's is."""
    from rich import box
    from rich.table import Table

    note = "counted (emulator); us: modelled (peak rates, MI355X), a bound, not a timing"
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=note)
    header = "op, shape|way, kernel|VALU|all|MFMA|B/unit|of\nleast|lines|LDS +|VGPR|waves|groups"
    for i, name in enumerate((*header.split("|"), *FLOORS, "bound us")):
        shown.add_column(name, no_wrap=True, justify="left" if i < 2 else "right")
    for mine, theirs in zip(lines[::2], lines[1::2], strict=True):
        for row in (mine, theirs):
            times = {
                key: f" ({row[key] / mine[key]:.1f}x)" if row is theirs else ""
                for key in ("valu", "all", "bytes", "us")
            }
            shown.add_row(
                row["op"] if row is mine else row["shape"],
                f"{row['way']}, {row['kernel']}",
                *(f"{row[key]:.4g}{times[key]}" for key in ("valu", "all")),
                f"{row['mfma_share']:.0%}",
                f"{row['bytes']:.4g}{times['bytes']}",
                *(f"{row[key]:.2f}" for key in ("of_least_bytes", "of_least_lines")),
                *(str(row[key]) for key in ("lds_conflict_clocks", "vgprs", "waves", "workgroups")),
                *(f"{row[f'{name}_us']:.3f}" for name in FLOORS),
                f"{row['us']:.3f}{times['us']}",
            )
        shown.add_section()
    return shown


def chart(lines: list[Line], path: Path) -> None:
    """Bars: instructions and bytes a unit, Triton's over ours."""
    import matplotlib.pyplot as plt

    labels = [f"{row['op']}\n{row['shape']}" for row in lines[::2]]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.45 * len(labels)), layout="constrained")
    for i, key in enumerate(("valu", "all", "bytes")):
        ratios = [b[key] / a[key] for a, b in zip(lines[::2], lines[1::2], strict=True)]
        axes.barh(np.arange(len(labels)) + (i - 1) * 0.27, ratios, 0.25, label=key)
    axes.set_yticks(np.arange(len(labels)), labels, fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.legend(title="Triton's passes over rotquant_hip: counted (emulator)")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    from rich.console import Console
    from rich.progress import track

    args = counted.arguments(__doc__)
    work = track(tasks(args.quick), "executing gfx950 code", console=Console(stderr=True))
    lines = [row for task in work for row in task()]
    Console(width=225).print(table(lines))
    if args.out:
        counted.write(lines, args.out)
    if args.chart:
        chart(lines, args.chart)


if __name__ == "__main__":
    main()
