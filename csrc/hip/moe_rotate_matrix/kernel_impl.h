// SPDX-License-Identifier: MIT
// rotate_quant by a matrix whose scales go to every sorted row of their token; other workgroups of
// the launch clear the padding.
#pragma once

#include "hip/moe_rotate_matrix/config.h"
#include "hip/moe_rotate_quant/sorted_scales.h"
#include "hip/rotate_matrix/kernel_impl.h"

namespace rotquant::hip {

template <class Config, ElementFormat kElement, bool kMse>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Config::kThreads, Config::kMinWaves) void moe_rotate_matrix_kernel(
    const MoeRotateMatrixArgs args) {
  using Shape = MatrixShape<Config::kRotationSize>;
  const MoeRotateQuantParams& p = args.params;
  const RotateMatrixPlan& plan = args.plan;
  const SortedScales scales(p);
  if (arch::block_index_y() >= static_cast<uint32_t>(plan.grid_rows))
    return clear_padding(scales, plan.grid_rows, plan.grid_strips, args.padding_rows,
                         Config::kThreads);

  const int64_t groups = p.x.k / kGroup;
  auto finish = [&](int64_t row0, int64_t group0, uint32_t lane, Sums<Config>& sums) {
    const uint32_t token = token_of(lane), quarter = quarter_of(lane);
    RQ_UNROLL
    for (int i = 0; i < Config::kTokenTiles; ++i) {
      const int64_t row = row0 + i * kTileTokens;
      const TokenRows<QuarterLanes> rows(scales, row + token, lane);
      const device::Group group = quantized_group<Config, kElement, kMse>(p, sums.tile[i]);
      const bool inside = token < p.x.rows - row && quarter < groups - group0;
      if (inside) {
        const uint64_t index = uint64_t{token} * static_cast<uint32_t>(groups) + quarter;
        arch::store(p.codes + (row * groups + group0) * kGroupBytes + index * kGroupBytes,
                    group.codes);
      }
      rows.scatter(scales, lane, group0 + quarter, inside ? group.scale : 0);
    }
  };
  static_assert(Shape::kPanels == 1 || Config::kRotationSize == kScaleTileGroups * kGroup);
  static_assert(Shape::kPanels > 1 || Config::kTokenTiles == 1);
  // A strip of nothing but padding groups, which is a single panel: whole blocks of 256 channels
  // leave none.
  auto pad = [&](int64_t row0, int64_t group0) {
    if constexpr (Shape::kPanels == 1) {
      const uint32_t lane = arch::thread_index() % arch::kWaveSize;
      const TokenRows<QuarterLanes> rows(scales, row0 + token_of(lane), lane);
      rows.scatter(scales, lane, group0 + quarter_of(lane), 0);
    }
  };
  // The rows of the tokens are in the registers that the fragments of RS 32 would need.
  constexpr bool kResident = !kMse && Config::kRotationSize < kGroup;
  for_each_product<Config, !kMse, kResident>(p.x, p.rotation, plan, finish, pad);
}

}  // namespace rotquant::hip
