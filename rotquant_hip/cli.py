# SPDX-License-Identifier: MIT
"""Command line: ``python -m rotquant_hip <command>``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

SCALE_MODES = ("round_up", "ceil", "floor", "even", "mse")
ROTATION_SIZES = (16, 32, 64, 128, 256)


def _token_count(text: str) -> int:
    value = int(text)
    if value < 64:
        raise argparse.ArgumentTypeError(f"expected at least 64, got {value}")
    return value


def _rotation_size(text: str) -> int:
    value = int(text)
    if value not in ROTATION_SIZES:
        known = ", ".join(map(str, ROTATION_SIZES))
        raise argparse.ArgumentTypeError(f"expected one of {known}, got {value}")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rotquant_hip")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="quantise a small language model to MXFP4 with and without rotation",
        description="Perplexity of a real language model in bf16, in MXFP4 (weights and "
        "activations), and in MXFP4 after a block Hadamard rotation. Reads installed packages "
        "only; never the network. Exit status: 0 if every rotation lowers the perplexity, 1 if "
        "one does not, 2 if something is missing.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--tokens", type=_token_count, default=8192, help="tokens to evaluate")
    demo.add_argument(
        "--rotation-sizes",
        type=_rotation_size,
        nargs="+",
        default=[32, 64],
        metavar="RS",
        help="block sizes to compare; halved for a layer whose width they do not divide",
    )
    demo.add_argument("--scale-mode", choices=SCALE_MODES, default="round_up")
    demo.add_argument("--device", default="cpu", help="torch device that runs model and ops")
    demo.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of the model; auto is float32 on a CPU without fast bfloat16",
    )
    demo.add_argument("--seed", type=int, default=0, help="chooses the articles")
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        help="folder for demo.png, demo.json and demo.csv",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = vars(build_parser().parse_args(argv))
    options.pop("command")  # one command so far: argparse has refused anything else

    # Imported here so that --help and argument errors need neither torch nor the demo's packages.
    from rotquant_hip.demo import DemoError, DemoOptions, run

    try:
        return run(DemoOptions(**options))
    except DemoError as error:
        print(error, file=sys.stderr)
        return 2
