// SPDX-License-Identifier: MIT
// MXFP4: e2m1 elements (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives) in groups of 32 along K that
// share one e8m0 scale byte b = 2^(b - 127). Source: OCP Microscaling Formats (MX) v1.0.
#pragma once

#include <stdint.h>

#include "core/macros.h"

namespace rotquant {

constexpr int kGroup = 32;               // elements that share a scale
constexpr int kGroupBytes = kGroup / 2;  // their packed e2m1 codes
constexpr uint8_t kScaleNaN = 255;

// Values are the format codes of the scaled MFMA (cbsz / blgp), so a kernel can pass them on.
enum class ElementFormat : int { e2m1 = 4 };

enum class ScaleMode : int { round_up, floor, even, ceil, mse };

constexpr uint32_t kInfBits = 0x7F800000u;

// What is added to the bits of amax before its exponent is read: see scale_byte().
// round_up: a mantissa above 1.5 carries (amax / 6 = amax / (1.5 * 4)); ceil: any mantissa above 1
// does; even: mantissas from 1.75 on do. mse starts from round_up.
RQ_HOST_DEVICE constexpr uint32_t scale_bias(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::floor: return 0;
    case ScaleMode::even: return 0x200000u;
    case ScaleMode::ceil: return 0x7FFFFFu;
    default: return 0x3FFFFFu;
  }
}

// Scale byte of a finite group maximum, for values that are still to be multiplied by 2^-shift
// (the 1/sqrt(RS) of a Hadamard). Exact for every mode: no division, nothing to round.
RQ_HOST_DEVICE int scale_byte(uint32_t amax_bits, uint32_t bias, int shift) {
  int byte = static_cast<int>((amax_bits + bias) >> 23) - 2 - shift;
  return byte < 0 ? 0 : byte;
}

// False for a group that holds NaN or Inf (its byte is 255) and for a group of zeros: both have
// all codes 0.
RQ_HOST_DEVICE bool has_codes(uint32_t amax_bits) { return amax_bits - 1u < kInfBits - 1u; }

RQ_HOST_DEVICE float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

RQ_HOST_DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// 2^exponent for -149 <= exponent <= 127.
RQ_HOST_DEVICE float exp2_int(int exponent) {
  return exponent >= -126 ? bits_to_float(static_cast<uint32_t>(exponent + 127) << 23)
                          : bits_to_float(1u << (exponent + 149));
}

// Value of an e8m0 byte: 0 is 2^-127 (a float32 subnormal, not zero), 255 is NaN.
RQ_HOST_DEVICE float e8m0_value(uint8_t byte) {
  return byte == kScaleNaN ? bits_to_float(0x7FC00000u) : exp2_int(byte - 127);
}

RQ_HOST_DEVICE float e2m1_value(uint32_t code) {
  uint32_t magnitude = code & 7u;
  // 0 and .5 are the subnormals; from 1 on it is a float of 1 mantissa bit and exponent bias 1.
  float value = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                              : bits_to_float((magnitude + 252u) << 22);
  return (code & 8u) ? -value : value;
}

// Nearest e2m1 code of a value in units of its scale; ties to the even code, saturating at 6, sign
// kept. The seven thresholds are the midpoints; a tie goes up exactly where the upper code is even.
RQ_HOST_DEVICE uint32_t e2m1_code(float value) {
  float t = value < 0 ? -value : value;
  uint32_t code = (t > 0.25f) + (t >= 0.75f) + (t > 1.25f) + (t >= 1.75f) + (t > 2.5f) +
                  (t >= 3.5f) + (t > 5.0f);
  return code | (float_to_bits(value) >> 28 & 8u);
}

}  // namespace rotquant
