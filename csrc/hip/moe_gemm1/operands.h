// SPDX-License-Identifier: MIT
// Where the operands of the GEMM over gate and up are: tokens gathered by route, weights in units
// of 32 channels of the intermediate.
#pragma once

#include "hip/device/expert_tile.h"
#include "hip/device/mma.h"
#include "hip/moe_gemm1/config.h"

namespace rotquant::hip {

// A row that is padding reads some token; what is made of it is never used.
struct GatherRows {
  static constexpr int64_t first = 0;
  uint32_t count;             // tokens
  const int32_t* sorted_ids;  // of the tile's rows

  RQ_DEVICE uint32_t operator()(uint32_t i) const {
    const auto token = static_cast<uint32_t>(moe_token(sorted_ids[i]));
    return token < count ? token : count - 1;
  }
};

// Fragments 4u .. 4u + 3 of a tile belong to its unit u; past the expert's last unit that one
// again. In memory gate and up are either one behind the other or alternate fragment by fragment.
// The fragments of a unit are gate, gate, up, up or gate, up, gate, up accordingly: two neighbours
// share a band of scales.
struct GateUpWeights {
  static constexpr int64_t first = 0;
  uint32_t first_unit, units;  // of the tile; of the expert
  bool interleaved;

  RQ_DEVICE uint32_t unit(uint32_t u) const {
    return first_unit + u < units ? first_unit + u : units - 1;
  }
  RQ_DEVICE uint32_t block(uint32_t fragment) const {
    return 2 * band(fragment / 2) + fragment % 2;
  }
  RQ_DEVICE uint32_t band(uint32_t pair) const {
    const uint32_t u = unit(pair / 2);
    return interleaved ? 2 * u + pair % 2 : u + pair % 2 * units;
  }
  RQ_DEVICE uint32_t block_reach(uint32_t) const { return units * kUnitFrags; }
  RQ_DEVICE uint32_t band_reach(uint32_t) const { return units * kUnitFrags / 2; }
};

template <class Tile>
RQ_DEVICE GateUpWeights weights_of(const MoeGemm1Params& p, const device::ExpertTile& tile) {
  return {tile.n * (Tile::kTileN / (kUnitFrags * device::kFragRows)),
          static_cast<uint32_t>(p.inter / kGroup), p.interleaved};
}

RQ_DEVICE GatherRows rows_of(const MoeGemm1Params& p, const device::ExpertTile& tile) {
  return {static_cast<uint32_t>(p.sorting.tokens), p.sorting.sorted_ids + tile.row0};
}

RQ_DEVICE device::TokenScales token_scales_of(const device::ExpertTile& tile) {
  return {tile.row0 / kScaleTileRows,
          static_cast<uint32_t>(tile.row0 % kScaleTileRows / device::kFragRows * 8)};
}

// NOTE: all experts together may take more than 4 GiB; offsets within one are 32-bit.
RQ_DEVICE device::Operands operands_of(const MoeGemm1Params& p, const device::ExpertTile& tile) {
  const int64_t row_bytes = p.k / 2, padded_groups = round_up_to(p.k / kGroup, kScaleTileGroups);
  const int64_t first_row = 2 * p.inter * tile.expert;
  return {p.a,        p.w1 + first_row * row_bytes,
          p.a_scales, p.w1_scale + first_row * padded_groups,
          row_bytes,  padded_groups};
}

RQ_DEVICE uint32_t steps_of(uint32_t groups) {
  return (groups + kScaleTileGroups - 1) / kScaleTileGroups;
}

}  // namespace rotquant::hip
