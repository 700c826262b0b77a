// SPDX-License-Identifier: MIT
// Launchers of single instances, defined in inst/.
#pragma once

#include "hip/arch/launch.h"
#include "hip/moe_rotate_quant/config.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

template <class Config>
void launch_moe_rotate_quant(const MoeRotateQuantArgs& args, hipStream_t stream);

}  // namespace rotquant::hip
#endif
