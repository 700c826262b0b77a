# SPDX-License-Identifier: MIT
"""Reports the instructions that the emulator implements but that no test of the session executed."""

from __future__ import annotations

from collections import Counter

import pytest

try:
    import gfx950_emulator as emu
except ModuleNotFoundError:  # the test files say so, each for itself
    emu = None

_executed: Counter = Counter()
_run = emu and emu.Object.run


def _counting_run(self: emu.Object, *args, **kwargs) -> emu.Stats:
    stats = _run(self, *args, **kwargs)
    _executed.update(stats.mnemonics)
    return stats


if emu:
    emu.Object.run = _counting_run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not emu:
        return
    never = sorted(emu.implemented() - set(_executed))
    reached = len(emu.implemented()) - len(never)
    terminalreporter.write_line(
        f"{reached} of {len(emu.implemented())} implemented instructions executed"
    )
    if reached > 600:  # a whole run, not a selection
        terminalreporter.write_line("never executed: " + " ".join(never))
