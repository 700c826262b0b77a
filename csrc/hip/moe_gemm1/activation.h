// SPDX-License-Identifier: MIT
// The gated activations in float32, by the hardware's exponential and reciprocal.
//
// exp2 and rcp are right to a unit in the last place, so a sigmoid's relative error is below
// (2 |s| + 4) 2^-23, where |s| is what its rounded argument contributes.
#pragma once

#include "core/params.h"
#include "hip/arch/arch.h"

namespace rotquant::hip {

constexpr float kLog2e = 1.44269504088896340736f;

RQ_DEVICE float sigmoid_of_scaled(float minus_s_log2e) {
  return arch::rcp(1.0f + arch::exp2(minus_s_log2e));
}

// The normal distribution, 0.5 (1 + erf(g / sqrt 2)), by its smaller tail, where nothing cancels:
// 0.5 erfc(x) = t Q(t) exp(-x^2), t = 1 / (1 + 0.4 x), with Q fitted at Chebyshev nodes to a
// relative error below 2^-21 for all x >= 0; the argument of the exponential adds x^2 2^-22.
RQ_DEVICE float normal_cdf(float g) {
  constexpr float kHalfQ[] = {0.112837948f,  0.112832315f,   0.103972331f,
                              0.0838731453f, 0.0722406656f,  -0.00598078640f,
                              0.0882139653f, -0.0936627537f, 0.0256732423f};
  const float x = __builtin_fabsf(g) * 0.70710678118654752440f;
  const float t = arch::rcp(1.0f + 0.4f * x);
  float q = kHalfQ[8];
  RQ_UNROLL
  for (int i = 7; i >= 0; --i) q = q * t + kHalfQ[i];
  const float tail = q * t * arch::exp2(g * g * (-0.5f * kLog2e));
  return g < 0 ? tail : 1.0f - tail;
}

// NaN stays NaN: a bad row must be seen (B34).
struct GateLimits {
  float limit;
  RQ_DEVICE float gate(float g) const { return arch::minimum(g, limit); }
  RQ_DEVICE float up(float u) const { return arch::maximum(arch::minimum(u, limit), -limit); }
};

// body(f) with f(gate, up), one instance of it for each kind of gate.
template <class Body>
RQ_DEVICE void with_gate(const MoeActivation& activation, Body&& body) {
  const GateLimits limits{activation.limit};
  if (activation.kind == Activate::gelu) {
    body([=](float gate, float up) {
      const float g = limits.gate(gate);
      return g * normal_cdf(g) * limits.up(up);
    });
  } else if (activation.kind == Activate::gelu_tanh) {
    // 0.5 (1 + tanh z) is the sigmoid of 2 z.
    body([=](float gate, float up) {
      constexpr float kSlope = -1.59576912160573071176f * kLog2e;  // -2 sqrt(2 / pi)
      const float g = limits.gate(gate);
      return g * sigmoid_of_scaled(g * (kSlope + 0.044715f * kSlope * (g * g))) * limits.up(up);
    });
  } else if (activation.kind == Activate::swiglu) {
    const float slope = -activation.alpha * kLog2e;
    body([=](float gate, float up) {
      const float g = limits.gate(gate);
      return g * sigmoid_of_scaled(g * slope) * (limits.up(up) + 1.0f);
    });
  } else {
    body([=](float gate, float up) {
      const float g = limits.gate(gate);
      return g * sigmoid_of_scaled(g * -kLog2e) * limits.up(up);
    });
  }
}

}  // namespace rotquant::hip
