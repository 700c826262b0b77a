# SPDX-License-Identifier: MIT
"""pytest plugin of `make test-emulate`: the op tests on gfx950 machine code, launchers included.

Few examples, because a kernel runs about 10^5 times slower than on the hardware; the run fails
unless kernels were launched.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import settings

MAX_EXAMPLES = 25

NOT_EMULATED = {
    "test_isa_": "about the vector levels of the CPU code",
    "test_rounding_to_every_pattern": "an identity matrix, whose product rounds operands to bf16",
}


def pytest_configure(config: pytest.Config) -> None:
    # After conftest.py has chosen its own.
    settings.register_profile("emulate", settings.get_profile("ci"), max_examples=MAX_EXAMPLES)
    settings.load_profile("emulate")


def pytest_report_header() -> str:
    from rotquant_hip import _loader

    emulated = _loader.build_info().get("emulated", False)
    if not emulated:
        raise pytest.UsageError(f"{_loader.BUILD_INFO.parent} is not the build for the emulator")
    return f"rotquant_hip for the emulator: {_loader.BUILD_INFO.parent}, {MAX_EXAMPLES} examples"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [i for i in items if i.name.startswith(tuple(NOT_EMULATED))]
    items[:] = [i for i in items if i not in left_out]
    config.hook.pytest_deselected(items=left_out)


def launches() -> int:
    """Kernels that the emulator has been asked to run in this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = {line.split()[-1] for line in maps if "libamdhip64" in line}
    return ctypes.CDLL(library.pop()).gfx950_emulator_launches() if library else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not launches():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = terminalreporter.write_line
    line(f"{launches()} launches of gfx950 machine code")
    for prefix, reason in NOT_EMULATED.items():
        line(f"deselected {prefix}*: {reason}")
