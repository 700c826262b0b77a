// SPDX-License-Identifier: MIT
// The CPU back end. Work is cut by the caller: each function does items [begin, end) of `*_items`,
// so that csrc/ops can hand it to at::parallel_for. No torch here.
#pragma once

#include <vector>

#include "core/params.h"
#include "cpu/moe_items.h"

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

// What the MoE GEMMs go over; reads the sorting. Blocks whose expert is none of `experts`, which
// no moe_sort makes, are left out.
std::vector<MoeTile> moe_tiles(const MoeSorting& sorting, int experts);

// Item: a tile of one expert's rows x a range of columns (cpu/moe_items.h). The codes are `a`, not
// `x`; `config` is the GPU's.
void moe_gemm1(const MoeGemm1Params& params, const std::vector<MoeTile>& tiles, int64_t begin,
               int64_t end);
// The same, except that an item that adds to the output is a range of columns for all tiles, so
// that every token's terms are added in the order of the sorted rows.
void moe_gemm2(const MoeGemm2Params& params, const std::vector<MoeTile>& tiles, int64_t begin,
               int64_t end);

// Item: a token.
void moe_reduce(const MoeReduceParams& params, int64_t begin, int64_t end);

// Items of core/layout_ops.h.
void shuffle_scales(const ShuffleScalesParams& params, int64_t begin, int64_t end);
void shuffle_weight(const ShuffleWeightParams& params, int64_t begin, int64_t end);

}  // namespace rotquant::cpu
