# SPDX-License-Identifier: MIT
"""Which pipeline ``fused_moe`` runs, and why: ``explain`` answers it for any shape.

Pipelines:
    inline_atomic: sort; gemm1, which quantises x itself; gemm2, which adds into the output.
    inline_reduce: the same, but gemm2 stores a row per route and a weighted reduce adds them.
    staged_atomic: sort; rotate and quantise; gemm1; gemm2, which adds into the output.
    staged_reduce: the same with rows and a reduce.
    staged_fp4_reduce: the same with rows in MXFP4, which is lossy.

Tables. ``tuned/*.csv`` of the package, then the files that ROTQUANT_HIP_TUNED lists (separated as
in PATH), whose rows replace the package's of the same key and add to them otherwise. UTF-8, a
row on every line but blank ones and comments, which begin with #; spaces around a field are no part
of it. A table that holds anything unknown, or a key twice, is refused with its file and line, by
every call until it is put right. Columns:
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
in ``misses()``, and written by ``record()`` or ROTQUANT_HIP_RECORD as rows of such a table. A
call goes on when a row cannot be written: that is warned about once, and nothing more is recorded
there. On a CPU there are no rows, and the rule is not a miss.

A row that cannot run as it stands is changed in one of the ways of ``_fit``, each told in the
plan's ``why`` and logged when it is first used.

The environment and the tables are read at the first call; ``reload()`` reads them again.
"""

from __future__ import annotations

import csv
import errno
import fcntl
import io
import logging
import math
import operator
import os
import re
import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
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

_GFX = re.compile(r"gfx[0-9a-f]{3,}")
_MAX_TOPK = 16  # kMoeMaxTopk of csrc/core/moe.h
_INTER_ROTATION_SIZES = (0, 16, 32, 64, 128)
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


def _shown(value: object) -> str:
    """repr() of what somebody wrote, short enough for a sentence."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _lines(content: bytes, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of every line that is neither blank nor a comment."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before, byte = error.object[: error.start], error.object[error.start]
        line = len(re.split(rb"\r\n|\r|\n", before))
        raise TableError(f"{path}:{line}: expected UTF-8, got the byte 0x{byte:02x}") from None
    # NOTE: not splitlines(), which also ends a line at U+2028 and others that a note may hold.
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if "\0" in line:
            raise TableError(f"{path}:{number}: expected text, got a NUL byte")
        # A line at a time, so that a quote left open cannot swallow the rows below it.
        reader = csv.reader([line.rstrip("\n")], skipinitialspace=True, strict=True)
        try:
            fields = next(reader)
        except csv.Error as error:
            unclosed = str(error) == "unexpected end of data"
            reason = "a quote is left open" if unclosed else error
            raise TableError(f"{path}:{number}: expected a line of CSV: {reason}") from None
        yield number, [field.strip() for field in fields]


def _parse_table(
    lines: Iterable[tuple[int, list[str]]], path: Path
) -> Iterator[tuple[Shape, int, Plan]]:
    lines = iter(lines)
    number, header = next(lines, (1, []))
    if tuple(header) != COLUMNS:
        got = _shown(",".join(header)) if header else "no line"
        raise TableError(f"{path}:{number}: expected columns {','.join(COLUMNS)}, got {got}")
    for number, fields in lines:
        where = f"{path}:{number}"
        try:
            yield _parse(fields, where)
        except ValueError as error:
            raise TableError(f"{where}: {error}") from None


def _read(path: Path) -> bytes:
    try:
        # A folder, a pipe or a device would fail in other ways, wait or never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise TableError(f"{path}:1: cannot be read: not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise TableError(f"{path}:1: cannot be read: {error.strerror}") from None


def read_table(path: Path) -> Iterator[tuple[Shape, int, Plan]]:
    """Key, tokens and plan of every row; comments are lines that begin with #.

    Raises:
        TableError: see the module.
    """
    yield from _parse_table(_lines(_read(path), path), path)


def _parse(row: list[str], where: str) -> tuple[Shape, int, Plan]:
    if len(row) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} fields, got {len(row)}")
    field = dict(zip(COLUMNS, row, strict=True))

    def size(name: str, unit: int = 1) -> int:
        value = int(field[name]) if re.fullmatch(r"[0-9]{1,18}", field[name]) else 0
        if value < 1 or value % unit:
            expected = "a positive integer" if unit == 1 else f"a positive multiple of {unit}"
            raise ValueError(f"{name}: expected {expected}, got {_shown(field[name])}")
        return value

    def one_of(name: str, known: tuple) -> str:
        if field[name] not in map(str, known):
            raise ValueError(f"{name}: expected one of {known}, got {_shown(field[name])}")
        return field[name]

    if not _GFX.fullmatch(field["gfx"]):
        raise ValueError(f"gfx: expected a name such as gfx950, got {_shown(field['gfx'])}")
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
            known = tuple(_configs(gemm))
            raise ValueError(f"{gemm}: expected one of {known}, got {_shown(name)}")
        kind, rows, _ = _tile(name)
        inline = gemm == "gemm1" and pipeline.startswith("inline")
        if rows != block_m or (kind == "inline") != inline:
            raise ValueError(f"{gemm}: {name!r} is not for {pipeline} with block_m {block_m}")
    us = _positive(field["us"]) if field["us"] else None
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


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"us: expected a positive number or nothing, got {_shown(text)}")
    return value


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


def _checked_size(name: str, value: int, least: int = 1, unit: int = 1) -> None:
    expected = f"an integer of at least {least}" if unit == 1 else f"a positive multiple of {unit}"
    try:
        fits = operator.index(value) >= least and operator.index(value) % unit == 0
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: expected {expected}, got {_shown(value)}")


def _checked_shape(shape: Shape) -> None:
    """ValueError for sizes and activations that no call runs with, and no row can name."""
    _checked_size("hidden", shape.hidden, unit=32)
    _checked_size("inter", shape.inter, unit=32)
    _checked_size("experts", shape.experts)
    _checked_size("topk", shape.topk)
    if shape.topk > _MAX_TOPK:
        raise ValueError(f"topk: expected 1 to {_MAX_TOPK}, got {shape.topk}")
    if shape.activation not in ACTIVATIONS:
        raise ValueError(
            f"activation: expected one of {ACTIVATIONS}, got {_shown(shape.activation)}"
        )


def rule(tokens: int, experts: int, topk: int) -> tuple[str, int, str]:
    """Pipeline, block_m and reason for a shape without rows, by routes per expert.

    The steps lie between those of the selection that aiter publishes for Kimi-K2.5 (385 experts,
    top 9), read as routes per expert: 3 at its last 16-row block, 6 to 48 for blocks of 32, 96 for
    128, 191 and more with an MXFP4 intermediate, which here is only used where asked for.

    Args:
        tokens: M.
        experts: of all ranks, shared ones too.
        topk: shared experts among them.

    Raises:
        ValueError: a size that no call has.
    """
    _checked_size("tokens", tokens, least=0)
    _checked_size("experts", experts)
    _checked_size("topk", topk)
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
        self.is_miss = not rows and _GFX.fullmatch(shape.gfx) is not None
        self.plans: dict[int, Plan] = {}
        self.misses: dict[int, Missed] = {}

    def bucket(self, tokens: int) -> int:
        return self.buckets[min(bisect_left(self.buckets, tokens), len(self.buckets) - 1)]

    def base(self, bucket: int) -> Plan:
        if self.rows:
            return self.rows[bucket]
        pipeline, block_m, why = rule(bucket, self.routed, self.shape.topk)
        return Plan(pipeline, block_m, "", "", "rule", "rule", why, bucket)

    def plan(self, bucket: int) -> Plan:
        return _fit(self.base(bucket), self.shape.gfx, self.request)

    def miss(self, bucket: int) -> Missed:
        missed = self.misses.get(bucket)
        if missed is None:
            gfx, *rest = self.shape
            missed = self.misses[bucket] = Missed(Miss(gfx, bucket, *rest), self.base(bucket))
        return missed


class Missed(NamedTuple):
    """A miss, and what the rule says in place of a row."""

    miss: Miss
    plan: Plan


# For a call that cannot run: what is wrong with it is for the op to say.
_REFUSED = Plan("staged_reduce", 32, "", "", "rule", "rule", "the call is refused", 1)


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
) -> tuple[Plan, Missed | None]:
    """The plan of a call, for ``fused_moe``, and what to ``count`` once it has run.

    ``routed``: experts of all ranks. Sizes and activations that the op refuses get some plan.
    A dictionary look-up and a search among the buckets; no strings are made after the first call.
    """
    key = (gfx, hidden, inter, experts, topk, activation, routed, request)
    choice = _choices.get(key)
    if choice is None:
        shape = Shape(gfx, hidden, inter, experts, topk, activation)
        try:
            _checked_shape(shape)
            _checked_size("routed", routed)
        except ValueError:
            return _REFUSED, None
        choice = _choices[key] = _Choice(shape, routed, Request(*request))
    bucket = choice.bucket(tokens)
    plan = choice.plans.get(bucket)
    if plan is None:
        plan = choice.plans[bucket] = choice.plan(bucket)
        base = choice.base(bucket)
        if plan.why != base.why:
            _log.info("fused_moe: %s -> %s for %s", base.pipeline, plan, choice.shape)
    return plan, choice.miss(bucket) if choice.is_miss else None


def count(missed: Missed) -> None:
    """A call has run without a row: said once for each shape, counted, and recorded."""
    gfx, _, *rest = missed.miss
    shape = Shape(gfx, *rest)
    if shape not in _warned:
        _warned.add(shape)
        _log.warning(
            "fused_moe: no tuned row for %s: the rule of rotquant_hip.dispatch is used; "
            "dispatch.record or %s=<file.csv> writes the missing rows",
            ", ".join(f"{name}={value}" for name, value in shape._asdict().items()),
            RECORD,
        )
    _misses[missed.miss] += 1
    for recording in tuple(_recordings):
        recording._add(*missed)


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
        hidden: H, a multiple of 32.
        inter: I, a multiple of 32.
        experts: in w1, shared ones too.
        topk: routes of a token, shared experts too; at most 16.
        activation: one of ``ACTIVATIONS``.
        gfx: architecture, as ``gfx_of(x.device)`` says; "cpu" for the CPU.
        all_experts: of all ranks with expert parallelism; ``experts`` by default.
        deterministic: as in ``fused_moe``.
        fp4_intermediate: as in ``fused_moe``; by default what the environment says.
        quantise_first: x is float32 or is rotated by a matrix.
        inter_rotation_size: of the intermediate; 0 is none.

    Raises:
        ValueError: an argument that no call has; names it.
        TableError: a table of ROTQUANT_HIP_TUNED that cannot be used.
    """
    shape = Shape(gfx, hidden, inter, experts, topk, activation)
    _checked_size("tokens", tokens, least=0)
    _checked_shape(shape)
    if gfx != "cpu" and not (isinstance(gfx, str) and _GFX.fullmatch(gfx)):
        raise ValueError(f"gfx: expected 'cpu' or a name such as gfx950, got {_shown(gfx)}")
    if all_experts is None:
        all_experts = experts
    _checked_size("all_experts", all_experts, least=experts)
    if inter_rotation_size not in _INTER_ROTATION_SIZES:
        raise ValueError(
            f"inter_rotation_size: expected one of {_INTER_ROTATION_SIZES}, "
            f"got {_shown(inter_rotation_size)}"
        )
    fp4 = fp4_by_default() if fp4_intermediate is None else fp4_intermediate
    choice = _Choice(
        shape,
        all_experts,
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
    if device.type != "cuda":
        raise ValueError(f"device: expected a CPU or a GPU, got {device}")
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
        """Inside an op: trouble is told once and ends the recording, not the call."""
        if miss in self._seen:
            return
        self._seen.add(miss)
        try:
            _append(self.path, miss, plan)
        except TableError as error:
            self.close()
            _log.warning("fused_moe: %s; misses are no longer recorded there", error)


def _append(path: Path, miss: Miss | None = None, plan: Plan | None = None) -> None:
    """Adds what a table lacks: the header, and the row of a miss.

    Raises:
        TableError: it cannot be written, or is no table of ours; it is left as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK: of a pipe, it is opening that would wait.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        with open(os.open(path, flags, 0o666), "rb+", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise TableError(f"{path}:1: cannot be recorded in: not a regular file")
            # Ranks may share a file: whoever holds the lock looks for the row before adding it.
            fcntl.flock(file, fcntl.LOCK_EX)
            content = file.readall()
            added = _missing(content, path, miss, plan)
            # One write, so that a process that ends meanwhile leaves no half of a row.
            if added and file.write(added) != len(added):
                file.truncate(len(content))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise TableError(f"{path}:1: cannot be recorded in: {error.strerror}") from None


def _missing(content: bytes, path: Path, miss: Miss | None, plan: Plan | None) -> bytes:
    """What has to follow the content of a table so that it has a header and the miss's row."""
    lines = list(_lines(content, path))
    present = set()
    added = io.StringIO()
    writer = csv.writer(added, lineterminator="\n")
    if lines:
        for shape, tokens, _ in _parse_table(lines, path):
            gfx, *rest = shape
            present.add(Miss(gfx, tokens, *rest))
    else:
        writer.writerow(COLUMNS)
    if miss is not None and miss not in present:
        writer.writerow((*miss, plan.pipeline, plan.block_m, "", "", "rule", "", plan.why))
    text = added.getvalue().encode()
    needs_newline = text and content and not content.endswith((b"\n", b"\r"))
    return b"\n" + text if needs_newline else text


def record(path: str | os.PathLike[str]) -> Recording:
    """Write every miss from now on to a CSV file, once each, as rows that ROTQUANT_HIP_TUNED takes.

    They hold what the rule chose, ready to be tuned. A table that exists is added to, also by
    several processes at once; a last line without its newline gets one.

    Raises:
        TypeError: not a path.
        TableError: the file cannot be written, or holds anything that is not such a table; it is
            left as it was. Trouble of this kind later on is warned about once, and ends the
            recording.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected a str or os.PathLike, got {type(path).__name__}")
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise TableError(f"path: expected the name of a file, got {_shown(os.fspath(path))}")
    _append(Path(path))
    return Recording(path)


# --- state ----------------------------------------------------------------------------------------


class _State:
    def __init__(self) -> None:
        user = [Path(part) for part in os.environ.get(TUNED, "").split(os.pathsep) if part]
        self.tables = [load_tables(sorted(SHIPPED.glob("*.csv"))), load_tables(user)]
        value = os.environ.get(FP4_INTERMEDIATE, "0")
        if value not in ("", "0", "1"):
            raise ValueError(f"{FP4_INTERMEDIATE}: expected 0 or 1, got {_shown(value)}")
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
    """Whether ROTQUANT_HIP_FP4_INTERMEDIATE=1 allows an MXFP4 intermediate in every call.

    Raises:
        ValueError: it is neither 0 nor 1, nor empty.
        TableError: a table of ROTQUANT_HIP_TUNED cannot be used.
    """
    return _state().fp4_intermediate


def reload() -> None:
    """Read tables and environment again at the next call; forget misses and warnings."""
    if _state.cache_info().currsize and _state().recording:
        _state().recording.close()
    _state.cache_clear()
    _choices.clear()
    _warned.clear()
    _misses.clear()
