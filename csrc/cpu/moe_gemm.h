// SPDX-License-Identifier: MIT
// The two GEMMs of a mixture of experts on a CPU, for the instruction set that RQ_ISA names.
// Products are gemm_a4w4's, so the result is the same bytes on every instruction set and number of
// threads.
#pragma once

#include "cpu/activate.h"
#include "cpu/gemm_a4w4.h"
#include "cpu/kernels.h"
#include "cpu/moe_items.h"

namespace rotquant::cpu::RQ_ISA {

// --- gemm1 --------------------------------------------------------------------------------------

RQ_INLINE TokenRows gathered_rows(const MoeGemm1Params& p, const MoeTile& tile) {
  TokenRows rows{tile.in_use, {}, p.a_scales, tile.row0};
  for (int row = 0; row < tile.in_use; ++row)
    if (is_route_row(p.sorting, tile.row0 + row))
      rows.codes[row] = p.a + moe_token(p.sorting.sorted_ids[tile.row0 + row]) * (p.k / 2);
  return rows;
}

// values [tile.rows][columns] from sums in which 16 gate and 16 up columns alternate.
RQ_INLINE void activate_tile(const MoeGemm1Params& p, const MoeTile& tile, int64_t column0,
                             int64_t columns, const float* sums, float* values) {
  const float* bias = p.bias ? p.bias + tile.expert * 2 * p.inter + column0 : nullptr;
  for (int row = 0; row < tile.rows; ++row) {
    const int64_t sorted = tile.row0 + row;
    if (row >= tile.in_use || !is_route_row(p.sorting, sorted)) {
      memset(values + row * columns, 0, columns * sizeof(float));
      continue;
    }
    for (int64_t column = 0; column < columns; column += kLanes) {
      const float* sum = sums + row * 2 * kMoeWidest + 2 * column;
      f32v g = load<f32v>(sum), u = load<f32v>(sum + kLanes);
      if (p.apply_weight) {
        g *= p.sorting.sorted_weights[sorted];
        u *= p.sorting.sorted_weights[sorted];
      }
      if (bias) {
        g += load<f32v>(bias + column);
        u += load<f32v>(bias + p.inter + column);
      }
      store(values + row * columns + column, activate(p.activation, g, u));
    }
  }
}

// Rotates and quantises values as rotate_quant does.
RQ_INLINE void quantise_tile(const MoeGemm1Params& p, const MoeTile& tile, int64_t column0,
                             int64_t columns, const float* values) {
  uint8_t codes[kGemmRows * kMoeWidest / 2], scales[kGemmRows * kMoeWidest / kGroup];
  Rotation rotation = p.inter_rotation;
  if (rotation.prescale) rotation.prescale += column0;
  if (rotation.matrix) rotation.matrix += column0 / rotation.size * rotation.matrix_stride;
  const RotateQuantParams params{{values, DType::fp32, tile.rows, columns, columns},
                                 rotation,
                                 ElementFormat::e2m1,
                                 p.scale_mode,
                                 false,
                                 false,
                                 codes,
                                 scales};
  rotate_quant(params, 0,
               tile.rows * (columns / (rotation.size > kGroup ? rotation.size : kGroup)));

  const int64_t padded = round_up_to(p.inter / kGroup, kScaleTileGroups);
  const int64_t group0 = column0 / kGroup, groups = columns / kGroup;
  const int64_t written = column0 + columns < p.inter ? group0 + groups : padded;
  for (int row = 0; row < tile.rows; ++row) {
    const int64_t sorted = tile.row0 + row;
    memcpy(p.codes + sorted * (p.inter / 2) + column0 / 2, codes + row * columns / 2, columns / 2);
    for (int64_t g = group0; g < written; ++g)
      p.scales[scale_offset(sorted, g, padded)] =
          g < group0 + groups ? scales[row * groups + g - group0] : 0;
  }
}

void moe_gemm1(const MoeGemm1Params& p, const MoeTile* tiles, int64_t tile_count, int64_t begin,
               int64_t end) {
  const MoeItems items = moe_gemm1_items(p, tile_count);
  const int64_t padded = round_up_to(p.k / kGroup, kScaleTileGroups);
  alignas(64) float sums[kGemmRows][2 * kMoeWidest], values[kGemmRows * kMoeWidest];
  for (int64_t item = begin; item < end; ++item) {
    const MoeTile& tile = tiles[item % tile_count];
    const int64_t column0 = item / tile_count * items.columns;
    const int64_t columns = p.inter - column0 < items.columns ? p.inter - column0 : items.columns;
    const int64_t expert_row = tile.expert * 2 * p.inter;
    const Weight weight{p.w1 + expert_row * (p.k / 2), p.w1_scale + expert_row * padded};
    int64_t block_rows[2 * kMoeWidest / kGemmBlock];
    const int blocks = static_cast<int>(2 * columns / kGemmBlock);
    for (int j = 0; j < blocks; ++j) {
      const int64_t row = j % 2 * p.inter + column0 + j / 2 * kGemmBlock;
      block_rows[j] = p.interleaved ? interleaved_row(row, p.inter) : row;
    }
    multiply_tile(gathered_rows(p, tile), weight, p.k, block_rows, blocks, &sums[0][0],
                  2 * kMoeWidest);
    activate_tile(p, tile, column0, columns, &sums[0][0], values);
    quantise_tile(p, tile, column0, columns, values);
  }
}

// --- gemm2 --------------------------------------------------------------------------------------

RQ_INLINE f32v rounded_to(DType dtype, f32v v) {
  switch (dtype) {
    case DType::bf16: return from_bf16(to_bf16(v));
    case DType::fp16: return from_fp16(to_fp16(v));
    default: return v;
  }
}

// One row's `columns` from column0 on, `y` with the bias added.
RQ_INLINE void finish_row(const MoeGemm2Params& p, int64_t sorted, int64_t column0, int64_t columns,
                          const float* y) {
  const int32_t id = p.sorting.sorted_ids[sorted];
  const int64_t token = moe_token(id), route = token * p.sorting.topk + moe_slot(id);
  switch (p.finish) {
    case MoeFinish::rows:
      for (int64_t c = 0; c < columns; c += kLanes)
        store_as(p.out, p.out_dtype, route * p.hidden + column0 + c, load<f32v>(y + c));
      break;
    case MoeFinish::mxfp4:
      for (int64_t c = 0; c < columns; c += kGroup) {
        const int64_t group = (route * p.hidden + column0 + c) / kGroup;
        p.scales[group] = quantize_group(load<f32v>(y + c), load<f32v>(y + c + kLanes),
                                         scale_bias(ScaleMode::round_up), false, 0,
                                         p.codes + group * kGroupBytes);
      }
      break;
    case MoeFinish::atomic: {
      const float weight = p.apply_weight ? p.sorting.sorted_weights[sorted] : 1.0f;
      for (int64_t c = 0; c < columns; c += kLanes) {
        const int64_t index = token * p.hidden + column0 + c;
        const f32v term = rounded_to(p.out_dtype, weight * load<f32v>(y + c));
        store_as(p.out, p.out_dtype, index, load_as_float(p.out, p.out_dtype, index) + term);
      }
    }
  }
}

void moe_gemm2(const MoeGemm2Params& p, const MoeTile* tiles, int64_t tile_count, int64_t begin,
               int64_t end) {
  const MoeItems items = moe_gemm2_items(p, tile_count);
  const int64_t padded = round_up_to(p.inter / kGroup, kScaleTileGroups);
  const bool adds = p.finish == MoeFinish::atomic;
  alignas(64) float sums[kGemmRows][kMoeWidest];
  // Items of the adding kind go over all tiles: a token's terms in ascending order, on any threads.
  const int64_t tiles_per_item = adds ? tile_count : 1;
  for (int64_t at = begin * tiles_per_item; at < end * tiles_per_item; ++at) {
    const MoeTile& tile = tiles[at % tile_count];
    const int64_t column0 = at / tile_count * items.columns;
    const int64_t columns = p.hidden - column0 < items.columns ? p.hidden - column0 : items.columns;
    const int64_t expert_row = tile.expert * p.hidden;
    const Weight weight{p.w2 + expert_row * (p.inter / 2), p.w2_scale + expert_row * padded};
    const float* bias = p.bias ? p.bias + expert_row + column0 : nullptr;
    TokenRows rows{tile.in_use, {}, p.a_scales, tile.row0};
    for (int row = 0; row < tile.in_use; ++row)
      if (is_route_row(p.sorting, tile.row0 + row))
        rows.codes[row] = p.a + (tile.row0 + row) * (p.inter / 2);
    int64_t block_rows[kMoeWidest / kGemmBlock];
    const int blocks = static_cast<int>(columns / kGemmBlock);
    for (int j = 0; j < blocks; ++j) block_rows[j] = column0 + j * kGemmBlock;
    multiply_tile(rows, weight, p.inter, block_rows, blocks, &sums[0][0], kMoeWidest);
    for (int row = 0; row < tile.in_use; ++row) {
      if (!rows.codes[row]) continue;
      for (int64_t c = 0; bias && c < columns; c += kLanes)
        store(&sums[row][c], load<f32v>(&sums[row][c]) + load<f32v>(bias + c));
      finish_row(p, tile.row0 + row, column0, columns, sums[row]);
    }
  }
}

}  // namespace rotquant::cpu::RQ_ISA
