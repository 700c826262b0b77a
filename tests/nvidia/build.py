# SPDX-License-Identifier: MIT
"""Builds rotquant_hip._C in place with the GPU kernels compiled for NVIDIA: a test bed.

The kernels of csrc/hip run there with the headers beside this file in place of gfx950.h and the HIP
runtime, so that `pytest -m gpu`, compute-sanitizer and bench/ work on such a GPU too. It says
nothing about the speed on gfx950 and no wheel is made from it. Needs a CUDA torch, nvcc and a C++20
compiler:

    python tests/nvidia/build.py && python -m pytest -m gpu tests

A GPU is needed to run, not to build.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "build_backend"))

import build_config  # noqa: E402  (needs the line above)

OBJECTS = ROOT / "build" / "nvidia"
# no_mfma.cpp stands in for them.
WITH_MFMA = tuple(
    f"csrc/hip/{op}/"
    for op in ("gemm_a4w4", "rotate_matrix", "moe_gemm1", "moe_gemm2", "moe_rotate_matrix")
)
MACROS = ["-DROTQUANT_WITH_HIP", "-D__HIP_PLATFORM_NVIDIA__"]
# --fmad=false is what -ffp-contract=off is elsewhere. Subnormals are kept by default.
CUDA_FLAGS = [
    "-x",
    "cu",
    "-DRQ_NVIDIA",
    "-O3",
    "-std=c++20",
    "--fmad=false",
    "-Xcompiler=-fPIC,-Wall,-Wextra",
]
# nvcc also drives the C++ compiler, because it knows where its own headers are.
CXX_FLAGS = ["-x", "c++", "-Xcompiler=" + ",".join(["-fPIC", *build_config.CXX_FLAGS])]


def compile_source(source: str, args: argparse.Namespace) -> str:
    """Compile one file of csrc and return its object; raises if the compiler fails."""
    target = OBJECTS / f"{source}.o"
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.endswith(".hip"):
        flags = [*CUDA_FLAGS, f"-arch={args.arch}"]
    else:
        system = [*cpp_extension.include_paths("cpu"), sysconfig.get_path("include")]
        flags = [*CXX_FLAGS, *(f"-isystem={path}" for path in system)]
    include = [f"-I{ROOT / 'csrc'}", f"-I{Path(__file__).parent}"]
    files = [*include, "-c", str(ROOT / source), "-o", str(target)]
    subprocess.run([args.nvcc, *flags, *MACROS, *files], check=True)
    print(f"compiled {source}", flush=True)
    return str(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default="sm_90", help="what nvcc compiles for (%(default)s)")
    parser.add_argument("--nvcc", default="nvcc", help="the compiler (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    args = parser.parse_args()

    # Slowest first: the kernels have by far the most instances.
    sources = [s for s in build_config.sources(ROOT, with_hip=True) if not s.startswith(WITH_MFMA)]
    sources = sorted([*sources, "tests/nvidia/no_mfma.cpp"], key=lambda s: "/inst/" not in s)
    with ThreadPoolExecutor(args.jobs) as pool:
        objects = list(pool.map(lambda source: compile_source(source, args), sources))

    package = ROOT / build_config.PACKAGE
    library = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    # The CUDA runtime is the one that torch has loaded, found by its soname.
    torch_libraries = [f"-L{path}" for path in cpp_extension.library_paths("cpu")]
    link = [args.nvcc, "-shared", "-cudart=shared", "-o", str(library), *objects]
    subprocess.run([*link, *torch_libraries, "-lc10", "-ltorch_cpu", "-ltorch"], check=True)
    record = {"torch": str(torch.__version__), "hip": torch.version.hip, "archs": [args.arch]}
    (package / build_config.BUILD_INFO).write_text(json.dumps(record, indent=1) + "\n")
    print(f"built {library}")


if __name__ == "__main__":
    main()
