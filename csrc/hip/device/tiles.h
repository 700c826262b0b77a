// SPDX-License-Identifier: MIT
// How a wave covers an activation, and how its 32-channel groups get into registers and back.
//
// A wave owns 2^n scale groups of each of (wave size / 2^n) rows: lane bits 0 .. n-1 are the group,
// the others the row; n >= 3, so eight neighbouring lanes always hold 256 neighbouring channels.
//
// A lane computes on whole groups (64 bytes of bf16), but if each lane loaded its own group, every
// 16-byte load would touch one cache line per lane, eight times the least. So a load covers whole
// lines, and afterwards the two top lane bits are swapped with the two bits of the register index:
//
//   load j of lane l:  chunk (l / 16) of the group of lane (l with its top two bits replaced by j)
//   after the swap:    register j of lane l is chunk j of lane l's own group
//
// (16 = a quarter of the wave.) Why these bits: gfx950 swaps them in one instruction
// (v_permlane16_swap, v_permlane32_swap), 0.5 instructions per channel for both; DPP needs 1.5 for
// the bits inside a row of 16. Doing h = 8 and 16 across lanes instead, with 8 channels a lane,
// would cost 3, and four lanes would each work out the same scale.
#pragma once

#include "core/params.h"
#include "hip/device/fwht.h"
#include "hip/device/tile_plan.h"

namespace rotquant::device {

using arch::u32x4;

constexpr uint32_t kChunks = 4;  // of 16 bytes: a group of 16-bit channels
constexpr uint32_t kChunkChannels = kGroup / kChunks;
constexpr uint32_t kQuarter = arch::kWaveSize / kChunks;

struct WaveTile {
  int64_t row0, group0;  // of lane 0
  int log2_groups;       // n above
  int64_t rows, groups;  // of the whole activation

  RQ_DEVICE uint32_t row_in_tile(uint32_t lane) const { return lane >> log2_groups; }
  RQ_DEVICE uint32_t group_in_tile(uint32_t lane) const { return lane & ((1u << log2_groups) - 1); }
  RQ_DEVICE int64_t row(uint32_t lane) const { return row0 + row_in_tile(lane); }
  RQ_DEVICE int64_t group(uint32_t lane) const { return group0 + group_in_tile(lane); }
  RQ_DEVICE bool contains(uint32_t lane) const { return row(lane) < rows && group(lane) < groups; }
  RQ_DEVICE bool full() const { return contains(arch::kWaveSize - 1); }
  // Lanes past the edge read the last row or group again, so that no load needs a predicate.
  RQ_DEVICE int64_t readable_row(uint32_t lane) const {
    return row(lane) < rows ? row(lane) : rows - 1;
  }
  RQ_DEVICE int64_t readable_group(uint32_t lane) const {
    return group(lane) < groups ? group(lane) : groups - 1;
  }
};

RQ_DEVICE uint32_t chunk_of(uint32_t lane) { return lane / kQuarter; }
RQ_DEVICE uint32_t owner_of(uint32_t lane, uint32_t j) { return lane % kQuarter + j * kQuarter; }

// Elements from the group of one lane to that of the lane `bit` further, in a full tile.
RQ_DEVICE int64_t lane_stride(const WaveTile& tile, int64_t row_stride, uint32_t bit) {
  return bit >> tile.log2_groups ? (bit >> tile.log2_groups) * row_stride : int64_t{bit} * kGroup;
}

RQ_DEVICE void swap_chunks(u32x4 (&v)[kChunks]) {
  RQ_UNROLL
  for (int w = 0; w < 4; ++w) {
    uint32_t a = v[0][w], b = v[1][w], c = v[2][w], d = v[3][w];
    arch::swap_lane_bit<kQuarter>(a, b);
    arch::swap_lane_bit<kQuarter>(c, d);
    arch::swap_lane_bit<2 * kQuarter>(a, c);
    arch::swap_lane_bit<2 * kQuarter>(b, d);
    v[0][w] = a, v[1][w] = b, v[2][w] = c, v[3][w] = d;
  }
}

template <DType kDType>
RQ_DEVICE f32x2 unpack(uint32_t pair) {
  return kDType == DType::bf16 ? arch::unpack_bf16(pair) : arch::unpack_fp16(pair);
}

// The 32 channels of every lane's group, as float32.
template <DType kDType>
RQ_DEVICE void load_group(const Activation& x, const WaveTile& tile, uint32_t lane,
                          f32x2 (&y)[kPairs]) {
  if constexpr (kDType == DType::fp32) {
    // A group is a whole line here: the lane reads it alone, eight loads hit the same line.
    const float* p = static_cast<const float*>(x.data) + tile.readable_row(lane) * x.row_stride +
                     tile.readable_group(lane) * kGroup;
    RQ_UNROLL
    for (int j = 0; j < kPairs / 2; ++j) {
      const u32x4 v = arch::load_stream(p + 4 * j);
      y[2 * j] = f32x2{bits_to_float(v[0]), bits_to_float(v[1])};
      y[2 * j + 1] = f32x2{bits_to_float(v[2]), bits_to_float(v[3])};
    }
  } else {
    const auto* base = static_cast<const uint16_t*>(x.data) + chunk_of(lane) * kChunkChannels;
    u32x4 v[kChunks];
    if (tile.full()) {
      const uint32_t first = owner_of(lane, 0);
      const uint16_t* p = base + tile.row(first) * x.row_stride + tile.group(first) * kGroup;
      const int64_t step = lane_stride(tile, x.row_stride, kQuarter);
      const int64_t half = lane_stride(tile, x.row_stride, 2 * kQuarter);
      v[0] = arch::load_stream(p);
      v[1] = arch::load_stream(p + step);
      v[2] = arch::load_stream(p + half);
      v[3] = arch::load_stream(p + half + step);
    } else {
      RQ_UNROLL
      for (uint32_t j = 0; j < kChunks; ++j) {
        const uint32_t owner = owner_of(lane, j);
        v[j] = arch::load_stream(base + tile.readable_row(owner) * x.row_stride +
                                 tile.readable_group(owner) * kGroup);
      }
    }
    swap_chunks(v);
    RQ_UNROLL
    for (int i = 0; i < kPairs; ++i) y[i] = unpack<kDType>(v[i / 4][i % 4]);
  }
}

// Stores every lane's 32 channels to a contiguous [rows, k] tensor.
RQ_DEVICE void store_group(void* out, DType dtype, const WaveTile& tile, uint32_t lane,
                           const f32x2 (&y)[kPairs]) {
  const int64_t k = tile.groups * kGroup;
  if (dtype == DType::fp32) {
    if (!tile.contains(lane)) return;
    float* p = static_cast<float*>(out) + tile.row(lane) * k + tile.group(lane) * kGroup;
    RQ_UNROLL
    for (int j = 0; j < kPairs / 2; ++j)
      arch::store(p + 4 * j, u32x4{float_to_bits(y[2 * j].x), float_to_bits(y[2 * j].y),
                                   float_to_bits(y[2 * j + 1].x), float_to_bits(y[2 * j + 1].y)});
    return;
  }
  u32x4 v[kChunks];
  RQ_UNROLL
  for (int i = 0; i < kPairs; ++i)
    v[i / 4][i % 4] = dtype == DType::bf16 ? arch::pack_bf16(y[i]) : arch::pack_fp16(y[i]);
  swap_chunks(v);
  auto* base = static_cast<uint16_t*>(out) + chunk_of(lane) * kChunkChannels;
  RQ_UNROLL
  for (uint32_t j = 0; j < kChunks; ++j) {
    const uint32_t owner = owner_of(lane, j);
    if (tile.contains(owner))
      arch::store(base + tile.row(owner) * k + tile.group(owner) * kGroup, v[j]);
  }
}

// Calls body(tile, lane) for every tile of this wave; a clamped grid strides over the rest.
// All threads of a workgroup make the same number of calls, so the body may have barriers.
template <class Body>
RQ_DEVICE void for_each_wave_tile(const TilePlan& plan, int64_t rows, int64_t groups, Body&& body) {
  const uint32_t thread_lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const uint32_t wave_rows = arch::kWaveSize >> plan.log2_groups;
  const uint32_t tile_rows = plan.threads >> plan.log2_groups;
  for (int64_t r = arch::block_index_y(); r < plan.row_tiles; r += plan.grid_rows) {
    for (int64_t g = arch::block_index_x(); g < plan.group_tiles; g += plan.grid_groups) {
      const WaveTile tile{r * tile_rows + wave * wave_rows, g << plan.log2_groups, plan.log2_groups,
                          rows, groups};
      body(tile, arch::opaque(thread_lane));
    }
  }
}

}  // namespace rotquant::device
