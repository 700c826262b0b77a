// SPDX-License-Identifier: MIT
#include "cpu/moe_items.h"

#include "cpu/backend.h"

namespace rotquant::cpu {

std::vector<MoeTile> moe_tiles(const MoeSorting& s, int experts) {
  std::vector<MoeTile> tiles;
  const int64_t rows = moe_rows_in_use(s, s.num_valid[0]);
  for (int64_t row = 0; row + s.block_m <= rows; row += s.block_m) {
    const int expert = s.sorted_expert_ids[row / s.block_m];
    if (expert < 0 || expert >= experts) continue;
    for (int64_t part = row; part < row + s.block_m; part += 16) {
      const bool extends = !tiles.empty() && tiles.back().expert == expert &&
                           tiles.back().row0 + tiles.back().rows == part &&
                           tiles.back().rows < kGemmRows;
      if (!extends) tiles.push_back({part, 0, 0, expert});
      MoeTile& tile = tiles.back();
      for (int64_t i = part; i < part + 16; ++i)
        if (is_route_row(s, i)) tile.in_use = static_cast<int>(i - tile.row0) + 1;
      tile.rows += 16;
    }
  }
  return tiles;
}

}  // namespace rotquant::cpu
