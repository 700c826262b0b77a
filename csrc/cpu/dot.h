// SPDX-License-Identifier: MIT
// 64 bytes at a time: what a dot product of e2m1 codes needs beside the generic vectors. One
// instruction each where RQ_ISA has it, the same values from generic vectors elsewhere.
#pragma once

#include "cpu/vector.h"

#if defined(RQ_ISA_AVX512) || defined(RQ_ISA_AVX2)
#include <immintrin.h>
#endif

namespace rotquant::cpu::RQ_ISA {

constexpr int kBytes = 4 * kLanes;
typedef uint8_t u8q __attribute__((vector_size(kBytes)));
typedef int8_t i8q __attribute__((vector_size(kBytes)));
typedef int16_t i16q __attribute__((vector_size(kBytes)));
typedef uint16_t u16q __attribute__((vector_size(kBytes)));

#if defined(RQ_ISA_AVX2)
// f on both halves of its 64-byte arguments.
template <class Out, class F, class... In>
RQ_INLINE Out halves(F f, In... in) {
  Out out;
  for (int i = 0; i < 2; ++i) {
    const __m256i half = f(load<__m256i>(reinterpret_cast<const char*>(&in) + 32 * i)...);
    memcpy(reinterpret_cast<char*>(&out) + 32 * i, &half, 32);
  }
  return out;
}
#endif

// Twice the value of e2m1 codes 0 .. 15, an integer of -12 .. 12.
RQ_INLINE i8q e2m1_doubled(u8q code) {
#if defined(RQ_ISA_AVX512) || defined(RQ_ISA_AVX2)
  const __m128i values = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
#if defined(RQ_ISA_AVX512)
  return (i8q)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)code);
#else
  const __m256i table = _mm256_broadcastsi128_si256(values);
  return halves<i8q>([=](__m256i c) { return _mm256_shuffle_epi8(table, c); }, code);
#endif
#else
  const i8q magnitude = (i8q)(code & 7);
  const i8q value = magnitude + ((magnitude > 4) & (magnitude - 4)) + ((magnitude > 6) & 2);
  return code > 7 ? -value : value;
#endif
}

// sum + a * b, neighbouring products added; nothing overflows if |a| <= 24 and |b| <= 12.
RQ_INLINE i16q add_products(i16q sum, u8q a, i8q b) {
#if defined(RQ_ISA_AVX512)
  return sum + (i16q)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#elif defined(RQ_ISA_AVX2)
  return sum + halves<i16q>([](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); }, a, b);
#else
  const i16q even = (i16q)((u16q)a & 255) * ((i16q)((u16q)b << 8) >> 8);
  const i16q odd = (i16q)((u16q)a >> 8) * ((i16q)b >> 8);
  return sum + even + odd;
#endif
}

RQ_INLINE i32v sum_neighbours(i16q v) {
#if defined(RQ_ISA_AVX512)
  return (i32v)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi16(1));
#elif defined(RQ_ISA_AVX2)
  return halves<i32v>([](__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }, v);
#else
  return ((i32v)((u32v)v << 16) >> 16) + ((i32v)v >> 16);
#endif
}

// value * 2^exponent rounded once, subnormals and overflow included; NaN if the exponent is.
// |value| < 2^24, and 0 or at least 2^-24; the exponent an integer of magnitude below 600.
RQ_INLINE f32v scale_by(f32v value, f32v exponent) {
#if defined(RQ_ISA_AVX512)
  return (f32v)_mm512_scalef_ps((__m512)value, (__m512)exponent);
#else
  // In two factors, each a normal power of two. The first product is exact: the exponent's half is
  // -100 at the least, and below that everything has long become 0.
  f32v e = exponent > 200.0f ? splat(200.0f) : exponent;
  e = e < -200.0f ? splat(-200.0f) : e;
  const i32v whole = __builtin_convertvector(exponent == exponent ? e : splat(0.0f), i32v);
  const i32v half = whole >> 1;
  const f32v scaled =
      value * as_float((u32v)(half + 127) << 23) * as_float((u32v)(whole - half + 127) << 23);
  return exponent == exponent ? scaled : exponent;
#endif
}

}  // namespace rotquant::cpu::RQ_ISA
