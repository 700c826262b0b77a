// SPDX-License-Identifier: MIT
// From a wave's sums in LDS to the output: each sorted row goes where its route wants it. Rows that
// are none, padding, go nowhere. Columns come in 32s, so that whatever a lane takes at once exists
// or does not.
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
    to[row_of(lane)] = is_route(p.sorting, route.id) ? row * p.hidden : -1;
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

// The sum of bias and value is the value itself where there is no bias: -0 changes nothing.
// NOTE: +0 would make +0 of -0.
template <int kColumns>
struct Bias {
  f32x2 pairs[kColumns / 2];

  // Of neighbouring columns from `column` on, all inside.
  RQ_DEVICE Bias(const float* bias, int64_t column) {
    RQ_UNROLL
    for (f32x2& pair : pairs) pair = f32x2{-0.0f, -0.0f};
    if (!bias) return;
    RQ_UNROLL
    for (int i = 0; i < kColumns / 2; i += 2) {
      const u32x4 four = arch::load(bias + column + 2 * i);
      pairs[i] = f32x2{bits_to_float(four[0]), bits_to_float(four[1])};
      pairs[i + 1] = f32x2{bits_to_float(four[2]), bits_to_float(four[3])};
    }
  }
};

// A row of the output for each route, unweighted: eight neighbouring columns a lane.
template <DType kDType, class Routes, class Sums>
RQ_DEVICE void finish_rows(const MoeGemm2Params& p, const float* bias_of_expert,
                           const Routes& routes, const Sums& sums, int64_t column0, uint32_t lane) {
  constexpr uint32_t kLanesPerRow = Sums::kColumns / device::kStoreColumns;
  constexpr uint32_t kRowsAtOnce = arch::kWaveSize / kLanesPerRow;
  const uint32_t in_tile = lane % kLanesPerRow * device::kStoreColumns;
  const int64_t column = column0 + in_tile;
  if (column >= p.hidden) return;
  const device::Output out{p.out, kDType, 0, p.hidden, p.hidden, nullptr};
  const Bias<device::kStoreColumns> bias(bias_of_expert, column);
  const f32x4 bias_lo = {bias.pairs[0].x, bias.pairs[0].y, bias.pairs[1].x, bias.pairs[1].y};
  const f32x4 bias_hi = {bias.pairs[2].x, bias.pairs[2].y, bias.pairs[3].x, bias.pairs[3].y};
#pragma unroll 2
  for (uint32_t first = 0; first < Sums::kRows; first += kRowsAtOnce) {
    const uint32_t row = first + lane / kLanesPerRow;
    const int64_t to = routes.to[row];
    const f32x4 lo = sums.template at<f32x4>(row, in_tile) + bias_lo;
    const f32x4 hi = sums.template at<f32x4>(row, in_tile + 4) + bias_hi;
    if (to >= 0) device::store_columns(out, to + column, lo, hi);
  }
}

// Added to the token's row, weighted. A lane has two columns: as a pair, which one addition of
// 16-bit values takes, or half a tile apart; so neighbouring lanes add to neighbouring dwords.
template <DType kDType, class Routes, class Sums>
RQ_DEVICE void finish_atomic(const MoeGemm2Params& p, const float* bias, const Routes& routes,
                             const Sums& sums, int64_t column0, uint32_t lane) {
  constexpr bool kPaired = kDType != DType::fp32;
  constexpr uint32_t kLanesPerRow = Sums::kColumns / 2;
  constexpr uint32_t kRowsAtOnce = arch::kWaveSize / kLanesPerRow;
  constexpr uint32_t kApart = kPaired ? 1 : kLanesPerRow;
  const uint32_t in_tile = lane % kLanesPerRow * (kPaired ? 2 : 1);
  const int64_t column = column0 + in_tile;
  if (column >= p.hidden) return;
  const bool has_second = column + kApart < p.hidden;
  f32x2 added = {-0.0f, -0.0f};  // as in Bias
  if (bias) added = f32x2{bias[column], has_second ? bias[column + kApart] : 0.0f};
#pragma unroll 2
  for (uint32_t first = 0; first < Sums::kRows; first += kRowsAtOnce) {
    const uint32_t row = first + lane / kLanesPerRow;
    const int64_t to = routes.to[row];
    f32x2 y;
    if constexpr (kPaired)
      y = sums.template at<f32x2>(row, in_tile);
    else
      y = f32x2{sums.template at<float>(row, in_tile),
                sums.template at<float>(row, in_tile + kApart)};
    y = (y + added) * routes.weight[row];
    if (to < 0) continue;
    if constexpr (kDType == DType::bf16) {
      arch::atomic_add_bf16(static_cast<uint16_t*>(p.out) + to + column, arch::pack_bf16(y));
    } else if constexpr (kDType == DType::fp16) {
      arch::atomic_add_fp16(static_cast<uint16_t*>(p.out) + to + column, arch::pack_fp16(y));
    } else {
      float* out = static_cast<float*>(p.out) + to + column;
      arch::atomic_add_fp32(out, y.x);
      if (has_second) arch::atomic_add_fp32(out + kApart, y.y);
    }
  }
}

// MXFP4 rows by route: a lane quantises a group of 32 columns.
template <class Routes, class Sums>
RQ_DEVICE void finish_mxfp4(const MoeGemm2Params& p, const float* bias_of_expert,
                            const Routes& routes, const Sums& sums, int64_t column0,
                            uint32_t lane) {
  constexpr uint32_t kLanesPerRow = Sums::kColumns / kGroup;
  const uint32_t in_tile = lane % kLanesPerRow * kGroup;
  const int64_t column = column0 + in_tile;
  if (column >= p.hidden) return;
  const Bias<kGroup> bias(bias_of_expert, column);
#pragma unroll 1
  for (uint32_t row = lane / kLanesPerRow; row < Sums::kRows;
       row += arch::kWaveSize / kLanesPerRow) {
    f32x2 y[device::kPairs];
    RQ_UNROLL
    for (int i = 0; i < device::kPairs; i += 2) {
      const f32x4 four = sums.template at<f32x4>(row, in_tile + 2 * i);
      y[i] = f32x2{four[0], four[1]} + bias.pairs[i];
      y[i + 1] = f32x2{four[2], four[3]} + bias.pairs[i + 1];
    }
    const device::Group group =
        device::quantize_group<ElementFormat::e2m1, false>(y, scale_bias(ScaleMode::round_up), 0);
    const int64_t to = routes.to[row];
    if (to < 0) continue;
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
  const auto as = [&](auto dtype) {
    if constexpr (kFinish == MoeFinish::rows)
      finish_rows<DType{dtype.value}>(p, bias, routes, sums, column0, lane);
    else
      finish_atomic<DType{dtype.value}>(p, bias, routes, sums, column0, lane);
  };
  if constexpr (kFinish == MoeFinish::mxfp4)
    finish_mxfp4(p, bias, routes, sums, column0, lane);
  else if (p.out_dtype == DType::bf16)
    as(device::Index<static_cast<int>(DType::bf16)>{});
  else if (p.out_dtype == DType::fp16)
    as(device::Index<static_cast<int>(DType::fp16)>{});
  else
    as(device::Index<static_cast<int>(DType::fp32)>{});
}

}  // namespace rotquant::hip
