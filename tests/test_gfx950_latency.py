# SPDX-License-Identifier: MIT
"""Every family of kernels with memory operations that take effect as late as its waits allow, and
at random moments before that; and kernels that lack a wait, without the emulator's checks.

All kernel tests in late mode: `GFX950_EMULATOR_LATENCY=late pytest tests -k gfx950`.
"""

from __future__ import annotations

import gfx950_emulator as emu
import gfx950_kernels as kernels
import pytest
import test_gfx950_execution as execution
import test_gfx950_gemm as gemm
import test_gfx950_moe_gemm1 as gemm1
import test_gfx950_moe_gemm2 as gemm2
import test_gfx950_moe_rotate_quant as moe_rotate
import test_gfx950_moe_sort as moe_sort
import test_gfx950_mutations as rotate_quant
import test_gfx950_rotate_matrix as rotate_matrix


def moe_rotate_matrix() -> None:
    sorting = moe_rotate.random_sorting(40, 6, 16, 16, dropped=0.1)
    (config,) = (c for c in moe_rotate.BF16 if c.size == 64)
    x = moe_rotate.difficult("bf16", 40, 320)
    moe_rotate.check_matrix(config, x, sorting, 6, rotate_matrix.dense(64))


FAMILIES = {
    "rotate_quant": rotate_quant.run_all,
    "rotate": lambda: execution.test_rotate("bf16", 64),
    "dequant": lambda: execution.test_dequant(True),
    "layout": lambda: execution.test_layout_kernels("separated"),
    "rotate_matrix": rotate_matrix.run_rs_64,
    "moe_rotate_quant": moe_rotate.run_rs_64,
    "moe_rotate_matrix": moe_rotate_matrix,
    "moe_sort_scales": lambda: moe_rotate.test_sort_scales(True),
    "moe_reduce": gemm2.run_reduce_all,
    **{f"moe_sort {n}": lambda n=n: moe_sort.run_all(n) for n in ("alone", "apart")},
    **{f"gemm {n}": lambda n=n: gemm.run_all(n) for n in gemm.CHANGES},
    **{f"moe_gemm1 {n}": lambda n=n: gemm1.run_all(n) for n in gemm1.CHANGES},
    **{f"moe_gemm2 {n}": lambda n=n: gemm2.run_one(*n) for n in gemm2.CHANGES},
}


@pytest.mark.parametrize("latency", ["late", "1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, latency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GFX950_EMULATOR_LATENCY", latency)
    FAMILIES[family]()


def rotate_quant_code() -> tuple[str, str, int, int]:
    return rotate_quant.STEM, *kernels.assembly_of(rotate_quant.STEM, rotate_quant.SYMBOL)


def staged_gemm_code() -> tuple[str, str, int, int]:
    return gemm.one_kernel("staged_256x256")


NOTHING = "s_nop 0"
WITHOUT_WAITS = {  # code, the wait, what takes its place, a run
    "vector memory": (rotate_quant_code, r"s_waitcnt vmcnt\(0\)", NOTHING, rotate_quant.run_all),
    "LDS": (
        rotate_quant_code,
        r"s_waitcnt lgkmcnt\(0\)\n\ts_barrier",
        f"{NOTHING}\n\ts_barrier",
        rotate_quant.run_all,
    ),
    "loads to LDS": (
        staged_gemm_code,
        r"s_waitcnt vmcnt\(0\)",
        NOTHING,
        lambda: gemm.run_all("staged_256x256"),
    ),
}


@pytest.mark.parametrize("case", WITHOUT_WAITS)
def test_a_missing_wait_shows_without_checks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not when everything arrives at once."""
    code, wait, instead, run = WITHOUT_WAITS[case]
    stem, *assembly = code()
    wrong = kernels.changed(*assembly, (wait, instead, 0))
    checked = emu.Object.run

    def unchecked(self: emu.Object, name: str, **options) -> emu.Stats:
        return checked(self, name, **options | {"check": False})

    monkeypatch.setattr(emu.Object, "run", unchecked)
    with kernels.replaced(stem, wrong):
        run()
    monkeypatch.setenv("GFX950_EMULATOR_LATENCY", "late")
    kernels.assert_caught(stem, wrong, run)
