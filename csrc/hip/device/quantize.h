// SPDX-License-Identifier: MIT
// One lane quantises one group of 32: amax, scale byte, codes. Nothing crosses lanes.
#pragma once

#include "hip/device/fwht.h"

namespace rotquant::device {

using arch::u32x4;

struct Group {
  u32x4 codes;  // 32 e2m1 codes, element 0 in the low nibble of byte 0
  uint32_t scale;
};

RQ_DEVICE void round_to_bf16(f32x2 (&y)[kPairs]) {
  RQ_UNROLL
  for (int i = 0; i < kPairs; ++i) y[i] = arch::unpack_bf16(arch::pack_bf16(y[i]));
}

RQ_DEVICE uint32_t amax_bits(const f32x2 (&y)[kPairs]) {
  // Four independent chains: a single one would wait for its own latency at every step.
  float m[4] = {0, 0, 0, 0};
  RQ_UNROLL
  for (int i = 0; i < kPairs; ++i) m[i % 4] = arch::maximum_abs(m[i % 4], y[i].x, y[i].y);
  return float_to_bits(arch::maximum_abs(arch::maximum_abs(m[0], m[1], m[2]), m[3], m[3])) &
         0x7FFFFFFFu;
}

RQ_DEVICE u32x4 codes_e2m1(const f32x2 (&y)[kPairs], float scale) {
  u32x4 w = {0, 0, 0, 0};
  // Byte by byte over the four registers: back-to-back writes to one register would each need a
  // wait state.
  RQ_UNROLL
  for (int r = 0; r < 4; ++r) w[r] = arch::cvt_pk_fp4_f32<0>(w[r], y[4 * r].x, y[4 * r].y, scale);
  RQ_UNROLL
  for (int r = 0; r < 4; ++r)
    w[r] = arch::cvt_pk_fp4_f32<1>(w[r], y[4 * r + 1].x, y[4 * r + 1].y, scale);
  RQ_UNROLL
  for (int r = 0; r < 4; ++r)
    w[r] = arch::cvt_pk_fp4_f32<2>(w[r], y[4 * r + 2].x, y[4 * r + 2].y, scale);
  RQ_UNROLL
  for (int r = 0; r < 4; ++r)
    w[r] = arch::cvt_pk_fp4_f32<3>(w[r], y[4 * r + 3].x, y[4 * r + 3].y, scale);
  return w;
}

// Sum of squared errors of codes whose values are multiplied by `unit`, against y * inverse_scale:
// a balanced binary tree over the 32 elements, neighbours first.
RQ_DEVICE float squared_error(const f32x2 (&y)[kPairs], u32x4 codes, float inverse_scale,
                              float unit) {
  float sum[kPairs];
  RQ_UNROLL
  for (int r = 0; r < 4; ++r) {
    const f32x2 q[4] = {
        arch::cvt_pk_f32_fp4<0>(codes[r], unit), arch::cvt_pk_f32_fp4<1>(codes[r], unit),
        arch::cvt_pk_f32_fp4<2>(codes[r], unit), arch::cvt_pk_f32_fp4<3>(codes[r], unit)};
    RQ_UNROLL
    for (int i = 0; i < 4; ++i) {
      const f32x2 d = y[4 * r + i] * inverse_scale - q[i];
      const f32x2 square = d * d;
      sum[4 * r + i] = square.x + square.y;
    }
  }
  RQ_UNROLL
  for (int width = kPairs / 2; width > 0; width /= 2) {
    RQ_UNROLL
    for (int i = 0; i < width; ++i) sum[i] = sum[2 * i] + sum[2 * i + 1];
  }
  return sum[0];
}

// `shift`: the values are still to be multiplied by 2^-shift, which the exponent does.
template <ElementFormat kElement, bool kMse>
RQ_DEVICE Group quantize_group(const f32x2 (&y)[kPairs], uint32_t bias, int shift) {
  static_assert(kElement == ElementFormat::e2m1);
  const uint32_t amax = amax_bits(y);
  int byte = scale_byte(amax, bias, shift);
  float scale = bits_to_float(static_cast<uint32_t>(byte + shift) << 23);
  u32x4 codes = codes_e2m1(y, scale);
  if constexpr (kMse) {
    const float finer = bits_to_float(static_cast<uint32_t>(byte + shift - 1) << 23);
    const u32x4 finer_codes = codes_e2m1(y, finer);
    const float inverse = exp2_int(127 - byte - shift);
    const bool better =
        squared_error(y, finer_codes, inverse, 0.5f) < squared_error(y, codes, inverse, 1.0f);
    if (better && byte > 0) {
      codes = finer_codes;
      --byte;
    }
  }
  codes = has_codes(amax) ? codes : u32x4{0, 0, 0, 0};
  return {codes, amax >= kInfBits ? uint32_t{kScaleNaN} : static_cast<uint32_t>(byte)};
}

}  // namespace rotquant::device
