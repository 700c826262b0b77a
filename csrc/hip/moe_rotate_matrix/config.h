// SPDX-License-Identifier: MIT
// moe_rotate_quant with a matrix: the tiles of rotate_matrix, the padding of moe_rotate_quant.
#pragma once

#include "hip/moe_rotate_quant/config.h"
#include "hip/rotate_matrix/config.h"

namespace rotquant::hip {

struct MoeRotateMatrixArgs {
  MoeRotateQuantParams params;
  RotateMatrixPlan plan;  // of [tokens, padded groups]
  int padding_rows;       // of the grid, after the plan's
};

template <class Config>
inline MoeRotateMatrixArgs plan_moe_rotate_matrix(const MoeRotateQuantParams& p) {
  constexpr int64_t kTileChannels = kScaleTileGroups * kGroup;
  const RotateMatrixPlan plan = plan_matrix<Config>(round_up_to(p.x.k, kTileChannels), p.x.rows);
  return {p, plan, padding_grid_rows(p.sorting.max_rows, plan.grid_strips, Config::kThreads / 64)};
}

}  // namespace rotquant::hip
