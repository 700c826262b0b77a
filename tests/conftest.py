# SPDX-License-Identifier: MIT
"""What every test module shares: devices, hypothesis profiles, seeds."""

from __future__ import annotations

import ctypes
import os
import sys

import isa
import pytest
import torch
from hypothesis import HealthCheck, settings

import rotquant_hip  # noqa: F401  (registers the ops)

# No deadline, and no complaint about slow drawing: on a busy machine time says nothing.
settings.register_profile(
    "local", max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# The same examples on every run, so that a failure belongs to the change that shows it.
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def _devices() -> list:
    """The CPU, and the GPU if there is one and the ops were built for it."""
    has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("rotquant_hip::quant", "CUDA")
    if has_kernels and torch.cuda.is_available():
        return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
    return ["cpu"]


@pytest.fixture(scope="session", params=_devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(scope="session")
def isa_libraries(tmp_path_factory) -> dict[str, ctypes.CDLL]:
    return isa.build_libraries(tmp_path_factory.mktemp("isa"))


class SkipWithoutEmulator:
    """Last of the import finders: what imports the emulator where there is none is skipped."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in ("gfx950_emulator", "tinygrad"):
            pytest.skip("needs the emulator: pip install ./emulator", allow_module_level=True)


def pytest_configure() -> None:
    # Not earlier: other conftest files ask whether it is installed.
    sys.meta_path.append(SkipWithoutEmulator())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """The NVIDIA test bed (tests/nvidia) has no matrix kernels: skip what needs them."""
    try:
        return (yield)
    except RuntimeError as error:
        if "not on the NVIDIA test bed" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise
