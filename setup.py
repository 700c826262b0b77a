# SPDX-License-Identifier: MIT
"""Builds rotquant_hip._C. Metadata is in pyproject.toml, decisions in build_backend/."""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_backend"))

import build_config  # noqa: E402  (needs the line above when setup.py is run by hand)

setup(**build_config.setup_arguments(ROOT, sys.argv[1:]))
