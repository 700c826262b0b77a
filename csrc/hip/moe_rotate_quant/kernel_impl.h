// SPDX-License-Identifier: MIT
// rotate_quant whose scales go to every sorted row of their token: load -> rotate -> quantise ->
// store codes, scatter scales; other workgroups of the launch clear the padding.
#pragma once

#include "hip/moe_rotate_quant/config.h"
#include "hip/moe_rotate_quant/sorted_scales.h"
#include "hip/rotate_quant/kernel_impl.h"

namespace rotquant::hip {

// The rows of a token are in registers while it is quantised, which mse has too few of.
template <class Config>
constexpr int kMoeMinWaves = Config::kMse ? device::kMinWaves - 1 : device::kMinWaves;

template <class Config>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(device::kMaxThreads, kMoeMinWaves<Config>) void moe_rotate_quant_kernel(
    const MoeRotateQuantArgs args) {
  const MoeRotateQuantParams& p = args.params;
  const TilePlan& plan = args.plan;
  const SortedScales scales(p);
  if (arch::block_index_y() >= static_cast<uint32_t>(plan.grid_rows))
    return clear_padding(scales, plan.grid_rows, plan.grid_groups, args.padding_rows, plan.threads);

  device::for_each_wave_tile(
      plan, p.x.rows, p.x.k / kGroup, [&](const WaveTile& tile, uint32_t lane) {
        if (tile.row0 >= tile.rows) return;
        const TokenRows<AdjacentLanes> rows(scales, tile.row(lane), lane);
        const device::Group group = quantized_group<Config>(p, tile, lane);
        const bool inside = tile.contains(lane);
        if (inside) {
          const int64_t index = tile.row(lane) * tile.groups + tile.group(lane);
          arch::store(p.codes + index * kGroupBytes, group.codes);
        }
        rows.scatter(scales, lane, tile.group(lane), inside ? group.scale : 0);
      });
}

}  // namespace rotquant::hip
