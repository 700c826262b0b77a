// SPDX-License-Identifier: MIT
// Walsh-Hadamard butterflies on a group of 32 channels per lane, in registers: steps h = 1 .. 16
// stay inside the lane, h = 32, 64, 128 go to the lane 1, 2 or 4 away.
//
// A Hadamard given to hip/rotate_matrix as a matrix takes fewer issue slots (counted, VALU a
// channel: 3.9 against 8.9 at RS 64, 4.1 against 10.9 at RS 128), but both stay below what memory
// leaves room for (12.4), and sums in another order would not have the bytes that the butterflies
// define.
#pragma once

#include "core/hadamard.h"
#include "hip/arch/arch.h"

namespace rotquant::device {

using arch::f32x2;

constexpr int kPairs = kGroup / 2;  // a lane's 32 channels, held as packed pairs

template <int kStep>
RQ_DEVICE void butterfly_in_lane(f32x2 (&y)[kPairs]) {
  if constexpr (kStep == 1) {
    // As one packed fma a pair: the products by 1 and -1 are exact.
    RQ_UNROLL
    for (int i = 0; i < kPairs; ++i)
      y[i] = arch::fma(f32x2{y[i].y, y[i].y}, f32x2{1.0f, -1.0f}, f32x2{y[i].x, y[i].x});
  } else {
    constexpr int kDistance = kStep / 2;
    RQ_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      if (i & kDistance) continue;
      const f32x2 a = y[i], b = y[i + kDistance];
      y[i] = a + b;
      y[i + kDistance] = a - b;
    }
  }
}

template <int kLaneBit>
RQ_DEVICE void butterfly_across_lanes(f32x2 (&y)[kPairs], uint32_t lane) {
  // Partner + own for the lower lane, partner - own for the upper: the product is exact, so this
  // rounds once, like the butterfly that it stands for.
  const float sign = lane & kLaneBit ? -1.0f : 1.0f;
  RQ_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    const f32x2 partner{arch::from_xor_lane<kLaneBit>(y[i].x),
                        arch::from_xor_lane<kLaneBit>(y[i].y)};
    y[i] = arch::fma(y[i], f32x2{sign, sign}, partner);
  }
}

// Unnormalised Hadamard of every block of kSize channels; a block is kSize / 32 adjacent lanes.
template <int kSize>
RQ_DEVICE void fwht(f32x2 (&y)[kPairs], uint32_t lane) {
  butterfly_in_lane<1>(y);
  butterfly_in_lane<2>(y);
  butterfly_in_lane<4>(y);
  butterfly_in_lane<8>(y);
  if constexpr (kSize >= 32) butterfly_in_lane<16>(y);
  if constexpr (kSize >= 64) butterfly_across_lanes<1>(y, lane);
  if constexpr (kSize >= 128) butterfly_across_lanes<2>(y, lane);
  if constexpr (kSize >= 256) butterfly_across_lanes<4>(y, lane);
}

}  // namespace rotquant::device
