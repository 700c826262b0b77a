// SPDX-License-Identifier: MIT
// Natural scales to sorted, shuffled ones: a lane fetches 8 groups of rows r and r + 16, which are
// four dwords of a tile. Every cell is written, padding with 0.
#include "core/moe.h"
#include "hip/arch/arch.h"
#include "hip/arch/launch.h"
#ifndef RQ_DEVICE_ONLY
#include "hip/backend.h"
#endif

namespace rotquant::hip {

constexpr int kSortScalesThreads = 256;
constexpr uint32_t kTileLanes = 16;  // one for each pair of rows
constexpr uint32_t kWorkgroupTiles = kSortScalesThreads / kTileLanes;

struct Scales {
  uint32_t word[2];  // of four groups each
};

// 8 scales of the route of a sorted row; 0 where there is no route or no group.
RQ_DEVICE Scales load_scales(const MoeSortScalesParams& p, uint32_t row, int64_t group) {
  const MoeSorting& s = p.sorting;
  Scales scales{};
  if (row >= static_cast<uint32_t>(s.num_valid[0]) || row >= s.max_rows) return scales;
  const int32_t id = s.sorted_ids[row];
  if (moe_token(id) >= s.tokens || moe_slot(id) >= s.topk) return scales;
  const int64_t natural =
      p.by_route ? int64_t{moe_token(id)} * s.topk + moe_slot(id) : int64_t{moe_token(id)};
  const uint8_t* in = p.in + natural * p.groups + group;
  if (p.groups - group >= kScaleTileGroups) {
    __builtin_memcpy(&scales, in, sizeof(scales));  // one load, from any byte
    return scales;
  }
  RQ_UNROLL
  for (int i = 0; i < kScaleTileGroups; ++i)
    if (group + i < p.groups) scales.word[i / 4] |= uint32_t{in[i]} << (i % 4 * 8);
  return scales;
}

// A workgroup: 16 tiles of every so many-th band of 32 rows.
RQ_GLOBAL RQ_LAUNCH_BOUNDS(kSortScalesThreads,
                           8) void moe_sort_scales_kernel(const MoeSortScalesParams p,
                                                          int64_t bands, int64_t tiles,
                                                          int64_t band_stride) {
  const uint32_t thread = arch::thread_index(), r = thread % kTileLanes;
  const int64_t tile = int64_t{arch::block_index_x()} * kWorkgroupTiles + thread / kTileLanes;
  if (tile >= tiles) return;
  for (int64_t band = arch::block_index_y(); band < bands; band += band_stride) {
    const uint32_t row = static_cast<uint32_t>(band * kScaleTileRows) + r;
    const Scales low = load_scales(p, row, tile * kScaleTileGroups);
    const Scales high = load_scales(p, row + 16, tile * kScaleTileGroups);
    auto* out = reinterpret_cast<uint32_t*>(p.out + (band * tiles + tile) * kScaleTileBytes) + r;
    RQ_UNROLL
    for (int g = 0; g < 4; ++g) {
      auto byte = [&](uint32_t dword) { return dword >> (8 * g) & 0xFF; };
      out[g * kTileLanes] = byte(low.word[0]) | byte(high.word[0]) << 8 | byte(low.word[1]) << 16 |
                            byte(high.word[1]) << 24;
    }
  }
}

#ifndef RQ_DEVICE_ONLY
void moe_sort_scales(const MoeSortScalesParams& params, hipStream_t stream) {
  constexpr int64_t kMaxGridRows = 65535;
  require_current_device();
  MoeSortScalesParams p = params;
  int64_t bands = moe_scale_rows(p.sorting.max_rows) / kScaleTileRows;
  int64_t tiles = round_up_to(p.groups, kScaleTileGroups) / kScaleTileGroups;
  if (bands == 0 || tiles == 0) return;
  int64_t rows = bands < kMaxGridRows ? bands : kMaxGridRows;
  const int64_t columns = (tiles + kWorkgroupTiles - 1) / kWorkgroupTiles;
  void* args[] = {&p, &bands, &tiles, &rows};
  check(hipLaunchKernel(reinterpret_cast<const void*>(moe_sort_scales_kernel),
                        dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows)),
                        dim3(kSortScalesThreads), args, 0, stream),
        "kernel launch failed");
}
#endif

}  // namespace rotquant::hip
