// SPDX-License-Identifier: MIT
// A Hadamard whose size is known at run time only, stage by stage, with the numerics of
// hip/rotate_quant: the size is uniform, so a stage that it lacks costs a scalar branch.
#pragma once

#include "hip/device/fwht.h"

namespace rotquant::hip {

using arch::f32x2;
using device::kPairs;

RQ_DEVICE void prescale_group(const float* prescale, f32x2 (&y)[kPairs]) {
  RQ_UNROLL
  for (int i = 0; i < kPairs; i += 2) {
    const auto s = arch::load(prescale + 2 * i);
    y[i] *= f32x2{bits_to_float(s[0]), bits_to_float(s[1])};
    y[i + 1] *= f32x2{bits_to_float(s[2]), bits_to_float(s[3])};
  }
}

// Steps h = 1 .. 16, as far as the size goes; not for size 0.
RQ_DEVICE void hadamard_in_lane(int size, f32x2 (&y)[kPairs]) {
  device::butterfly_in_lane<1>(y);
  device::butterfly_in_lane<2>(y);
  device::butterfly_in_lane<4>(y);
  device::butterfly_in_lane<8>(y);
  if (size >= 32) device::butterfly_in_lane<16>(y);
}

// 1 / sqrt(size), as core/hadamard.h has it for one size: a power of two goes into the scale's
// exponent, anything else is multiplied in. Size 0: none.
struct HadamardNorm {
  int shift = 0;
  float factor = 1;

  RQ_DEVICE explicit HadamardNorm(int size) {
    if (size == 0) return;
    const int log2 = __builtin_ctz(size);
    if (log2 % 2 == 0)
      shift = log2 / 2;
    else
      factor = 0.70710678118654752440f * exp2_int(-(log2 / 2));
  }
  RQ_DEVICE void operator()(f32x2 (&y)[kPairs]) const {
    if (factor == 1) return;
    RQ_UNROLL
    for (int i = 0; i < kPairs; ++i) y[i] *= factor;
  }
};

}  // namespace rotquant::hip
