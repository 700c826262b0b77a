// SPDX-License-Identifier: MIT
// From a wave's sums in LDS to the output: each sorted row goes where its route wants it. Padding
// rows go nowhere. Columns come in 32s, so that whatever a lane takes at once exists or does not.
#pragma once

#include "core/moe.h"
#include "hip/device/epilogue.h"
#include "hip/device/quantize.h"

namespace rotquant::hip {

using arch::f32x2;
using device::f32x4;
using device::u32x4;

// Of the sorted row that a lane has in charge: its lane's number, or the wave's last.
struct Route {
  int32_t id;
  float weight;  // of MoeFinish::atomic
};

// NOTE: before the product, which hides the latency; the first use is after it.
template <MoeFinish kFinish>
RQ_DEVICE Route fetch_route(const MoeGemm2Params& p, int64_t row0, uint32_t row) {
  Route route{p.sorting.sorted_ids[row0 + row], 1.0f};
  if constexpr (kFinish == MoeFinish::atomic)
    if (p.apply_weight) route.weight = p.sorting.sorted_weights[row0 + row];
  return route;
}

// Where a wave's rows go. Every wave has its own: no barrier.
template <MoeFinish kFinish, int kRows_>
struct WaveRoutes {
  static constexpr uint32_t kRows = kRows_;
  static_assert(kRows <= arch::kWaveSize);
  int64_t to[kRows];    // the first element of its row of the output; negative: padding
  float weight[kRows];  // of MoeFinish::atomic

  RQ_DEVICE static uint32_t row_of(uint32_t lane) { return lane < kRows ? lane : kRows - 1; }

  RQ_DEVICE void put(const MoeGemm2Params& p, const Route& route, uint32_t lane) {
    const int64_t token = moe_token(route.id);
    // NOTE: 64 bits: rows times columns pass 2^31.
    const int64_t row =
        kFinish == MoeFinish::atomic ? token : token * p.sorting.topk + moe_slot(route.id);
    to[row_of(lane)] = token < p.sorting.tokens ? row * p.hidden : -1;
    if constexpr (kFinish == MoeFinish::atomic) weight[row_of(lane)] = route.weight;
  }
};

// Sums of one tile, or of `kParts` that are `stride` apart, added in their order.
template <int kParts, class Tile>
struct WaveSums {
  static constexpr uint32_t kRows = Tile::kRows, kColumns = Tile::kColumns;
  Tile* first;
  int stride;

  // Of neighbouring columns from `column` on: T is f32x4, f32x2 or float.
  template <class T>
  RQ_DEVICE T at(uint32_t row, uint32_t column) const {
    T sum = part<T>(*first, row, column);
    RQ_UNROLL
    for (int p = 1; p < kParts; ++p) sum += part<T>(first[p * stride], row, column);
    return sum;
  }

 private:
  template <class T>
  RQ_DEVICE static T part(Tile& tile, uint32_t row, uint32_t column) {
    return *reinterpret_cast<T*>(reinterpret_cast<float*>(&tile.chunk(row, column / 4)) +
                                 column % 4);
  }
};

RQ_DEVICE f32x4 load_f32x4(const float* p) { return __builtin_bit_cast(f32x4, arch::load(p)); }

// A row of the output for each route, unweighted: eight neighbouring columns a lane.
template <class Routes, class Sums>
RQ_DEVICE void finish_rows(const MoeGemm2Params& p, const float* bias, const Routes& routes,
                           const Sums& sums, int64_t column0, uint32_t lane) {
  constexpr uint32_t kLanesPerRow = Sums::kColumns / device::kStoreColumns;
  const uint32_t in_tile = lane % kLanesPerRow * device::kStoreColumns;
  const int64_t column = column0 + in_tile;
  if (column >= p.hidden) return;
  const device::Output out{p.out, p.out_dtype, 0, p.hidden, p.hidden, nullptr};
  f32x4 bias_lo{}, bias_hi{};
  if (bias) bias_lo = load_f32x4(bias + column), bias_hi = load_f32x4(bias + column + 4);
#pragma unroll 1
  for (uint32_t r = lane / kLanesPerRow; r < Sums::kRows; r += arch::kWaveSize / kLanesPerRow) {
    const int64_t to = routes.to[r];
    if (to < 0) continue;
    f32x4 lo = sums.template at<f32x4>(r, in_tile), hi = sums.template at<f32x4>(r, in_tile + 4);
    // NOTE: a bias that is not there must not be added as 0: -0 + 0 is +0.
    if (bias) lo += bias_lo, hi += bias_hi;
    device::store_columns(out, to + column, lo, hi);
  }
}

// Added to the token's row, weighted. A lane has two columns: as a pair, which one addition of
// 16-bit values takes, or half a tile apart; so neighbouring lanes add to neighbouring dwords.
template <bool kPaired, class Routes, class Sums>
RQ_DEVICE void finish_atomic(const MoeGemm2Params& p, const float* bias, const Routes& routes,
                             const Sums& sums, int64_t column0, uint32_t lane) {
  constexpr uint32_t kLanesPerRow = Sums::kColumns / 2;
  constexpr uint32_t kApart = kPaired ? 1 : kLanesPerRow;
  const uint32_t in_tile = lane % kLanesPerRow * (kPaired ? 2 : 1);
  const int64_t column = column0 + in_tile;
  if (column >= p.hidden) return;
  const bool has_second = column + kApart < p.hidden;
  f32x2 added{};
  if (bias) added = f32x2{bias[column], has_second ? bias[column + kApart] : 0.0f};
#pragma unroll 1
  for (uint32_t r = lane / kLanesPerRow; r < Sums::kRows; r += arch::kWaveSize / kLanesPerRow) {
    const int64_t to = routes.to[r];
    if (to < 0) continue;
    f32x2 y;
    if constexpr (kPaired)
      y = sums.template at<f32x2>(r, in_tile);
    else
      y = f32x2{sums.template at<float>(r, in_tile), sums.template at<float>(r, in_tile + kApart)};
    if (bias) y += added;
    y *= routes.weight[r];
    if constexpr (kPaired) {
      uint16_t* out = static_cast<uint16_t*>(p.out) + to + column;
      if (p.out_dtype == DType::bf16)
        arch::atomic_add_bf16(out, arch::pack_bf16(y));
      else
        arch::atomic_add_fp16(out, arch::pack_fp16(y));
    } else {
      float* out = static_cast<float*>(p.out) + to + column;
      arch::atomic_add_fp32(out, y.x);
      if (has_second) arch::atomic_add_fp32(out + kApart, y.y);
    }
  }
}

// MXFP4 rows by route: a lane quantises a group of 32 columns.
template <class Routes, class Sums>
RQ_DEVICE void finish_mxfp4(const MoeGemm2Params& p, const float* bias, const Routes& routes,
                            const Sums& sums, int64_t column0, uint32_t lane) {
  constexpr uint32_t kGroups = Sums::kColumns / kGroup;
#pragma unroll 1
  for (uint32_t i = lane; i < Sums::kRows * kGroups; i += arch::kWaveSize) {
    const uint32_t row = i / kGroups, in_tile = i % kGroups * kGroup;
    const int64_t column = column0 + in_tile;
    const int64_t to = routes.to[row];
    if (column >= p.hidden || to < 0) continue;
    f32x2 y[device::kPairs];
    RQ_UNROLL
    for (uint32_t c = 0; c < kGroup; c += 4) {
      f32x4 v = sums.template at<f32x4>(row, in_tile + c);
      if (bias) v += load_f32x4(bias + column + c);
      y[c / 2] = f32x2{v[0], v[1]}, y[c / 2 + 1] = f32x2{v[2], v[3]};
    }
    const device::Group group =
        device::quantize_group<ElementFormat::e2m1, false>(y, scale_bias(ScaleMode::round_up), 0);
    const int64_t index = (to + column) / kGroup;
    arch::store(p.codes + index * kGroupBytes, group.codes);
    p.scales[index] = static_cast<uint8_t>(group.scale);
  }
}

// `column0`: of the wave's tile.
template <MoeFinish kFinish, class Routes, class Sums>
RQ_DEVICE void finish(const MoeGemm2Params& p, uint32_t expert, const Routes& routes,
                      const Sums& sums, int64_t column0, uint32_t lane) {
  const float* bias = p.bias ? p.bias + expert * p.hidden : nullptr;
  if constexpr (kFinish == MoeFinish::rows)
    finish_rows(p, bias, routes, sums, column0, lane);
  else if constexpr (kFinish == MoeFinish::atomic)
    p.out_dtype == DType::fp32 ? finish_atomic<false>(p, bias, routes, sums, column0, lane)
                               : finish_atomic<true>(p, bias, routes, sums, column0, lane);
  else
    finish_mxfp4(p, bias, routes, sums, column0, lane);
}

}  // namespace rotquant::hip
