// SPDX-License-Identifier: MIT
// How a launch covers [rows, groups] with workgroups and waves; see tiles.h. Host and device.
#pragma once

#include "core/layout.h"
#include "core/mxfp4.h"

namespace rotquant::device {

constexpr int kMaxThreads = 256;
constexpr int kMinWaves = 5;  // per SIMD, so at most 96 VGPRs

struct TilePlan {
  int log2_groups;    // a wave covers 2^log2_groups groups of each of its rows
  int threads;        // per workgroup
  int64_t row_tiles;  // tiles of a workgroup: rows x groups
  int64_t group_tiles;
  int grid_rows, grid_groups;
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `rows` counts the rows that must be written, padding rows of shuffled scales included.
inline TilePlan plan_tiles(int64_t k, int64_t rows, bool shuffle_scales, int wave_size) {
  constexpr int kMinLog2 = 3;
  const int64_t groups = k / kGroup;
  int log2_wave = 0;
  while ((1 << log2_wave) < wave_size) ++log2_wave;

  TilePlan plan{};
  plan.log2_groups = kMinLog2;
  if (!shuffle_scales) {
    // Fewest idle lanes, then the longest run along a row.
    int64_t fewest = round_up_to(groups, int64_t{1} << kMinLog2);
    for (int n = kMinLog2 + 1; n <= log2_wave; ++n) {
      const int64_t covered = round_up_to(groups, int64_t{1} << n);
      if (covered <= fewest) plan.log2_groups = n, fewest = covered;
    }
  }
  const int64_t wave_rows = wave_size >> plan.log2_groups;
  // A workgroup that writes shuffled scales owns exactly one 32 x 8 tile of them.
  const int64_t waves = shuffle_scales ? kScaleTileRows / wave_rows
                        : divide_up(rows, wave_rows) * wave_size < kMaxThreads
                            ? divide_up(rows, wave_rows)
                            : kMaxThreads / wave_size;
  plan.threads = static_cast<int>(waves) * wave_size;
  plan.row_tiles = divide_up(rows, waves * wave_rows);
  plan.group_tiles = divide_up(groups, int64_t{1} << plan.log2_groups);

  // NOTE: the grid is clamped and the kernel strides over the rest: HIP counts a grid's threads in
  // 32 bits, and 2^31 elements must not be the largest size that works.
  constexpr int64_t kMaxGridRows = 65535, kMaxGrid = int64_t{1} << 22;
  const int64_t grid_groups = plan.group_tiles < kMaxGrid ? plan.group_tiles : kMaxGrid;
  const int64_t room =
      kMaxGrid / grid_groups < kMaxGridRows ? kMaxGrid / grid_groups : kMaxGridRows;
  plan.grid_groups = static_cast<int>(grid_groups);
  plan.grid_rows = static_cast<int>(plan.row_tiles < room ? plan.row_tiles : room);
  return plan;
}

}  // namespace rotquant::device
