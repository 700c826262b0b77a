# SPDX-License-Identifier: MIT
"""Follows the install paths of the documents, each in an environment that holds nothing else.

Works on an unpacked sdist, so that what it lacks is missed. The steps are in documents.py. With
names of environments runs only these.

    python tests/install_paths.py [package] [emulator]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from documents import ROOT, RUN

sys.path.insert(0, str(ROOT / "emulator/tests"))
from assemble import compile_hip  # noqa: E402
from emulator_example import KERNEL  # noqa: E402

PROGRAM = """
#include <hip/hip_runtime.h>
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
int main() {
  float host[64], *device;
  for (int i = 0; i < 64; ++i) host[i] = i;
  if (hipMalloc(&device, sizeof host) != hipSuccess) return 1;
  if (hipMemcpy(device, host, sizeof host, hipMemcpyHostToDevice) != hipSuccess) return 1;
  twice<<<1, 64>>>(device);
  if (hipMemcpy(host, device, sizeof host, hipMemcpyDeviceToHost) != hipSuccess) return 1;
  return host[21] == 42 ? 0 : 1;
}
"""


def sdist(folder: Path) -> Path:
    """The unpacked source distribution of this checkout."""
    code = "import sys, rotquant_build; rotquant_build.build_sdist(sys.argv[1])"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "build_backend")}
    subprocess.run(
        [sys.executable, "-c", code, folder],
        cwd=ROOT,
        env=environ,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder)
    return next(path for path in folder.iterdir() if path.is_dir())


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Variables of a shell in which a new virtual environment is active."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept["PATH"] = f"{folder}/bin{os.pathsep}/usr/local/bin:/usr/bin:/bin"
    # One level of the emulator's core, not three: it is the package that is tried.
    return {**kept, "GFX950_EMULATOR_LEVELS": "2", "PIP_QUIET": "1", **variables}


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "sdist").mkdir()
        tree = sdist(work / "sdist")
        (work / "kernel.co").write_bytes(compile_hip(KERNEL))
        (work / "program.hip").write_text(PROGRAM)
        files = {"KERNEL": str(work / "kernel.co"), "PROGRAM": str(work / "program.hip")}
        for name in names or RUN:
            environ = environment(work / name, **files)
            for _, command in RUN[name]:
                start = time.monotonic()
                print(f"[{name}] {command}", flush=True)
                done = subprocess.run(
                    ["bash", "-c", command],
                    cwd=tree,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                if done.returncode:
                    raise SystemExit(f"{done.stdout}\n[{name}] {command}: exit {done.returncode}")
                last = done.stdout.strip().splitlines()[-1:]
                print(f"    {time.monotonic() - start:.0f} s {' '.join(last)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
