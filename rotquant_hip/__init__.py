# SPDX-License-Identifier: MIT
"""Online rotation and MXFP4 quantisation for AMD gfx950, with a CPU version of every op.

Importing needs no GPU and touches no device. The ops are ``torch.ops.rotquant_hip.*``; the
functions here are the same ops with types and documentation.
"""

from rotquant_hip import cli

if cli.is_starting():
    cli.start()  # the command line: --help and argument errors end here, before torch is loaded

from rotquant_hip._loader import load_extension  # noqa: E402

BUILD_INFO = load_extension()

from rotquant_hip import autograd, dispatch, fake, fake_moe  # noqa: E402, F401  (register the fakes)
from rotquant_hip.modules import QuantizedActivation, RotQuantLinear  # noqa: E402
from rotquant_hip.moe import (  # noqa: E402
    MoeSorting,
    fused_moe,
    moe_gemm1,
    moe_gemm1_configs,
    moe_gemm2,
    moe_gemm2_atomic_,
    moe_gemm2_configs,
    moe_gemm2_mxfp4,
    moe_reduce,
    moe_rotate_quant,
    moe_sort,
    moe_sort_scales,
    moe_sort_zero_,
)
from rotquant_hip.moe_layer import RotQuantMoE, route  # noqa: E402
from rotquant_hip.ops import (  # noqa: E402
    GATE_MODES,
    GROUP,
    ROTATION_SIZES,
    SCALE_MODES,
    dequant,
    fake_quant,
    gemm_a4w4,
    gemm_configs,
    quant,
    rotate,
    rotate_quant,
    shuffle_scales,
    shuffle_weight,
    unshuffle_scales,
    unshuffle_weight,
)
from rotquant_hip.version import __version__  # noqa: E402

__all__ = [
    "BUILD_INFO",
    "GATE_MODES",
    "GROUP",
    "MoeSorting",
    "QuantizedActivation",
    "ROTATION_SIZES",
    "RotQuantLinear",
    "RotQuantMoE",
    "SCALE_MODES",
    "__version__",
    "dequant",
    "dispatch",
    "fake_quant",
    "fused_moe",
    "gemm_a4w4",
    "gemm_configs",
    "moe_gemm1",
    "moe_gemm1_configs",
    "moe_gemm2",
    "moe_gemm2_atomic_",
    "moe_gemm2_configs",
    "moe_gemm2_mxfp4",
    "moe_reduce",
    "moe_rotate_quant",
    "moe_sort",
    "moe_sort_scales",
    "moe_sort_zero_",
    "quant",
    "rotate",
    "rotate_quant",
    "route",
    "shuffle_scales",
    "shuffle_weight",
    "unshuffle_scales",
    "unshuffle_weight",
]
