// SPDX-License-Identifier: MIT
// Which tile of which expert a workgroup of a MoE GEMM computes. The grid covers as many blocks as
// any routing could need; workgroups past what this one needs leave at once.
#pragma once

#include "core/gemm_configs.h"
#include "core/moe.h"
#include "hip/arch/arch.h"

namespace rotquant::device {

struct ExpertTile {
  bool any;         // else nothing is to be done
  uint32_t expert;  // local
  int64_t row0;     // of the sorted rows
  uint32_t n;       // tile of weight rows
};

// Blocks of one expert follow each other, and with them the workgroups that share its weights
// (gemm_tile_of). Uniform.
RQ_DEVICE ExpertTile expert_tile_of(const MoeSorting& sorting, uint32_t tiles_n) {
  const uint32_t blocks =
      static_cast<uint32_t>(sorting.num_valid[0]) / static_cast<uint32_t>(sorting.block_m);
  const uint32_t id = arch::block_index_x();
  if (id >= blocks * tiles_n) return {};
  const GemmTileIndex tile = gemm_tile_of(id, blocks, tiles_n);
  return {true, static_cast<uint32_t>(sorting.sorted_expert_ids[tile.m]),
          int64_t{tile.m} * sorting.block_m, tile.n};
}

}  // namespace rotquant::device
