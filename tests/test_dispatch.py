# SPDX-License-Identifier: MIT
"""Which pipeline runs: tables, the rule, what a request changes, misses and their recording."""

from __future__ import annotations

import codecs
import logging
import multiprocessing
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

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
    plan, missed = dispatch.choose(gfx, tokens, *sizes.values(), sizes["experts"], request)
    if missed is not None:
        dispatch.count(missed)
    return plan


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


HEADER_LINE = HEADER.encode() + b"\n"
ROW = row().encode()
NOTED = row(note='"seen, twice"').encode()
SPACED = b'gfx950, 64 ,256,96, "16",4,any,staged_atomic,32,,,rule,,\xe2\x80\xa8 x'


def contents() -> st.SearchStrategy[bytes]:
    """Files that somebody might have: near to a table, and anything."""
    pieces = (
        HEADER_LINE,
        ROW,
        NOTED,
        SPACED,
        b"\n",
        b"\r\n",
        b"\r",
        b"\0",
        b'"',
        b"# x",
        b" ",
        b",",
    )
    damage = (
        *pieces,
        codecs.BOM_UTF8,
        b"\xff",
        b"\xe2\x80\xa8",
        b"\x0b",
        b"\x1c",
        b"nan",
        b"9" * 5000,
    )
    near = st.lists(st.sampled_from(damage) | st.binary(max_size=3)).map(b"".join)
    return near | near.map(lambda tail: HEADER_LINE + ROW + tail) | st.binary(max_size=200)


def refused(error: pytest.ExceptionInfo, path: Path) -> str:
    """The message, which is one sentence with file and line, without these."""
    place, _, message = str(error.value).removeprefix(str(path)).partition(": ")
    assert str(error.value).startswith(str(path)) and place[0] == ":" and int(place[1:]) >= 1
    assert message and len(message) < 500 and message.isprintable()
    return message


@given(contents())
@example(HEADER_LINE + NOTED.replace(b'twice"', b"twice"))
@example("\n".join((HEADER, row())).encode("utf-16"))
def test_any_bytes_are_rows_or_one_sentence(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.csv")
        path.write_bytes(content)
        try:
            dispatch.load_tables([path])
        except dispatch.TableError:
            with pytest.raises(dispatch.TableError) as error:
                dispatch.load_tables([path])
            refused(error, path)


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"", 1, "expected columns"),
        (b"# only\n# comments", 1, "expected columns"),
        (HEADER_LINE + NOTED[:-1] + b"\n" + ROW, 2, "a quote is left open"),
        (HEADER_LINE + ROW + b"\n" + NOTED + b"x", 3, "expected a line of CSV"),
        (HEADER_LINE + b"# caf\xe9\n", 2, "expected UTF-8, got the byte 0xe9"),
        (HEADER_LINE.replace(b"\n", b"\r") + b"\xff", 2, "expected UTF-8, got the byte 0xff"),
        (HEADER.encode("utf-16"), 1, "expected UTF-8"),
        (HEADER.encode("utf-16-le"), 1, "got a NUL byte"),
        (HEADER_LINE + ROW + b"\0\n", 2, "got a NUL byte"),
        (HEADER_LINE + ROW + b"x" * 200_000, 2, "field larger than field limit"),
        (HEADER_LINE + b"x" * 100_000, 2, "expected 14 fields, got 1"),
        (HEADER_LINE + row(us="nan").encode(), 2, "us: expected a positive number"),
        (HEADER_LINE + row(us="inf").encode(), 2, "us: expected a positive number"),
        (HEADER_LINE + row(us="fast").encode(), 2, "us: expected a positive number"),
        (HEADER_LINE + row(hidden="9" * 5000).encode(), 2, "hidden: expected a positive multiple"),
        (HEADER_LINE + row(tokens="\u0663").encode(), 2, "tokens: expected a positive integer"),
        (HEADER_LINE + row(gemm1="x" * 9000).encode(), 2, "gemm1: expected one of"),
        (HEADER_LINE + ROW + b"\n\n" + SPACED, 4, "mine.csv:2 again"),
    ],
)
def test_bytes_that_are_no_table(tmp_path, content, line, message):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with pytest.raises(dispatch.TableError) as error:
        dispatch.load_tables([path])
    assert message in refused(error, path) and str(error.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    "content",
    [
        codecs.BOM_UTF8 + HEADER_LINE + ROW,
        (HEADER_LINE + ROW).replace(b"\n", b"\r\n"),
        (HEADER_LINE + ROW).replace(b"\n", b"\r"),
        b"\n  # indented\n \n" + HEADER_LINE.replace(b",", b", ") + SPACED,
        HEADER_LINE + row(note="\u2028 a\x0b b\x1c c").encode(),
        b'# a "quote left open\n' + HEADER_LINE + NOTED,
    ],
)
def test_bytes_that_are_a_table(tmp_path, content):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    ((shape, tokens, plan),) = dispatch.read_table(path)
    assert shape == ("gfx950", *OTHER.values(), "any") and tokens == 64
    assert plan.where.startswith(f"{path}:")


@pytest.mark.parametrize("what", ["folder", "pipe", "device"])
def test_what_is_no_file_is_no_table(tmp_path, what):
    path = {"folder": tmp_path, "pipe": tmp_path / "pipe", "device": Path("/dev/zero")}[what]
    if what == "pipe":
        os.mkfifo(path)
    for use in (lambda: dispatch.load_tables([path]), lambda: dispatch.record(path)):
        with pytest.raises(dispatch.TableError) as error:
            use()
        refused(error, path)


def small_moe() -> torch.Tensor:
    """3 tokens through 2 experts; H and I are 64, top 1."""

    def weight(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.zeros(2, rows, 32, dtype=torch.uint8)
        return codes, rq.shuffle_scales(torch.zeros(2, rows, 2, dtype=torch.uint8))

    (w1, s1), (w2, s2) = weight(128), weight(64)
    routes = torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32)
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    return rq.fused_moe(x, w1, w2, *routes, w1_scale=s1, w2_scale=s2)


def test_a_bad_table_is_told_by_the_first_op(tmp_path, monkeypatch):
    path = tmp_path / "mine.csv"
    path.write_bytes(HEADER_LINE + NOTED[:-1])
    monkeypatch.setenv(dispatch.TUNED, str(path))
    dispatch.reload()
    for _ in range(2):  # and by the next, until it is put right
        with pytest.raises(dispatch.TableError) as error:
            small_moe()
        assert "a quote is left open" in refused(error, path)
    path.write_bytes(HEADER_LINE + NOTED)
    assert small_moe().shape == (3, 64)


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


KEY = ("gfx950", 4, *OTHER.values(), "silu")  # of choose(4)


def keys(path: Path) -> list[tuple]:
    return [(s.gfx, tokens, *s[1:]) for s, tokens, _ in dispatch.read_table(path)]


@given(contents())
@example(HEADER_LINE + ROW)  # no newline at its end
@example(b"# only a comment")
@example(HEADER_LINE + row(tokens=4, activation="silu").replace(",", ", ").encode() + b"\n")
def test_a_table_is_added_to_and_all_else_left_alone(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.csv")
        path.write_bytes(content)
        try:
            before = keys(path)
        except dispatch.TableError:
            before = None
        is_blank = all(b.strip()[:1] in (b"", b"#") for b in content.splitlines())
        dispatch.reload()
        try:
            recording = dispatch.record(path)
        except dispatch.TableError:
            assert before is None
            assert path.read_bytes() == content
            return
        with recording:
            choose(4)
        assert path.read_bytes().startswith(content)
        if before is None:
            assert keys(path) == [KEY]
        else:
            assert not is_blank
            assert keys(path) == (before if KEY in before else [*before, KEY])
        once = path.read_bytes()
        dispatch.reload()
        with dispatch.record(path):
            choose(4)
        assert path.read_bytes() == once


@pytest.mark.parametrize(
    "content",
    [
        b"name,age\nada,36\n",
        HEADER_LINE + ROW + b"\n" + ROW[:20],  # torn
        HEADER_LINE[:30],
        HEADER_LINE + ROW + b"\n" + bytes(40),
        HEADER.encode("utf-16"),
    ],
)
def test_a_foreign_file_is_left_alone(tmp_path, monkeypatch, caplog, content):
    path = tmp_path / "notes.csv"
    path.write_bytes(content)
    with pytest.raises(dispatch.TableError) as error:
        dispatch.record(path)
    refused(error, path)
    monkeypatch.setenv(dispatch.RECORD, str(path))
    dispatch.reload()
    choose(4)
    choose(1000)
    assert path.read_bytes() == content
    told = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
    assert len(told) == 1 and "misses are no longer recorded there" in told[0]
    assert len(dispatch.misses()) == 2


@pytest.mark.parametrize("place", ["folder", "below a file", "device", "pipe", "long name"])
def test_trouble_with_recording_is_a_warning_and_the_op_goes_on(
    tmp_path, monkeypatch, caplog, place
):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    path = {
        "folder": tmp_path,
        "below a file": tmp_path / "file" / "misses.csv",
        "device": Path("/dev/full"),
        "pipe": tmp_path / "pipe",
        "long name": tmp_path / ("x" * 300),
    }[place]
    monkeypatch.setenv(dispatch.RECORD, str(path))
    monkeypatch.setattr(dispatch, "_CPU", "gfx950")
    dispatch.reload()
    assert small_moe().shape == (3, 64)
    choose(1000)
    told = [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]
    assert len(told) == 1 and "cannot be recorded in" in told[0]
    with pytest.raises(dispatch.TableError) as error:
        dispatch.record(path)
    refused(error, path)


def test_an_op_on_a_cpu_never_touches_the_record(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_CPU", "cpu")
    monkeypatch.setenv(dispatch.RECORD, str(tmp_path))  # a folder
    dispatch.reload()
    assert small_moe().shape == (3, 64) and not caplog.records


def test_a_full_disk_leaves_whole_rows(tmp_path, caplog):
    path = tmp_path / "misses.csv"
    with dispatch.record(path):
        choose(4)
        whole = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:  # room for a part of the next row
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, hard))
            choose(1000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        choose(9000)
    assert path.read_bytes() == whole and keys(path) == [KEY]
    assert sum("cannot be recorded in" in r.getMessage() for r in caplog.records) == 1


def _record_some(path: Path, start) -> None:
    start.wait(60)
    with dispatch.record(path):
        for topk in (1, 2, 3, 4):
            for tokens in (1, 2, 4, 8):
                choose(tokens, topk=topk)


def test_processes_share_a_file(tmp_path):
    path = tmp_path / "misses.csv"
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    processes = [context.Process(target=_record_some, args=(path, start)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = keys(path)
    assert len(found) == len(set(found)) == 16
    assert path.read_text().count(HEADER) == 1


@pytest.mark.parametrize("path", [None, 3, "", "a\0b"])
def test_a_path_that_is_none(path):
    with pytest.raises((TypeError, ValueError), match="^path: expected .*, got "):
        dispatch.record(path)


# Recorded rows of such calls made a file that is refused as a table.
@pytest.mark.parametrize(
    "shape",
    [
        {"activation": "relu"},
        {"hidden": 33},
        {"inter": 0},
        {"experts": 0},
        {"topk": 0},
        {"topk": 17},
    ],
)
def test_a_call_that_is_refused_is_no_miss(tmp_path, caplog, shape):
    path = tmp_path / "misses.csv"
    with dispatch.record(path):
        choose(4, **shape)
        assert not dispatch.misses() and not caplog.records
        choose(4)
    assert keys(path) == [KEY]


def call(**changes: object) -> None:
    experts, hidden, inter = 4, 64, 32
    codes = {
        name: torch.zeros(experts, rows, k // 2, dtype=torch.uint8)
        for name, rows, k in (("w1", 2 * inter, hidden), ("w2", hidden, inter))
    }
    scales = {f"{n}_scale": torch.zeros(256, 8, dtype=torch.uint8) for n in codes}
    ids = torch.zeros(3, 2, dtype=torch.int32)
    arguments = {"x": torch.zeros(3, hidden), "topk_weights": torch.rand(3, 2), "topk_ids": ids}
    rq.fused_moe(**arguments | codes | scales | changes)


def test_a_call_that_the_op_refuses_is_no_miss(monkeypatch, tmp_path):
    monkeypatch.setattr(dispatch, "_CPU", "gfx950")
    with dispatch.record(tmp_path / "misses.csv") as recording:
        for changes in (
            {"activation": "relu"},
            {"scale_mode": "mse"},
            {"limit": -1.0},
            {"w2": torch.zeros(4, 64, 48, dtype=torch.uint8)},
            {"shared": torch.zeros(3, 32)},
            {"num_shared_experts": 15},
        ):
            with pytest.raises(RuntimeError, match=": expected"):
                call(**changes)
        assert not dispatch.misses() and not list(dispatch.read_table(recording.path))
        call()
        assert len(dispatch.misses()) == len(list(dispatch.read_table(recording.path))) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": -5}, "tokens: expected an integer of at least 0, got -5"),
        ({"tokens": 1.5}, "tokens: expected an integer of at least 0, got 1.5"),
        ({"hidden": 33}, "hidden: expected a positive multiple of 32, got 33"),
        ({"inter": 0}, "inter: expected a positive multiple of 32, got 0"),
        ({"inter": "96"}, "inter: expected a positive multiple of 32, got '96'"),
        ({"experts": 0}, "experts: expected an integer of at least 1, got 0"),
        ({"topk": 0}, "topk: expected an integer of at least 1, got 0"),
        ({"topk": 99}, "topk: expected 1 to 16, got 99"),
        ({"activation": "relu"}, "activation: expected one of .*, got 'relu'"),
        ({"activation": "any"}, "activation: expected one of .*, got 'any'"),
        ({"activation": ["silu"]}, "activation: expected one of .*, got ..silu"),
        ({"gfx": "mi350"}, "gfx: expected 'cpu' or a name such as gfx950, got 'mi350'"),
        ({"gfx": None}, "gfx: expected 'cpu' or a name such as gfx950, got None"),
        ({"all_experts": 0}, "all_experts: expected an integer of at least 16, got 0"),
        ({"all_experts": 8}, "all_experts: expected an integer of at least 16, got 8"),
        ({"inter_rotation_size": 48}, "inter_rotation_size: expected one of .*, got 48"),
    ],
)
def test_explain_names_what_no_call_has(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dispatch.explain(**{"tokens": 64, **OTHER} | changes)


@pytest.mark.parametrize(("name", "sizes"), [("tokens", (-1, 8, 2)), ("experts", (1, 0, 2))])
def test_the_rule_names_what_no_call_has(name, sizes):
    with pytest.raises(ValueError, match=f"^{name}: expected an integer of at least"):
        dispatch.rule(*sizes)


def test_fp4_by_environment(monkeypatch):
    assert not dispatch.fp4_by_default()
    monkeypatch.setenv(dispatch.FP4_INTERMEDIATE, "1")
    dispatch.reload()
    assert dispatch.explain(tokens=8192, **KIMI).pipeline == "staged_fp4_reduce"
    monkeypatch.setenv(dispatch.FP4_INTERMEDIATE, "yes")
    dispatch.reload()
    for _ in range(2):
        with pytest.raises(ValueError, match="FP4_INTERMEDIATE: expected 0 or 1, got 'yes'"):
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


def test_a_device_without_an_architecture():
    with pytest.raises(ValueError, match="device: expected a CPU or a GPU, got meta"):
        dispatch.gfx_of(torch.device("meta"))
