// SPDX-License-Identifier: MIT
#include "cpu/moe_rotate_quant.h"

#include <string.h>

#include <algorithm>

#include "cpu/moe_items.h"

namespace rotquant::cpu {

int64_t moe_sort_scales_items(const MoeSortScalesParams& p) {
  return moe_scale_rows(p.sorting.max_rows) / kScaleTileRows;
}

void moe_sort_scales(const MoeSortScalesParams& p, int64_t begin, int64_t end) {
  const MoeSorting& s = p.sorting;
  const int64_t padded_groups = round_up_to(p.groups, kScaleTileGroups);
  const int64_t band_bytes = kScaleTileRows * padded_groups;
  const int64_t in_use = moe_rows_in_use(s, s.num_valid[0]);
  memset(p.out + begin * band_bytes, 0, (end - begin) * band_bytes);
  const int64_t first = begin * kScaleTileRows, last = std::min(end * kScaleTileRows, in_use);
  for (int64_t row = first; row < last; ++row) {
    if (!is_route_row(s, row)) continue;
    const int64_t token = moe_token(s.sorted_ids[row]), slot = moe_slot(s.sorted_ids[row]);
    const uint8_t* in = p.in + (p.by_route ? token * s.topk + slot : token) * p.groups;
    for (int64_t group = 0; group < p.groups; ++group)
      p.out[scale_offset(row, group, padded_groups)] = in[group];
  }
}

}  // namespace rotquant::cpu
