# SPDX-License-Identifier: MIT
"""What is compiled into rotquant_hip._C and with which flags.

Decided here without building anything and without touching a device, so that a machine with no
GPU, no rocminfo and no network builds the same wheel and tests can ask. `setup.py` only passes
the answer on.

Relied on, read in torch 2.13's torch/utils/cpp_extension.py:
  * CppExtension never calls hipify; only CUDAExtension and the JIT `load` do.
  * BuildExtension registers `.hip` as a source suffix, and `_is_cuda_file` is true for it when
    torch.version.hip is set and a ROCm tree is found: those sources go to $ROCM_HOME/bin/hipcc
    with the flags under the key "nvcc". Everything else goes to the C++ compiler ("cxx").
  * `_get_rocm_arch_flags` adds --offload-arch from PYTORCH_ROCM_ARCH, or from the *visible GPUs*
    when it is unset or empty. An --offload-arch among our own flags ends that search, so we always
    pass one; torch then only adds -fno-gpu-rdc.
  * -fPIC, -D__HIP_PLATFORM_AMD__=1 and -DUSE_ROCM=1 are added for every source of a HIP build.
  * Ninja tracks headers for C++ sources only, not for hipcc: see `remove_stale_hip_objects`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import emulate

PACKAGE = "rotquant_hip"
EXTENSION = f"{PACKAGE}._C"
BUILD_INFO = "_build_info.json"

#: Architectures that csrc/hip has kernels for. The first is the default.
KNOWN_ARCHS = ("gfx950",)

# -ffp-contract=off: the results are specified bit by bit, and both compilers fuse a*b+c by default.
COMMON_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
# NOTE: -fopenmp when compiling (without it at::parallel_for is a serial loop) but not when linking:
# the OpenMP runtime must be the one torch has loaded, or torch.set_num_threads has no effect on us.
CXX_FLAGS = [*COMMON_FLAGS, "-fopenmp"]


def prefix_maps(root: Path, torch: Any) -> list[str]:
    """Flags that keep the build's folders out of torch's error macros and debug information."""
    python = sysconfig.get_path("include")
    folders = {root: ".", Path(torch.__file__).parent: "torch", python: "python"}  # the last wins
    return [f"-ffile-prefix-map={folder}={to}" for folder, to in folders.items()]


class BuildRefused(SystemExit):
    """Ends the build with one sentence on stderr, exit status 1 and no traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"{PACKAGE}: {sentence}")


def offload_archs(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The gfx architectures to compile for: those of PYTORCH_ROCM_ARCH that have kernels here.

    Unset means the default. ROCm images often export every architecture of their torch, so names
    without kernels are left out and reported; a list with none left, or an empty one, is refused.
    """
    value = environ.get("PYTORCH_ROCM_ARCH")
    if value is None:
        print(f"{PACKAGE}: PYTORCH_ROCM_ARCH is unset, building for {KNOWN_ARCHS[0]}")
        return [KNOWN_ARCHS[0]]
    requested = list(dict.fromkeys(re.split(r"[;,\s]+", value.strip(";, \t\n"))))
    known = ", ".join(KNOWN_ARCHS)
    if requested == [""]:
        raise BuildRefused(
            f"PYTORCH_ROCM_ARCH={value!r} names no architecture: unset it for the default "
            f"({KNOWN_ARCHS[0]}) or list some of: {known}."
        )
    # "gfx950:xnack-" is gfx950 with a target feature.
    archs = [arch for arch in requested if arch.partition(":")[0] in KNOWN_ARCHS]
    if not archs:
        raise BuildRefused(
            f"PYTORCH_ROCM_ARCH={value!r} has no architecture with kernels here; known: {known}."
        )
    skipped = [arch for arch in requested if arch not in archs]
    note = f" (no kernels for {', '.join(skipped)}: left out)" if skipped else ""
    print(f"{PACKAGE}: building for {', '.join(archs)}, from PYTORCH_ROCM_ARCH{note}")
    return archs


def sources(root: Path, with_hip: bool) -> list[str]:
    """Source files in a fixed order, as /-separated paths relative to `root`."""
    patterns = ["csrc/register.cpp", "csrc/ops/**/*.cpp", "csrc/cpu/**/*.cpp"]
    if with_hip:
        patterns.append("csrc/hip/**/*.hip")
    return [p.relative_to(root).as_posix() for glob in patterns for p in sorted(root.glob(glob))]


def import_torch() -> Any:
    """The torch of this environment, or a refusal in one sentence."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise BuildRefused(no_torch_sentence()) from None
        raise BuildRefused(f"torch is installed but does not import: {error}.") from None
    except (ImportError, OSError) as error:
        raise BuildRefused(f"torch is installed but does not import: {error}.") from None
    return torch


def no_torch_sentence() -> str:
    """Why a build without torch is refused, and what to do."""
    return (
        "no torch in this environment to build against: install the PyTorch that you want to run "
        "with (a ROCm build for the GPU kernels, any build for the CPU ops), then repeat; if one "
        "is installed but hidden by build isolation, add --no-build-isolation."
    )


def extension_arguments(root: Path, torch: Any, archs: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for torch's CppExtension; `archs` is empty for a torch without HIP."""
    from torch.utils import cpp_extension

    device = "cuda" if archs else "cpu"  # "cuda" is torch's name for the ROCm paths too
    # -isystem, although CppExtension adds -I for torch's: a directory given with both counts as a
    # system one, so that -Wextra speaks of our code only. With HIP it also finds ROCm's headers.
    system = [f"-isystem{path}" for path in cpp_extension.include_paths(device)]
    # NOTE: the torch version is on the command line so that ninja rebuilds after torch is replaced.
    flags = [*prefix_maps(root, torch), *system]
    macros: list[tuple[str, str | None]] = [("ROTQUANT_TORCH_VERSION", f'"{torch.__version__}"')]
    if archs:
        macros += [("ROTQUANT_WITH_HIP", None), ("ROTQUANT_HIP_ARCHS", f'"{";".join(archs)}"')]
    return {
        "name": EXTENSION,
        "sources": sources(root, with_hip=bool(archs)),
        "include_dirs": [str(root / "csrc")],
        "define_macros": macros,
        "libraries": ["amdhip64", "c10_hip", "torch_hip"] if archs else [],
        "library_dirs": cpp_extension.library_paths(device),
        "extra_compile_args": {
            "cxx": [*CXX_FLAGS, *flags],
            "nvcc": [*COMMON_FLAGS, *(f"--offload-arch={arch}" for arch in archs), *flags],
        },
    }


def device_archs(torch: Any, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Architectures to build kernels for with this torch; none if it has no HIP."""
    if torch.version.hip is None:
        print(f"{PACKAGE}: torch {torch.__version__} has no HIP, building the CPU ops only")
        return []
    from torch.utils.cpp_extension import ROCM_HOME

    if ROCM_HOME is None or not Path(ROCM_HOME, "bin", "hipcc").exists():
        raise BuildRefused(
            f"torch {torch.__version__} is a ROCm build but there is no bin/hipcc under "
            f"{ROCM_HOME or 'any usual ROCm path'}: set ROCM_HOME to a ROCm development tree."
        )
    return offload_archs(environ)


def remove_stale_hip_objects(root: Path, build_temp: Path) -> None:
    """Delete hipcc's objects that are older than any file they may include: ninja rebuilds them."""
    included = (p for p in (root / "csrc").rglob("*") if p.suffix not in (".cpp", ".hip"))
    newest = max((p.stat().st_mtime for p in included if p.is_file()), default=0.0)
    for obj in (build_temp / "csrc" / "hip").rglob("*.o"):
        if obj.stat().st_mtime < newest:
            obj.unlink()


def build_command(root: Path, torch: Any, archs: Sequence[str], emulated: bool = False) -> type:
    """The build_ext command: torch's, plus the record that the loader checks before loading _C."""
    from torch.utils.cpp_extension import BuildExtension

    record = {"torch": str(torch.__version__), "hip": torch.version.hip, "archs": list(archs)}
    if emulated:
        record["emulated"] = True

    class BuildWithRecord(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            if self.editable_mode:  # setuptools would compile in a temporary folder, all each time
                self.build_temp = str(root / "build" / f"editable-{sys.implementation.cache_tag}")

        def build_extensions(self) -> None:
            remove_stale_hip_objects(root, Path(self.build_temp))
            try:
                super().build_extensions()
            except RuntimeError as error:  # ninja failed; what the compiler said is above
                raise BuildRefused(f"{error}: see the compiler's message above.") from None

        def run(self) -> None:
            super().run()
            folders = [Path(self.build_lib, PACKAGE)]
            if self.inplace:  # also what an editable install asks for
                folders.append(root / PACKAGE)
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / BUILD_INFO).write_text(json.dumps(record, indent=1) + "\n")

    return BuildWithRecord


#: The commands that compile. All others describe or pack the sources and work without torch.
BUILD_COMMANDS = frozenset(
    {"build", "build_ext", "bdist", "bdist_wheel", "editable_wheel", "install", "develop"}
)


def setup_arguments(root: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments for setuptools.setup. `arguments` is sys.argv without the script."""
    if not BUILD_COMMANDS.intersection(arguments):
        return {}
    torch = import_torch()
    from torch.utils.cpp_extension import CppExtension

    archs = device_archs(torch)
    if emulate.requested():
        if archs:
            raise BuildRefused(
                "ROTQUANT_HIP_EMULATE=1 is for a torch without HIP; this one has it."
            )
        arguments = extension_arguments(root, torch, [])
        arguments = emulate.add_kernels(
            arguments, root, [*COMMON_FLAGS, *prefix_maps(root, torch)], BuildRefused
        )
        return {
            "ext_modules": [CppExtension(**arguments)],
            "cmdclass": {"build_ext": build_command(root, torch, [emulate.ARCH], emulated=True)},
        }
    return {
        "ext_modules": [CppExtension(**extension_arguments(root, torch, archs))],
        "cmdclass": {"build_ext": build_command(root, torch, archs)},
    }
