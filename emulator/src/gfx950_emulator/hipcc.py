# SPDX-License-Identifier: MIT
"""Compiles HIP programs whole, host and device, against the emulator in place of ROCm's runtime.

    python -m gfx950_emulator.hipcc -O2 -o program program.hip && ./program

Needs clang >= 20 with the amdgcn target and its lld (default: the PyPI package ziglang), HIP's
headers (default: those inside the PyPI package triton) and a host C++ compiler to link with. Takes
the usual options: -c, -o, -shared, sources (.hip .cpp .o), -l -L -Wl, to the linker; the others go
to every compilation. `--runtime` prints the folder of the stand-in for libamdhip64.
Environment: GFX950_EMULATOR_CLANG, GFX950_EMULATOR_LLD, GFX950_EMULATOR_HIP_INCLUDE, CXX,
GFX950_EMULATOR_CACHE (where libamdhip64.so is built, default ~/.cache/gfx950_emulator).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

RUNTIME = Path(__file__).parent / "hip"
LIBRARY = "libamdhip64.so"
_SONAMES = ("libamdhip64.so.6", "libamdhip64.so.7")  # what programs built with ROCm ask for
_DEFINES = ["-D__HIP_PLATFORM_AMD__=1"]


class ToolMissing(RuntimeError):
    """A compiler or header that is not there; the message says what to install or set."""


def _package(name: str) -> Path | None:
    """Folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _tool(variable: str, zig: str) -> list[str]:
    if chosen := os.environ.get(variable):
        return shlex.split(chosen)
    if _package("ziglang") is None:
        raise ToolMissing(f"no clang for gfx950: `pip install ziglang`, or set {variable}")
    return [sys.executable, "-m", "ziglang", zig]


def clang() -> list[str]:
    """Command of the compiler for gfx950 and for the host part of HIP sources."""
    command = _tool("GFX950_EMULATOR_CLANG", "clang")
    if (
        "ziglang" in command
    ):  # it looks for its own headers in the wrong place, and defaults to musl
        command += [
            "-resource-dir",
            str(_package("ziglang") / "lib"),
            "-target",
            f"{platform.machine()}-linux-gnu",
        ]
    return command


def hip_include() -> Path:
    """Folder that has hip/hip_runtime.h."""
    triton = _package("triton")
    chosen = os.environ.get("GFX950_EMULATOR_HIP_INCLUDE")
    candidates = [chosen, triton and triton / "backends/amd/include", "/opt/rocm/include"]
    for folder in candidates:
        if folder and Path(folder, "hip/hip_runtime.h").exists():
            return Path(folder)
    raise ToolMissing(
        "no HIP headers: `pip install triton` has them, or set GFX950_EMULATOR_HIP_INCLUDE to the "
        "folder that has hip/hip_runtime.h"
    )


def host_compiler() -> list[str]:
    """Command of the host C++ compiler."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise ToolMissing("no host C++ compiler: install g++ or set CXX")


def _run(command: Sequence[str | os.PathLike]) -> None:
    result = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.stdout:
        sys.stderr.write(result.stdout)
    if result.returncode:
        raise SystemExit(result.returncode)


def compile_hip(source: str | Path, out: str | Path, flags: Sequence[str] = ()) -> None:
    """Compiles one HIP source to a host object with the gfx950 code object inside.

    clang would start a linker that ziglang does not ship as a program, so each step is a call.
    """
    unit = hashlib.sha256(str(Path(source).resolve()).encode()).hexdigest()[:16]
    common = [*clang(), "-x", "hip", "--offload-arch=gfx950", "-nogpulib", "-nogpuinc"]
    common += [f"-cuid={unit}", "-include", str(RUNTIME / "prelude.h")]
    common += ["-isystem", str(hip_include()), *_DEFINES, *flags]
    with tempfile.TemporaryDirectory() as folder:
        assembly, device, image = (
            str(Path(folder, n)) for n in ("device.s", "device.o", "device.co")
        )
        only_device = ["--cuda-device-only", "--no-gpu-bundle-output"]
        _run([*common, *only_device, "-S", "-o", assembly, str(source)])
        assembler = [*_tool("GFX950_EMULATOR_CLANG", "clang"), "-target", "amdgcn-amd-amdhsa"]
        _run([*assembler, "-mcpu=gfx950", "-c", "-o", device, assembly])
        _run([*_tool("GFX950_EMULATOR_LLD", "ld.lld"), "-shared", "-o", image, device])
        embed = ["-Xclang", "-fcuda-include-gpubinary", "-Xclang", image]
        _run([*common, "--cuda-host-only", *embed, "-fPIC", "-c", "-o", str(out), str(source)])


def build_runtime(folder: str | Path | None = None) -> Path:
    """Folder with the stand-in libamdhip64.so, built if it is missing or its sources changed."""
    sources = sorted(RUNTIME.glob("*.cpp"))
    config = _python_config()
    inputs = [
        config.encode(),
        str(hip_include()).encode(),
        *(p.read_bytes() for p in sorted(RUNTIME.iterdir())),
    ]
    key = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    if folder is None:
        cache = os.environ.get("GFX950_EMULATOR_CACHE", "~/.cache/gfx950_emulator")
        folder = Path(cache).expanduser() / key
    folder = Path(folder)
    stamp = folder / "key"
    if stamp.exists() and stamp.read_text() == key:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        Path(temporary, "python_config.h").write_text(config)
        built = Path(temporary, LIBRARY)
        command = [*host_compiler(), "-std=c++17", "-O2", "-fPIC", "-shared", *_DEFINES]
        command += [f"-I{temporary}", "-isystem", str(hip_include()), *map(str, sources)]
        _run([*command, f"-Wl,-soname,{LIBRARY}", "-o", str(built), "-ldl", "-pthread"])
        os.replace(built, folder / LIBRARY)
    for name in _SONAMES:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(LIBRARY)
    stamp.write_text(key)
    return folder


def _python_config() -> str:
    """Where a plain C++ program finds this Python: python_config.h."""
    variables = sysconfig.get_config_vars("LIBDIR", "INSTSONAME")
    library = str(Path(*variables)) if all(variables) else "libpython3.so"
    folders = [str(Path(__file__).parents[1]), *(p for p in sys.path if p.endswith("-packages"))]
    attach = (
        "try:\n"
        "    from gfx950_emulator.hip_host import attach\n"
        "except ModuleNotFoundError:\n"
        "    import sys\n"
        f"    sys.path += {folders!r}\n"
        "    from gfx950_emulator.hip_host import attach\n"
    )
    return (
        f'constexpr char kLibPython[] = R"~({library})~";\n'
        f'constexpr char kPythonHome[] = R"~({sys.base_prefix})~";\n'
        f'constexpr char kAttach[] = R"~({attach})~";\n'
    )


def link_flags(folder: Path) -> list[str]:
    """What links a program or library against the stand-in in `folder`."""
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lamdhip64"]


def main(arguments: Sequence[str]) -> None:
    """The command line described at the top."""
    if list(arguments) == ["--runtime"]:
        print(build_runtime())
        return
    out, only_compile, sources, flags, linking = "", False, [], [], []
    rest = iter(arguments)
    for a in rest:
        if a == "-o":
            out = next(rest)
        elif a == "-c":
            only_compile = True
        elif a == "-shared" or a.startswith(("-l", "-L", "-Wl,")):
            linking.append(a)
        elif a in ("-I", "-D", "-include", "-isystem"):
            flags += [a, next(rest)]
        elif a.startswith("-"):
            flags.append(a)
        else:
            sources.append(a)
    if not sources or (only_compile and out and len(sources) > 1):
        raise SystemExit(
            "usage: python -m gfx950_emulator.hipcc [-c] [-shared] [-o OUT] [FLAGS] SOURCES"
        )
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for i, source in enumerate(sources):
            if source.endswith((".o", ".a", ".so")):
                objects.append(source)
                continue
            own = (
                out
                if only_compile and out
                else f"{Path(source).stem}.o"
                if only_compile
                else f"{folder}/{i}.o"
            )
            objects.append(own)
            if source.endswith((".hip", ".cu")):
                compile_hip(source, own, flags)
            else:
                host = [
                    *host_compiler(),
                    "-fPIC",
                    "-isystem",
                    str(hip_include()),
                    *_DEFINES,
                    *flags,
                ]
                _run([*host, "-c", "-o", own, source])
        if not only_compile:
            _run(
                [
                    *host_compiler(),
                    *objects,
                    "-o",
                    out or "a.out",
                    *linking,
                    *link_flags(build_runtime()),
                ]
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ToolMissing as error:
        raise SystemExit(f"gfx950_emulator.hipcc: {error}") from None
