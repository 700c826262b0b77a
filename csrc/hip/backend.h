// SPDX-License-Identifier: MIT
// The GPU back end: the functions of cpu/backend.h plus a stream. The current device is the
// tensors'. Nothing synchronises; a failed launch throws.
#pragma once

#include "core/params.h"
#include "hip/arch/runtime.h"

namespace rotquant::hip {

// A rotation matrix is given as `matrix_bf16`.
void rotate(const RotateParams& params, hipStream_t stream);
void rotate_quant(const RotateQuantParams& params, hipStream_t stream);
void dequant(const DequantParams& params, hipStream_t stream);
void gemm_a4w4(const GemmParams& params, hipStream_t stream);
void shuffle_scales(const ShuffleScalesParams& params, hipStream_t stream);
void shuffle_weight(const ShuffleWeightParams& params, hipStream_t stream);

}  // namespace rotquant::hip
