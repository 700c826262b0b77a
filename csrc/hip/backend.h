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
void moe_sort(const MoeSortParams& params, hipStream_t stream);
void moe_rotate_quant(const MoeRotateQuantParams& params, hipStream_t stream);
void moe_sort_scales(const MoeSortScalesParams& params, hipStream_t stream);
void moe_gemm1(const MoeGemm1Params& params, hipStream_t stream);
void moe_gemm2(const MoeGemm2Params& params, hipStream_t stream);
void moe_reduce(const MoeReduceParams& params, hipStream_t stream);
void shuffle_scales(const ShuffleScalesParams& params, hipStream_t stream);
void shuffle_weight(const ShuffleWeightParams& params, hipStream_t stream);

}  // namespace rotquant::hip
