// SPDX-License-Identifier: MIT
// Matrix times tokens, and out of the sums the group that each lane goes on with.
#pragma once

#include "hip/rotate_matrix/tokens.h"

namespace rotquant::hip {

using arch::f32x4;
using device::kPairs;

// One panel of output channels of one token tile, [image of the panel][MFMA row tile].
template <class Config, class Shape = MatrixShape<Config::kRotationSize>>
using TileSums = f32x4[Shape::kImagesPerPanel][Shape::kTiles];

template <class Config>
struct Sums {
  TileSums<Config> tile[Config::kTokenTiles];
};

template <class Config, int kLoads, class Fragment>
RQ_DEVICE void multiply(const TokenFragment (&b)[Config::kTokenTiles][kLoads], Fragment&& fragment,
                        Sums<Config>& sums) {
  constexpr int kSize = Config::kRotationSize;
  using Shape = MatrixShape<kSize>;
  if constexpr (kSize == 16) {
    RQ_UNROLL
    for (int i = 0; i < Config::kTokenTiles; ++i) {
      RQ_UNROLL
      for (int j = 0; j < kLoads; ++j) {
        u32x2 block[2];
        split_blocks(b[i][j], block);
        RQ_UNROLL
        for (int h = 0; h < 2; ++h)
          sums.tile[i][2 * j + h][0] =
              arch::mfma_bf16(fragment(2 * j + h, 0, 0), block[h], f32x4{0, 0, 0, 0});
      }
    }
  } else {
    RQ_UNROLL
    for (int image = 0; image < Shape::kImagesPerPanel; ++image) {
      RQ_UNROLL
      for (int t = 0; t < Shape::kTiles; ++t) {
        RQ_UNROLL
        for (int s = 0; s < Shape::kSteps; ++s) {
          const auto a = fragment(image, t, s);
          RQ_UNROLL
          for (int i = 0; i < Config::kTokenTiles; ++i) {
            f32x4& sum = sums.tile[i][image][t];
            sum = arch::mfma_bf16(a, b[i][image * Shape::kSteps + s], s ? sum : f32x4{0, 0, 0, 0});
          }
        }
      }
    }
  }
}

template <int kLaneBit>
RQ_DEVICE void swap_lane_bit(float& first, float& second) {
  uint32_t a = float_to_bits(first), b = float_to_bits(second);
  arch::swap_lane_bit<kLaneBit>(a, b);
  first = bits_to_float(a), second = bits_to_float(b);
}

// The lane's group (quarter l / 16 of the panel) out of the sums of one token tile. From RS 128 on
// the lane has it; of shorter blocks it has a part of each, and parts are exchanged for blocks.
template <int kSize>
RQ_DEVICE void own_group(
    f32x4 (&sums)[MatrixShape<kSize>::kImagesPerPanel][MatrixShape<kSize>::kTiles],
    f32x2 (&y)[kPairs]) {
  float v[kGroup];  // channels of the group, in the end
  RQ_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    if constexpr (kSize >= 128) v[i] = sums[0][i / 4][i % 4];
    if constexpr (kSize == 64) v[i] = sums[i / 16][i % 16 / 4][i % 4];
    if constexpr (kSize == 32) v[i] = sums[i / 8][i % 8 / 4][i % 4];
    if constexpr (kSize == 16) v[i] = sums[i / 4 % 4 * 2 + i / 16][0][i % 4];
  }
  if constexpr (kSize == 64) {
    RQ_UNROLL
    for (int i = 0; i < 16; ++i) swap_lane_bit<32>(v[i], v[i + 16]);
  }
  if constexpr (kSize <= 32) {
    constexpr int kPart = kSize / 4;  // consecutive channels of a part
    RQ_UNROLL
    for (int i = 0; i < kGroup / 4; ++i) {
      const int at = i % kPart + i / kPart * 4 * kPart;
      float &a = v[at], &b = v[at + kPart], &c = v[at + 2 * kPart], &d = v[at + 3 * kPart];
      swap_lane_bit<16>(a, b), swap_lane_bit<16>(c, d);
      swap_lane_bit<32>(a, c), swap_lane_bit<32>(b, d);
    }
  }
  RQ_UNROLL
  for (int i = 0; i < kPairs; ++i) y[i] = f32x2{v[2 * i], v[2 * i + 1]};
}

}  // namespace rotquant::hip
