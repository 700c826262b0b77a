# SPDX-License-Identifier: MIT
"""ROTQUANT_HIP_EMULATE=1: what the build for the emulator compiles, and that it refuses politely.

Nothing is compiled here; `make test-emulate` makes that build and runs the op tests on it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "build_backend"))
import build_config  # noqa: E402
import emulate  # noqa: E402

PLAIN = {
    "name": "rotquant_hip._C",
    "sources": ["csrc/register.cpp"],
    "define_macros": [("ROTQUANT_TORCH_VERSION", '"2"')],
    "extra_compile_args": {"cxx": ["-O3"], "nvcc": []},
}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, list[str]]]:
    """Records (source, flags) of what would be compiled for gfx950."""
    calls: list[tuple[Path, list[str]]] = []

    def compile_hip(source: Path, out: Path, flags: list[str]) -> None:
        calls.append((source, flags))
        out.write_text("")

    tools = SimpleNamespace(
        RUNTIME=tmp_path,
        __file__=__file__,
        compile_hip=compile_hip,
        hip_include=lambda: Path("/hip"),
        build_runtime=lambda folder: folder,
        link_flags=lambda folder: [f"-L{folder}", "-lamdhip64"],
    )
    monkeypatch.setattr(emulate, "_tools", lambda refuse: tools)
    return calls


def copy_of_sources(root: Path) -> Path:
    for path in (ROOT / "csrc/hip").rglob("*.hip"):
        to = root / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text("")
    return root


def test_every_hip_source_is_compiled_whole_and_linked(compiled: list, tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path / "tree")
    arguments = emulate.add_kernels(PLAIN, root, ["-O3"], build_config.BuildRefused)
    sources = sorted((root / "csrc/hip").rglob("*.hip"))
    assert sorted(source for source, _ in compiled) == sources and len(sources) > 3
    for _, flags in compiled:
        assert {"-O3", "-DROTQUANT_WITH_HIP", "-D__HIP_PLATFORM_AMD__=1"} <= set(flags)
        assert '-DROTQUANT_HIP_ARCHS="gfx950"' in flags and "-DRQ_DEVICE_ONLY" not in flags
    macros = dict(arguments["define_macros"])
    assert {"ROTQUANT_TORCH_VERSION", "ROTQUANT_WITH_HIP", "ROTQUANT_HIP_EMULATE"} <= set(macros)
    assert arguments["sources"] == PLAIN["sources"]
    assert len(arguments["extra_objects"]) == len(sources)
    assert all(Path(o).is_relative_to(root / "build/emulate") for o in arguments["extra_objects"])
    assert "-lamdhip64" in arguments["extra_link_args"]


def test_objects_are_kept_until_a_source_changes(compiled: list, tmp_path: Path) -> None:
    root = copy_of_sources(tmp_path / "tree")
    emulate.add_kernels(PLAIN, root, [], build_config.BuildRefused)
    first = len(compiled)
    emulate.add_kernels(PLAIN, root, [], build_config.BuildRefused)
    assert len(compiled) == first
    (root / "csrc/hip/new.h").write_text("")
    objects = list((root / "build").rglob("*.o"))
    for path in objects:  # older than the new header, whatever the clock's resolution
        os.utime(path, (0, path.stat().st_mtime - 10))
    emulate.add_kernels(PLAIN, root, [], build_config.BuildRefused)
    assert len(compiled) == 2 * first


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_it_is_asked_for_by_name(value: str, expected: bool) -> None:
    assert emulate.requested({"ROTQUANT_HIP_EMULATE": value}) is expected
    assert emulate.requested({}) is False


def test_without_the_emulator_it_is_refused_in_one_sentence(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gfx950_emulator", None)
    with pytest.raises(build_config.BuildRefused) as refusal:
        emulate._tools(build_config.BuildRefused)
    assert "pip install ./emulator" in str(refusal.value) and "\n" not in str(refusal.value)
