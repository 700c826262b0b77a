// SPDX-License-Identifier: MIT
// What is fixed at compile time for one instance of the GEMM over gate and up, and what a launch
// passes. The tiles are those of the dense GEMM.
#pragma once

#include "core/moe.h"
#include "hip/gemm_a4w4/config.h"

namespace rotquant::hip {

// 32 channels of the intermediate, a scale group: two fragments of gate and two of up.
constexpr int kUnitFrags = 4;

struct MoeGemm1Args {
  MoeGemm1Params params;
  int tiles_n;
};

}  // namespace rotquant::hip
