// SPDX-License-Identifier: MIT
// Launchers of single instances, defined in inst/.
#pragma once

#include "hip/arch/launch.h"
#include "hip/rotate_quant/config.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

inline dim3 grid_of(const TilePlan& plan) { return dim3(plan.grid_groups, plan.grid_rows); }

template <class Config>
void launch_rotate_quant(const RotateQuantArgs& args, hipStream_t stream);

template <class Config>
void launch_rotate(const RotateArgs& args, hipStream_t stream);

}  // namespace rotquant::hip
#endif
