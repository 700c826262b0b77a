# SPDX-License-Identifier: MIT
"""No document names a command that nothing runs."""

from __future__ import annotations

import re

import documents
from documents import CI, NOT_RUN, ROOT, RUN

RUNS = {name for steps in RUN.values() for name, _ in steps if name}


def test_every_documented_command_is_run_or_says_why_not() -> None:
    assert documented() - {*CI, *RUNS, *NOT_RUN} == set(), "add it to tests/documents.py"


def test_no_entry_is_left_of_a_command_that_no_document_names() -> None:
    assert {*CI, *RUNS, *NOT_RUN} - documented() == set()


def documented() -> set[str]:
    found = documents.documented()
    assert len(found) > 20
    return found


def test_ci_runs_the_targets_that_are_said_to() -> None:
    script = (ROOT / ".ci/run").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in set(CI.values()):
        assert re.search(rf"^make {target}$", script, re.M), target
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_commands_are_found() -> None:
    text = "Run `make a`, `make` or `x.py`:\n```\nmake b  # why\nV=1 pip c && pytest\nno\n```\n"
    text += "```python\nmake d\n```\nand `python\ne.py`\n"
    want = {"make a", "make b", "V=1 pip c", "pytest", "python e.py"}
    assert documents.in_markdown(text) == want
    text = (
        '#   docker a\nRUN pip b \\\n    && cmake c\nENTRYPOINT ["pytest"]\nCMD ["-m", "not gpu"]\n'
    )
    want = {"docker a", "pip b", "cmake c", 'pytest -m "not gpu"'}
    assert documents.in_dockerfile(text) == want
