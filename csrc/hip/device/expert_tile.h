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
// (gemm_tile_of). A block whose expert is none of `experts` is left alone. Uniform.
// NOTE: kBlockM is sorting.block_m, but the compiler knows it: nothing to divide by.
template <int kBlockM>
RQ_DEVICE ExpertTile expert_tile_of(const MoeSorting& sorting, int experts, uint32_t tiles_n) {
  const uint32_t blocks =
      static_cast<uint32_t>(moe_rows_in_use(sorting, sorting.num_valid[0])) / kBlockM;
  const uint32_t id = arch::block_index_x();
  if (id >= blocks * tiles_n) return {};
  const GemmTileIndex tile = gemm_tile_of(id, blocks, tiles_n);
  const auto expert = static_cast<uint32_t>(sorting.sorted_expert_ids[tile.m]);
  return {expert < static_cast<uint32_t>(experts), expert, int64_t{tile.m} * kBlockM, tile.n};
}

}  // namespace rotquant::device
