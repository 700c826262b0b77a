# SPDX-License-Identifier: MIT
"""Runs the Python of emulator/README.md on a code object with its kernel `axpy`.

python tests/emulator_example.py kernel.co
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "emulator/README.md"
KERNEL = """
extern "C" __attribute__((global)) void axpy(const float* x, float* y, float a, int n) {
  const int i = __builtin_amdgcn_workgroup_id_x() * 256 + __builtin_amdgcn_workitem_id_x();
  if (i < n) y[i] = a * x[i];
}
"""

if __name__ == "__main__":
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict = {}
    exec(block.replace("kernel.co", sys.argv[1]), names)
    assert (names["y"] == 2.5).all()
