// SPDX-License-Identifier: MIT
// Launchers of single instances, defined in inst/.
#pragma once

#include "hip/arch/launch.h"
#include "hip/gemm_a4w4/config.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

template <class Tile>
void launch_gemm(const GemmArgs& args, hipStream_t stream);

void launch_gemm_sum(const GemmArgs& args, hipStream_t stream);

}  // namespace rotquant::hip
#endif
