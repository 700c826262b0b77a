// SPDX-License-Identifier: MIT
#include "cpu/moe_items.h"

#include <algorithm>

#include "cpu/backend.h"

namespace rotquant::cpu {

std::vector<MoeTile> moe_tiles(const MoeSorting& s, int experts) {
  std::vector<MoeTile> tiles;
  const int64_t rows = std::min<int64_t>(s.num_valid[0], s.max_rows);
  for (int64_t row = 0; row < rows; row += s.block_m) {
    const int expert = s.sorted_expert_ids[row / s.block_m];
    if (expert < 0 || expert >= experts) continue;
    for (int64_t part = row; part < row + s.block_m; part += 16) {
      const bool extends = !tiles.empty() && tiles.back().expert == expert &&
                           tiles.back().row0 + tiles.back().rows == part &&
                           tiles.back().rows < kGemmRows;
      if (!extends) tiles.push_back({part, 0, 0, expert});
      MoeTile& tile = tiles.back();
      for (int64_t i = part; i < part + 16; ++i)
        if (is_route(s, i)) tile.in_use = static_cast<int>(i - tile.row0) + 1;
      tile.rows += 16;
    }
  }
  return tiles;
}

void moe_gather_scales(const MoeSorting& s, const uint8_t* natural, int64_t groups, uint8_t* out,
                       int64_t begin, int64_t end) {
  const int64_t padded = round_up_to(groups, kScaleTileGroups);
  for (int64_t row = begin; row < end; ++row)
    for (int64_t g = 0; g < groups; ++g)
      out[scale_offset(row, g, padded)] =
          is_route(s, row) ? natural[moe_token(s.sorted_ids[row]) * groups + g] : 0;
}

}  // namespace rotquant::cpu
