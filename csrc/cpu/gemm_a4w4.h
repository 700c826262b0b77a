// SPDX-License-Identifier: MIT
// gemm_a4w4 on a CPU, for the instruction set that RQ_ISA names.
//
// Codes become small integers (twice the value), so a group of 32 products is summed exactly in
// integers; it is scaled by both scales at once and rounded to float32, and the groups are added in
// float32 in ascending order. The same bytes on every instruction set and number of threads.
//
// The order of channels within a group is free as long as both sides keep it: a 64-byte vector has
// the low (or the high) nibbles of 4 bytes of each of 16 weight rows, so a dword of the
// activation's codes, split into nibbles, meets all 16 of them at once.
#pragma once

#include "cpu/dot.h"
#include "cpu/gemm_items.h"
#include "cpu/kernels.h"

namespace rotquant::cpu::RQ_ISA {

constexpr int kChunkGroups = kScaleTileGroups;  // K is walked in chunks of one scale tile
constexpr int kChunkBytes = kChunkGroups * kGroupBytes;
constexpr int kQuads = kGroupBytes / 4;  // dwords of a group's codes
constexpr int kOffset = 12;              // makes an activation's doubled value unsigned

// kGemmRows activations of one chunk.
struct Tokens {
  alignas(64) uint8_t nibbles[2][kGemmRows][kChunkBytes];  // low, high: doubled value + kOffset
  float exponents[kGemmRows][kChunkGroups];
};

// 16 weight rows of one chunk.
struct WeightBlock {
  alignas(64) int8_t nibbles[kChunkGroups][2][kQuads][kBytes];  // low, high: doubled value
  int16_t start[kChunkGroups][kBytes / 2];  // what takes kOffset out again, in two parts
  float exponents[kChunkGroups][kLanes];    // NaN for a scale of NaN; includes the two doublings
};

// Up to kGemmRows activations, wherever their codes are; no codes are a row of zeros.
struct TokenRows {
  int count;
  const uint8_t* codes[kGemmRows];
  const uint8_t* scales;  // shuffled
  int64_t scale_row;      // of the first; the others follow it. Divisible by 16
};

struct Weight {
  const uint8_t* codes;   // in weight_offset()'s order
  const uint8_t* scales;  // shuffled
};

// Exponents of the scales of 16 consecutive rows, the first divisible by 16, for one group.
RQ_INLINE f32v load_exponents(const uint8_t* scales, int64_t row, int64_t group, int64_t padded) {
  // Their bytes are in the 16 dwords from here on (core/layout.h).
  const int64_t offset = scale_offset(row, group, padded);
  const u32v dwords = load<u32v>(scales + offset / 4 * 4);
  const i32v byte = (i32v)(dwords >> static_cast<uint32_t>(offset % 4 * 8) & 255u);
  const f32v exponent = __builtin_convertvector(byte - 127, f32v);
  return byte == kScaleNaN ? splat(e8m0_value(kScaleNaN)) : exponent;
}

RQ_INLINE void unpack_tokens(const TokenRows& rows, int64_t k, int64_t group0, int groups,
                             Tokens& tokens) {
  const int64_t padded = round_up_to(k / kGroup, kScaleTileGroups);
  for (int row = 0; row < rows.count; ++row) {
    alignas(64) uint8_t codes[kChunkBytes] = {};
    if (rows.codes[row])
      memcpy(codes, rows.codes[row] + group0 * kGroupBytes, groups * kGroupBytes);
    for (int i = 0; i < kChunkBytes; i += kBytes) {
      const u8q pair = load<u8q>(codes + i);
      store(tokens.nibbles[0][row] + i, e2m1_doubled(pair & 15) + kOffset);
      store(tokens.nibbles[1][row] + i, e2m1_doubled(pair >> 4) + kOffset);
    }
  }
  for (int row = 0; row < rows.count; row += kLanes)
    for (int g = 0; g < groups; ++g) {
      const f32v exponents = load_exponents(rows.scales, rows.scale_row + row, group0 + g, padded);
      for (int i = 0; i < kLanes; ++i) tokens.exponents[row + i][g] = exponents[i];
    }
}

// Dword i of each of 16 rows of 4 dwords.
RQ_INLINE void transpose_quads(const uint8_t* in, u32v (&out)[kQuads]) {
#if defined(RQ_ISA_AVX512)
  const __m512i r0 = load<__m512i>(in), r1 = load<__m512i>(in + 64);
  const __m512i r2 = load<__m512i>(in + 128), r3 = load<__m512i>(in + 192);
  const __m512i low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i high = low + _mm512_set1_epi64(0x0000000200000002);
  const __m512i a = _mm512_permutex2var_epi32(r0, low, r1);  // dwords 0 and 1 of rows 0 .. 7
  const __m512i b = _mm512_permutex2var_epi32(r2, low, r3);  // of rows 8 .. 15
  const __m512i c = _mm512_permutex2var_epi32(r0, high, r1);
  const __m512i d = _mm512_permutex2var_epi32(r2, high, r3);
  out[0] = (u32v)_mm512_shuffle_i64x2(a, b, 0x44), out[1] = (u32v)_mm512_shuffle_i64x2(a, b, 0xEE);
  out[2] = (u32v)_mm512_shuffle_i64x2(c, d, 0x44), out[3] = (u32v)_mm512_shuffle_i64x2(c, d, 0xEE);
#else
  uint32_t dwords[kQuads][kLanes];
  for (int row = 0; row < kLanes; ++row)
    for (int i = 0; i < kQuads; ++i) memcpy(&dwords[i][row], in + row * kGroupBytes + 4 * i, 4);
  for (int i = 0; i < kQuads; ++i) out[i] = load<u32v>(dwords[i]);
#endif
}

RQ_INLINE void unpack_weights(const Weight& weight, int64_t k, int64_t row0, int64_t group0,
                              int groups, WeightBlock& block) {
  const int64_t padded = round_up_to(k / kGroup, kScaleTileGroups);
  const u8q offset = u8q{} + kOffset;
  for (int g = 0; g < groups; ++g) {
    u32v quads[kQuads];
    transpose_quads(weight.codes + weight_offset(row0, (group0 + g) * kGroupBytes, k / 2), quads);
    i16q sum{};
    for (int i = 0; i < kQuads; ++i) {
      const u8q pair = (u8q)quads[i];
      const i8q low = e2m1_doubled(pair & 15), high = e2m1_doubled(pair >> 4);
      store(block.nibbles[g][0][i], low);
      store(block.nibbles[g][1][i], high);
      sum = add_products(add_products(sum, offset, low), offset, high);
    }
    store(block.start[g], -sum);
    store(block.exponents[g], load_exponents(weight.scales, row0, group0 + g, padded) - 2.0f);
  }
}

// sums [kRows][kBlocks * 16] += tokens x weights of one chunk.
template <int kRows, int kBlocks>
RQ_INLINE void multiply_chunk(const Tokens& tokens, int row, const WeightBlock* blocks, int groups,
                              float* sums, int64_t stride) {
  f32v total[kRows][kBlocks];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kBlocks; ++j) total[i][j] = load<f32v>(sums + i * stride + j * kLanes);
  for (int g = 0; g < groups; ++g) {
    i16q sum[kRows][kBlocks];
    for (int j = 0; j < kBlocks; ++j)
      for (int i = 0; i < kRows; ++i) sum[i][j] = load<i16q>(blocks[j].start[g]);
    for (int half = 0; half < 2; ++half)
      for (int quad = 0; quad < kQuads; ++quad)
        for (int i = 0; i < kRows; ++i) {
          const uint8_t* at = tokens.nibbles[half][row + i] + g * kGroupBytes + 4 * quad;
          const u8q token = (u8q)(u32v{} + load<uint32_t>(at));
          for (int j = 0; j < kBlocks; ++j)
            sum[i][j] = add_products(sum[i][j], token, load<i8q>(blocks[j].nibbles[g][half][quad]));
        }
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kBlocks; ++j)
        total[i][j] += scale_by(__builtin_convertvector(sum_neighbours(sum[i][j]), f32v),
                                load<f32v>(blocks[j].exponents[g]) + tokens.exponents[row + i][g]);
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kBlocks; ++j) store(sums + i * stride + j * kLanes, total[i][j]);
}

template <int kBlocks>
RQ_INLINE void multiply_rows(const Tokens& tokens, int rows, const WeightBlock* blocks, int groups,
                             float* sums, int64_t stride) {
  int row = 0;
  for (; row + 4 <= rows; row += 4)
    multiply_chunk<4, kBlocks>(tokens, row, blocks, groups, sums + row * stride, stride);
  for (; row < rows; ++row)
    multiply_chunk<1, kBlocks>(tokens, row, blocks, groups, sums + row * stride, stride);
}

// The registers of AVX-512 hold the sums of 4 x 2 blocks; others have half as many or fewer.
#if defined(RQ_ISA_AVX512)
constexpr int kBlocksAtOnce = 2;
#else
constexpr int kBlocksAtOnce = 1;
#endif

// sums [rows.count][blocks * 16] = rows x weight; block j is 16 weight rows from block_rows[j] on.
static void multiply_tile(const TokenRows& rows, const Weight& weight, int64_t k,
                          const int64_t* block_rows, int blocks, float* sums, int64_t stride) {
  const int64_t groups = k / kGroup;
  Tokens tokens;
  WeightBlock unpacked[kBlocksAtOnce];
  for (int row = 0; row < rows.count; ++row)
    memset(sums + row * stride, 0, blocks * kLanes * sizeof(float));
  for (int64_t group0 = 0; group0 < groups; group0 += kChunkGroups) {
    const int count =
        static_cast<int>(groups - group0 < kChunkGroups ? groups - group0 : kChunkGroups);
    unpack_tokens(rows, k, group0, count, tokens);
    for (int block = 0; block < blocks; block += kBlocksAtOnce) {
      const bool all = block + kBlocksAtOnce <= blocks;
      for (int j = 0; j < (all ? kBlocksAtOnce : 1); ++j)
        unpack_weights(weight, k, block_rows[block + j], group0, count, unpacked[j]);
      float* column = sums + block * kLanes;
      if (all)
        multiply_rows<kBlocksAtOnce>(tokens, rows.count, unpacked, count, column, stride);
      else
        multiply_rows<1>(tokens, rows.count, unpacked, count, column, stride);
    }
  }
}

RQ_INLINE void store_sums(const GemmParams& p, int64_t row0, int rows, int64_t column0,
                          int64_t columns, const float* sums, int64_t stride) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    const int64_t real = columns - column < kLanes ? columns - column : kLanes;
    f32v bias{};
    if (p.bias) {
      float values[kLanes] = {};
      memcpy(values, p.bias + column0 + column, real * sizeof(float));
      bias = load<f32v>(values);
    }
    for (int row = 0; row < rows; ++row) {
      const f32v v = load<f32v>(sums + row * stride + column) + bias;
      const int64_t index = (row0 + row) * p.n + column0 + column;
      if (real == kLanes) {
        store_as(p.out, p.out_dtype, index, v);
        continue;
      }
      float values[kLanes];
      store_as(values, p.out_dtype, 0, v);
      const int64_t size = p.out_dtype == DType::fp32 ? 4 : 2;
      memcpy(static_cast<char*>(p.out) + index * size, values, real * size);
    }
  }
}

void gemm_a4w4(const GemmParams& p, int64_t begin, int64_t end) {
  constexpr int kStride = kGemmMaxBlocks * kGemmBlock;
  static_assert(kGemmBlock == kLanes && kGemmRows % kLanes == 0);
  const GemmItems items = gemm_items(p);
  alignas(64) float sums[kGemmRows][kStride];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row0 = item % items.row_tiles * kGemmRows;
    const int64_t column0 = item / items.row_tiles * items.columns;
    const int64_t columns = p.n - column0 < items.columns ? p.n - column0 : items.columns;
    TokenRows rows{
        static_cast<int>(p.m - row0 < kGemmRows ? p.m - row0 : kGemmRows), {}, p.a_scales, row0};
    for (int row = 0; row < rows.count; ++row) rows.codes[row] = p.a + (row0 + row) * (p.k / 2);
    int64_t block_rows[kGemmMaxBlocks];
    for (int j = 0; j < kGemmMaxBlocks; ++j) block_rows[j] = column0 + j * kGemmBlock;
    const int blocks = static_cast<int>((columns + kGemmBlock - 1) / kGemmBlock);
    multiply_tile(rows, {p.b, p.b_scales}, p.k, block_rows, blocks, &sums[0][0], kStride);
    store_sums(p, row0, rows.count, column0, columns, &sums[0][0], kStride);
  }
}

}  // namespace rotquant::cpu::RQ_ISA
