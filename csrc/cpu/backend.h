// SPDX-License-Identifier: MIT
// The CPU back end. Work is cut by the caller: each function does items [begin, end) of `*_items`,
// so that csrc/ops can hand it to at::parallel_for. No torch here.
#pragma once

#include "core/params.h"

namespace rotquant::cpu {

// Item: one rotation block of one row (32 channels where there is no rotation).
int64_t rotate_items(const RotateParams& params);
void rotate(const RotateParams& params, int64_t begin, int64_t end);

// Item: as above, but never less than a group of 32. Padding cells of shuffled scales are the
// caller's to clear.
int64_t rotate_quant_items(const RotateQuantParams& params);
void rotate_quant(const RotateQuantParams& params, int64_t begin, int64_t end);

// Item: one group of 32.
int64_t dequant_items(const DequantParams& params);
void dequant(const DequantParams& params, int64_t begin, int64_t end);

// Item: one tile of the output (cpu/gemm_items.h). `config` and `workspace` are the GPU's.
int64_t gemm_a4w4_items(const GemmParams& params);
void gemm_a4w4(const GemmParams& params, int64_t begin, int64_t end);

// Items of core/layout_ops.h.
void shuffle_scales(const ShuffleScalesParams& params, int64_t begin, int64_t end);
void shuffle_weight(const ShuffleWeightParams& params, int64_t begin, int64_t end);

}  // namespace rotquant::cpu
