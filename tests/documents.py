# SPDX-License-Identifier: MIT
"""Every command that a document names, and what runs it.

`test_documents.py` fails on a command that is not listed here; `install_paths.py` runs what is
listed under RUN, in environments that hold only what the documents' own commands install.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "emulator/README.md",
    "emulator/HIP.md",
)
PROGRAMS = r"(?:make|pip|python3?|pytest|cmake|docker|find|pre-commit|rotquant-hip|\.ci/run|\./\w+)"
COMMAND = re.compile(rf"(?:\w+=\S+ |\w+=\$\(.*?\) )*{PROGRAMS}(?: .*)?")
# "pytest" and "./program" are commands without arguments; the others name a program then.
NOT_COMMANDS = {"make", "pip", "python", "python3", "cmake", "docker"}

#: Run by .ci/run through make: at the left what is documented, at the right the target.
CI = {
    "make lint": "lint",
    "make test": "test",
    "make test-emulate": "test-emulate",
    "pip install --no-build-isolation -e .": "test",  # how make installs the extension
    "cmake -S . -B build/gfx950 -G Ninja": "test",
    "cmake --build build/gfx950 --target gfx950": "test",
}

#: For each environment its steps: (what is documented, or None; what runs).
COLLECT = "--collect-only -q"  # `make test` runs them; here it is imports that may fail
RUN: dict[str, list[tuple[str | None, str]]] = {
    "package": [
        (None, "pip install -r requirements/torch.txt"),
        ("pip install .", "pip install ."),
        (None, "python tests/readme_examples.py"),
        ("pip install -r requirements/test.txt", "pip install -r requirements/test.txt"),
        (
            "python bench/fused_moe.py --threads 1 --seconds 8",
            "python bench/fused_moe.py --threads 1 --seconds 0.1 --experts 16 --m 1 4",
        ),
        (
            "python bench/fused_moe.py --accuracy",
            "python bench/fused_moe.py --accuracy --seeds 1",
        ),
        ("pytest -m gpu", "pytest -m gpu"),
        ("pytest", f"pytest {COLLECT}"),
        ('pytest -m "not gpu"', f'pytest {COLLECT} -m "not gpu"'),
    ],
    "emulator": [
        ("pip install ./emulator", "pip install ./emulator"),
        (None, "python tests/emulator_example.py $KERNEL"),
        (
            "pip install ./emulator ziglang triton==3.6.0",
            "pip install ./emulator ziglang triton==3.6.0",
        ),
        (
            "python -m gfx950_emulator.hipcc -O2 -std=c++17 -o program program.hip",
            "python -m gfx950_emulator.hipcc -O2 -std=c++17 -o program $PROGRAM",
        ),
        ("./program", "./program"),
        (
            "LD_LIBRARY_PATH=$(python -m gfx950_emulator.hipcc --runtime) ./program",
            "LD_LIBRARY_PATH=$(python -m gfx950_emulator.hipcc --runtime) ./program",
        ),
        ("pip install './emulator[test]'", "pip install './emulator[test]'"),
        ("pytest emulator/tests", f"pytest {COLLECT} emulator/tests"),
        ("python bench/emulator.py", "python bench/emulator.py"),
    ],
}

NOT_RUN = {
    "make test-install": "two fresh environments, a build each; by hand until its time is known",
    "python bench/gfx950_counts.py": "make test-install runs it with --quick",
    "python bench/gfx950_moe_counts.py": "make test-install runs it with --quick",
    "rotquant-hip": "the name of the program; tests/test_demo.py runs it",
    "GFX950_EMULATOR_LATENCY=late pytest -k gfx950": (
        "many minutes; tests/test_gfx950_latency.py has a launch of each family"
    ),
    "GFX950_EMULATOR_LATENCY=late pytest emulator/tests": (
        "many minutes; emulator/tests/test_latency.py has the mode"
    ),
    "make demo": "minutes of a real model; tests/test_demo.py runs its parts",
    "python -m rotquant_hip demo": "what make demo runs",
    "make bench": "minutes of timing; tests/test_moe_bench.py runs the script on small layers",
    "make format": "rewrites the sources; `make lint` checks what it would do",
    "make test-moe-full": "minutes a model",
    ".ci/run": "is what runs the others",
    "pre-commit install": "changes the checkout's hooks; the linters are those of make lint",
    "find . -name '*rotate_quant*'": "only lists files",
    "python tests/nvidia/build.py": "needs an NVIDIA GPU and nvcc",
    "python bench/fused_moe.py --model kimi-k2.5-tp4 --m 1 2 4 8 16 32 64 128 256 512 1024 "
    "--tuned kimi.csv": "times on a GPU; tests/test_moe_bench.py writes such a table on a CPU",
    "ROTQUANT_HIP_TUNED=kimi.csv python -m your.server": "the server is the reader's",
    "docker build -t rotquant_hip .": "needs docker; its pip and pytest commands are in RUN",
    "docker run --rm rotquant_hip": "needs docker",
    "docker run --rm --device /dev/kfd --device /dev/dri --group-add video rotquant_hip -m gpu": (
        "needs docker and an AMD GPU"
    ),
    "python3 -m pip install -r requirements/test.txt": "as pip in RUN, in a ROCm image",
    "MAX_JOBS=${MAX_JOBS} python3 -m pip install --no-build-isolation --no-deps .": (
        "the image's ROCm torch; tests/test_build.py builds with a stub tool chain"
    ),
}


def _parts(line: str) -> list[str]:
    """The commands of a line, without its comment."""
    line = re.sub(r"\s+#.*", "", " ".join(line.split()))
    return [p for p in line.split(" && ") if COMMAND.fullmatch(p) and p not in NOT_COMMANDS]


def in_markdown(text: str) -> set[str]:
    """Lines of code blocks other than Python's, and `spans of code`."""
    fence = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.M | re.S)
    blocks = [body for language, body in fence.findall(text) if language != "python"]
    lines = [line for body in blocks for line in body.splitlines()]
    for text_or_comment in (fence.sub("", text), *blocks):
        lines += re.findall(r"`([^`]+)`", text_or_comment)
    return {part for line in lines for part in _parts(line)}


def in_dockerfile(text: str) -> set[str]:
    """What RUN, ENTRYPOINT with CMD, and the comments name."""
    text = text.replace("\\\n", " ")
    words = re.findall(r"^(?:ENTRYPOINT|CMD) \[(.*)\]", text, re.M)
    default = " ".join(words).replace('"not gpu"', "'not gpu'").replace('", "', " ")
    lines = re.findall(r"^(?:RUN|#  ) *(.*)", text, re.M)
    lines.append(re.sub(r"['\",]", "", default).replace("not gpu", '"not gpu"'))
    return {part for line in lines for part in _parts(line)}


def documented() -> set[str]:
    """All commands of all documents."""
    found = set().union(*(in_markdown((ROOT / name).read_text()) for name in DOCUMENTS))
    return found | in_dockerfile((ROOT / "Dockerfile").read_text())
