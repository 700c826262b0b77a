// SPDX-License-Identifier: MIT
// Launcher of a single instance, defined in inst/.
#pragma once

#include "hip/arch/launch.h"
#include "hip/moe_gemm2/config.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

template <class Tile, MoeFinish kFinish>
void launch_moe_gemm2(const MoeGemm2Args& args, uint32_t workgroups, hipStream_t stream);

}  // namespace rotquant::hip
#endif
