# SPDX-License-Identifier: MIT
"""Code objects for the tests, made by the clang 22 and lld of the PyPI package ziglang. No ROCm."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_CACHE = Path(tempfile.gettempdir()) / "gfx950_emulator_tests"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def _zig(*command: str) -> None:
    _run(sys.executable, "-m", "ziglang", *command)


def assemble(source: str) -> bytes:
    """Assembly text to a linked code object."""
    return _build(source, ".s", ())


def compile_hip(source: str, *flags: str) -> bytes:
    """HIP device source (no headers) to a linked code object."""
    return _build(source, ".hip", flags)


@cache
def _build(source: str, suffix: str, flags: tuple[str, ...]) -> bytes:
    _CACHE.mkdir(exist_ok=True)
    digest = hashlib.sha256("\0".join((source, suffix, *flags)).encode()).hexdigest()[:24]
    out = _CACHE / f"{digest}.co"
    if not out.exists():
        text = out.with_suffix(suffix)
        text.write_text(source)
        assembly = out.with_suffix(".dev.s") if suffix == ".hip" else text
        if suffix == ".hip":
            _zig("clang", "-x", "hip", "--offload-arch=gfx950", "--cuda-device-only", "-nogpulib", "-nogpuinc",
                 "--no-gpu-bundle-output", "-O3", *flags, "-S", "-o", str(assembly), str(text))  # fmt: skip
        target = ("-target", "amdgcn-amd-amdhsa", "-mcpu=gfx950")
        _zig("clang", *target, "-c", str(assembly), "-o", str(out.with_suffix(".o")))
        _zig("ld.lld", "-shared", str(out.with_suffix(".o")), "-o", str(out))
    return out.read_bytes()


def kernel(name: str, body: str, *, lds: int = 0, scratch: int = 0) -> str:
    """One assembly kernel with s[0:1] = kernarg, s2 = workgroup id, v0 = work item; two pointers in
    kernarg."""
    return f"""
  .text
  .globl {name}
  .p2align 8
  .type {name},@function
{name}:
{body}
  s_endpgm
.L{name}_end:
  .size {name}, .L{name}_end-{name}
  .rodata
  .p2align 6
  .amdhsa_kernel {name}
    .amdhsa_group_segment_fixed_size {lds}
    .amdhsa_private_segment_fixed_size {scratch}
    .amdhsa_enable_private_segment {1 if scratch else 0}
    .amdhsa_kernarg_size 16
    .amdhsa_user_sgpr_kernarg_segment_ptr 1
    .amdhsa_user_sgpr_count 2
    .amdhsa_system_sgpr_workgroup_id_x 1
    .amdhsa_next_free_vgpr 256
    .amdhsa_accum_offset 128
    .amdhsa_next_free_sgpr 96
    .amdhsa_reserve_vcc 1
    .amdhsa_float_denorm_mode_32 3
    .amdhsa_float_denorm_mode_16_64 3
    .amdhsa_ieee_mode 1
    .amdhsa_dx10_clamp 1
  .end_amdhsa_kernel
"""


def module(kernels: list[str], names: list[str], lds: int = 0) -> str:
    """A whole assembly file: kernels and the metadata that names their two pointer arguments."""
    entries = "".join(
        f"""
  - .args:
      - {{.address_space: global, .offset: 0, .size: 8, .value_kind: global_buffer}}
      - {{.address_space: global, .offset: 8, .size: 8, .value_kind: global_buffer}}
    .group_segment_fixed_size: {lds}
    .kernarg_segment_align: 8
    .kernarg_segment_size: 16
    .max_flat_workgroup_size: 1024
    .name: {n}
    .private_segment_fixed_size: 0
    .sgpr_count: 96
    .symbol: {n}.kd
    .vgpr_count: 128
    .wavefront_size: 64"""
        for n in names
    )
    head = '  .amdgcn_target "amdgcn-amd-amdhsa--gfx950"\n'
    tail = f"""
  .amdgpu_metadata
---
amdhsa.kernels:{entries}
amdhsa.target: amdgcn-amd-amdhsa--gfx950
amdhsa.version: [1, 2]
...
  .end_amdgpu_metadata
"""
    return head + "".join(kernels) + tail


def run_lines(lines: str, data, outputs: int, *, lds: int = 0, block: int | None = None, **options):
    """Runs `lines` on uint32 data [items, inputs] (see instruction_kernel); returns uint32 [items,
    outputs]."""
    import numpy as np

    import gfx950_emulator as emu

    items, inputs = data.shape
    obj = emu.load(
        assemble(module([instruction_kernel("t", lines, inputs, outputs, lds)], ["t"], lds))
    )
    out = np.zeros((items, outputs), np.uint32)
    block = block or min(items, 1024)
    data = np.ascontiguousarray(data, np.uint32)
    obj.run("t", grid=items // block, block=block, args=[data, emu.Uninitialized(out)], **options)
    return out


def instruction_kernel(name: str, lines: str, inputs: int, outputs: int, lds: int = 0) -> str:
    """A kernel that loads `inputs` dwords per work item to v10.., runs `lines`, stores `outputs`
    dwords from v60...

    The work item's index is v0 + 1024 * workgroup: use one workgroup, or workgroups of 1024.
    """
    loads = "\n".join(
        f"  global_load_dword v{10 + i}, v1, s[4:5] offset:{4 * i}" for i in range(inputs)
    )
    stores = "\n".join(
        f"  global_store_dword v2, v{60 + i}, s[6:7] offset:{4 * i}" for i in range(outputs)
    )
    body = f"""
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_lshl_b32 s3, s2, 10
  v_add_u32 v3, s3, v0
  v_mul_u32_u24 v1, {4 * max(inputs, 1)}, v3
  v_mul_u32_u24 v2, {4 * max(outputs, 1)}, v3
  s_waitcnt lgkmcnt(0)
{loads}
  s_waitcnt vmcnt(0)
{lines}
  s_waitcnt vmcnt(0) lgkmcnt(0)
{stores}
"""
    return kernel(name, body, lds=lds)
