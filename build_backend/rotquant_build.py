# SPDX-License-Identifier: MIT
"""PEP 517 backend: setuptools, building against the torch that is already installed.

pip builds in an isolated environment where the user's torch cannot be imported. Naming torch in
`build-system.requires` would download another one, usually of the wrong kind, and the extension
would not load. So this backend asks the environment's own interpreter where it imports from and
appends those folders to sys.path: build requirements that pip installed still come first.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from typing import Any

from build_config import BuildRefused, no_torch_sentence

SCRIPTS = sysconfig.get_path("scripts")
SETUPTOOLS_FLOOR = 77  # the first with SPDX licence expressions, and what torch 2.13 asks for


def _see_environment() -> None:
    """Make what is installed beside sys.executable importable."""
    # A fresh interpreter knows every case: .pth files, user site, system site, conda, Debian.
    # The two variables are how pip isolates: they are pip's here, not the user's.
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    query = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.path))"]
    answer = subprocess.run(query, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    folders = [f for f in json.loads(answer.stdout.splitlines()[-1]) if f]
    sys.path.extend(f for f in folders if f not in sys.path)
    importlib.invalidate_caches()


def _require(need_torch: bool) -> list[str]:
    """Look for what a build needs. Returns what is missing and can be downloaded."""
    wanted = ("setuptools", "torch") if need_torch else ("setuptools",)
    if any(importlib.util.find_spec(name) is None for name in wanted):
        _see_environment()
    if need_torch and importlib.util.find_spec("torch") is None:
        raise BuildRefused(no_torch_sentence())
    # An environment that is used without being activated has its ninja here.
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + os.pathsep + SCRIPTS
    missing = []
    found = importlib.util.find_spec("setuptools") is not None
    if not found or int(version("setuptools").partition(".")[0]) < SETUPTOOLS_FLOOR:
        missing.append(f"setuptools>={SETUPTOOLS_FLOOR}")
    if need_torch and shutil.which("ninja") is None:
        missing.append("ninja")  # without it torch compiles one file at a time
    return missing


def _setuptools(need_torch: bool = True) -> Any:
    """The backend of setuptools, once everything that it needs is there."""
    missing = [name for name in _require(need_torch) if name.startswith("setuptools")]
    if missing:  # only without isolation: with it, the installer has brought what was missing
        raise BuildRefused(f"{missing[0]} is needed to build: install it, then repeat.")
    from setuptools import build_meta

    return build_meta


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return _require(need_torch=True)


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return _require(need_torch=True)


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return _require(need_torch=False)


def prepare_metadata_for_build_wheel(directory: str, config_settings: Any = None) -> str:
    return _setuptools().prepare_metadata_for_build_wheel(directory, config_settings)


def prepare_metadata_for_build_editable(directory: str, config_settings: Any = None) -> str:
    return _setuptools().prepare_metadata_for_build_editable(directory, config_settings)


def build_sdist(directory: str, config_settings: Any = None) -> str:
    return _setuptools(need_torch=False).build_sdist(directory, config_settings)


def build_wheel(
    directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    return _setuptools().build_wheel(directory, config_settings, metadata_directory)


def build_editable(
    directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    return _setuptools().build_editable(directory, config_settings, metadata_directory)
