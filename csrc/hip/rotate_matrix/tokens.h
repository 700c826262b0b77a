// SPDX-License-Identifier: MIT
// The tokens of a wave: loaded and converted to operands of the MFMA, without LDS.
#pragma once

#include "hip/device/tiles.h"
#include "hip/rotate_matrix/images.h"

namespace rotquant::hip {

using arch::f32x2;

RQ_DEVICE uint32_t token_of(uint32_t lane) { return lane % kTileTokens; }

// 32 channels of 16 tokens, in bf16: an operand of the MFMA as it is.
using TokenFragment = u32x4;

// 8 channels to bf16, prescaled: float32, rounded once.
template <DType kDType>
RQ_DEVICE u32x4 to_bf16(const u32x4 (&raw)[kDType == DType::fp32 ? 2 : 1], const float* prescale) {
  if (kDType == DType::bf16 && !prescale) return raw[0];
  f32x2 y[4];
  RQ_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (kDType == DType::fp32)
      y[i] = f32x2{bits_to_float(raw[i / 2][i % 2 * 2]), bits_to_float(raw[i / 2][i % 2 * 2 + 1])};
    else
      y[i] = device::unpack<kDType>(raw[0][i]);
  }
  if (prescale) {
    const u32x4 s[2] = {arch::load(prescale), arch::load(prescale + 4)};
    RQ_UNROLL
    for (int i = 0; i < 4; ++i)
      y[i] *= f32x2{bits_to_float(s[i / 2][i % 2 * 2]), bits_to_float(s[i / 2][i % 2 * 2 + 1])};
  }
  return u32x4{arch::pack_bf16(y[0]), arch::pack_bf16(y[1]), arch::pack_bf16(y[2]),
               arch::pack_bf16(y[3])};
}

// The strip's channels of the wave's tokens. Tokens and channels past the end read the last ones
// again, so that no load needs a predicate.
template <class Config, int kLoads>
RQ_DEVICE void load_tokens(const Activation& x, const float* prescale, int64_t row0, int64_t group0,
                           uint32_t lane, TokenFragment (&b)[Config::kTokenTiles][kLoads]) {
  constexpr DType kDType = Config::kDType;
  constexpr int kRaw = kDType == DType::fp32 ? 2 : 1;
  constexpr int kElementBytes = kDType == DType::fp32 ? 4 : 2;
  const int64_t groups = x.k / kGroup;
  u32x4 raw[Config::kTokenTiles][kLoads][kRaw];
  const uint32_t last_group = groups - 1 - group0 < kLoads ? groups - 1 - group0 : kLoads - 1;
  uint32_t channel[kLoads];  // from the lane's first one
  RQ_UNROLL
  for (uint32_t j = 0; j < kLoads; ++j) channel[j] = (j < last_group ? j : last_group) * kGroup;
  const int64_t channel0 = group0 * kGroup + quarter_of(lane) * 8;
  RQ_UNROLL
  for (int i = 0; i < Config::kTokenTiles; ++i) {
    // What is the same for all lanes stays in scalar registers: the first row, and the last token.
    int64_t row = row0 + i * kTileTokens;
    if (row >= x.rows) row = x.rows - 1;
    const uint32_t last = x.rows - 1 - row < kTileTokens ? x.rows - 1 - row : kTileTokens - 1;
    const uint32_t token = token_of(lane) < last ? token_of(lane) : last;
    const char* p = static_cast<const char*>(x.data) + row * x.row_stride * kElementBytes +
                    (token * x.row_stride + channel0) * kElementBytes;
    RQ_UNROLL
    for (int j = 0; j < kLoads; ++j) {
      RQ_UNROLL
      for (int r = 0; r < kRaw; ++r) {
        const char* at = p + channel[j] * kElementBytes + r * sizeof(u32x4);
        if constexpr (kDType == DType::fp32)
          raw[i][j][r] = arch::load_stream(reinterpret_cast<const float*>(at));
        else
          raw[i][j][r] = arch::load_stream(reinterpret_cast<const uint16_t*>(at));
      }
    }
  }
  RQ_UNROLL
  for (int i = 0; i < Config::kTokenTiles; ++i) {
    RQ_UNROLL
    for (int j = 0; j < kLoads; ++j)
      b[i][j] = to_bf16<kDType>(raw[i][j], prescale ? prescale + channel0 + channel[j] : nullptr);
  }
}

// RS 16: 32 channels are two blocks, in different halves of the wave. Swaps that lane bit with a
// register, after which each block is an operand of the MFMA with K = 16.
RQ_DEVICE void split_blocks(const TokenFragment& b, u32x2 (&block)[2]) {
  RQ_UNROLL
  for (int i = 0; i < 2; ++i) {
    uint32_t first = b[i], second = b[i + 2];
    arch::swap_lane_bit<32>(first, second);
    block[0][i] = first, block[1][i] = second;
  }
}

}  // namespace rotquant::hip
