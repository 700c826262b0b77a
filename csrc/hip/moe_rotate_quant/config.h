// SPDX-License-Identifier: MIT
// How one launch covers the tokens, as rotate_quant does, and with more workgroups the padding.
#pragma once

#include "core/moe.h"
#include "hip/rotate_quant/config.h"

namespace rotquant::hip {

// Workgroups that clear padding are the grid's rows from the quantising ones' on: so many rows of
// `columns` workgroups of `waves` waves. A wave takes a band of 32 sorted rows, and more of them
// where that would be more waves than the GPU holds.
constexpr int padding_grid_rows(int64_t max_rows, int64_t columns, int64_t waves) {
  constexpr int64_t kMaxWaves = 8192;
  const int64_t bands = moe_scale_rows(max_rows) / kScaleTileRows;
  return static_cast<int>(
      device::divide_up(bands < kMaxWaves ? bands : kMaxWaves, columns * waves));
}

struct MoeRotateQuantArgs {
  MoeRotateQuantParams params;
  TilePlan plan;     // of [tokens, padded groups]
  int padding_rows;  // of the grid, after the plan's
};

inline MoeRotateQuantArgs plan_moe_rotate_quant(const MoeRotateQuantParams& p, int wave_size) {
  constexpr int64_t kTileChannels = kScaleTileGroups * kGroup;
  constexpr int kMaxGridRows = 65535;
  const int64_t k = round_up_to(p.x.k, kTileChannels);
  TilePlan plan = device::plan_tiles(k, p.x.rows, false, wave_size);
  const int padding =
      padding_grid_rows(p.sorting.max_rows, plan.grid_groups, plan.threads / wave_size);
  if (plan.grid_rows > kMaxGridRows - padding) plan.grid_rows = kMaxGridRows - padding;
  return {p, plan, padding};
}

}  // namespace rotquant::hip
