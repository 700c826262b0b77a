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

// The routes of a wave's rows. They are fetched before the product, which hides the latency, and
// wait in LDS, which costs no registers meanwhile. Every wave has its own: no barrier.
template <int kRows>
struct WaveRoutes {
  int32_t id[kRows];
  float weight[kRows];  // of MoeFinish::atomic

  template <MoeFinish kFinish>
  RQ_DEVICE void fetch(const MoeGemm2Params& p, int64_t row0, uint32_t lane) {
    static_assert(kRows <= arch::kWaveSize);
    if (lane >= kRows) return;
    id[lane] = p.sorting.sorted_ids[row0 + lane];
    if constexpr (kFinish == MoeFinish::atomic)
      weight[lane] = p.apply_weight ? p.sorting.sorted_weights[row0 + lane] : 1.0f;
  }
};

// Row of the output by route. NOTE: 64 bits: rows times columns pass 2^31.
RQ_DEVICE int64_t route_row(const MoeSorting& sorting, int32_t id) {
  return int64_t{moe_token(id)} * sorting.topk + moe_slot(id);
}

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
    const int32_t id = routes.id[r];
    if (moe_token(id) >= p.sorting.tokens) continue;
    f32x4 lo = sums.template at<f32x4>(r, in_tile), hi = sums.template at<f32x4>(r, in_tile + 4);
    // NOTE: a bias that is not there must not be added as 0: -0 + 0 is +0.
    if (bias) lo += bias_lo, hi += bias_hi;
    device::store_columns(out, route_row(p.sorting, id) * p.hidden + column, lo, hi);
  }
}

// Added to the token's row, weighted. A lane has two columns: as a pair for the additions of 16-bit
// values, half a tile apart for those of float32; so neighbouring lanes add to neighbouring dwords.
template <class Routes, class Sums>
RQ_DEVICE void finish_atomic(const MoeGemm2Params& p, const float* bias, const Routes& routes,
                             const Sums& sums, int64_t column0, uint32_t lane) {
  constexpr uint32_t kLanesPerRow = Sums::kColumns / 2;
  const uint32_t place = lane % kLanesPerRow;
  const bool paired = p.out_dtype != DType::fp32;
  const uint32_t first = paired ? 2 * place : place, second = first + (paired ? 1 : kLanesPerRow);
  const bool has_first = column0 + first < p.hidden, has_second = column0 + second < p.hidden;
  if (!has_first) return;
  f32x2 added{};
  if (bias) {
    added.x = bias[column0 + first];
    if (has_second) added.y = bias[column0 + second];
  }
#pragma unroll 1
  for (uint32_t r = lane / kLanesPerRow; r < Sums::kRows; r += arch::kWaveSize / kLanesPerRow) {
    const int32_t id = routes.id[r];
    if (moe_token(id) >= p.sorting.tokens) continue;
    f32x2 y{sums.template at<float>(r, first), sums.template at<float>(r, second)};
    if (bias) y += added;
    y *= routes.weight[r];
    const int64_t index = moe_token(id) * p.hidden + column0 + first;
    if (paired) {
      uint16_t* to = static_cast<uint16_t*>(p.out) + index;
      if (p.out_dtype == DType::bf16)
        arch::atomic_add_bf16(to, arch::pack_bf16(y));
      else
        arch::atomic_add_fp16(to, arch::pack_fp16(y));
    } else {
      float* to = static_cast<float*>(p.out) + index;
      arch::atomic_add_fp32(to, y.x);
      if (has_second) arch::atomic_add_fp32(to + kLanesPerRow, y.y);
    }
  }
}

// MXFP4 rows by route: a lane quantises a group of 32 columns. Lanes go down the rows, whose chunks
// are in different banks.
template <class Routes, class Sums>
RQ_DEVICE void finish_mxfp4(const MoeGemm2Params& p, const float* bias, const Routes& routes,
                            const Sums& sums, int64_t column0, uint32_t lane) {
  constexpr uint32_t kGroups = Sums::kColumns / kGroup;
#pragma unroll 1
  for (uint32_t i = lane; i < Sums::kRows * kGroups; i += arch::kWaveSize) {
    const uint32_t row = i % Sums::kRows, in_tile = i / Sums::kRows * kGroup;
    const int64_t column = column0 + in_tile;
    const int32_t id = routes.id[row];
    if (column >= p.hidden || moe_token(id) >= p.sorting.tokens) continue;
    f32x2 y[device::kPairs];
    RQ_UNROLL
    for (uint32_t c = 0; c < kGroup; c += 4) {
      f32x4 v = sums.template at<f32x4>(row, in_tile + c);
      if (bias) v += load_f32x4(bias + column + c);
      y[c / 2] = f32x2{v[0], v[1]}, y[c / 2 + 1] = f32x2{v[2], v[3]};
    }
    const device::Group group =
        device::quantize_group<ElementFormat::e2m1, false>(y, scale_bias(ScaleMode::round_up), 0);
    const int64_t index = route_row(p.sorting, id) * (p.hidden / kGroup) + column / kGroup;
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
    finish_atomic(p, bias, routes, sums, column0, lane);
  else
    finish_mxfp4(p, bias, routes, sums, column0, lane);
}

}  // namespace rotquant::hip
