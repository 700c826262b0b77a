# SPDX-License-Identifier: MIT
"""Command line: ``rotquant-hip <command>`` or ``python -m rotquant_hip <command>``."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

SCALE_MODES = ("round_up", "ceil", "floor", "even", "mse")
ROTATION_SIZES = (16, 32, 64, 128, 256)
PROGRAM = "rotquant-hip"  # as in pyproject.toml
MODULE = "rotquant_hip"
INTERRUPTED = 130  # as shells say it: 128 + SIGINT


def is_starting() -> bool:
    """Whether this process is the command line, and the package is imported for nothing else yet.

    While Python looks for the module of ``-m``, ``sys.argv[0]`` is "-m", and ``sys.orig_argv`` has
    the module's name before its arguments.
    """
    if sys.argv[:1] == ["-m"]:
        return sys.orig_argv[-len(sys.argv)] in (MODULE, f"-m{MODULE}")
    return bool(sys.argv) and Path(sys.argv[0]).name == PROGRAM


def _program() -> str:
    called = Path(sys.argv[0]).name
    return f"python -m {MODULE}" if called in ("-m", "__main__.py") else called


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None


def _token_count(text: str) -> int:
    value = _integer(text)
    if value < 64:
        raise argparse.ArgumentTypeError(f"expected at least 64, got {value}")
    return value


def _rotation_size(text: str) -> int:
    value = _integer(text)
    if value not in ROTATION_SIZES:
        known = ", ".join(map(str, ROTATION_SIZES))
        raise argparse.ArgumentTypeError(f"expected one of {known}, got {value}")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_program())
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo",
        help="quantise a small language model to MXFP4 with and without rotation",
        description="Perplexity of a real language model in bf16, in MXFP4 (weights and "
        "activations), and in MXFP4 after a block Hadamard rotation. Reads installed packages "
        "only; never the network.",
        epilog="Exit status: 0 if every rotation lowers the perplexity, 1 if one does not, 2 if an "
        "argument is wrong, something is missing or --out cannot be written, 3 after a fault "
        "of the program, with its traceback, 130 if interrupted. The files are written all at "
        "the end, or not at all.",
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
    demo.add_argument("--seed", type=_integer, default=0, help="chooses the articles")
    demo.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        help="folder for demo.png, demo.json and demo.csv",
    )
    return parser


def start(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the arguments, then loads torch and the extension; exits with a sentence if it cannot.

    For ``rotquant_hip/__init__.py``, so that --help and argument errors need neither.
    """
    options = build_parser().parse_args(argv)
    try:
        from rotquant_hip._loader import load_extension

        load_extension()
    except ImportError as error:
        _exit(error, 2)
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)
    return options


def _exit(message: object, status: int) -> NoReturn:
    print(f"{_program()}: {message}", file=sys.stderr)
    sys.exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status, as ``demo --help`` tells; argparse and what is missing raise SystemExit."""
    options = vars(start(argv))
    options.pop("command")  # one command so far: argparse has refused anything else
    try:
        from rotquant_hip.demo import DemoError, DemoOptions, run

        try:
            return run(DemoOptions(**options))
        except DemoError as error:
            print(error, file=sys.stderr)
            return 2
    # What stopped the package from loading, or a person, is told in a line.
    except KeyboardInterrupt:
        _exit("interrupted", INTERRUPTED)
    except ImportError as error:
        _exit(error, 2)
    except Exception:
        traceback.print_exc()
        return 3
