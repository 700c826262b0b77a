// SPDX-License-Identifier: MIT
// Operands for few tokens: codes and scales go from memory straight to the registers that the
// matrix instruction reads. Nothing is shared between waves. Weights are read once, past the
// caches.
#pragma once

#include "hip/device/mma.h"

namespace rotquant::device {

// What one step of 256 k needs.
template <int kTokens, int kWeights>
struct StepOperands {
  u32x4 tokens[kTokens][kStepHalves];
  u32x4 weights[kWeights][kStepHalves];
  uint32_t token_scales[(kTokens + 1) / 2];
  uint32_t weight_scales[kWeights / 2];
};

// The weights alone; a GEMM that makes its tokens itself has these with another kind of token.
template <int kWeights>
class DirectWeights {
 public:
  static_assert(kWeights % 2 == 0);

  // `first_weight`: this wave's first fragment in the workgroup's tile. Groups from `end_group` on
  // count as 0.
  template <class Weights>
  RQ_DEVICE DirectWeights(const Operands& in, const Weights& weights, uint32_t first_weight,
                          uint32_t end_group, uint32_t lane)
      : b_(arch::make_buffer(in.b + weights.first * (kFragRows * in.row_bytes))),
        b_scales_(arch::make_buffer(in.b_scales + weights.first / 2 * band_bytes(in))),
        end_group_(end_group),
        lane_(lane) {
    RQ_UNROLL
    for (int j = 0; j < kWeights; ++j)
      block_[j] =
          weights.block(first_weight + j) * (kFragRows * static_cast<uint32_t>(in.row_bytes));
    RQ_UNROLL
    for (int j = 0; j < kWeights / 2; ++j)
      band_[j] = weights.band(first_weight / 2 + j) * static_cast<uint32_t>(band_bytes(in));
  }

  RQ_DEVICE void load_half(uint32_t step, uint32_t h, u32x4 (&to)[kWeights][kStepHalves]) const {
    const bool real = group(step) + h * kHalfGroups < end_group_;
    const uint32_t offset =
        real ? step * kWeightStep + h * kFragBytes + lane_ * 16 : arch::kNowhere;
    RQ_UNROLL
    for (int j = 0; j < kWeights; ++j)
      to[j][h] = arch::load_16<arch::Cache::stream>(b_, offset, block_[j]);
  }
  RQ_DEVICE void load_scales(uint32_t step, uint32_t (&to)[kWeights / 2]) const {
    RQ_UNROLL
    for (int j = 0; j < kWeights / 2; ++j)
      to[j] = arch::load_4(b_scales_, scale_offset(step), band_[j]);
  }

  // The lane's group in the first half of a step, and its place among a band's scales.
  RQ_DEVICE uint32_t group(uint32_t step) const {
    return step * kScaleTileGroups + frag_group(lane_);
  }
  RQ_DEVICE uint32_t scale_offset(uint32_t step) const {
    return group(step) < end_group_ ? step * kScaleTileBytes + lane_ * 4 : arch::kNowhere;
  }
  // NOTE: a scale byte of a group that does not exist can be anything, and 0 times NaN is NaN:
  // where the upper half step is past the end, its two scale bytes go.
  RQ_DEVICE uint32_t scale_mask(uint32_t step) const {
    return group(step) + kHalfGroups < end_group_ ? 0xFFFFFFFFu : 0xFFFFu;
  }

  RQ_DEVICE static int64_t band_bytes(const Operands& in) {
    return kScaleTileRows * in.padded_groups;
  }

 private:
  arch::Buffer b_, b_scales_;
  uint32_t block_[kWeights], band_[kWeights / 2];  // byte offsets
  uint32_t end_group_, lane_;
};

template <int kTokens, int kWeights>
class DirectOperands {
 public:
  static_assert(kTokens == 1 || kTokens % 2 == 0);

  template <class Rows, class Weights>
  RQ_DEVICE DirectOperands(const Operands& in, const Rows& rows, const TokenScales& scales,
                           const Weights& weights, uint32_t first_weight, uint32_t end_group,
                           uint32_t lane)
      : weights_(in, weights, first_weight, end_group, lane),
        a_(arch::make_buffer(in.a + rows.first * in.row_bytes)),
        a_scales_(
            arch::make_buffer(in.a_scales + scales.band * DirectWeights<kWeights>::band_bytes(in))),
        band_bytes_(static_cast<uint32_t>(DirectWeights<kWeights>::band_bytes(in))),
        end_group_(end_group),
        scale_shift_(scales.shift) {
    RQ_UNROLL
    for (int i = 0; i < kTokens; ++i)
      token_row_[i] = rows(i * kFragRows + frag_row(lane)) * static_cast<uint32_t>(in.row_bytes);
  }

  RQ_DEVICE void load(uint32_t step, StepOperands<kTokens, kWeights>& to) const {
    const uint32_t group = weights_.group(step);
    RQ_UNROLL
    for (uint32_t h = 0; h < kStepHalves; ++h) {
      weights_.load_half(step, h, to.weights);
      const bool real = group + h * kHalfGroups < end_group_;
      const uint32_t token = real ? (group + h * kHalfGroups) * kGroupBytes : arch::kNowhere;
      RQ_UNROLL
      for (int i = 0; i < kTokens; ++i) to.tokens[i][h] = arch::load_16(a_, token + token_row_[i]);
    }
    RQ_UNROLL
    for (int i = 0; i < (kTokens + 1) / 2; ++i)
      to.token_scales[i] = arch::load_4(a_scales_, weights_.scale_offset(step), i * band_bytes_);
    weights_.load_scales(step, to.weight_scales);
  }

  RQ_DEVICE void multiply(uint32_t step, const StepOperands<kTokens, kWeights>& in,
                          f32x4 (&acc)[kTokens][kWeights]) const {
    const uint32_t mask = weights_.scale_mask(step);
    uint32_t token_scales[(kTokens + 1) / 2], weight_scales[kWeights / 2];
    RQ_UNROLL
    for (int i = 0; i < (kTokens + 1) / 2; ++i) token_scales[i] = in.token_scales[i] & mask;
    if constexpr (kTokens == 1) token_scales[0] >>= scale_shift_;
    RQ_UNROLL
    for (int j = 0; j < kWeights / 2; ++j) weight_scales[j] = in.weight_scales[j] & mask;
    unrolled<kStepHalves>([&](auto h) {
      unrolled<kTokens>([&](auto i) {
        unrolled<kWeights>([&](auto j) {
          multiply_fragment<h.value, i.value, j.value>(
              acc[i.value][j.value], in.tokens[i.value][h.value], in.weights[j.value][h.value],
              token_scales[i.value / 2], weight_scales[j.value / 2]);
        });
      });
    });
  }

 private:
  DirectWeights<kWeights> weights_;
  arch::Buffer a_, a_scales_;
  uint32_t token_row_[kTokens];  // byte offset
  uint32_t band_bytes_, end_group_, scale_shift_;
};

}  // namespace rotquant::device
