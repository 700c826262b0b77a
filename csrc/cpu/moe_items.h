// SPDX-License-Identifier: MIT
// How the MoE GEMMs are cut into items: tiles of one expert's rows x ranges of columns.
#pragma once

#include "core/moe.h"
#include "cpu/gemm_items.h"

namespace rotquant::cpu {

// Sorted rows of one expert, across the borders of blocks: weights are unpacked once for them all.
struct MoeTile {
  int64_t row0;  // divisible by 16
  int rows;      // kGemmRows at most
  int in_use;    // rows up to the last that is a route
  int expert;
};

struct MoeItems {
  int64_t columns;  // of an item, a multiple of `unit`
  int64_t count;
};

// Columns outermost, as in gemm_items(): the tiles of one expert share what they read of it.
constexpr MoeItems moe_items(int64_t tiles, int64_t columns, int64_t unit, int64_t widest) {
  constexpr int64_t kEnough = 64;
  int64_t width = widest;
  while (width > unit && tiles * (columns / width) < kEnough) width /= 2;
  return {width, tiles * ((columns + width - 1) / width)};
}

constexpr int kMoeWidest = 128;  // columns of an item; gate or up of gemm1

constexpr MoeItems moe_gemm1_items(const MoeGemm1Params& p, int64_t tiles) {
  const int64_t unit = p.inter_rotation.size > kGroup ? p.inter_rotation.size : kGroup;
  return moe_items(tiles, p.inter, unit, unit > kMoeWidest / 2 ? unit : kMoeWidest / 2);
}

// An item that adds to the output goes over all tiles itself.
constexpr MoeItems moe_gemm2_items(const MoeGemm2Params& p, int64_t tiles) {
  return moe_items(p.finish == MoeFinish::atomic ? 1 : tiles, p.hidden, kGroup, kMoeWidest);
}

// Zeros stand for the rows that are none.
RQ_HOST_DEVICE bool is_route_row(const MoeSorting& s, int64_t row) {
  return is_route(s, s.sorted_ids[row]);
}

}  // namespace rotquant::cpu
