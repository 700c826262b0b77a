// SPDX-License-Identifier: MIT
// Every gfx950 builtin the kernels use, each wrapped once. Needs clang and no HIP header.
#pragma once

#include <stdint.h>

#include "core/macros.h"

namespace rotquant::arch {

using f32x2 = float __attribute__((ext_vector_type(2)));
using u32x4 = uint32_t __attribute__((ext_vector_type(4)));

constexpr uint32_t kWaveSize = 64;

// --- where am I -------------------------------------------------------------------------------
RQ_DEVICE uint32_t thread_index() { return __builtin_amdgcn_workitem_id_x(); }
RQ_DEVICE uint32_t block_index_x() { return __builtin_amdgcn_workgroup_id_x(); }
RQ_DEVICE uint32_t block_index_y() { return __builtin_amdgcn_workgroup_id_y(); }

// A wave-uniform value, in a scalar register.
RQ_DEVICE uint32_t uniform(uint32_t value) { return __builtin_amdgcn_readfirstlane(value); }

// The same value, but the compiler no longer knows it: what is computed from it stays where it is
// used instead of being hoisted out of a loop and kept in registers. No instruction.
RQ_DEVICE uint32_t opaque(uint32_t value) {
  asm volatile("" : "+v"(value));
  return value;
}

// --- memory -----------------------------------------------------------------------------------
// 16 bytes, non-temporal: x is read once and should not push the codes, which the GEMM reads next,
// out of L2.
// NOTE: T sets the alignment that is promised. Waves run in unaligned access mode under ROCm, so
// rows of bf16 that start at any even address still load 16 bytes at a time.
template <class T>
RQ_DEVICE u32x4 load_stream(const T* p) {
  using Unaligned = u32x4 __attribute__((aligned(alignof(T))));
  return __builtin_nontemporal_load(reinterpret_cast<const Unaligned*>(p));
}
RQ_DEVICE void store(void* p, u32x4 value) { *static_cast<u32x4*>(p) = value; }

// Workgroup barrier that also orders LDS.
RQ_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// --- lane exchange ----------------------------------------------------------------------------
namespace dpp {
constexpr int kXor1 = 0xB1;  // quad_perm [1, 0, 3, 2]
constexpr int kXor2 = 0x4E;  // quad_perm [2, 3, 0, 1]
constexpr int kAll = 0xF;    // row and bank masks
}  // namespace dpp
constexpr int kSwizzleXor4 = 0x101F;

// Value of the lane whose index differs in the one bit kLaneBit (1, 2 or 4).
template <int kLaneBit>
RQ_DEVICE uint32_t from_xor_lane(uint32_t value) {
  static_assert(kLaneBit == 1 || kLaneBit == 2 || kLaneBit == 4);
  if constexpr (kLaneBit == 4) {
    // DPP has no xor 4 and would take two instructions a value; the LDS crossbar (no LDS memory is
    // touched) takes none of the VALU's, which is what RS 256 is short of.
    return __builtin_amdgcn_ds_swizzle(value, kSwizzleXor4);
  } else {
    constexpr int kControl = kLaneBit == 1 ? dpp::kXor1 : dpp::kXor2;
    return __builtin_amdgcn_mov_dpp(value, kControl, dpp::kAll, dpp::kAll, true);
  }
}

template <int kLaneBit>
RQ_DEVICE float from_xor_lane(float value) {
  return bits_to_float(from_xor_lane<kLaneBit>(float_to_bits(value)));
}

// Swaps a lane bit with a register index: afterwards lanes with the bit clear hold (own r0,
// partner's r0), lanes with it set (partner's r1, own r1). Its own inverse, one instruction.
template <int kLaneBit>
RQ_DEVICE void swap_lane_bit(uint32_t& r0, uint32_t& r1) {
  static_assert(kLaneBit == 16 || kLaneBit == 32);
  if constexpr (kLaneBit == 16) {
    const auto swapped = __builtin_amdgcn_permlane16_swap(r0, r1, false, false);
    r0 = swapped[0], r1 = swapped[1];
  } else {
    const auto swapped = __builtin_amdgcn_permlane32_swap(r0, r1, false, false);
    r0 = swapped[0], r1 = swapped[1];
  }
}

// --- arithmetic -------------------------------------------------------------------------------
RQ_DEVICE f32x2 fma(f32x2 a, f32x2 b, f32x2 c) { return __builtin_elementwise_fma(a, b, c); }

// max(m, |a|, |b|). NOTE: v_maximum3, not v_max3: the latter drops NaN and hides a bad group.
RQ_DEVICE float maximum_abs(float m, float a, float b) {
  return __builtin_elementwise_maximum(__builtin_elementwise_maximum(m, __builtin_fabsf(a)),
                                       __builtin_fabsf(b));
}

// --- conversion -------------------------------------------------------------------------------
// Two e2m1 codes of a / scale (low nibble) and b / scale into byte kByte of `old`. The hardware
// reads only the exponent of `scale`, rounds to nearest even, saturates and keeps the sign.
template <int kByte>
RQ_DEVICE uint32_t cvt_pk_fp4_f32(uint32_t old, float a, float b, float scale) {
  return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(old, a, b, scale, kByte);
}

// The two values of byte kByte, times scale.
template <int kByte>
RQ_DEVICE f32x2 cvt_pk_f32_fp4(uint32_t codes, float scale) {
  return __builtin_amdgcn_cvt_scalef32_pk_f32_fp4(codes, scale, kByte);
}

RQ_DEVICE f32x2 unpack_bf16(uint32_t pair) {
  return f32x2{bits_to_float(pair << 16), bits_to_float(pair & 0xFFFF0000u)};
}

RQ_DEVICE f32x2 unpack_fp16(uint32_t pair) {
  using f16x2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_convertvector(__builtin_bit_cast(f16x2, pair), f32x2);
}

RQ_DEVICE uint32_t pack_bf16(f32x2 value) {
  using bf16x2 = __bf16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, __builtin_convertvector(value, bf16x2));
}

RQ_DEVICE uint32_t pack_fp16(f32x2 value) {
  using f16x2 = _Float16 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(uint32_t, __builtin_convertvector(value, f16x2));
}

}  // namespace rotquant::arch
