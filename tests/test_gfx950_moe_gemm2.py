# SPDX-License-Identifier: MIT
"""moe_gemm2's and moe_reduce's gfx950 machine code, executed by the emulator with all its checks.

Every sum is held against float64 with a bound from float32 summation. Everything that pads is
poisoned, outputs begin unwritten and are exactly as large as they are, and behind the last expert's
weights there is nothing.

Bug reports from other implementations that this covers: B05 and B15 (a hidden size that is not a
multiple of the tile), B06 (NaN scales in the padding), B22 (an output beyond 2^31 elements), B25
(experts' weights beyond 4 GiB), B34 (a NaN row stays in its row), B35 (routes of experts that are
elsewhere), B37 (all routes to the last expert), B40 (the same bytes on every run).
"""

from __future__ import annotations

from collections import defaultdict

import gfx950_kernels as kernels
import moe_gemm2_kernels as moe
import numpy as np
import pytest
from compare import assert_bytes_equal, assert_close
from gfx950_asm import Kernel, read_kernels
from gfx950_build import code_objects
from moe_scales import poisoned_bands
from numpy.typing import NDArray

from rotquant_hip import reference, reference_moe

STEMS = (*(moe.stem(finish) for finish in moe.FINISHES), "moe_reduce-kernel")
OUT_DTYPES = ("bf16", "fp16", "fp32")
CONFIGS = moe.configs()
BY_NAME = {config.name: index for index, config in enumerate(CONFIGS)}
OF_BLOCK = {m: [i for i, c in enumerate(CONFIGS) if c.tile_m == m] for m in reference_moe.BLOCK_M}
UNTOUCHED = 0xA5

# Around every edge of steps, halves and groups; those that others refuse (B10, B11, B12) included.
INTER = (32, 96, 128, 192, 224, 256, 288, 352, 512, 544, 576, 704)
HIDDEN = (32, 64, 96, 160, 224, 256, 288, 544)

#: Mnemonics executed so far; test_every_instruction_was_executed reads it.
executed: dict[str, set[str]] = defaultdict(set)


def run(problem: moe.Problem, config: int = -1, **options) -> tuple[NDArray, ...]:
    outputs, stats = moe.run(problem, config, **options)
    executed[moe.stem(options.get("finish", "rows"))] |= set(stats.mnemonics)
    return outputs


def run_reduce(*args, **options) -> NDArray:
    out, stats = moe.reduce(*args, **options)
    executed["moe_reduce-kernel"] |= set(stats.mnemonics)
    return out


def what_of(problem: moe.Problem, config: int, *rest: object) -> str:
    name = CONFIGS[config].name if config >= 0 else f"block_m {problem.block_m}"
    sizes = (problem.tokens, problem.topk, len(problem.w2), problem.inter, problem.hidden)
    return f"{name}, tokens, topk, experts, I, H = {sizes}, {', '.join(map(str, rest))}"


def check_rows(
    problem: moe.Problem, config: int, dtype: str, columns: NDArray | None = None, **options
) -> NDArray:
    """The rows of kept routes are right, those of dropped ones untouched; returns the output."""
    (out,) = run(problem, config, finish="rows", out_dtype=dtype, **options)
    kept = problem.kept
    assert (out[~kept].view(np.uint8) == UNTOUCHED).all(), "a dropped route's row was written"
    exact, bound = moe.expected(problem, columns)
    found = moe.to_float64(out if columns is None else out[:, columns])
    bound = moe.output_bound(exact, bound, dtype)
    what = what_of(problem, config, "rows", dtype)
    assert_close(found[kept], exact[kept], what, bound=bound[kept])
    return out


def check_atomic(
    problem: moe.Problem,
    config: int,
    dtype: str,
    columns: NDArray | None = None,
    *,
    weighted: bool = True,
    **options,
) -> NDArray:
    (out,) = run(problem, config, finish="atomic", out_dtype=dtype, weighted=weighted, **options)
    exact, bound = moe.expected_sum(problem, dtype, weighted=weighted, columns=columns)
    found = moe.to_float64(out if columns is None else out[:, columns])
    assert_close(found, exact, what_of(problem, config, "atomic", dtype), bound=bound)
    return out


def check_mxfp4(problem: moe.Problem, config: int, rows: NDArray, **options) -> None:
    """Exactly `rows`, the float32 output, which has the same sums, quantised."""
    codes, scales = run(problem, config, finish="mxfp4", **options)
    kept = problem.kept
    for part, name in ((codes, "codes"), (scales, "scales")):
        assert (part[~kept] == UNTOUCHED).all(), f"{name} of a dropped route were written"
    want_codes, want_scales = reference.quant(rows[kept])
    what = what_of(problem, config, "mxfp4")
    assert_bytes_equal(scales[kept], want_scales, f"{what}, scales")
    assert_bytes_equal(codes[kept], want_codes, f"{what}, codes")


def check_all(problem: moe.Problem, config: int, dtype: str) -> None:
    rows = check_rows(problem, config, "fp32")
    check_mxfp4(problem, config, rows)
    check_atomic(problem, config, dtype)
    if dtype != "fp32":
        (out,) = run(problem, config, finish="rows", out_dtype=dtype)
        what = what_of(problem, config, "rows", dtype, "rounded once")
        assert_bytes_equal(out[problem.kept], rounded(rows[problem.kept], dtype), what)


def as_float32(array: NDArray) -> NDArray[np.float32]:
    bf16 = array.dtype == np.uint16
    return reference.bf16_to_float32(array) if bf16 else array.astype(np.float32)


def rounded(array: NDArray[np.float32], dtype: str) -> NDArray:
    with np.errstate(over="ignore"):
        bf16 = dtype == "bf16"
        return reference.float32_to_bf16(array) if bf16 else array.astype(moe.ARRAY[dtype])


def with_dropped(ids: NDArray, experts: int, seed: int = 0) -> NDArray:
    """Some ids that are no expert: negative, too large."""
    rng = np.random.default_rng(seed)
    bad = np.array([-1, experts, 2**31 - 1, -(2**31)], np.int32)
    return np.where(rng.random(ids.shape) < 0.25, rng.choice(bad, ids.shape), ids).astype(np.int32)


# --- moe_gemm2 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", range(len(CONFIGS)))
def test_every_configuration(config: int) -> None:
    """Each way to finish; two blocks of an expert, a tile that overhangs, dropped routes; then many
    steps of K, of both parities, for one block. # B05 B06 B15 B35"""
    tile = CONFIGS[config]
    ids = with_dropped(np.arange(2 * tile.tile_m + 8, dtype=np.int32).reshape(-1, 2) % 3 % 2, 2)
    sizes = dict(experts=2, block_m=tile.tile_m, seed=config)
    inter = INTER[config % len(INTER)]
    problem = moe.make(ids, inter=inter, hidden=tile.tile_n + 32, bias=True, **sizes)
    check_all(problem, config, OUT_DTYPES[config % 3])
    long = moe.make(np.zeros((3, 1), np.int32), inter=1888, hidden=96, **sizes)
    check_all(long, config, OUT_DTYPES[(config + 1) % 3])


@pytest.mark.parametrize("index", range(len(INTER)))
def test_sizes(index: int) -> None:
    """The chosen configuration: every intermediate size and block, dtypes. # B06 B15"""
    inter, hidden = INTER[index], HIDDEN[5 * index % len(HIDDEN)]
    block_m = reference_moe.BLOCK_M[index % 4]
    ids = moe.routing(1 + 7 * index % 23, 3, 3, seed=index)
    sizes = dict(block_m=block_m, inter=inter, hidden=hidden)
    check_all(moe.make(ids, experts=3, bias=index % 2 == 1, **sizes), -1, OUT_DTYPES[index % 3])


# name: hidden, intermediate size of a shard, top-k
SHARDS = {
    "Qwen3-30B-A3B": (2048, 768, 8),
    "Qwen3-30B-A3B TP2": (2048, 384, 8),
    "Qwen3-30B-A3B TP4": (2048, 192, 8),
    "gpt-oss-120b": (2880, 2880, 4),
    "gpt-oss-120b TP8": (2880, 360 // 32 * 32 + 32, 4),  # 360 padded
    "DeepSeek-R1 TP8": (7168, 256, 9),
    "Kimi-K2.5 TP4": (7168, 512, 9),
    "MiniMax-M2.5 TP4": (3072, 384, 8),
    "Qwen3.5-397B TP4": (4096, 256, 10),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards_of_models(name: str) -> None:
    """Real sizes, thinned to two experts and two tokens; a sample of the columns. # B09"""
    hidden, inter, topk = SHARDS[name]
    index = list(SHARDS).index(name)
    block_m = (16, 32, 64)[index % 3]
    rng = np.random.default_rng(index)
    ids = rng.integers(0, 2, (2, topk)).astype(np.int32)
    problem = moe.make(
        ids, experts=2, block_m=block_m, inter=inter, hidden=hidden, bias="gpt-oss" in name
    )
    columns = np.unique(np.r_[0, hidden - 1, rng.integers(0, hidden, 200)])
    check_rows(problem, -1, "bf16", columns)
    check_atomic(problem, -1, "bf16", columns)


@pytest.mark.parametrize("block_m", reference_moe.BLOCK_M)
def test_one_token_and_one_expert(block_m: int) -> None:
    """One token; then every route to the last expert, behind whose weights is nothing. # B37"""
    sizes = dict(block_m=block_m, inter=160, hidden=96)
    for config in OF_BLOCK[block_m]:
        check_all(moe.make(np.array([[6]], np.int32), experts=7, **sizes), config, "bf16")
    everything = np.full((block_m // 2 + 3, 2), 3, np.int32)
    check_all(moe.make(everything, experts=4, **sizes), -1, "fp16")


@pytest.mark.parametrize("finish", moe.FINISHES)
def test_routes_of_experts_elsewhere(finish: str) -> None:
    """B35. Only experts 1 and 4 are local; then none: nothing at all is written."""
    ids = moe.routing(20, 3, 6)
    for local in ((1, 4), ()):
        mask = np.isin(np.arange(6), local).astype(np.int32)
        problem = moe.make(
            ids, experts=6, block_m=16, inter=96, hidden=64, expert_mask=mask, bias=True
        )
        assert problem.kept.any() == bool(local) and not problem.kept.all()
        if not local:
            problem.w2, problem.w2_scales = (
                np.zeros((1, 64, 48), np.uint8),
                np.zeros((1, 64, 3), np.uint8),
            )
            problem.sorting = problem.sorting._replace(
                sorted_ids=np.full(16, 3 << 24 | 20, np.int32),
                sorted_weights=np.zeros(16, np.float32),
                sorted_expert_ids=np.full(1, -1, np.int32),
            )
            problem.a, problem.a_scales = np.zeros((16, 48), np.uint8), np.zeros((16, 3), np.uint8)
            for part in run(problem, finish=finish):
                assert (part.view(np.uint8) == (0 if finish == "atomic" else UNTOUCHED)).all()
        elif finish == "rows":
            check_rows(problem, -1, "bf16")
        elif finish == "mxfp4":
            check_mxfp4(problem, -1, check_rows(problem, -1, "fp32"))
        else:
            # What a token without a local expert had before, it has afterwards.
            before = np.random.default_rng(1).standard_normal((20, 64)).astype(np.float16)
            (after,) = run(problem, finish=finish, out_dtype="fp16", out=before.copy())
            idle = ~problem.kept.reshape(20, 3).any(1)
            assert idle.any()
            assert_bytes_equal(after[idle], before[idle], "tokens without a local expert")
            assert (after[~idle] != before[~idle]).any(1).all()


@pytest.mark.parametrize("dtype", OUT_DTYPES)
def test_atomic_equals_rows_and_reduce(dtype: str) -> None:
    """Without weights and with: the two pipelines agree within the atomic one's bound, twice. The
    number of additions is the least: one for a pair of 16-bit columns, one for a float32."""
    problem = moe.make(
        with_dropped(moe.routing(21, 6, 8), 8), experts=8, block_m=16, inter=224, hidden=160
    )
    (rows,) = run(problem, finish="rows", out_dtype=dtype)
    for weighted in (True, False):
        atomic = check_atomic(problem, -1, dtype, weighted=weighted)
        reduced = run_reduce(
            rows,
            problem.sorting.reverse_sorted,
            problem.topk,
            weights=problem.weights if weighted else None,
            out_dtype=dtype,
        )
        _, bound = moe.expected_sum(problem, dtype, weighted=weighted)
        what = f"atomic against rows and reduce, {dtype}, weighted {weighted}"
        assert_close(moe.to_float64(atomic), moe.to_float64(reduced), what, bound=2 * bound)
    _, stats = moe.run(problem, finish="atomic", out_dtype=dtype)
    columns = 1 if dtype == "fp32" else 2
    assert stats.atomics == np.count_nonzero(problem.kept) * problem.hidden // columns


@pytest.mark.parametrize("name", ["direct_16x64", "direct_32x256", "staged_64x128"])
def test_the_same_bytes_in_any_order(name: str) -> None:
    """B40. Seeds shuffle the order of workgroups and waves."""
    config = BY_NAME[name]
    ids = moe.routing(CONFIGS[config].tile_m, 4, 5)
    problem = moe.make(
        ids, experts=5, block_m=CONFIGS[config].tile_m, inter=544, hidden=96, bias=True
    )
    for finish in ("rows", "mxfp4"):
        first = run(problem, config, finish=finish, out_dtype="bf16")
        for seed in (1, 2):
            again = run(problem, config, finish=finish, out_dtype="bf16", seed=seed)
            for a, b in zip(again, first, strict=True):
                assert_bytes_equal(a, b, f"{name}, {finish}, seed {seed}")
    # The atomic finish does not promise that: only the bound.
    check_atomic(problem, config, "bf16", seed=3)


@pytest.mark.parametrize("finish", moe.FINISHES)
def test_a_nan_row_stays_in_its_row(finish: str) -> None:
    """B34. In rows of both halves of a band, and in the last group."""
    problem = moe.make(moe.routing(30, 2, 2), experts=2, block_m=64, inter=288, hidden=96)
    clean = run(problem, finish=finish, out_dtype="bf16")
    routes = np.array([3, 41])
    problem.a_scales[problem.sorting.reverse_sorted[routes], [8, 0]] = 255
    dirty = run(problem, finish=finish, out_dtype="bf16")
    if finish == "atomic":
        hit = np.isin(np.arange(30), routes // 2)
        nan = np.isnan(moe.to_float64(dirty[0]))
        assert (nan == hit[:, None]).all()
        # The other tokens: two additions to zero commute.
        assert_bytes_equal(dirty[0][~hit], clean[0][~hit], "tokens without NaN")
        return
    hit = np.isin(np.arange(60), routes)
    for a, b in zip(dirty, clean, strict=True):
        assert_bytes_equal(a[~hit], b[~hit], "rows without NaN")
    if finish == "rows":
        assert np.isnan(moe.to_float64(dirty[0][hit])).all()
    else:
        assert not dirty[0][hit].any() and (dirty[1][hit] == 255).all()


def test_no_k_at_all() -> None:
    """An empty sum is 0, and the bias is still added."""
    for block_m in (16, 64):
        problem = moe.make(
            moe.routing(9, 2, 3), experts=3, block_m=block_m, inter=0, hidden=64, bias=True
        )
        check_rows(problem, -1, "fp32")


# --- sizes past 2^31 and 2^32: only the pages that are touched exist ------------------------------


def test_weights_beyond_4_gib() -> None:
    """B25. The last expert's weights begin past 4 GiB of those before it."""
    experts, hidden, inter = 1025, 8192, 1024
    row_bytes, padded_groups = inter // 2, inter // 32
    first = (experts - 1) * hidden
    assert first * row_bytes >= 1 << 32
    small = moe.make(np.zeros((3, 1), np.int32), experts=1, block_m=16, inter=inter, hidden=hidden)
    w2 = np.zeros(experts * hidden * row_bytes, np.uint8)
    scales = np.zeros(experts * hidden * padded_groups, np.uint8)
    w2[first * row_bytes :] = reference.shuffle_weight(small.w2[0]).reshape(-1)
    scales[first * padded_groups :] = poisoned_bands(small.w2_scales[0]).reshape(-1)
    small.sorting.sorted_expert_ids[0] = experts - 1
    given = {"shuffled": (w2, scales), "experts": experts}
    (out,) = run(small, out_dtype="fp32", count=False, **given)
    small.sorting.sorted_expert_ids[0] = 0
    exact, bound = moe.expected(small)
    assert_close(out, exact, "the last expert", bound=moe.output_bound(exact, bound, "fp32"))


@pytest.mark.parametrize("finish", moe.FINISHES)
def test_outputs_beyond_2_31(finish: str) -> None:
    """B22. The last token's rows, and the first's: everything between is never touched."""
    hidden, topk = 160, 2
    tokens = (1 << 24) - 1 if finish == "atomic" else 1 << 23
    small = moe.make(
        np.array([[0, 1], [1, 0]], np.int32), experts=2, block_m=16, inter=96, hidden=hidden
    )
    exact, bound = moe.expected(small) if finish != "atomic" else moe.expected_sum(small, "bf16")
    # The second token becomes the last of many.
    ids = small.sorting.sorted_ids
    token, slot = ids & 0xFFFFFF, ids >> 24
    ids[:] = np.where(token == 2, topk << 24 | tokens, slot << 24 | token * (tokens - 1))
    small.tokens = tokens
    rows = tokens if finish == "atomic" else tokens * topk
    assert rows * hidden > 1 << 31
    size = {"atomic": (2,), "rows": (2,), "mxfp4": (0.5, 1 / 32)}[finish]
    outputs = tuple(np.zeros(int(rows * hidden * bytes_), np.uint8) for bytes_ in size)
    run(small, finish=finish, out_dtype="bf16", outputs=outputs, count=False)
    kept = np.r_[0, rows - 1] if finish == "atomic" else np.r_[0, 1, rows - 2, rows - 1]
    parts = [part.reshape(rows, -1)[kept] for part in outputs]
    if finish == "mxfp4":
        small.tokens = 2
        ids[:] = np.where(token == 2, topk << 24 | 2, slot << 24 | token)
        for part, want in zip(parts, run(small, finish=finish), strict=True):
            assert_bytes_equal(part, want, "rows of the first and the last token")
        return
    if finish == "rows":
        bound = moe.output_bound(exact, bound, "bf16")
    assert_close(moe.to_float64(parts[0].view(np.uint16)), exact, finish, bound=bound)


# --- moe_reduce -----------------------------------------------------------------------------------


def reduce_case(
    tokens: int, topk: int, hidden: int, form: str, seed: int = 0
) -> tuple[NDArray | tuple[NDArray, NDArray], NDArray[np.float32], NDArray, NDArray]:
    """Rows, the same as float32, reverse_sorted with dropped routes whose rows are NaN, weights."""
    rng = np.random.default_rng((seed, tokens, topk, hidden))
    routes = tokens * topk
    reverse = np.where(rng.random(routes) < 0.2, -1, rng.integers(0, 1000, routes)).astype(np.int32)
    weights = rng.standard_normal(routes).astype(np.float32)
    if form == "mxfp4":
        codes = rng.integers(0, 256, (routes, hidden // 2), np.uint8)
        scales = rng.integers(100, 140, (routes, hidden // 32)).astype(np.uint8)
        scales[reverse < 0] = 255
        with np.errstate(invalid="ignore"):
            return (codes, scales), reference.dequant(codes, scales), reverse, weights
    spread = np.exp2(rng.integers(-8, 8, (routes, hidden)))
    rows = rounded((rng.standard_normal((routes, hidden)) * spread).astype(np.float32), form)
    rows[reverse < 0] = rounded(np.array([np.nan], np.float32), form)
    return rows, as_float32(rows), reverse, weights


@pytest.mark.parametrize("form", (*OUT_DTYPES, "mxfp4"))
def test_reduce(form: str) -> None:
    """Byte for byte the float32 sum in the order of the slots: dtypes, top-k on both sides of what
    is in flight, columns on both sides of a wave and a workgroup, shared or not, weights or not."""
    cases = ((1, 1, 32), (5, 8, 96), (3, 9, 544), (2, 16, 2080), (7, 4, 2880), (4, 7, 64))
    for i, (tokens, topk, hidden) in enumerate(cases):
        rows, values, reverse, weights = reduce_case(tokens, topk, hidden, form, i)
        out_dtype = OUT_DTYPES[(i + len(form)) % 3]
        shared = None
        if i % 2:
            given = np.random.default_rng(i).standard_normal((tokens, hidden)).astype(np.float32)
            shared = rounded(given, out_dtype)
        given_weights = None if i == 3 else weights
        options = dict(weights=given_weights, shared=shared, out_dtype=out_dtype)
        out = run_reduce(rows, reverse, topk, **options)
        want = moe.reduce_expected(
            values, reverse, topk, given_weights, None if shared is None else as_float32(shared)
        )
        what = f"reduce of {form} rows to {out_dtype}, tokens, topk, H = {tokens, topk, hidden}"
        assert_bytes_equal(out, rounded(want, out_dtype), what)
        # B40: and once more with few workgroups that stride over the tokens, in another order.
        again = run_reduce(rows, reverse, topk, max_grid=(65535, 2), seed=i, **options)
        assert_bytes_equal(again, out, what)


def test_reduce_reads_no_dropped_row() -> None:
    """Counted: distinct bytes read are those of the kept rows, the routes and their weights."""
    for form, row_bytes in (("bf16", 2 * 288), ("fp32", 4 * 288), ("mxfp4", 288 // 2 + 288 // 32)):
        rows, _, reverse, weights = reduce_case(6, 5, 288, form)
        _, stats = moe.reduce(rows, reverse, 5, weights=weights, out_dtype="bf16")
        kept = np.count_nonzero(reverse >= 0)
        arguments = 104
        assert stats.unique_read_bytes - (kept * row_bytes + 30 * 8) in range(arguments + 1), form


def test_reduce_edges() -> None:
    """-0 survives a dropped route and a sum of its own; NaN rows stay in their token (B34); a scale
    byte of 0 is 2^-127 and 255 is NaN even with code 0; no route at all leaves `shared`."""
    rows = np.zeros((6, 32), np.float32)
    rows[0], rows[2:4], rows[4] = -0.0, np.inf, np.nan
    reverse = np.array([0, -1, 1, 2, -1, -1], np.int32)
    weights = np.array([1, np.nan, 1, -1, np.nan, np.inf], np.float32)
    shared = np.full((3, 32), -0.0, np.float32)
    options = dict(weights=weights, shared=shared, out_dtype="fp32")
    out = run_reduce(rows, reverse, 2, **options)
    assert_bytes_equal(out[[0, 2]], shared[[0, 2]], "-0 and a token without a route")
    assert np.isnan(out[1]).all(), "Inf - Inf"

    codes = np.full((4, 16), 0x10, np.uint8)
    scales = np.array([[0], [255], [254], [0]], np.uint8)
    out = run_reduce((codes, scales), np.arange(4, dtype=np.int32), 1, out_dtype="fp32")
    with np.errstate(invalid="ignore", over="ignore"):
        want = reference.dequant(codes, scales)
    assert np.isnan(out[1]).all()
    assert_bytes_equal(out[[0, 2, 3]], want[[0, 2, 3]] + np.float32(0), "ends of the scale")


def test_reduce_beyond_2_31() -> None:
    """B22. The last token's rows begin past 2^31 elements; the first columns of each are done."""
    tokens, topk, hidden, done = 17, 16, 1 << 23, 2048
    assert (tokens - 1) * topk * hidden >= 1 << 31
    few, values, reverse, weights = reduce_case(1, topk, done, "bf16")
    rows = np.zeros((tokens * topk, hidden), np.uint16)
    rows[-topk:, :done] = few
    out = np.zeros((tokens, hidden), np.uint16)
    options = dict(weights=np.tile(weights, tokens), out=out, max_grid=(1, 65535), count=False)
    run_reduce(rows, np.tile(reverse, tokens), topk, **options)
    want = moe.reduce_expected(values, reverse, topk, weights, None)
    assert_bytes_equal(out[-1:, :done], rounded(want, "bf16"), "the last token")


# --- counts ---------------------------------------------------------------------------------------


def test_counts(capsys) -> None:
    """LDS has no conflict, stores and additions of neighbouring lanes share whole lines; and what
    it costs to finish a tile, beside its product over 256 of K."""
    lines = []
    for name in ("direct_32x256", "staged_64x128", "staged_128x256"):
        tile = CONFIGS[BY_NAME[name]]
        ids = np.zeros((tile.tile_m, 1), np.int32)
        sizes = dict(experts=1, block_m=tile.tile_m, inter=256, hidden=tile.tile_n)
        problem = moe.make(ids, **sizes)
        for finish in ("rows", "atomic", "mxfp4"):
            _, stats = moe.run(problem, BY_NAME[name], finish=finish, out_dtype="bf16")
            assert stats.lds_cycles == stats.lds_least_cycles and not stats.lds_underaligned, name
            if name.startswith("staged") and finish != "mxfp4":
                assert stats.lines == stats.least_lines, f"{name} {finish}"
            lines.append(
                f"{name} {finish}: {stats.instructions} instructions, of these"
                f" {stats.classes['mfma']} matrix, {stats.classes['lds']} LDS;"
                f" lines {stats.lines} of {stats.least_lines} least"
            )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


@pytest.mark.parametrize("form", ("bf16", "mxfp4"))
def test_counts_of_reduce(form: str, capsys) -> None:
    """Each byte once, in whole lines; memory takes longer than anything else that is counted."""
    rows, _, _, weights = reduce_case(8, 8, 7168, form)
    kept = np.zeros(64, np.int32)
    _, stats = moe.reduce(rows, kept, 8, weights=weights, out_dtype="bf16")
    assert stats.lines == stats.least_lines
    floor = stats.resource_floor("mi355x").us
    assert floor["l2"] < floor["hbm"] and floor["valu"] < 1.2 * floor["hbm"]
    with capsys.disabled():
        print(
            f"\nreduce of {form} rows, 8 tokens, top-8, 7168: floors in us (a bound, not a"
            " timing): " + ", ".join(f"{name} {us:.3f}" for name, us in floor.items() if us)
        )


# --- the code objects -----------------------------------------------------------------------------

#: Waves per SIMD below 4, and why.
FEWER_WAVES = {
    "moe_gemm2_staged 4 4 2 2": (3, "two workgroups' LDS fill a compute unit: 2 waves each SIMD"),
    "moe_gemm2_staged 4 4 2 4": (3, "one workgroup's LDS fills a compute unit: 2 waves each SIMD"),
}


@pytest.fixture(scope="module")
def code() -> list[tuple[str, Kernel]]:
    return [(s, kernel) for s in STEMS for kernel in read_kernels(code_objects() / f"{s}.s")]


def test_registers_and_lds(code: list[tuple[str, Kernel]], capsys) -> None:
    lines = [f"{'gfx950 kernel':40} VGPR SGPR    LDS waves/SIMD"]
    for stem, kernel in code:
        meta = kernel.metadata
        for key in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
            assert meta[key] == 0, f"{stem} {kernel.name}: {key} {meta[key]}"
        assert not any(m.startswith(("scratch_", "flat_")) for m in kernel.mnemonics), kernel.name
        least, _ = FEWER_WAVES.get(kernel.name, (4, ""))
        assert kernel.waves_per_simd >= least, f"{kernel.name}: {meta['.vgpr_count']} VGPRs"
        assert meta[".group_segment_fixed_size"] <= 160 * 1024
        lines.append(
            f"{stem.split('-')[-1] + ' ' + kernel.name:40} {meta['.vgpr_count']:4}"
            f" {meta['.sgpr_count']:4} {meta['.group_segment_fixed_size']:6}"
            f" {kernel.waves_per_simd}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_instances_and_atomics(code: list[tuple[str, Kernel]]) -> None:
    """A kernel for each configuration and way to finish; additions only where they belong."""
    for finish in moe.FINISHES:
        mine = [kernel for stem, kernel in code if stem == moe.stem(finish)]
        assert len(mine) == len(CONFIGS)
        for kernel in mine:
            atomics = {i.split()[0] for i in kernel.instructions if "atomic" in i}
            packed = {"global_atomic_pk_add_bf16", "global_atomic_pk_add_f16"}
            assert atomics == (packed | {"global_atomic_add_f32"} if finish == "atomic" else set())
            # Nothing comes back from an addition, and none goes beyond the device.
            assert not any(" sc" in i for i in kernel.instructions if "atomic" in i)


# --- wrong kernels are caught ---------------------------------------------------------------------

# (configuration, finish): {name: (what is replaced, by what, how many of the matches: 0 is all)}
CHANGES = {
    ("direct_16x64", "rows"): {
        "a scale byte: row half of the weights": (r"op_sel:\[1,0,0\]", "op_sel:[0,0,0]", 0),
        "the mask of the scales of half a step": (r"0xffff\b", "-1", 0),
        "the barrier before the sums of waves": (r"s_barrier", "s_nop 0", 0),
        "a wait for loads": (r"s_waitcnt vmcnt\(\d+\)", "s_waitcnt vmcnt(40)", 0),
        "padding rows are stored": (r"v_cmp_lt_i64_e32 vcc, -1, ", "v_cmp_le_i64_e32 vcc, -1, ", 0),
    },
    ("staged_64x128", "atomic"): {
        "padding rows are added": (r"v_cmp_lt_i64_e32 vcc, -1, ", "v_cmp_le_i64_e32 vcc, -1, ", 0),
        "no addition": (r"global_atomic_pk_add_bf16 .*", "s_nop 0", 0),
        "bf16 as fp16": (r"global_atomic_pk_add_bf16", "global_atomic_pk_add_f16", 0),
        "the wait for loads to LDS": (r"s_waitcnt vmcnt\(0\)", "s_waitcnt vmcnt(63)", 0),
    },
    ("direct_32x128", "mxfp4"): {
        "a maximum that drops NaN": (r"v_maximum3_f32", "v_max3_f32", 0),
        "a byte select": (r" op_sel:\[0,0,1,0\]", " op_sel:[0,0,1,1]", 1),
        "the scale byte of a NaN group": (r"(v_cndmask_b32_e32 v\d+), -1, ", r"\1, -2, ", 0),
        "a group's place": (r"v_lshrrev_b64 (v\[\d+:\d+\]), 5, ", r"v_lshrrev_b64 \1, 4, ", 0),
    },
}
REDUCE_CHANGES = {
    "a dropped route's row": (r"v_bfrev_b32_e32 (v\d+), 1$", r"v_mov_b32_e32 \1, 0", 0),
    "the weight of a dropped route": (r"(v_cndmask_b32_e64 v\d+), -1\.0, ", r"\1, 1.0, ", 0),
    "a slot's lane": (r"v_readlane_b32 (s\d+), (v\d+), s\d+", r"v_readlane_b32 \1, \2, 0", 1),
    "a wait for a row": (r"s_waitcnt vmcnt\([1-7]\)", "s_waitcnt vmcnt(8)", 0),
    "a sum": (r"v_pk_add_f32", "v_pk_mul_f32", 1),
}


def run_one(name: str, finish: str) -> None:
    tile = CONFIGS[BY_NAME[name]]
    problem = moe.make(
        moe.routing(tile.tile_m + 5, 2, 3), experts=3, block_m=tile.tile_m, inter=544, hidden=96
    )
    problem.a_scales[problem.sorting.reverse_sorted[3], 2] = 255
    nan = np.arange(2 * len(problem.weights)) == 3
    outputs = run(problem, BY_NAME[name], finish=finish, out_dtype="bf16")
    if finish == "mxfp4":
        rows = run(problem, BY_NAME[name], finish="rows", out_dtype="fp32")[0]
        for found, want in zip(outputs, reference.quant(rows), strict=True):
            assert_bytes_equal(found, want, name)
        return
    exact, bound = moe.expected(problem)
    bound = moe.output_bound(exact, bound, "bf16")
    if finish == "atomic":
        exact, bound = moe.expected_sum(problem, "bf16")
        nan = nan.reshape(-1, 2).any(1)
    found = moe.to_float64(outputs[0])
    assert_close(found[~nan], exact[~nan], name, bound=bound[~nan])
    assert np.isnan(found[nan]).all()


def run_reduce_all() -> None:
    for topk, hidden in ((9, 96), (3, 544)):
        rows, values, reverse, weights = reduce_case(4, topk, hidden, "bf16")
        out = run_reduce(rows, reverse, topk, weights=weights)
        want = moe.reduce_expected(values, reverse, topk, weights, None)
        assert_bytes_equal(out, rounded(want, "bf16"), f"reduce, topk {topk}")
    shared = np.full((1, 32), 0x8000, np.uint16)
    out = run_reduce(np.zeros((2, 32), np.uint16), np.full(2, -1, np.int32), 2, shared=shared)
    assert_bytes_equal(out, shared, "-0 and dropped routes")


CASES = [(*key, change) for key, changes in CHANGES.items() for change in changes]


@pytest.mark.parametrize("name, finish", CHANGES)
def test_the_unchanged_kernel_passes(name: str, finish: str) -> None:
    run_one(name, finish)
    run_reduce_all()


@pytest.mark.parametrize("name, finish, change", CASES)
def test_a_wrong_kernel_is_caught(name: str, finish: str, change: str, capsys) -> None:
    stem = moe.stem(finish)
    code = kernels.assembly_of(stem, CONFIGS[BY_NAME[name]].symbol)
    wrong = kernels.changed(*code, CHANGES[name, finish][change])
    how = kernels.assert_caught(stem, wrong, lambda: run_one(name, finish))
    with capsys.disabled():
        print(f"\n{name} {finish}, {change}: {how}")


@pytest.mark.parametrize("change", REDUCE_CHANGES)
def test_a_wrong_reduce_is_caught(change: str, capsys) -> None:
    code = kernels.assembly_of(STEMS[-1], "moe_reduce_kernelILNS0_9RowFormatE0E")
    wrong = kernels.changed(*code, REDUCE_CHANGES[change])
    how = kernels.assert_caught(STEMS[-1], wrong, run_reduce_all)
    with capsys.disabled():
        print(f"\nreduce, {change}: {how}")


def test_every_instruction_was_executed(capsys) -> None:
    """Runs last: each mnemonic in each code object has been executed by a test above."""
    for stem in STEMS:
        line = kernels.assert_all_executed(stem, executed[stem])
        with capsys.disabled():
            print(f"\n{line}")
