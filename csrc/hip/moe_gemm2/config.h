// SPDX-License-Identifier: MIT
// What a launch of moe_gemm2 passes. Its tiles are those of the dense GEMM.
#pragma once

#include "core/moe_configs.h"
#include "hip/gemm_a4w4/config.h"

namespace rotquant::hip {

struct MoeGemm2Args {
  MoeGemm2Params params;
  int tiles_n;
};

}  // namespace rotquant::hip
