# SPDX-License-Identifier: MIT
"""The machine code that the compiler makes of csrc/hip for gfx950, without ROCm and without a GPU.

`make gfx950` (CMake target gfx950, PyPI's ziglang as the compiler) builds it; so does this module.
"""

from __future__ import annotations

import pytest
from gfx950_asm import LANES, Kernel, read_kernels
from gfx950_build import code_objects
from matrix_kernels import CONFIGS

CONVERTER = "v_cvt_scalef32_pk_fp4_f32"
CHANNELS = 32  # a lane owns one scale group


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    """All but those of the GEMM and of MoE, which test_gfx950_gemm.py and _moe_*.py look at."""
    others = ("gemm", "moe_")
    paths = sorted(p for p in code_objects().glob("*.s") if not p.name.startswith(others))
    return [kernel for path in paths for kernel in read_kernels(path)]


def of_stem(kernels: list[Kernel], *stems: str) -> list[Kernel]:
    return [kernel for kernel in kernels if kernel.name.split()[0] in stems]


def is_valu(instruction: str) -> int:
    return int(instruction.startswith("v_"))


def valu_per_channel(kernel: Kernel) -> float:
    converter = "v_cvt_scalef32_pk_f32_fp4" if kernel.name == "dequant" else CONVERTER
    if kernel.name.startswith("rotate "):
        converter = "v_pk_fma_f32"
    return kernel.least_path(lambda i: i.startswith(converter), is_valu) / CHANNELS


def channels_of(kernel: Kernel) -> int:
    """Of one lane in one pass over a tile."""
    if not kernel.name.startswith("rotate_matrix"):
        return CHANNELS
    size, tiles = kernel.name.split(" RS ")[1].split("x")[0].split()
    return CHANNELS * int(tiles) * max(1, int(size) // 128)


def test_every_instance_is_there(kernels: list[Kernel]) -> None:
    sizes = (16, 32, 64, 128, 256)
    dtypes = ("bf16", "fp16", "fp32")
    expected = {
        f"rotate_quant {d} RS {s}{m}" for d in dtypes for s in (0, *sizes) for m in ("", " mse")
    }
    expected |= {f"rotate {d} RS {s}" for d in dtypes for s in sizes}
    expected |= {f"rotate_matrix_quant {config}{m}" for config in CONFIGS for m in ("", " mse")}
    expected |= {f"rotate_matrix {config}" for config in CONFIGS}
    expected |= {"dequant", "shuffle_scales", "shuffle_weight"}
    assert {kernel.name for kernel in kernels} == expected


def test_no_scratch_and_no_spills(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        for key in (".private_segment_fixed_size", ".vgpr_spill_count", ".sgpr_spill_count"):
            assert kernel.metadata[key] == 0, f"{kernel.name}: {key} {kernel.metadata[key]}"
        assert not any(m.startswith(("scratch_", "flat_")) for m in kernel.mnemonics), kernel.name


def test_at_least_four_waves_per_simd(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        least = 4
        if kernel.name.startswith("rotate_matrix") and " RS 256" in kernel.name:
            least = 2  # the matrix fills the LDS with one workgroup, of two waves a SIMD
        waves = kernel.waves_per_simd
        assert waves >= least, f"{kernel.name}: {kernel.metadata['.vgpr_count']} VGPRs"


def test_hardware_converter(kernels: list[Kernel]) -> None:
    """16 conversions of a pair for the 32 channels of a lane, and no other way to make a code."""
    for kernel in of_stem(kernels, "rotate_quant", "rotate_matrix_quant"):
        count = sum(i.startswith(CONVERTER) for i in kernel.instructions)
        candidates = 2 if kernel.name.endswith("mse") else 1
        least = candidates * channels_of(kernel) // 2
        assert count == least, f"{kernel.name}: {count} x {CONVERTER}"
    (dequant,) = of_stem(kernels, "dequant")
    assert (
        sum(i.startswith("v_cvt_scalef32_pk_f32_fp4") for i in dequant.instructions)
        == CHANNELS // 2
    )


def test_only_16_byte_vector_loads(kernels: list[Kernel]) -> None:
    """On every path, tails and unaligned rows included; x with the non-temporal hint."""
    for kernel in of_stem(
        kernels, "rotate_quant", "rotate", "rotate_matrix_quant", "rotate_matrix"
    ):
        loads = [
            i
            for i in kernel.instructions
            if i.split()[0].startswith(("global_load", "buffer_load"))
        ]
        assert {i.split()[0] for i in loads} == {"global_load_dwordx4"}, kernel.name
        streamed = sum(i.endswith(" nt") for i in loads)
        assert streamed >= (8 if "fp32" in kernel.name else 4), (
            f"{kernel.name}: {streamed} nt loads"
        )


def test_codes_leave_in_16_byte_stores(kernels: list[Kernel]) -> None:
    for kernel in of_stem(kernels, "rotate_quant"):
        stores = [i.split()[0] for i in kernel.instructions if i.startswith("global_store")]
        # codes; natural scales; a dword of a shuffled scale tile, with data or only padding
        expected = {"global_store_dwordx4", "global_store_byte", "global_store_dword"}
        assert set(stores) == expected, kernel.name
        assert stores.count("global_store_dwordx4") == 1, kernel.name


def test_matrix_products(kernels: list[Kernel]) -> None:
    """Every product on the matrix unit, by the instruction whose K the block fills; operands from
    LDS are transposed while they are read."""
    for kernel in of_stem(kernels, "rotate_matrix_quant", "rotate_matrix"):
        size = int(kernel.name.split(" RS ")[1].split()[0])
        shape = "16x16x16" if size == 16 else "16x16x32"
        matrix = [i.split()[0] for i in kernel.instructions if i.startswith("v_mfma")]
        assert set(matrix) == {f"v_mfma_f32_{shape}_bf16"}, kernel.name
        steps = max(1, size // 32)
        assert len(matrix) == channels_of(kernel) // 4 * steps, f"{kernel.name}: {len(matrix)}"
        reads = {m for m in kernel.mnemonics if m.startswith("ds_read")}
        assert reads == {"ds_read_b64_tr_b16"}, f"{kernel.name}: {sorted(reads)}"
        assert not any("accvgpr" in m for m in kernel.mnemonics), kernel.name


def test_packed_arithmetic(kernels: list[Kernel]) -> None:
    """The butterflies inside a lane are packed: half an instruction a channel and step."""
    for kernel in of_stem(kernels, "rotate_quant", "rotate"):
        if " RS 0" in kernel.name:
            continue
        packed = sum(i.startswith(("v_pk_add_f32", "v_pk_fma_f32")) for i in kernel.instructions)
        steps = int(kernel.name.split(" RS ")[1].split()[0]).bit_length() - 1
        assert packed >= steps * CHANNELS // 2, f"{kernel.name}: {packed} packed for {steps} steps"


def test_valu_issue_stays_below_the_memory_bound(kernels: list[Kernel]) -> None:
    """Counted instructions against the time the bytes take: modelled, not timed.

    MI355X: 256 CUs x 4 SIMDs issue 16 lanes of a VALU instruction a clock at 2.4 GHz; HBM moves
    8 TB/s; a bf16 channel moves 2 + 1/2 + 1/32 bytes. So 12.4 instructions a channel are free.
    """
    budget = 256 * 4 * 16 * 2.4e9 / 8e12 * (2 + 1 / 2 + 1 / 32)
    for kernel in of_stem(kernels, "rotate_quant"):
        if "bf16" in kernel.name and not kernel.name.endswith("mse"):
            assert valu_per_channel(kernel) < budget, (
                f"{kernel.name}: {valu_per_channel(kernel):.2f}"
            )


def test_print_the_table(kernels: list[Kernel], capsys) -> None:
    """Counted in the code object; VALU per channel is the full-tile path of one wave tile."""
    heads = ("VGPR", "SGPR", "LDS", "waves/SIMD", "VALU/channel")
    rows = [f"{'gfx950 kernel':40}" + "".join(f" {head:>{max(5, len(head))}}" for head in heads)]
    for kernel in kernels:
        meta = kernel.metadata
        # A matrix kernel has no one path; test_gfx950_rotate_matrix.py counts what it executes.
        counted = not kernel.name.startswith(("shuffle", "rotate_matrix", "gemm"))
        per_channel = f"{valu_per_channel(kernel):.2f}" if counted else ""
        rows.append(
            f"{kernel.name:40} {meta['.vgpr_count']:5} {meta['.sgpr_count']:5} "
            f"{meta['.group_segment_fixed_size']:5} {kernel.waves_per_simd:10} {per_channel:>12}"
        )
    with capsys.disabled():
        print("\n" + "\n".join(rows))
    assert len(rows) == len(kernels) + 1 and LANES == 64
