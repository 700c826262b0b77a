# SPDX-License-Identifier: MIT
"""Which pipeline ``fused_moe`` runs, and why: ``explain`` answers it for any shape.

Pipelines:
    inline_atomic: sort; gemm1, which quantises x itself; gemm2, which adds into the output.
    inline_reduce: the same, but gemm2 stores a row per route and a weighted reduce adds them.
    staged_atomic: sort; rotate and quantise; gemm1; gemm2, which adds into the output.
    staged_reduce: the same with rows and a reduce.
    staged_fp4_reduce: the same with rows in MXFP4, which is lossy.

Tables. ``tuned/*.csv`` of the package, then the files that ROTQUANT_HIP_TUNED lists (separated as
in PATH), whose rows replace the package's of the same key and add to them otherwise. A table that
holds anything unknown, or a key twice, is refused with its file and line. Columns:
    gfx, tokens, hidden, inter, experts, topk, activation: the key. ``experts`` and ``topk`` are
        those of the call: local experts, shared ones among them. ``activation`` may be ``any``,
        which a row for the activation itself goes before.
    pipeline, block_m
    gemm1, gemm2: configuration names, see ``moe_gemm1_configs()``; empty means chosen by shape.
    source: ``measured``, ``modelled`` or ``rule`` (somebody's judgement).
    us: time of a call in microseconds, or empty.
    note: anything.

Tokens. The row for the count itself, or else for the next count above it that has one, or else for
the largest. The package's rows are for powers of two, so that a count is rounded up to one.

Misses. A shape without any row gets ``rule``: warned about once (logger ``rotquant_hip``), counted
in ``misses()``, and written by ``record()`` or ROTQUANT_HIP_RECORD as rows of such a table. On
a CPU there are no rows, and the rule is not a miss.

A row that cannot run as it stands is changed in one of the ways of ``_fit``, each told in the
plan's ``why`` and logged when it is first used.

The environment and the tables are read at the first call; ``reload()`` reads them again.
"""

from __future__ import annotations

import csv
import fcntl
import logging
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from rotquant_hip._loader import build_info

PIPELINES = (
    "inline_atomic",
    "inline_reduce",
    "staged_atomic",
    "staged_reduce",
    "staged_fp4_reduce",
)
BLOCK_M = (16, 32, 64, 128)
ACTIVATIONS = ("silu", "swiglu", "gelu", "gelu_tanh")
SOURCES = ("measured", "modelled", "rule")
COLUMNS = (
    "gfx",
    "tokens",
    "hidden",
    "inter",
    "experts",
    "topk",
    "activation",
    "pipeline",
    "block_m",
    "gemm1",
    "gemm2",
    "source",
    "us",
    "note",
)

SHIPPED = Path(__file__).with_name("tuned")
TUNED = "ROTQUANT_HIP_TUNED"
RECORD = "ROTQUANT_HIP_RECORD"
FP4_INTERMEDIATE = "ROTQUANT_HIP_FP4_INTERMEDIATE"

_RULE_BUCKETS = tuple(2**i for i in range(16))  # 1 .. 32768 tokens
_log = logging.getLogger("rotquant_hip")


class TableError(ValueError):
    """A table that cannot be used; the message begins with file:line."""


class Shape(NamedTuple):
    """The key of a row, but for the tokens."""

    gfx: str
    hidden: int
    inter: int
    experts: int  # local, shared experts among them
    topk: int  # shared experts among them
    activation: str


class Request(NamedTuple):
    """What a call asks for beyond its shape."""

    deterministic: bool = False
    fp4_intermediate: bool = False
    quantise_first: bool = False  # x is float32, or its rotation a matrix: not inside gemm1
    inter_rotation_size: int = 0


@dataclass(frozen=True)
class Plan:
    """What runs, and why. ``str()`` is for people."""

    pipeline: str
    block_m: int
    gemm1: str  # configuration names; empty: chosen by shape
    gemm2: str
    source: str  # of the row: measured, modelled or rule
    where: str  # file:line of the row, or "rule"
    why: str
    bucket: int  # tokens that the row is for
    us: float | None = None
    gemm1_config: int = -1  # the names as indices
    gemm2_config: int = -1

    def __str__(self) -> str:
        names = [
            f"{gemm} {name or 'chosen by shape'}"
            for gemm, name in (("gemm1", self.gemm1), ("gemm2", self.gemm2))
        ]
        time = "" if self.us is None else f", {self.us:g} us"
        return (
            f"{self.pipeline}, block_m {self.block_m}, {', '.join(names)} "
            f"[{self.source}{time}; {self.where}]: {self.why}"
        )


# --- tables ---------------------------------------------------------------------------------------

Table = dict[Shape, dict[int, Plan]]  # by tokens


@cache
def _configs(gemm: str) -> dict[str, int]:
    names = getattr(torch.ops.rotquant_hip, f"_moe_{gemm}_configs")()
    return {name: index for index, name in enumerate(names)}


def _tile(config: str) -> tuple[str, int, int]:
    """Kind, rows and columns of a configuration: ("direct", 16, 256) of "direct_16x256"."""
    kind, rows, columns = re.match(r"([a-z]+)_(\d+)x(\d+)", config).groups()
    return kind, int(rows), int(columns)


def read_table(path: Path) -> Iterator[tuple[Shape, int, Plan]]:
    """Key, tokens and plan of every row; comments are lines that begin with #.

    Raises:
        TableError: see the module.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise TableError(f"{path}:1: cannot be read: {error}") from None
    # A comment becomes an empty line, so that the reader goes on counting lines.
    reader = csv.reader("\n" if line.startswith("#") else line for line in lines)
    rows = ((reader.line_num, row) for row in reader if row)
    line, header = next(rows, (1, []))
    if tuple(header) != COLUMNS:
        raise TableError(f"{path}:{line}: expected columns {','.join(COLUMNS)}, got {header}")
    for line, row in rows:
        where = f"{path}:{line}"
        try:
            yield _parse(row, where)
        except ValueError as error:
            raise TableError(f"{where}: {error}") from None


def _parse(row: list[str], where: str) -> tuple[Shape, int, Plan]:
    if len(row) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} fields, got {len(row)}")
    field = {name: value.strip() for name, value in zip(COLUMNS, row, strict=True)}

    def size(name: str, unit: int = 1) -> int:
        value = int(field[name]) if re.fullmatch(r"-?\d+", field[name]) else 0
        if value < 1 or value % unit:
            expected = "a positive integer" if unit == 1 else f"a positive multiple of {unit}"
            raise ValueError(f"{name}: expected {expected}, got {field[name]!r}")
        return value

    def one_of(name: str, known: tuple) -> str:
        if field[name] not in map(str, known):
            raise ValueError(f"{name}: expected one of {known}, got {field[name]!r}")
        return field[name]

    if not re.fullmatch(r"gfx[0-9a-f]{3,}", field["gfx"]):
        raise ValueError(f"gfx: expected a name such as gfx950, got {field['gfx']!r}")
    activation = one_of("activation", ("any", *ACTIVATIONS))
    shape = Shape(
        field["gfx"],
        size("hidden", 32),
        size("inter", 32),
        size("experts"),
        size("topk"),
        activation,
    )
    pipeline, block_m = one_of("pipeline", PIPELINES), int(one_of("block_m", BLOCK_M))
    for gemm in ("gemm1", "gemm2"):
        name = field[gemm]
        if not name:
            continue
        if name not in _configs(gemm):
            raise ValueError(f"{gemm}: expected one of {tuple(_configs(gemm))}, got {name!r}")
        kind, rows, _ = _tile(name)
        inline = gemm == "gemm1" and pipeline.startswith("inline")
        if rows != block_m or (kind == "inline") != inline:
            raise ValueError(f"{gemm}: {name!r} is not for {pipeline} with block_m {block_m}")
    us = float(field["us"]) if field["us"] else None
    if us is not None and not us > 0:
        raise ValueError(f"us: expected a positive number or nothing, got {field['us']!r}")
    tokens = size("tokens")
    plan = Plan(
        pipeline,
        block_m,
        field["gemm1"],
        field["gemm2"],
        one_of("source", SOURCES),
        where,
        f"the row for {tokens} tokens" + (f" ({field['note']})" if field["note"] else ""),
        tokens,
        us,
    )
    return shape, tokens, plan


def load_tables(paths: list[Path]) -> Table:
    """The rows of some files as one table, in which a key may be only once."""
    table: Table = {}
    for path in paths:
        for shape, tokens, plan in read_table(path):
            rows = table.setdefault(shape, {})
            if tokens in rows:
                raise TableError(f"{plan.where}: the key of {rows[tokens].where} again")
            rows[tokens] = plan
    return table


# --- the choice -----------------------------------------------------------------------------------


def rule(tokens: int, experts: int, topk: int) -> tuple[str, int, str]:
    """Pipeline, block_m and reason for a shape without rows, by routes per expert.

    The steps lie between those of the selection that aiter publishes for Kimi-K2.5 (385 experts,
    top 9), read as routes per expert: 3 at its last 16-row block, 6 to 48 for blocks of 32, 96 for
    128, 191 and more with an MXFP4 intermediate, which here is only used where asked for.

    Args:
        tokens: M.
        experts: of all ranks, shared ones too.
        topk: shared experts among them.
    """
    routes = tokens * topk / experts
    why = f"{routes:.3g} routes per expert"
    if routes <= 4:
        return "inline_atomic", 16, f"{why}: a block of 16 rows holds them, x quantised inside"
    if routes <= 64:
        return "staged_atomic", 32, f"{why}: blocks of 32 rows, x quantised once"
    if routes <= 128:
        return "staged_reduce", 128, f"{why}: blocks of 128 rows, a row for each route"
    return "staged_fp4_reduce", 128, f"{why}: blocks of 128 rows, a row in MXFP4 for each route"


def _fit(plan: Plan, gfx: str, request: Request) -> Plan:
    """The plan with what the request rules out replaced, and `why` saying so."""
    stage, finish = plan.pipeline.split("_", 1)
    reasons = []
    if gfx == "cpu" and (stage == "inline" or finish == "atomic"):
        # There are no launches to save, and rows are rounded once where atomics round every sum.
        stage, finish = "staged", finish.replace("atomic", "reduce")
        reasons.append("staged, with a row for each route, as on every CPU")
    if stage == "inline" and request.quantise_first:
        stage = "staged"
        reasons.append("staged, not inline, as x is float32 or its rotation a matrix")
    if finish == "atomic" and request.deterministic:
        finish = "reduce"
        reasons.append("reduce, not atomic, as deterministic=True")
    if finish == "fp4_reduce" and not request.fp4_intermediate:
        finish = "reduce"
        reasons.append("rows in the output's dtype, as fp4_intermediate was not asked for")
    gemm1 = plan.gemm1
    if gemm1:
        kind, _, columns = _tile(gemm1)
        if (kind == "inline") != (stage == "inline"):
            gemm1 = ""
        elif columns // 2 < request.inter_rotation_size:
            gemm1 = ""
            reasons.append(
                f"gemm1 chosen by shape, as {plan.gemm1} is too narrow for an intermediate "
                f"rotation of {request.inter_rotation_size}"
            )
    return replace(
        plan,
        pipeline=f"{stage}_{finish}",
        gemm1=gemm1,
        why="; ".join((plan.why, *reasons)),
        gemm1_config=_configs("gemm1")[gemm1] if gemm1 else -1,
        gemm2_config=_configs("gemm2")[plan.gemm2] if plan.gemm2 else -1,
    )


class Miss(NamedTuple):
    """A shape without rows, and the tokens that the rule was asked for."""

    gfx: str
    tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    activation: str


class _Choice:
    """The plans of one shape and request, by tokens; each made when it is first used."""

    def __init__(self, shape: Shape, routed: int, request: Request) -> None:
        rows: dict[int, Plan] = {}
        for table in _state().tables:
            for activation in ("any", shape.activation):
                rows |= table.get(shape._replace(activation=activation), {})
        self.shape, self.routed, self.request = shape, routed, request
        self.rows = rows
        self.buckets = tuple(sorted(rows)) or _RULE_BUCKETS
        self.is_miss = not rows and shape.gfx.startswith("gfx")
        self.plans: dict[int, Plan] = {}
        self.misses: dict[int, Miss] = {}

    def bucket(self, tokens: int) -> int:
        return self.buckets[min(bisect_left(self.buckets, tokens), len(self.buckets) - 1)]

    def base(self, bucket: int) -> Plan:
        if self.rows:
            return self.rows[bucket]
        pipeline, block_m, why = rule(bucket, self.routed, self.shape.topk)
        return Plan(pipeline, block_m, "", "", "rule", "rule", why, bucket)

    def plan(self, bucket: int) -> Plan:
        return _fit(self.base(bucket), self.shape.gfx, self.request)

    def count_miss(self, bucket: int) -> None:
        miss = self.misses.get(bucket)
        if miss is None:
            gfx, *rest = self.shape
            miss = self.misses[bucket] = Miss(gfx, bucket, *rest)
        _misses[miss] += 1
        for recording in _recordings:
            recording._add(miss, self.base(bucket))


def choose(
    gfx: str,
    tokens: int,
    hidden: int,
    inter: int,
    experts: int,
    topk: int,
    activation: str,
    routed: int,
    request: tuple,
) -> Plan:
    """The plan of a call, for ``fused_moe``; misses are counted. ``routed``: experts of all ranks.

    A dictionary look-up and a search among the buckets; no strings are made after the first call.
    """
    key = (gfx, hidden, inter, experts, topk, activation, routed, request)
    choice = _choices.get(key)
    if choice is None:
        shape = Shape(gfx, hidden, inter, experts, topk, activation)
        choice = _choices[key] = _Choice(shape, routed, Request(*request))
        if choice.is_miss and shape not in _warned:
            _warned.add(shape)
            _log.warning(
                "fused_moe: no tuned row for %s: the rule of rotquant_hip.dispatch is used; "
                "dispatch.record or %s=<file.csv> writes the missing rows",
                ", ".join(f"{name}={value}" for name, value in shape._asdict().items()),
                RECORD,
            )
    bucket = choice.bucket(tokens)
    plan = choice.plans.get(bucket)
    if plan is None:
        plan = choice.plans[bucket] = choice.plan(bucket)
        base = choice.base(bucket)
        if plan.why != base.why:
            _log.info("fused_moe: %s -> %s for %s", base.pipeline, plan, choice.shape)
    if choice.is_miss:
        choice.count_miss(bucket)
    return plan


def explain(
    *,
    tokens: int,
    hidden: int,
    inter: int,
    experts: int,
    topk: int,
    activation: str = "silu",
    gfx: str = "gfx950",
    all_experts: int | None = None,
    deterministic: bool = False,
    fp4_intermediate: bool | None = None,
    quantise_first: bool = False,
    inter_rotation_size: int = 0,
) -> Plan:
    """What ``fused_moe`` would run, without running it or counting a miss.

    Args:
        tokens: M.
        hidden: H.
        inter: I.
        experts: in w1, shared ones too.
        topk: routes of a token, shared experts too.
        activation: one of ``ACTIVATIONS``.
        gfx: architecture, as ``gfx_of(x.device)`` says; "cpu" for the CPU.
        all_experts: of all ranks with expert parallelism; ``experts`` by default.
        deterministic: as in ``fused_moe``.
        fp4_intermediate: as in ``fused_moe``; by default what the environment says.
        quantise_first: x is float32 or is rotated by a matrix.
        inter_rotation_size: of the intermediate.
    """
    fp4 = fp4_by_default() if fp4_intermediate is None else fp4_intermediate
    choice = _Choice(
        Shape(gfx, hidden, inter, experts, topk, activation),
        all_experts or experts,
        Request(deterministic, fp4, quantise_first, inter_rotation_size),
    )
    return choice.plan(choice.bucket(tokens))


def misses() -> dict[Miss, int]:
    """How often the rule was asked, by shape and tokens (rounded up to a power of two)."""
    return dict(_misses)


# --- devices --------------------------------------------------------------------------------------

# The build against the emulator runs gfx950 code for CPU tensors.
_CPU = "gfx950" if build_info().get("emulated") else "cpu"
_gfx_names: dict[torch.device, str] = {}


def gfx_of(device: torch.device) -> str:
    """Architecture of a tensor's device, without target features; "cpu" for the CPU."""
    if device.type == "cpu":
        return _CPU
    name = _gfx_names.get(device)
    if name is None:
        properties = torch.cuda.get_device_properties(device)
        name = getattr(properties, "gcnArchName", properties.name).partition(":")[0]
        _gfx_names[device] = name
    return name


# --- recording ------------------------------------------------------------------------------------


class Recording:
    """Writes misses until ``close()``; also a context manager. See ``record``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._seen: set[Miss] = set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._append(None, None)
        _recordings.append(self)

    def close(self) -> None:
        """Stop; what was written stays."""
        if self in _recordings:
            _recordings.remove(self)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, miss: Miss, plan: Plan) -> None:
        if miss not in self._seen:
            self._seen.add(miss)
            self._append(miss, plan)

    def _append(self, miss: Miss | None, plan: Plan | None) -> None:
        # Ranks may share a file: whoever holds the lock looks for the row before adding it.
        with self.path.open("a+", encoding="utf-8", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            present = {tuple(row[:7]) for row in csv.reader(file)}
            writer = csv.writer(file, lineterminator="\n")
            if not present:
                writer.writerow(COLUMNS)
            if miss is not None and tuple(map(str, miss)) not in present:
                row = (*miss, plan.pipeline, plan.block_m, "", "", "rule", "", plan.why)
                writer.writerow(row)


def record(path: str | os.PathLike[str]) -> Recording:
    """Write every miss from now on to a CSV file, once each, as rows that ROTQUANT_HIP_TUNED takes.

    They hold what the rule chose, ready to be tuned. A file that exists is added to, also by
    several processes at once.
    """
    return Recording(path)


# --- state ----------------------------------------------------------------------------------------


class _State:
    def __init__(self) -> None:
        user = [Path(part) for part in os.environ.get(TUNED, "").split(os.pathsep) if part]
        self.tables = [load_tables(sorted(SHIPPED.glob("*.csv"))), load_tables(user)]
        value = os.environ.get(FP4_INTERMEDIATE, "0")
        if value not in ("", "0", "1"):
            raise ValueError(f"{FP4_INTERMEDIATE}: expected 0 or 1, got {value!r}")
        self.fp4_intermediate = value == "1"
        path = os.environ.get(RECORD)
        self.recording = Recording(path) if path else None


@cache
def _state() -> _State:
    return _State()


_choices: dict[tuple, _Choice] = {}
_warned: set[Shape] = set()
_misses: Counter[Miss] = Counter()
_recordings: list[Recording] = []


def fp4_by_default() -> bool:
    """Whether ROTQUANT_HIP_FP4_INTERMEDIATE=1 allows an MXFP4 intermediate in every call."""
    return _state().fp4_intermediate


def reload() -> None:
    """Read tables and environment again at the next call; forget misses and warnings."""
    if _state.cache_info().currsize and _state().recording:
        _state().recording.close()
    _state.cache_clear()
    _choices.clear()
    _warned.clear()
    _misses.clear()
