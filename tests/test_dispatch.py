# SPDX-License-Identifier: MIT
"""Which pipeline runs: tables, the rule, what a request changes, misses and their recording."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

import rotquant_hip as rq
from rotquant_hip import dispatch

HEADER = ",".join(dispatch.COLUMNS)
KIMI = {"hidden": 7168, "inter": 512, "experts": 385, "topk": 9}
OTHER = {"hidden": 256, "inter": 96, "experts": 16, "topk": 4}
NO_REQUEST = (False, False, False, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in (dispatch.TUNED, dispatch.RECORD, dispatch.FP4_INTERMEDIATE):
        monkeypatch.delenv(name, raising=False)
    dispatch.reload()
    yield
    monkeypatch.undo()
    dispatch.reload()


def row(**changes: object) -> str:
    fields = dict.fromkeys(dispatch.COLUMNS, "") | {"gfx": "gfx950", "tokens": 64, **OTHER}
    fields |= {"activation": "any", "pipeline": "staged_atomic", "block_m": 32, "source": "rule"}
    return ",".join(str(value) for value in (fields | changes).values())


@pytest.fixture
def table(tmp_path):
    def write(*rows: str, name: str = "mine.csv", header: str = HEADER) -> Path:
        path = tmp_path / name
        path.write_text("\n".join((header, *rows)) + "\n")
        return path

    return write


@pytest.fixture
def tuned(table, monkeypatch):
    def use(*rows: str) -> Path:
        path = table(*rows)
        monkeypatch.setenv(dispatch.TUNED, str(path))
        dispatch.reload()
        return path

    return use


def choose(tokens: int, request=NO_REQUEST, gfx: str = "gfx950", **shape: object) -> dispatch.Plan:
    sizes = OTHER | {"activation": "silu"} | shape
    return dispatch.choose(gfx, tokens, *sizes.values(), sizes["experts"], request)


# --- the shipped table and the rule ---------------------------------------------------------------


def published(tokens: int) -> tuple[str, int]:
    """What aiter publishes for Kimi-K2.5, in our names; without an MXFP4 intermediate."""
    if tokens <= 128:
        return "inline_atomic", 16
    return ("staged_atomic", 32) if tokens <= 2048 else ("staged_reduce", 128)


@pytest.mark.parametrize("tokens", [2**i for i in range(16)])
def test_kimi(tokens):
    plan = dispatch.explain(tokens=tokens, **KIMI)
    assert (plan.pipeline, plan.block_m) == published(tokens)
    assert plan.source == "rule" and "kimi" in plan.where and plan.bucket == tokens
    allowed = dispatch.explain(tokens=tokens, **KIMI, fp4_intermediate=True)
    fp4 = "staged_fp4_reduce" if tokens >= 8192 else plan.pipeline
    assert allowed.pipeline == fp4
    # The rule is a reading of the same selection.
    ruled = dispatch.rule(tokens, KIMI["experts"], KIMI["topk"])[:2]
    assert ruled == (allowed.pipeline, allowed.block_m)


def test_every_row_that_is_shipped_can_be_told_about():
    tables = dispatch.load_tables(sorted(dispatch.SHIPPED.glob("*.csv")))
    assert tables
    for shape, rows in tables.items():
        for tokens, plan in rows.items():
            assert (plan.pipeline, plan.source) and plan.bucket == tokens
            assert shape.gfx == "gfx950"


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 1), (1, 1), (3, 4), (129, 256), (10**6, 32768)])
def test_tokens_go_to_the_next_bucket_up_or_the_largest(tokens, bucket):
    for shape in (KIMI, OTHER):
        assert dispatch.explain(tokens=tokens, **shape).bucket == bucket


def test_the_rule_counts_the_routes_of_all_ranks():
    one_rank = dispatch.explain(tokens=64, **OTHER)
    of_eight = dispatch.explain(tokens=64, **OTHER, all_experts=8 * OTHER["experts"])
    assert one_rank.pipeline == "staged_atomic" and of_eight.pipeline == "inline_atomic"
    assert "2 routes per expert" in of_eight.why


# --- what a request changes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "request_", "pipeline", "reason"),
    [
        (1, {"deterministic": True}, "inline_reduce", "deterministic=True"),
        (1024, {"deterministic": True}, "staged_reduce", "deterministic=True"),
        (1, {"quantise_first": True}, "staged_atomic", "float32 or its rotation a matrix"),
        (8192, {}, "staged_reduce", "was not asked for"),
        (8192, {"fp4_intermediate": True, "deterministic": True}, "staged_fp4_reduce", ""),
        (1, {"fp4_intermediate": True}, "inline_atomic", ""),
        (1, {"gfx": "cpu"}, "staged_reduce", "as on every CPU"),
    ],
)
def test_a_row_that_does_not_apply_is_changed_and_says_so(tokens, request_, pipeline, reason):
    plan = dispatch.explain(tokens=tokens, **KIMI, **request_)
    assert plan.pipeline == pipeline and reason in plan.why and reason in str(plan)


# B12: another class of kernel than the table has, without a line in the log.
def test_b12_a_change_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "rotquant_hip")
    for _ in range(3):
        choose(1, (True, False, True, 0), **KIMI)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "inline_atomic -> staged_reduce" in line and "deterministic" in line


def test_a_named_configuration_too_narrow_for_the_rotation(tuned):
    wide = next(name for name in rq.moe_gemm1_configs() if name.startswith("direct_32x256"))
    narrow = next(name for name in rq.moe_gemm1_configs() if name.startswith("direct_32x128"))
    tuned(row(gemm1=narrow), row(gemm1=wide, tokens=128))
    sizes = OTHER | {"inter_rotation_size": 128}
    plan = dispatch.explain(tokens=64, **sizes)
    assert plan.gemm1 == "" and plan.gemm1_config == -1 and f"{narrow} is too narrow" in plan.why
    plan = dispatch.explain(tokens=128, **sizes)
    assert rq.moe_gemm1_configs()[plan.gemm1_config] == plan.gemm1 == wide
    assert dispatch.explain(tokens=64, **OTHER).gemm1 == narrow


# --- tables ---------------------------------------------------------------------------------------


def test_every_configuration_has_a_name_that_a_table_can_check():
    for configs in (rq.moe_gemm1_configs(), rq.moe_gemm2_configs()):
        for name in configs:
            kind, rows, columns = dispatch._tile(name)
            assert kind in ("inline", "direct", "staged") and rows in dispatch.BLOCK_M and columns


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gfx": "cpu"}, "gfx: expected a name such as gfx950, got 'cpu'"),
        ({"tokens": -64}, "tokens: expected a positive integer, got '-64'"),
        ({"tokens": "many"}, "tokens: expected a positive integer, got 'many'"),
        ({"hidden": 0}, "hidden: expected a positive multiple of 32, got '0'"),
        ({"inter": 100}, "inter: expected a positive multiple of 32, got '100'"),
        ({"activation": "relu"}, "activation: expected one of"),
        ({"pipeline": "staged"}, "pipeline: expected one of"),
        ({"block_m": 48}, "block_m: expected one of"),
        ({"gemm1": "direct_8x8"}, "gemm1: expected one of"),
        ({"gemm2": "direct_16x256"}, "gemm2: 'direct_16x256' is not for staged_atomic"),
        ({"gemm1": "inline_16x256", "block_m": 16}, "gemm1: 'inline_16x256' is not for"),
        ({"source": "guess"}, "source: expected one of"),
        ({"us": "-1"}, "us: expected a positive number"),
        ({"note": "a,b"}, "expected 14 fields, got 15"),
    ],
)
def test_an_unusable_row_is_refused_with_its_place(table, changes, message):
    path = table("# a comment", "", row(**changes))
    with pytest.raises(dispatch.TableError) as error:
        dispatch.load_tables([path])
    assert str(error.value).startswith(f"{path}:4: ") and message in str(error.value)


def test_an_unusable_file_is_refused(table, tmp_path):
    with pytest.raises(dispatch.TableError, match=":1: expected columns gfx,tokens"):
        dispatch.load_tables([table(row(), header=HEADER.replace("gemm1", "kernel1"))])
    with pytest.raises(dispatch.TableError, match="none.csv:1: cannot be read"):
        dispatch.load_tables([tmp_path / "none.csv"])


def test_a_key_twice_is_refused(table):
    one, two = table(row(), name="1.csv"), table(row(block_m=16), name="2.csv")
    for paths in ([one, two], [table(row(), row())]):
        with pytest.raises(dispatch.TableError, match=r"the key of .*csv:2 again"):
            dispatch.load_tables(paths)


# B52: a variable that replaces the shipped table instead of adding to it.
def test_b52_own_tables_extend_the_shipped_one(tuned, table, monkeypatch):
    mine = tuned(
        row(**KIMI, tokens=16, pipeline="staged_reduce", block_m=64, source="measured", us=12.5),
        row(tokens=48, activation="silu", block_m=16),
    )
    more = table(row(tokens=96, activation="silu", block_m=64), row(tokens=96), name="more.csv")
    monkeypatch.setenv(dispatch.TUNED, os.pathsep.join((str(mine), str(more))))
    dispatch.reload()
    plan = dispatch.explain(tokens=16, **KIMI)
    assert (plan.pipeline, plan.block_m, plan.where) == ("staged_reduce", 64, f"{mine}:2")
    assert "measured, 12.5 us" in str(plan)
    assert dispatch.explain(tokens=32, **KIMI).pipeline == "inline_atomic"  # the shipped row
    # A row for any activation and one for silu are one table; gelu has the first only.
    buckets = {t: dispatch.explain(tokens=t, **OTHER).bucket for t in (1, 48, 49, 96, 500)}
    assert buckets == {1: 48, 48: 48, 49: 96, 96: 96, 500: 96}
    assert dispatch.explain(tokens=96, **OTHER).block_m == 64
    gelu = dispatch.explain(tokens=1, **OTHER, activation="gelu")
    assert (gelu.bucket, gelu.block_m) == (96, 32)


# --- misses ---------------------------------------------------------------------------------------


# B52: a miss that nobody sees.
def test_b52_a_miss_is_warned_about_once_and_counted(caplog):
    for tokens in (3, 4, 4, 100):
        choose(tokens)
    choose(4, (True, False, False, 0))
    choose(4, topk=2)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2 and "inter=96" in warnings[0] and dispatch.RECORD in warnings[0]
    counts = {(miss.tokens, miss.topk): n for miss, n in dispatch.misses().items()}
    assert counts == {(4, 4): 4, (128, 4): 1, (4, 2): 1}


def test_no_miss(caplog):
    choose(4, **KIMI)
    choose(4, gfx="cpu")
    dispatch.explain(tokens=4, **OTHER)
    assert not dispatch.misses() and not caplog.records


# B52: nothing that writes the missing row.
def test_b52_recorded_rows_are_a_table(tmp_path, monkeypatch, caplog):
    path = tmp_path / "new" / "misses.csv"
    choose(4)  # before: in the next row all the same
    with dispatch.record(path):
        for tokens in (4, 4, 1000):
            choose(tokens)
    choose(4, topk=2)  # after
    with dispatch.record(path):
        choose(4)  # is there already
    lines = path.read_text().splitlines()
    assert lines[0] == HEADER and len(lines) == 3
    before = choose(1000)
    monkeypatch.setenv(dispatch.TUNED, str(path))
    dispatch.reload()
    caplog.clear()
    after = choose(1000)
    assert (after.pipeline, after.block_m) == (before.pipeline, before.block_m)
    assert after.where == f"{path}:3" and not dispatch.misses() and not caplog.records


def test_recording_by_environment(tmp_path, monkeypatch):
    path = tmp_path / "misses.csv"
    monkeypatch.setenv(dispatch.RECORD, str(path))
    dispatch.reload()
    choose(4)
    assert len(path.read_text().splitlines()) == 2


def test_fp4_by_environment(monkeypatch):
    assert not dispatch.fp4_by_default()
    monkeypatch.setenv(dispatch.FP4_INTERMEDIATE, "1")
    dispatch.reload()
    assert dispatch.explain(tokens=8192, **KIMI).pipeline == "staged_fp4_reduce"
    monkeypatch.setenv(dispatch.FP4_INTERMEDIATE, "yes")
    dispatch.reload()
    with pytest.raises(ValueError, match="expected 0 or 1, got 'yes'"):
        dispatch.fp4_by_default()


# --- devices --------------------------------------------------------------------------------------


def test_architecture_of_a_device(monkeypatch):
    emulated = rq.BUILD_INFO.get("emulated")
    assert dispatch.gfx_of(torch.device("cpu")) == ("gfx950" if emulated else "cpu")

    class Properties:
        name = "AMD Instinct MI355X"
        gcnArchName = "gfx950:sramecc+:xnack-"

    asked = []
    monkeypatch.setattr(dispatch, "_gfx_names", {})
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: asked.append(d) or Properties()
    )
    second = torch.device("cuda", 1)
    assert dispatch.gfx_of(second) == dispatch.gfx_of(second) == "gfx950"
    assert asked == [second]  # B44: of the tensor's device, not the current one; and cached
