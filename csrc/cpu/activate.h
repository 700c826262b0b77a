// SPDX-License-Identifier: MIT
// The activations of a gated MLP, 16 values at a time. Additions, multiplications, divisions and
// integers only, each rounded by itself: the same bytes on every instruction set.
//
// Against float64, exp_of() errs by at most 1.2 units in the last place and erfc_of() by 6e-7 of
// its value up to 2; beyond, the rounding of x^2 adds x^2 2^-24.
#pragma once

#include "core/params.h"
#include "cpu/dot.h"

namespace rotquant::cpu::RQ_ISA {

// Coefficients from the highest power down.
template <int kCount>
RQ_INLINE f32v polynomial(f32v x, const float (&coefficients)[kCount]) {
  f32v sum = splat(coefficients[0]);
  for (int i = 1; i < kCount; ++i) sum = sum * x + coefficients[i];
  return sum;
}

RQ_INLINE f32v exp_of(f32v x) {
  // Past these it is Inf or 0 anyway; NaN passes every comparison.
  x = x > 100.0f ? splat(100.0f) : x;
  x = x < -110.0f ? splat(-110.0f) : x;
  constexpr float kRound = 0x1.8p+23f;  // its last bit is worth 1
  const f32v n = (x * 0x1.715476p+0f + kRound) - kRound;
  // ln 2 in two parts, the first of 10 bits, so that its product is exact.
  const f32v r = (x - n * 0.693359375f) - n * -0x1.bd0106p-13f;
  constexpr float kTaylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24,
                               1.0f / 6,    0.5f,       1.0f,       1.0f};
  return scale_by(polynomial(r, kTaylor), n);
}

RQ_INLINE f32v sigmoid_times(f32v value, f32v x) { return value / (exp_of(-x) + 1.0f); }

// erfc of |x|: exp(-x^2) t P(t) with t = 1 / (1 + |x| / 2), P fitted for the least relative error.
RQ_INLINE f32v erfc_of(f32v x) {
  x = as_float(as_bits(x) & 0x7FFFFFFFu);
  x = x > 11.0f ? splat(11.0f) : x;  // 0 from here on
  const f32v t = 1.0f / (x * 0.5f + 1.0f);
  constexpr float kTail[] = {-0.0590689518f, 0.284574926f,   -0.487199813f,
                             0.278067082f,   -0.0266256034f, 0.202686846f,
                             0.243103772f,   0.282375306f,   0.282086432f};
  return exp_of(-(x * x)) * (polynomial(t, kTail) * t);
}

RQ_INLINE f32v gelu_of(f32v g) {
  // Half the tail, and 1 less that: nothing cancels on either side.
  const f32v tail = erfc_of(g * 0x1.6a09e6p-1f) * 0.5f;
  return g * (g < 0.0f ? tail : 1.0f - tail);
}

RQ_INLINE f32v gelu_tanh_of(f32v g) {
  // (1 + tanh z) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (g + 0.044715 g^3)
  return sigmoid_times(g, (g * g * 0.044715f + 1.0f) * g * 0x1.988454p+0f);
}

RQ_INLINE f32v activate(const MoeActivation& a, f32v g, f32v u) {
  g = g > a.limit ? splat(a.limit) : g;
  u = u > a.limit ? splat(a.limit) : u;
  u = u < -a.limit ? splat(-a.limit) : u;
  switch (a.kind) {
    case Activate::silu: return sigmoid_times(g, g) * u;
    case Activate::swiglu: return sigmoid_times(g, g * a.alpha) * (u + 1.0f);
    case Activate::gelu: return gelu_of(g) * u;
    default: return gelu_tanh_of(g) * u;
  }
}

}  // namespace rotquant::cpu::RQ_ISA
