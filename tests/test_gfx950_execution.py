# SPDX-License-Identifier: MIT
"""The kernels' gfx950 machine code, executed by the emulator with all its checks on.

Codes and scales equal the numpy reference byte for byte; no check fires (memory outside every
buffer, bytes or registers that nothing wrote, LDS races, a register used before its wait).
"""

from __future__ import annotations

from collections import defaultdict

import gfx950_kernels as kernels
import numpy as np
import pytest
from compare import assert_bytes_equal, assert_close
from gfx950_asm import LANES
from gfx950_build import code_objects
from strategies import to_float32

from rotquant_hip import layouts, reference

ROTATION_SIZES = (0, *reference.ROTATION_SIZES)
# (rows, K): one group, tails in both directions, K that is no power of two, whole tiles.
SHAPES = ((1, 32), (3, 96), (33, 288), (1, 4096), (5, 2048), (40, 256), (9, 4352))

#: Mnemonics executed so far, by code object; test_every_instruction_was_executed reads it.
executed: dict[str, set[str]] = defaultdict(set)


def note(stem: str, stats) -> None:
    executed[stem] |= set(stats.mnemonics)


def difficult(dtype: str, rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Values over many binades, with a zero, a tiny, a NaN and an Inf group where there is room."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-6, 7, (rows, k)))
    flat = x.reshape(-1)[: x.size // 32 * 32].reshape(-1, 32)
    for index, value in enumerate((0.0, 1e-39, np.nan, -np.inf)):
        group = 3 * index + 1
        if group < len(flat):
            flat[group, rng.integers(32) if index > 1 else slice(None)] = value
    x = x.astype(np.float32)
    if dtype == "bf16":
        return reference.float32_to_bf16(x)
    with np.errstate(over="ignore"):
        return x.astype(np.float16 if dtype == "fp16" else np.float32)


def expected(x: np.ndarray, rotation_size: int, **options) -> tuple[np.ndarray, np.ndarray]:
    values = to_float32(x)
    if rotation_size == 0:
        return reference.quant(values, scale_mode=options.get("scale_mode", "round_up"))
    return reference.rotate_quant(values, rotation_size=rotation_size, **options)


def check(
    x: np.ndarray,
    rotation_size: int,
    *,
    shuffle: bool = False,
    launch: dict | None = None,
    **options,
) -> None:
    codes, scales, stats = kernels.rotate_quant(
        x, rotation_size, shuffle=shuffle, **(launch or {}), **options
    )
    note(kernels.instances(x), stats)
    want_codes, want_scales = expected(x, rotation_size, **options)
    if shuffle:
        want_scales = reference.shuffle_scales(want_scales)
    what = f"{kernels.instances(x)} {x.shape} RS {rotation_size} shuffle {shuffle} {options}"
    assert_bytes_equal(codes, want_codes, f"codes of {what}")
    assert_bytes_equal(scales, want_scales, f"scales of {what}")


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("rotation_size", ROTATION_SIZES)
def test_every_instance_over_shapes_modes_and_layouts(dtype: str, rotation_size: int) -> None:
    for index, (rows, k) in enumerate(SHAPES):
        if rotation_size and k % rotation_size:
            continue
        x = difficult(dtype, rows, k, seed=index)
        for scale_mode in reference.SCALE_MODES:
            for shuffle in (False, True):
                check(x, rotation_size, scale_mode=scale_mode, shuffle=shuffle)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
def test_row_strides(dtype: str) -> None:
    """Also strides that leave rows on any element.

    NOTE: then 16-byte loads are aligned to 2 bytes, which needs the unaligned access mode that
    ROCm runs waves in; everywhere else the emulator insists on alignment.
    """
    for stride in (288, 320, 289, 1000):
        for rows, shuffle in ((5, False), (70, True)):
            wide = difficult(dtype, rows, stride)
            check(wide[:, :256], 64, shuffle=shuffle, launch={"unaligned": True})


@pytest.mark.parametrize("rotation_size", (16, 64, 128))
def test_prescale_and_bf16_intermediate(rotation_size: int) -> None:
    rng = np.random.default_rng(1)
    for dtype in kernels.DTYPES:
        x = difficult(dtype, 9, 384)
        prescale = rng.uniform(-2, 2, 384).astype(np.float32)
        for options in ({"prescale": prescale}, {"bf16_intermediate": True}):
            check(x, rotation_size, **options)
            check(x, rotation_size, shuffle=True, **options)


def test_all_bf16_patterns() -> None:
    bits = np.arange(65536, dtype=np.uint16).reshape(32, 2048)
    spread = bits.reshape(64, 1024).T.copy().reshape(32, 2048)  # mixed magnitudes in a group
    for x in (bits, spread):
        for rotation_size in (0, 64):
            check(x, rotation_size)


def test_a_clamped_grid_strides_over_the_rest() -> None:
    """B24: the launch is never as large as the problem has to be; here the grid is cut by hand."""
    x = difficult("bf16", 70, 1024)
    for shuffle in (False, True):
        plan = kernels.plan_tiles(1024, 256 if shuffle else 70, shuffle)
        assert plan.row_tiles > 2 and plan.grid_rows > 2
        check(x, 64, shuffle=shuffle, launch={"max_grid": (1, 2)})


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_waves_and_workgroups(seed: int) -> None:
    check(difficult("bf16", 70, 1088), 64, shuffle=True, launch={"seed": seed})


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("rotation_size", reference.ROTATION_SIZES)
def test_rotate(dtype: str, rotation_size: int) -> None:
    rng = np.random.default_rng(2)
    for rows, k in ((1, 256), (9, 768), (3, 4096)):
        x = difficult(dtype, rows, k)
        prescale = rng.uniform(-2, 2, k).astype(np.float32)
        for scale in (None, prescale):
            y32 = reference.rotate(to_float32(x), rotation_size=rotation_size, prescale=scale)
            for out_dtype in (np.uint16, np.float16, np.float32):
                y, stats = kernels.rotate(x, rotation_size, out_dtype=out_dtype, prescale=scale)
                note(kernels.instances(x), stats)
                with np.errstate(over="ignore", invalid="ignore"):
                    want = (
                        reference.float32_to_bf16(y32)
                        if out_dtype is np.uint16
                        else y32.astype(out_dtype)
                    )
                assert_close(to_float32(y), to_float32(want), f"rotate {dtype} RS {rotation_size}")


@pytest.mark.parametrize("shuffled", (False, True))
def test_dequant(shuffled: bool) -> None:
    """All 256 code bytes under all 256 scale bytes."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), 16).reshape(256, 16)
    want = reference.dequant(codes, scales)
    given = reference.shuffle_scales(scales) if shuffled else scales
    for out_dtype in (np.uint16, np.float16, np.float32):
        y, stats = kernels.dequant(codes, given, shuffled=shuffled, out_dtype=out_dtype)
        note("dequant-kernel", stats)
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = (
                reference.float32_to_bf16(want)
                if out_dtype is np.uint16
                else want.astype(out_dtype)
            )
        assert_close(to_float32(y), to_float32(rounded), f"dequant shuffled {shuffled} {out_dtype}")


@pytest.mark.parametrize("gate_mode", reference.GATE_MODES)
def test_layout_kernels(gate_mode: str) -> None:
    rng = np.random.default_rng(3)
    experts, rows, groups = (3, 96, 11) if gate_mode == "interleave" else (1, 70, 11)
    inter = rows // 2 if gate_mode == "interleave" else 0
    scales = rng.integers(0, 256, (experts, rows, groups)).astype(np.uint8)
    natural = scales if inter else scales[0]
    want = reference.shuffle_scales(natural, gate_mode=gate_mode)
    sizes = (experts, rows, groups, inter)
    got, back = kernels.poisoned(want.shape), kernels.poisoned(natural.shape)
    note("layout-kernel", kernels.shuffle("scales", natural, got, (*sizes, False)))
    assert_bytes_equal(got, want, f"shuffle_scales {gate_mode}")
    note("layout-kernel", kernels.shuffle("scales", want, back, (*sizes, True)))
    assert_bytes_equal(back, natural, f"unshuffle_scales {gate_mode}")

    weight = rng.integers(0, 256, (2, 96, 80)).astype(np.uint8)
    want = reference.shuffle_weight(weight, gate_mode=gate_mode)
    sizes = (2, 96, 80, 48 if gate_mode == "interleave" else 0)
    for source, target, inverse in ((weight, want, False), (want, weight, True)):
        got = kernels.poisoned(target.shape)
        note("layout-kernel", kernels.shuffle("weight", source, got, (*sizes, inverse)))
        assert_bytes_equal(got, target, f"shuffle_weight {gate_mode} inverse {inverse}")


@pytest.mark.parametrize("kind", ("scales", "weight"))
def test_layouts_beyond_4_gib(kind: str) -> None:
    """B26: offsets past 2^32, at the end of the tensor; other pages are never touched."""
    rows, columns = 1 << 22, 1040
    size = rows * columns
    assert size > 1 << 32
    map_offset = layouts.scale_offset if kind == "scales" else layouts.weight_offset
    last = np.arange(size - 512 * columns, size)
    natural, shuffled = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    natural[last] = np.random.default_rng(4).integers(1, 256, last.size)
    sizes = (1, rows, columns, 0, 0)
    note("layout-kernel", kernels.shuffle(kind, natural, shuffled, sizes, ends_only=True))
    offsets = map_offset(last // columns, last % columns, columns)
    item_bytes = 4 if kind == "scales" else 16
    written = offsets >= size - 256 * item_bytes
    assert written.sum() == 256 * item_bytes
    assert_bytes_equal(shuffled[offsets[written]], natural[last[written]], f"end of {kind}")


@pytest.mark.parametrize("shuffle", (False, True))
def test_counts_of_the_full_tile_path(shuffle: bool, capsys) -> None:
    """RS 64, K 4096: bytes moved, cache lines touched, VALU issue against memory (all counted)."""
    x = difficult("bf16", 256, 4096)
    _, _, stats = kernels.rotate_quant(x, 64, shuffle=shuffle)
    channels = x.size
    moved = (stats.unique_read_bytes + stats.unique_written_bytes) / channels
    least = 2 + 1 / 2 + 1 / 32
    assert moved == pytest.approx(least, rel=0.01)
    assert stats.lines == stats.least_lines
    assert stats.lds_cycles == stats.lds_least_cycles
    floor = stats.resource_floor(chip="mi355x").us
    assert floor["valu"] < floor["hbm"]
    valu = (stats.classes["valu"] + stats.classes["packed"]) * LANES / channels
    with capsys.disabled():
        print(
            f"\nrotate_quant bf16 RS 64, 256 x 4096, {'shuffled' if shuffle else 'natural'} scales:"
            f" {moved:.3f} bytes and {valu:.2f} VALU instructions per channel, lines"
            f" {stats.lines} of {stats.least_lines} least; floors in us (a bound, not a timing): "
            + ", ".join(f"{name} {us:.3f}" for name, us in floor.items() if us)
        )


def test_every_instruction_was_executed(capsys) -> None:
    """Runs last: each mnemonic in these code objects has been executed by a test above."""
    lines = []
    stems = {path.stem for path in code_objects().glob("*.co")}
    for stem in sorted(s for s in stems if s.startswith(("rotate_quant", "dequant", "layout"))):
        lines.append(kernels.assert_all_executed(stem, executed[stem]))
    with capsys.disabled():
        print("\nexecuted gfx950 code:\n" + "\n".join(lines))
