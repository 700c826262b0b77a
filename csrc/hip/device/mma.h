// SPDX-License-Identifier: MIT
// MXFP4 fragments and the tile product that the GEMMs share. Weights are the rows of the matrix
// instruction and tokens its columns, so that a lane ends with four neighbouring outputs of a
// token.
#pragma once

#include "core/layout.h"
#include "hip/arch/arch.h"

namespace rotquant::device {

using arch::f32x4;
using arch::u32x4;

constexpr uint32_t kFragRows = 16;   // weight rows, or tokens
constexpr uint32_t kStepHalves = 2;  // matrix instructions along k in a step of 256
constexpr uint32_t kStepBytes = kScaleTileGroups * kGroupBytes;  // of codes of one row
constexpr uint32_t kHalfGroups = kScaleTileGroups / kStepHalves;
constexpr uint32_t kWeightStep =
    kFragRows * kStepBytes;  // shuffled: a fragment row's step is contiguous
constexpr uint32_t kFragBytes = kFragRows * kStepBytes / kStepHalves;
static_assert(kFragBytes == arch::kWaveSize * 16);

// Which of the wave's 16 rows and of the half step's four groups a lane holds.
RQ_DEVICE uint32_t frag_row(uint32_t lane) { return lane % kFragRows; }
RQ_DEVICE uint32_t frag_group(uint32_t lane) { return lane / kFragRows; }

// Where A's row i of a workgroup tile comes from: the rows are those that follow `first`; past the
// last one it is the last one again. A gathering GEMM has another of these.
struct DenseRows {
  int64_t first;   // row of the codes that offsets count from; uniform
  uint32_t count;  // of rows from there on that offsets may reach, >= 1

  RQ_DEVICE uint32_t operator()(uint32_t i) const { return i < count ? i : count - 1; }
};

// Codes and scales of both operands.
struct Operands {
  const uint8_t* a;
  const uint8_t* b;
  const uint8_t* a_scales;
  const uint8_t* b_scales;
  int64_t row_bytes;      // k / 2
  int64_t padded_groups;  // ceil8(k / 32)
};

// Where the weight fragments of a workgroup tile come from: those that follow `first`; past the
// last one it is the last one again. Fragments 2q and 2q + 1 share a band of scales. The GEMM over
// gate and up has another of these.
struct DenseWeights {
  int64_t first;   // weight row / 16, even, that offsets count from; uniform
  uint32_t count;  // of fragments from there on that exist, >= 1

  RQ_DEVICE uint32_t block(uint32_t fragment) const {
    return fragment < count ? fragment : count - 1;
  }
  // Bands are padded to whole tiles: none of them needs an edge.
  RQ_DEVICE uint32_t band(uint32_t pair) const { return pair; }
  // Of fragments and bands that the two above may reach, for a tile of `fragments`.
  RQ_DEVICE uint32_t block_reach(uint32_t fragments) const {
    return count < fragments ? count : fragments;
  }
  RQ_DEVICE uint32_t band_reach(uint32_t pairs) const { return pairs; }
};

// Where the scales of a workgroup tile's tokens are.
struct TokenScales {
  int64_t band;    // token row / 32
  uint32_t shift;  // 8 if the tile starts in the upper half of a band
};

// acc[i][j] += the product of token fragment i and weight fragment j over half a step.
template <int kHalf, int kTokens, int kWeights>
RQ_DEVICE void multiply_fragment(f32x4& acc, u32x4 token, u32x4 weight, uint32_t token_scale,
                                 uint32_t weight_scale) {
  acc = arch::mfma_fp4<2 * kHalf + kWeights % 2, 2 * kHalf + kTokens % 2>(
      weight, token, acc, weight_scale, token_scale);
}

// Calls body(integral constant) for 0 .. kCount - 1: the matrix instruction takes its byte selects
// as immediates.
template <int kValue>
struct Index {
  static constexpr int value = kValue;
};
template <int kCount, int kFirst = 0, class Body>
RQ_DEVICE void unrolled(Body&& body) {
  if constexpr (kFirst < kCount) {
    body(Index<kFirst>{});
    unrolled<kCount, kFirst + 1>(body);
  }
}

}  // namespace rotquant::device
