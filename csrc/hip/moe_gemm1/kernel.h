// SPDX-License-Identifier: MIT
// Launchers of single instances, defined in inst/.
#pragma once

#include "core/moe_configs.h"
#include "hip/arch/launch.h"
#include "hip/moe_gemm1/config.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

// `workgroups`: for as many blocks as any routing could need.
template <MoeGemmKind kKind, class Tile>
void launch_moe_gemm1(const MoeGemm1Args& args, unsigned workgroups, hipStream_t stream);

}  // namespace rotquant::hip
#endif
