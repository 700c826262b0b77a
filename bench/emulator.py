# SPDX-License-Identifier: MIT
"""Speed of the emulator on one core, in CPU time: VALU lane operations, converts, matrix products.

pip install './emulator[test]' && python bench/emulator.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emulator/tests"))
import gfx950_emulator as emu  # noqa: E402
from assemble import assemble, kernel, module  # noqa: E402

LOOPS = 20000
BODIES = {
    "v_fma_f32": ("  v_fma_f32 v10, v11, v12, v13\n" * 16, 16),
    "v_add_u32": ("  v_add_u32 v10, v11, v12\n" * 16, 16),
    "v_pk_fma_f32": ("  v_pk_fma_f32 v[10:11], v[12:13], v[14:15], v[16:17]\n" * 16, 16),
    "v_add_f32 quad_perm": (
        "  v_add_f32_dpp v10, v11, v12 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf\n" * 16, 16),
    "v_cvt_scalef32_pk_fp4_f32": ("  v_cvt_scalef32_pk_fp4_f32 v10, v11, v12, v13\n" * 16, 16),
    "v_exp_f32": ("  v_exp_f32 v10, v11\n" * 16, 16),
    "v_mfma_scale_f32_16x16x128 fp4": (
        "  v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[10:13], v[14:17], v[40:43], v20, v21 "
        "op_sel_hi:[0,0,0] cbsz:4 blgp:4\n" * 4, 4),
    "v_mfma_scale_f32_32x32x64 fp4": (
        "  v_mfma_scale_f32_32x32x64_f8f6f4 v[40:55], v[10:13], v[14:17], v[40:55], v20, v21 "
        "op_sel_hi:[0,0,0] cbsz:4 blgp:4\n" * 4, 4),
    "v_mfma_scale_f32_16x16x128 fp8": (
        "  v_mfma_scale_f32_16x16x128_f8f6f4 v[40:43], v[10:17], v[30:37], v[40:43], v20, v21 "
        "op_sel_hi:[0,0,0]\n" * 4, 4),
    "v_mfma_f32_16x16x32_bf16": (
        "  v_mfma_f32_16x16x32_bf16 v[40:43], v[10:13], v[14:17], v[40:43]\n" * 4, 4),
}  # fmt: skip


def main() -> None:
    names = [f"k{i}" for i in range(len(BODIES))]
    clear = "".join(f"  v_mov_b32 v{i}, 0\n" for i in range(1, 60))
    kernels = [
        kernel(n, f"{clear}  s_movk_i32 s4, {LOOPS}\n{n}_loop:\n{body}  s_sub_u32 s4, s4, 1\n"
                  f"  s_cmp_lg_u32 s4, 0\n  s_cbranch_scc1 {n}_loop\n")
        for n, (body, _) in zip(names, BODIES.values(), strict=True)
    ]  # fmt: skip
    obj = emu.load(assemble(module(kernels, names)))
    empty = np.zeros(1, np.int32)
    for check in (False, True):
        print(f"check={check}")
        for name, (label, (_, per_loop)) in zip(names, BODIES.items(), strict=True):
            start = time.process_time()
            obj.run(name, grid=1, block=64, args=[empty, empty], check=check, threads=1)
            rate = LOOPS * per_loop / (time.process_time() - start)
            millions = rate / 1e6
            print(f"  {label:32s} {millions:9.3f} M/s  {64 * millions:9.1f} M lane operations/s")


if __name__ == "__main__":
    main()
