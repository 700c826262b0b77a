// SPDX-License-Identifier: MIT
// The GPU back end: the functions of cpu/backend.h plus a stream. The current device is the
// tensors'. Nothing synchronises; a failed launch throws.
#pragma once

#include "core/params.h"
#include "hip/arch/runtime.h"

namespace rotquant::hip {

void rotate(const RotateParams& params, hipStream_t stream);             // Hadamard only
void rotate_quant(const RotateQuantParams& params, hipStream_t stream);  // Hadamard or no rotation
void dequant(const DequantParams& params, hipStream_t stream);
void shuffle_scales(const ShuffleScalesParams& params, hipStream_t stream);
void shuffle_weight(const ShuffleWeightParams& params, hipStream_t stream);

}  // namespace rotquant::hip
