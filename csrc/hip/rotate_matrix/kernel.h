// SPDX-License-Identifier: MIT
// Launchers of single instances, defined in inst/.
#pragma once

#include "hip/arch/launch.h"
#include "hip/rotate_matrix/config.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

// The functions of hip/backend.h for a rotation with a matrix (`matrix_bf16`).
void rotate_by_matrix(const RotateParams& params, hipStream_t stream);
void rotate_quant_by_matrix(const RotateQuantParams& params, hipStream_t stream);

template <class Config, ElementFormat kElement, bool kMse>
void launch_rotate_matrix_quant(const RotateMatrixQuantArgs& args, hipStream_t stream);

template <class Config>
void launch_rotate_matrix(const RotateMatrixArgs& args, hipStream_t stream);

}  // namespace rotquant::hip
#endif
