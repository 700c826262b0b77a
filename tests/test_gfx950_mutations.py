# SPDX-License-Identifier: MIT
"""A wrong kernel is caught: its assembly is changed in one place, and the check must fail.

Each change is one that compiles, runs and looks plausible; on hardware it would be silent.
"""

from __future__ import annotations

import gfx950_kernels as kernels
import pytest
from test_gfx950_execution import check, difficult

STEM = "rotate_quant-inst-bf16"
SYMBOL = r"19rotate_quant_kernel\S*ELi64E\S*ELb0E"

# name: (what is replaced, by what, how many of the matches: 0 is all)
CHANGES = {
    "a lane index: neighbours two apart": (r"quad_perm:\[1,0,3,2\]", "quad_perm:[2,3,0,1]", 1),
    "a lane index: the swap of the other bit": (r"v_permlane16_swap", "v_permlane32_swap", 1),
    "a byte select: twice the same byte": (r" op_sel:\[0,0,1,0\]", " op_sel:[0,0,1,1]", 1),
    "a byte select: byte 0 for byte 2": (r" op_sel:\[0,0,0,1\]", "", 1),
    "operands of a butterfly": (r" neg_lo:\[0,1\] neg_hi:\[0,1\]", " neg_lo:[1,0] neg_hi:[1,0]", 1),
    "a maximum that drops NaN": (r"v_maximum3_f32", "v_max3_f32", 0),
    "the barrier between writing and reading LDS": (r"\n\ts_barrier\n", "\n\ts_nop 0\n", 0),
    "the wait before LDS is read": (r"s_waitcnt lgkmcnt\(0\)\n\ts_barrier", "s_barrier", 0),
    "the wait for the loads of x": (r"s_waitcnt vmcnt\(0\)", "s_waitcnt vmcnt(3)", 0),
    "the wait for a scalar load": (r"s_waitcnt lgkmcnt\(0\)", "s_nop 0", 1),
    "the scale byte of a NaN group": (r", 0xff$", ", 0xfe", 0),
}


@pytest.fixture(scope="module")
def assembly() -> tuple[str, int, int]:
    """The text, and where in it the kernel for RS 64 begins and ends."""
    return kernels.assembly_of(STEM, SYMBOL)


def run_all() -> None:
    x = difficult("bf16", 70, 1088)
    for shuffle in (False, True):
        check(x, 64, shuffle=shuffle)


def test_the_unchanged_kernel_passes(assembly) -> None:
    with kernels.replaced(STEM, assembly[0]):
        run_all()


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrong_kernel_is_caught(change: str, assembly, capsys) -> None:
    wrong = kernels.changed(*assembly, CHANGES[change])
    how = kernels.assert_caught(STEM, wrong, run_all)
    with capsys.disabled():
        print(f"\n{change}: {how}")
