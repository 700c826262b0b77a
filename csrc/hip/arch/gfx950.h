// SPDX-License-Identifier: MIT
// Every gfx950 builtin the kernels use, each wrapped once. Needs clang and no HIP header.
#pragma once

#include <stdint.h>

#include "core/macros.h"

namespace rotquant::arch {

using f32x2 = float __attribute__((ext_vector_type(2)));
using f32x4 = float __attribute__((ext_vector_type(4)));
using u32x2 = uint32_t __attribute__((ext_vector_type(2)));
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
// The same for a uniform value: it stays in scalar registers.
RQ_DEVICE int64_t opaque_uniform(int64_t value) {
  asm volatile("" : "+s"(value));
  return value;
}

// The kernel's first argument, where it lies. By its name all of it that is ever used is loaded at
// the start, into scalar registers that a long loop is then short of; from here it is loaded where
// it is used.
template <class Args>
RQ_DEVICE const Args& late_argument() {
  using Kernarg = const __attribute__((address_space(4))) Args*;
  return *(const Args*)(Kernarg)__builtin_amdgcn_kernarg_segment_ptr();
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
// The same for what other waves read too.
template <class T>
RQ_DEVICE u32x4 load(const T* p) {
  using Unaligned = u32x4 __attribute__((aligned(alignof(T))));
  return *reinterpret_cast<const Unaligned*>(p);
}
RQ_DEVICE void store(void* p, u32x4 value) { *static_cast<u32x4*>(p) = value; }

// LDS transpose read: the 16 lanes of a row fetch 8 bytes each, four lanes one row of a 4 x 16 tile
// of 16-bit elements; lane c of them gets column c. All lanes must be active.
RQ_DEVICE u32x2 read_transposed(const void* lds) {
  using b16x4 = short __attribute__((ext_vector_type(4)));
  using Pointer = __attribute__((address_space(3))) b16x4*;
  return __builtin_bit_cast(u32x2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((Pointer)lds));
}

// Workgroup barrier that also orders LDS.
RQ_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// --- atomic additions ---------------------------------------------------------------------------
// *p += value at the scope of the device; nothing comes back. Each of a pair of 16-bit values is
// added and rounded by itself. NOTE: 4-byte aligned, and in the device's own memory, as every
// allocation of torch on it is: in fine-grained memory an addition can be lost.
RQ_DEVICE void atomic_add_bf16(void* p, uint32_t pair) {
  using b16x2 = short __attribute__((ext_vector_type(2)));
  using Pointer = __attribute__((address_space(1))) b16x2*;
  __builtin_amdgcn_global_atomic_fadd_v2bf16((Pointer)p, __builtin_bit_cast(b16x2, pair));
}
RQ_DEVICE void atomic_add_fp16(void* p, uint32_t pair) {
  using f16x2 = _Float16 __attribute__((ext_vector_type(2)));
  using Pointer = __attribute__((address_space(1))) f16x2*;
  __builtin_amdgcn_global_atomic_fadd_v2f16((Pointer)p, __builtin_bit_cast(f16x2, pair));
}
RQ_DEVICE void atomic_add_fp32(float* p, float value) {
  using Pointer = __attribute__((address_space(1))) float*;
  __builtin_amdgcn_global_atomic_fadd_f32((Pointer)p, value);
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

// Value of any lane, which must be active. Through the LDS crossbar; no LDS memory is touched.
RQ_DEVICE uint32_t from_lane(uint32_t value, uint32_t lane) {
  return __builtin_amdgcn_ds_bpermute(static_cast<int>(lane * 4), static_cast<int>(value));
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

// --- votes and sums of a wave -------------------------------------------------------------------
using LaneMask = uint64_t;  // a bit a lane

RQ_DEVICE LaneMask ballot(bool vote) { return __builtin_amdgcn_ballot_w64(vote); }
RQ_DEVICE uint32_t count(LaneMask lanes) {
  return static_cast<uint32_t>(__builtin_popcountll(lanes));
}
// How many of `lanes` come before this one.
RQ_DEVICE uint32_t count_before(LaneMask lanes) {
  return __builtin_amdgcn_mbcnt_hi(static_cast<uint32_t>(lanes >> 32),
                                   __builtin_amdgcn_mbcnt_lo(static_cast<uint32_t>(lanes), 0));
}

// `lane` is uniform.
RQ_DEVICE uint32_t read_lane(uint32_t value, uint32_t lane) {
  return __builtin_amdgcn_readlane(value, lane);
}

// Sum over this lane and those before it. All lanes must be active.
RQ_DEVICE uint32_t prefix_sum(uint32_t value) {
  constexpr int kRowShr = 0x110;                           // + distance; within rows of 16 lanes
  constexpr int kRowBcast15 = 0x142, kRowBcast31 = 0x143;  // the last lane of a row, of half a wave
  constexpr int kOddRows = 0xA, kUpperRows = 0xC;
  value += __builtin_amdgcn_update_dpp(0, value, kRowShr + 1, dpp::kAll, dpp::kAll, true);
  value += __builtin_amdgcn_update_dpp(0, value, kRowShr + 2, dpp::kAll, dpp::kAll, true);
  value += __builtin_amdgcn_update_dpp(0, value, kRowShr + 4, dpp::kAll, dpp::kAll, true);
  value += __builtin_amdgcn_update_dpp(0, value, kRowShr + 8, dpp::kAll, dpp::kAll, true);
  value += __builtin_amdgcn_update_dpp(0, value, kRowBcast15, kOddRows, dpp::kAll, false);
  value += __builtin_amdgcn_update_dpp(0, value, kRowBcast31, kUpperRows, dpp::kAll, false);
  return value;
}

// What lanes of this wave wrote to LDS before is what they read after: LDS serves a wave in order,
// so only the compiler has to be told.
RQ_DEVICE void wave_fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront"); }

RQ_DEVICE void add_lds(uint32_t* lds, uint32_t value) {
  __hip_atomic_fetch_add(lds, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

// --- arithmetic -------------------------------------------------------------------------------
RQ_DEVICE f32x2 fma(f32x2 a, f32x2 b, f32x2 c) { return __builtin_elementwise_fma(a, b, c); }

// max(m, |a|, |b|). NOTE: v_maximum3, not v_max3: the latter drops NaN and hides a bad group.
RQ_DEVICE float maximum_abs(float m, float a, float b) {
  return __builtin_elementwise_maximum(__builtin_elementwise_maximum(m, __builtin_fabsf(a)),
                                       __builtin_fabsf(b));
}
// NaN if either is.
RQ_DEVICE float minimum(float a, float b) { return __builtin_elementwise_minimum(a, b); }
RQ_DEVICE float maximum(float a, float b) { return __builtin_elementwise_maximum(a, b); }

// Right to a unit in the last place. NOTE: results below the normal range are 0.
RQ_DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
RQ_DEVICE float rcp(float x) { return __builtin_amdgcn_rcpf(x); }

// --- matrix product ---------------------------------------------------------------------------
// c + A B in bf16 with float32 sums. Lane l holds row l % 16 of A and column l % 16 of B; k is
// 8 (l / 16) .. + 7 of 32 here, 4 (l / 16) .. + 3 of 16 in the narrow one. It gets rows
// 4 (l / 16) .. + 3 of column l % 16. Inactive lanes take part as well.
RQ_DEVICE f32x4 mfma_bf16(u32x4 a, u32x4 b, f32x4 c) {
  using bf16x8 = __bf16 __attribute__((ext_vector_type(8)));
  return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(bf16x8, a),
                                                 __builtin_bit_cast(bf16x8, b), c, 0, 0, 0);
}
RQ_DEVICE f32x4 mfma_bf16(u32x2 a, u32x2 b, f32x4 c) {
  using b16x4 = short __attribute__((ext_vector_type(4)));
  return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(b16x4, a),
                                                   __builtin_bit_cast(b16x4, b), c, 0, 0, 0);
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

// --- memory with an out-of-range value --------------------------------------------------------
// Raw buffer loads return 0 beyond the buffer's size, without touching memory. So a lane is masked
// by its offset, and its data needs no masking.
using Buffer = __amdgpu_buffer_rsrc_t;
constexpr int kRawDwords = 0x00027000;
constexpr uint32_t kNowhere = 0x80000000u;  // an offset that no buffer reaches

// `p` must be uniform. Offsets reach 2 GiB from it.
RQ_DEVICE Buffer make_buffer(const void* p) {
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(p), 0, kNowhere - 1, kRawDwords);
}

enum class Cache : int { normal = 0, stream = 2 };  // stream: non-temporal, read once

// `scalar` is uniform and no part of the range check: it must be 0 unless `offset` alone decides.
template <Cache kCache = Cache::normal>
RQ_DEVICE u32x4 load_16(Buffer b, uint32_t offset, uint32_t scalar = 0) {
  return __builtin_amdgcn_raw_buffer_load_b128(b, offset, scalar, static_cast<int>(kCache));
}
RQ_DEVICE uint32_t load_4(Buffer b, uint32_t offset, uint32_t scalar = 0) {
  return __builtin_amdgcn_raw_buffer_load_b32(b, offset, scalar, 0);
}
RQ_DEVICE uint32_t load_1(Buffer b, uint32_t offset) {
  return __builtin_amdgcn_raw_buffer_load_b8(b, offset, 0, 0);
}

// --- memory straight into LDS -----------------------------------------------------------------
// Lane l's 16 bytes go to the target + 16 * l. In assembly, because with the builtin the compiler
// waits for all of them before every LDS read. So it does not count them either:
// NOTE: wait_lds_loads(), then a barrier, before any wave reads; a barrier before overwriting.
using LdsAddress = uint32_t;

template <class T>
RQ_DEVICE LdsAddress lds_address(T* p) {
  using Lds = __attribute__((address_space(3))) void*;
  return static_cast<LdsAddress>(reinterpret_cast<uintptr_t>((Lds)p));
}

using LdsPointer = const __attribute__((address_space(3))) uint8_t*;

// A pointer of which the compiler knows nothing, so that constants added to it stay immediates.
RQ_DEVICE LdsPointer lds_pointer(LdsAddress address) {
  return reinterpret_cast<LdsPointer>(static_cast<uintptr_t>(opaque(address)));
}

template <class T>
RQ_DEVICE T read_lds(LdsPointer p) {
  return *reinterpret_cast<const __attribute__((address_space(3))) T*>(p);
}

// `lds` is uniform. The wait state is what M0 needs before it is read.
RQ_DEVICE void set_lds_target(LdsAddress lds) {
  asm volatile("s_mov_b32 m0, %0\n\ts_nop 0" ::"s"(lds) : "memory");
}

// A buffer of `bytes` bytes that moves, in the form that the loads below take. Everything uniform.
// NOTE: the descriptor has 48 bits for the address; those of user space are zero above.
struct MovingBuffer {
  u32x4 words;

  RQ_DEVICE MovingBuffer(const uint8_t* p, uint32_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    words = u32x4{static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32), bytes,
                  static_cast<uint32_t>(kRawDwords)};
  }
  RQ_DEVICE void advance(uint32_t bytes) {
    // Not before the loads that are issued from it, or it would need a copy.
    asm volatile("" : "+s"(words));
    const uint64_t address = (uint64_t{words[1]} << 32 | words[0]) + bytes;
    words[0] = static_cast<uint32_t>(address);
    words[1] = static_cast<uint32_t>(address >> 32);
    words[2] -= bytes;
  }
};

// From `offset` + kBoth of the buffer to target + kBoth: the hardware adds the immediate on both
// sides. NOTE: what LDS gets from beyond the buffer, zeros or nothing, must not matter.
template <int kBoth>
RQ_DEVICE void load_to_lds(const MovingBuffer& buffer, uint32_t offset) {
  asm volatile("buffer_load_dwordx4 %0, %1, 0 offen offset:%2 lds" ::"v"(offset), "s"(buffer.words),
               "n"(kBoth)
               : "memory");
}
RQ_DEVICE void wait_lds_loads() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

// All reads from LDS that were issued have arrived: one wait where the compiler, which waits for
// each read by itself, would put many.
RQ_DEVICE void wait_lds_reads() {
  constexpr int kLgkmcnt0 = 0xC07F;
  __builtin_amdgcn_s_waitcnt(kLgkmcnt0);
}

// --- scheduling -------------------------------------------------------------------------------
// The scheduler moves nothing across.
RQ_DEVICE void keep_order() { __builtin_amdgcn_sched_barrier(0); }

// And what made `value` comes before: without it the compiler, long before its scheduler, moves
// matrix instructions, which have no effect but their result, over loads and barriers.
RQ_DEVICE void keep_order(f32x4& value) {
  asm volatile("" : "+v"(value));
  keep_order();
}

// --- matrix -----------------------------------------------------------------------------------
// d[i][j] = c[i][j] + sum over k of rows[i][k] * columns[j][k], 16 x 16 x 128, of e2m1 codes with a
// scale byte for each 32 of k. Lane l holds k 32 * (l / 16) .. + 31 of row (column) l % 16, and in
// byte kRowByte (kColumnByte) of its scale register their scale; of d, rows 4 * (l / 16) .. + 3 in
// column l % 16.
template <int kRowByte, int kColumnByte>
RQ_DEVICE f32x4 mfma_fp4(u32x4 rows, u32x4 columns, f32x4 c, uint32_t row_scale,
                         uint32_t column_scale) {
  using i32x8 = int __attribute__((ext_vector_type(8)));
  constexpr int kE2m1 = 4;
  // The operand type has room for 8-bit elements; only its first half is read.
  const auto widen = [](u32x4 v) {
    return __builtin_bit_cast(i32x8, __builtin_shufflevector(v, v, 0, 1, 2, 3, -1, -1, -1, -1));
  };
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
      widen(rows), widen(columns), c, kE2m1, kE2m1, kRowByte, row_scale, kColumnByte, column_scale);
}

}  // namespace rotquant::arch
