// SPDX-License-Identifier: MIT
// The layout ops as "item i of the output": the same body serves a CPU loop and a GPU thread.
#pragma once

#include "core/layout.h"
#include "core/params.h"

namespace rotquant {

// --- scales: an item is one dword of the shuffled tensor, an MFMA lane's four scales -------------

// Rows of one expert in the shuffled tensor: padded to 256, except where gate and up interleave.
RQ_HOST_DEVICE int64_t shuffled_rows(const ShuffleScalesParams& p) {
  return p.inter ? p.rows : round_up_to(p.rows, kScaleRowPadding);
}

RQ_HOST_DEVICE int64_t shuffle_scale_items(const ShuffleScalesParams& p) {
  return p.experts * shuffled_rows(p) * round_up_to(p.groups, kScaleTileGroups) / 4;
}

RQ_HOST_DEVICE void shuffle_scale_dword_at(const ShuffleScalesParams& p, int64_t item) {
  const int64_t padded_groups = round_up_to(p.groups, kScaleTileGroups);
  const int64_t expert_bytes = shuffled_rows(p) * padded_groups;
  const int64_t offset = item * 4, expert = offset / expert_bytes;
  const Coord first = scale_coord(offset % expert_bytes, padded_groups);
  for (int byte = 0; byte < 4; ++byte) {
    const int64_t row = first.row + byte % 2 * 16, group = first.column + byte / 2 * 4;
    const bool real = row < p.rows && group < p.groups;
    const int64_t source_row = p.inter ? separated_row(row, p.inter) : row;
    const int64_t natural = (expert * p.rows + source_row) * p.groups + group;
    if (!p.inverse)
      p.out[offset + byte] = real ? p.in[natural] : uint8_t{0};
    else if (real)
      p.out[natural] = p.in[offset + byte];
  }
}

// --- weights: an item is 16 bytes, the run that both layouts keep together -----------------------

constexpr int64_t kWeightChunk = 16;

RQ_HOST_DEVICE int64_t shuffle_weight_items(const ShuffleWeightParams& p) {
  return p.experts * p.rows * (p.row_bytes / kWeightChunk);
}

RQ_HOST_DEVICE void shuffle_weight_chunk_at(const ShuffleWeightParams& p, int64_t item) {
  const int64_t expert_bytes = p.rows * p.row_bytes;
  const int64_t offset = item * kWeightChunk;  // in the shuffled tensor
  const int64_t expert = offset / expert_bytes;
  const Coord at = weight_coord(offset % expert_bytes, p.row_bytes);
  const int64_t row = p.inter ? separated_row(at.row, p.inter) : at.row;
  const int64_t natural = expert * expert_bytes + row * p.row_bytes + at.column;
  const uint8_t* from = p.in + (p.inverse ? offset : natural);
  uint8_t* to = p.out + (p.inverse ? natural : offset);
  for (int i = 0; i < kWeightChunk; ++i) to[i] = from[i];
}

}  // namespace rotquant
