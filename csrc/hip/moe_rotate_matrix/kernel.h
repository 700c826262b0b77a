// SPDX-License-Identifier: MIT
// Launchers of single instances, defined in inst/.
#pragma once

#include "hip/arch/launch.h"
#include "hip/moe_rotate_matrix/config.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

// moe_rotate_quant() of hip/backend.h for a rotation with a matrix (`matrix_bf16`).
void moe_rotate_quant_by_matrix(const MoeRotateQuantParams& params, hipStream_t stream);

template <class Config, ElementFormat kElement, bool kMse>
void launch_moe_rotate_matrix(const MoeRotateMatrixArgs& args, hipStream_t stream);

}  // namespace rotquant::hip
#endif
