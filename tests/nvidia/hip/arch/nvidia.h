// SPDX-License-Identifier: MIT
// The names of csrc/hip/arch/gfx950.h on an NVIDIA GPU: a test bed on which the kernels' algorithm
// runs under a race checker, in graphs and at any size. Same results bit for bit; speed is not its
// purpose.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "core/mxfp4.h"

#define RQ_GLOBAL __global__
#define RQ_SHARED __shared__
#define RQ_LAUNCH_BOUNDS(max_threads, min_waves) __launch_bounds__(max_threads)

namespace rotquant::arch {

// --- vectors: what clang's ext_vector_type has built in ------------------------------------------
struct f32x2 {
  float x, y;
};
RQ_DEVICE f32x2 operator+(f32x2 a, f32x2 b) { return {a.x + b.x, a.y + b.y}; }
RQ_DEVICE f32x2 operator-(f32x2 a, f32x2 b) { return {a.x - b.x, a.y - b.y}; }
RQ_DEVICE f32x2 operator*(f32x2 a, f32x2 b) { return {a.x * b.x, a.y * b.y}; }
RQ_DEVICE f32x2 operator*(f32x2 a, float b) { return {a.x * b, a.y * b}; }
RQ_DEVICE f32x2& operator*=(f32x2& a, f32x2 b) { return a = a * b; }
RQ_DEVICE f32x2& operator*=(f32x2& a, float b) { return a = a * b; }

struct alignas(16) u32x4 {
  uint32_t word[4];
  RQ_DEVICE uint32_t& operator[](int i) { return word[i]; }
  RQ_DEVICE uint32_t operator[](int i) const { return word[i]; }
};

constexpr int kWaveSize = 32;

// --- where am I -------------------------------------------------------------------------------
RQ_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
RQ_DEVICE int block_index_x() { return static_cast<int>(blockIdx.x); }
RQ_DEVICE int block_index_y() { return static_cast<int>(blockIdx.y); }

RQ_DEVICE int uniform(int value) { return value; }

RQ_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
RQ_DEVICE int64_t opaque_uniform(int64_t value) { return value; }

// --- memory -----------------------------------------------------------------------------------
// 16 bytes, evict first. NOTE: a wide load must be aligned here, but only T's alignment is
// promised.
template <class T>
RQ_DEVICE u32x4 load_stream(const T* p) {
  u32x4 value;
  if (reinterpret_cast<uintptr_t>(p) % sizeof(value) == 0) {
    const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p));
    value = {v.x, v.y, v.z, v.w};
  } else {
    T element[sizeof(value) / sizeof(T)];
    RQ_UNROLL
    for (int i = 0; i < static_cast<int>(sizeof(value) / sizeof(T)); ++i)
      element[i] = __ldcs(p + i);
    __builtin_memcpy(&value, element, sizeof(value));
  }
  return value;
}
// The same for what other waves read too.
template <class T>
RQ_DEVICE u32x4 load(const T* p) {
  u32x4 value;
  T element[sizeof(value) / sizeof(T)];
  RQ_UNROLL
  for (int i = 0; i < static_cast<int>(sizeof(value) / sizeof(T)); ++i) element[i] = p[i];
  __builtin_memcpy(&value, element, sizeof(value));
  return value;
}
RQ_DEVICE void store(void* p, u32x4 value) { *static_cast<u32x4*>(p) = value; }

RQ_DEVICE void barrier() { __syncthreads(); }

// --- lane exchange ----------------------------------------------------------------------------
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

template <int kLaneBit>
RQ_DEVICE uint32_t from_xor_lane(uint32_t value) {
  return __shfl_xor_sync(kAllLanes, value, kLaneBit);
}

template <int kLaneBit>
RQ_DEVICE float from_xor_lane(float value) {
  return __shfl_xor_sync(kAllLanes, value, kLaneBit);
}

RQ_DEVICE uint32_t from_lane(uint32_t value, uint32_t lane) {
  return __shfl_sync(kAllLanes, value, lane);
}

// Swaps a lane bit with a register index, as in gfx950.h: each lane sends the one it gives away.
template <int kLaneBit>
RQ_DEVICE void swap_lane_bit(uint32_t& r0, uint32_t& r1) {
  const bool set = threadIdx.x & kLaneBit;
  const uint32_t received = from_xor_lane<kLaneBit>(set ? r0 : r1);
  (set ? r0 : r1) = received;
}

// --- votes and sums of a wave -------------------------------------------------------------------
using LaneMask = uint32_t;

RQ_DEVICE LaneMask ballot(bool vote) { return __ballot_sync(kAllLanes, vote); }
RQ_DEVICE uint32_t count(LaneMask lanes) { return static_cast<uint32_t>(__popc(lanes)); }
RQ_DEVICE uint32_t lane_index() { return threadIdx.x % kWaveSize; }
RQ_DEVICE uint32_t count_before(LaneMask lanes) {
  return count(lanes & ((LaneMask{1} << lane_index()) - 1));
}

RQ_DEVICE uint32_t read_lane(uint32_t value, uint32_t lane) {
  return __shfl_sync(kAllLanes, value, static_cast<int>(lane));
}

RQ_DEVICE uint32_t prefix_sum(uint32_t value) {
  RQ_UNROLL
  for (uint32_t distance = 1; distance < kWaveSize; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_index() >= distance) value += before;
  }
  return value;
}

RQ_DEVICE void wave_fence() { __syncwarp(); }

RQ_DEVICE void add_lds(uint32_t* lds, uint32_t value) { atomicAdd(lds, value); }

// --- arithmetic -------------------------------------------------------------------------------
RQ_DEVICE f32x2 fma(f32x2 a, f32x2 b, f32x2 c) {
  return {__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y)};
}

// max(m, |a|, |b|) of m >= 0. Magnitudes order as their bits do, with NaN above Inf; fmaxf drops
// NaN.
RQ_DEVICE float maximum_abs(float m, float a, float b) {
  return bits_to_float(
      max(max(float_to_bits(m), float_to_bits(a) & 0x7FFFFFFFu), float_to_bits(b) & 0x7FFFFFFFu));
}

// --- conversion: gfx950's converters in software ------------------------------------------------
// As there, only the exponent field of `scale` counts, and field 0 means 2^-127.
RQ_DEVICE int scale_exponent(float scale) {
  return static_cast<int>(float_to_bits(scale) >> 23 & 0xFFu) - 127;
}

// e2m1_code() of core/mxfp4.h without its seven compares. From 2^e to 2^(e+1), e >= 0, codes are
// 2^(e-1) apart (below 1 as from 1 to 2), and so are floats at 2^(e+22): adding that rounds.
RQ_DEVICE uint32_t round_to_e2m1(float value) {
  const float t = fminf(fabsf(value), 6.0f);
  const uint32_t binade = max(float_to_bits(t), 0x3F800000u) & kInfBits;
  const uint32_t shifter = binade + (22u << 23);
  const uint32_t steps = float_to_bits(t + bits_to_float(shifter)) - shifter;
  return (steps + (binade >> 22) - 254u) | (float_to_bits(value) >> 28 & 8u);
}

template <int kByte>
RQ_DEVICE uint32_t cvt_pk_fp4_f32(uint32_t old, float a, float b, float scale) {
  const float inverse = exp2_int(-scale_exponent(scale));
  const uint32_t codes = round_to_e2m1(a * inverse) | round_to_e2m1(b * inverse) << 4;
  return (old & ~(0xFFu << 8 * kByte)) | codes << 8 * kByte;
}

template <int kByte>
RQ_DEVICE f32x2 cvt_pk_f32_fp4(uint32_t codes, float scale) {
  const float factor = exp2_int(scale_exponent(scale));
  return f32x2{e2m1_value(codes >> 8 * kByte & 0xFu), e2m1_value(codes >> (8 * kByte + 4) & 0xFu)} *
         factor;
}

RQ_DEVICE f32x2 unpack_bf16(uint32_t pair) {
  return {bits_to_float(pair << 16), bits_to_float(pair & 0xFFFF0000u)};
}

RQ_DEVICE f32x2 unpack_fp16(uint32_t pair) {
  return {__half2float(__ushort_as_half(static_cast<uint16_t>(pair))),
          __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16)))};
}

RQ_DEVICE uint32_t pack_bf16(f32x2 value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value.x)) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(value.y))) << 16;
}

RQ_DEVICE uint32_t pack_fp16(f32x2 value) {
  return __half_as_ushort(__float2half_rn(value.x)) |
         static_cast<uint32_t>(__half_as_ushort(__float2half_rn(value.y))) << 16;
}

// --- memory with an out-of-range value --------------------------------------------------------
struct Buffer {
  const uint8_t* p;
};
constexpr uint32_t kNowhere = 0x80000000u;  // offsets from here on load 0

RQ_DEVICE Buffer make_buffer(const void* p) { return {static_cast<const uint8_t*>(p)}; }

enum class Cache : int { normal, stream };

template <Cache kCache = Cache::normal>
RQ_DEVICE u32x4 load_16(Buffer b, uint32_t offset) {
  return offset < kNowhere ? load_stream(b.p + offset) : u32x4{};
}
RQ_DEVICE uint32_t load_4(Buffer b, uint32_t offset) {
  uint32_t value = 0;
  if (offset < kNowhere) __builtin_memcpy(&value, b.p + offset, sizeof(value));
  return value;
}
RQ_DEVICE uint32_t load_1(Buffer b, uint32_t offset) {
  return offset < kNowhere ? b.p[offset] : 0u;
}

}  // namespace rotquant::arch
