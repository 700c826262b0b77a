// SPDX-License-Identifier: MIT
// 16 floats at a time in the compiler's generic vectors: one zmm, two ymm or four xmm registers,
// whatever the file that includes this is compiled for.
//
// NOTE: every function is always_inline and inside RQ_ISA, so that code for one instruction set
// never leaks into another translation unit.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/mxfp4.h"

// Wide vectors never cross a call that is not inlined, so their calling convention is moot.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace rotquant::cpu::RQ_ISA {

constexpr int kLanes = 16;
typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32v __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes)));
typedef uint8_t u8v __attribute__((vector_size(kLanes)));

#define RQ_INLINE static inline __attribute__((always_inline))

template <class V>
RQ_INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
RQ_INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof(v));
}

// A cast between vectors of one size keeps the bits.
RQ_INLINE f32v as_float(u32v v) { return (f32v)v; }
RQ_INLINE u32v as_bits(f32v v) { return (u32v)v; }
RQ_INLINE f32v splat(float v) { return f32v{} + v; }

#if defined(__clang__)
#define RQ_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define RQ_SHUFFLE(v, ...) __builtin_shuffle(v, i32v{__VA_ARGS__})
#endif

// Lane i reads lane i ^ kDistance.
template <int kDistance>
RQ_INLINE f32v xor_lanes(f32v v) {
  if constexpr (kDistance == 1)
    return RQ_SHUFFLE(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  if constexpr (kDistance == 2)
    return RQ_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  if constexpr (kDistance == 4)
    return RQ_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  if constexpr (kDistance == 8)
    return RQ_SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
}

// 1 in lanes where the bit kDistance of the index is clear, -1 where it is set.
template <int kDistance>
RQ_INLINE f32v butterfly_signs() {
  f32v s{};
  for (int i = 0; i < kLanes; ++i) s[i] = i & kDistance ? -1.0f : 1.0f;
  return s;
}

// --- 16-bit formats, by integer arithmetic: exact, and the same on every instruction set ---------

RQ_INLINE f32v from_bf16(u16v h) { return as_float(__builtin_convertvector(h, u32v) << 16); }

RQ_INLINE f32v from_fp16(u16v h) {
  const u32v bits = __builtin_convertvector(h, u32v);
  const u32v magnitude = (bits & 0x7FFFu) << 13;
  // Moving the exponent bias by a multiplication also normalises subnormals.
  const u32v finite = as_bits(as_float(magnitude) * 0x1p112f);
  const u32v value = magnitude >= 0x0F800000u ? magnitude | kInfBits : finite;
  return as_float(value | (bits & 0x8000u) << 16);
}

RQ_INLINE u16v to_bf16(f32v v) {
  const u32v bits = as_bits(v);
  const u32v rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  const u32v quiet_nan = bits >> 16 | 0x40u;
  return __builtin_convertvector((bits & 0x7FFFFFFFu) > kInfBits ? quiet_nan : rounded, u16v);
}

RQ_INLINE u16v to_fp16(f32v v) {
  const u32v bits = as_bits(v);
  const u32v magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-14 the result counts units of 2^-24, which is the unit in the last place of 0.5: let
  // the float addition round.
  const u32v subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;
  const u32v normal = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  u32v h = magnitude < (113u << 23) ? subnormal : normal;
  h = magnitude >= 0x477FF000u ? (u32v{} + 0x7C00u) : h;  // 65520 and up round to Inf
  h = magnitude > kInfBits ? (u32v{} + 0x7E00u) : h;
  return __builtin_convertvector(h | (bits >> 16 & 0x8000u), u16v);
}

// --- reductions over a group: 32 floats in two vectors ------------------------------------------

// Largest magnitude as bits; NaN compares above Inf, so a bad element is never hidden.
RQ_INLINE uint32_t max_bits(u32v a, u32v b) {
  u32v m = a > b ? a : b;
  uint32_t best = 0;
  for (int i = 0; i < kLanes; ++i) best = m[i] > best ? m[i] : best;
  return best;
}

// Balanced binary tree over 32 floats, neighbours first.
RQ_INLINE float tree_sum(f32v a, f32v b) {
  a += xor_lanes<1>(a), b += xor_lanes<1>(b);
  a += xor_lanes<2>(a), b += xor_lanes<2>(b);
  a += xor_lanes<4>(a), b += xor_lanes<4>(b);
  a += xor_lanes<8>(a), b += xor_lanes<8>(b);
  return a[0] + b[0];
}

// e2m1 codes of values in units of their scale: the thresholds of core/mxfp4.h e2m1_code(), as
// compares that are all ones where true.
RQ_INLINE u32v e2m1_codes(f32v value) {
  const u32v bits = as_bits(value);
  const f32v t = as_float(bits & 0x7FFFFFFFu);
  const i32v below = (t > 0.25f) + (t >= 0.75f) + (t > 1.25f) + (t >= 1.75f) + (t > 2.5f) +
                     (t >= 3.5f) + (t > 5.0f);
  return (u32v)-below | (bits >> 28 & 8u);
}

RQ_INLINE f32v e2m1_values(u32v code) {
  const u32v magnitude = code & 7u;
  const f32v small = __builtin_convertvector((i32v)magnitude, f32v) * 0.5f;
  const u32v value = magnitude < 2u ? as_bits(small) : (magnitude + 252u) << 22;
  return as_float(value | (code & 8u) << 28);
}

}  // namespace rotquant::cpu::RQ_ISA
