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

// 8 scales of the route of a sorted row, the first in the low byte; 0 where there is no route or no
// group.
RQ_DEVICE uint64_t load_scales(const MoeSortScalesParams& p, uint32_t row, int64_t group) {
  const MoeSorting& s = p.sorting;
  if (static_cast<int32_t>(row) >= moe_rows_in_use(s, s.num_valid[0])) return 0;
  const int32_t id = s.sorted_ids[row];
  if (!is_route(s, id)) return 0;
  const int64_t natural =
      p.by_route ? int64_t{moe_token(id)} * s.topk + moe_slot(id) : int64_t{moe_token(id)};
  const uint8_t* in = p.in + natural * p.groups;
  uint64_t scales = 0;
  if (p.groups >= kScaleTileGroups) {
    // One load, from any byte. The last tile's begins early enough to end with the row.
    const int64_t last = p.groups - kScaleTileGroups, first = group < last ? group : last;
    __builtin_memcpy(&scales, in + first, sizeof(scales));
    return scales >> (8 * (group - first));
  }
  for (int i = 0; i < p.groups; ++i) scales |= uint64_t{in[i]} << (8 * i);
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
    const uint64_t low = load_scales(p, row, tile * kScaleTileGroups);
    const uint64_t high = load_scales(p, row + 16, tile * kScaleTileGroups);
    auto* out = reinterpret_cast<uint32_t*>(p.out + (band * tiles + tile) * kScaleTileBytes) + r;
    RQ_UNROLL
    for (int g = 0; g < 4; ++g) {
      auto byte = [&](uint64_t scales, int group) {
        return static_cast<uint32_t>(scales >> (8 * group)) & 0xFF;
      };
      out[g * kTileLanes] =
          byte(low, g) | byte(high, g) << 8 | byte(low, g + 4) << 16 | byte(high, g + 4) << 24;
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
