# SPDX-License-Identifier: MIT
"""The README's Python runs, and prints what the README says that it prints."""

from __future__ import annotations

import re

import readme_examples
from gfx950_build import ROOT
from readme_examples import TEXT

from rotquant_hip import dispatch


def test_the_python_runs(capsys, monkeypatch) -> None:
    for name in (dispatch.TUNED, dispatch.RECORD):
        monkeypatch.delenv(name, raising=False)
    dispatch.reload()
    readme_examples.run()
    printed = capsys.readouterr().out.split()
    assert printed and " ".join(printed) in " ".join(TEXT.split())


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(#([\w-]+)\)", TEXT):
        headings = [h.lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", TEXT, re.M)]
        assert target in headings
    for path in re.findall(r"`((?:tests|bench|emulator|rotquant_hip)/[\w./]+)`", TEXT):
        assert list(ROOT.glob(path)), path
