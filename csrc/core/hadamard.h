// SPDX-License-Identifier: MIT
// The Sylvester Hadamard rotation of one block: sizes and normalisation.
#pragma once

#include "core/macros.h"

namespace rotquant {

constexpr int kMinRotation = 16;
constexpr int kMaxRotation = 256;

// f.template operator()<RS>() for the run-time size; false if the size is none of 16 .. 256.
template <class F>
inline bool for_rotation_size(int size, F&& f) {
  switch (size) {
    case 16: f.template operator()<16>(); return true;
    case 32: f.template operator()<32>(); return true;
    case 64: f.template operator()<64>(); return true;
    case 128: f.template operator()<128>(); return true;
    case 256: f.template operator()<256>(); return true;
    default: return false;
  }
}

template <int kSize>
struct Hadamard {
  static_assert(kSize >= kMinRotation && kSize <= kMaxRotation && (kSize & (kSize - 1)) == 0);
  static constexpr int kLog2 = kSize == 16    ? 4
                               : kSize == 32  ? 5
                               : kSize == 64  ? 6
                               : kSize == 128 ? 7
                                              : 8;
  // 1/sqrt(RS) is 2^-kShift for 16, 64 and 256: it goes into the scale exponent for free.
  static constexpr bool kExact = kLog2 % 2 == 0;
  static constexpr int kShift = kLog2 / 2;
  static constexpr float kFactor =
      kExact ? 1.0f / (1 << kShift) : 0.70710678118654752440f / (1 << kShift);
};

}  // namespace rotquant
