// SPDX-License-Identifier: MIT
// The matrices of a strip: staged in LDS, read as operands of the MFMA. See config.h for the
// layout.
#pragma once

#include "hip/arch/arch.h"
#include "hip/rotate_matrix/config.h"

namespace rotquant::hip {

using arch::u32x2;
using arch::u32x4;

RQ_DEVICE uint32_t quarter_of(uint32_t lane) { return lane / kTileTokens; }

// Matrices of the strip to LDS. All loads are in flight before the first is stored.
// NOTE: a strip at the end of a row may have blocks that do not exist; they get the last one's
// matrix and their results are dropped.
template <class Config>
RQ_DEVICE void stage_matrices(const Rotation& rotation, int64_t strip, int64_t blocks,
                              MatrixImages<Config::kRotationSize>& lds) {
  using Shape = MatrixShape<Config::kRotationSize>;
  constexpr uint32_t kChunks = Shape::kColumns / 8;  // 16-byte chunks of a row of an image
  constexpr uint32_t kTotal = Shape::kImages * Config::kRotationSize * kChunks;
  static_assert(kTotal % Config::kThreads == 0);
  constexpr uint32_t kRounds = kTotal / Config::kThreads;

  const uint32_t thread = arch::opaque(arch::thread_index());
  u32x4 chunk[kRounds];
  RQ_UNROLL
  for (uint32_t i = 0; i < kRounds; ++i) {
    const uint32_t c = i * Config::kThreads + thread;
    const uint32_t column = c % kChunks * 8, k = c / kChunks % Config::kRotationSize;
    const uint32_t image = c / (kChunks * Config::kRotationSize);
    int64_t block = strip * Shape::kBlocks + image / Shape::kPanels;
    if (Shape::kBlocks > 1 && block >= blocks) block = blocks - 1;
    const uint32_t panel = image % Shape::kPanels;
    chunk[i] = arch::load(rotation.matrix_bf16 + block * rotation.matrix_stride +
                          k * Config::kRotationSize + panel * kPanelChannels + column);
  }
  RQ_UNROLL
  for (uint32_t i = 0; i < kRounds; ++i) {
    const uint32_t c = i * Config::kThreads + thread;
    const uint32_t unit = c % kChunks * 2, k = c / kChunks % Config::kRotationSize;
    uint64_t* image = lds.units + c / (kChunks * Config::kRotationSize) * Shape::kImageUnits;
    image[Shape::unit_index(k, unit)] = chunk[i][0] | uint64_t{chunk[i][1]} << 32;
    image[Shape::unit_index(k, unit + 1)] = chunk[i][2] | uint64_t{chunk[i][3]} << 32;
  }
}

// A fragment of R^T: 8 (RS 16: 4) consecutive k of the channel that is row l % 16 of the tile.
template <int kSize>
struct MatrixFragmentOf {
  using Type = u32x4;
};
template <>
struct MatrixFragmentOf<16> {
  using Type = u32x2;
};
template <int kSize>
using MatrixFragment = typename MatrixFragmentOf<kSize>::Type;

// Unit that this lane fetches for the first read of tile 0 of an image: 4 channels of one k.
template <int kSize>
RQ_DEVICE uint32_t fragment_unit(uint32_t lane) {
  const uint32_t row = lane % 16 / 4, u = lane % 4, quarter = quarter_of(lane);
  // RS 16: the order of k in which split_blocks() leaves the tokens.
  const uint32_t k = kSize == 16 ? quarter % 2 * 8 + quarter / 2 * 4 + row : quarter * 8 + row;
  return MatrixShape<kSize>::unit_index(k, MatrixShape<kSize>::unit_of(u, 0));
}

template <int kSize>
RQ_DEVICE MatrixFragment<kSize> read_fragment(const MatrixImages<kSize>& lds, uint32_t first_unit,
                                              int image, int tile, int step) {
  using Shape = MatrixShape<kSize>;
  MatrixFragment<kSize> fragment;
  RQ_UNROLL
  for (int half = 0; half < Shape::kReads; ++half) {
    const uint32_t k = step * 32 + half * 4;
    const uint32_t unit = (first_unit ^ tile ^ Shape::swizzle(half * 4)) +
                          image * Shape::kImageUnits + k * Shape::kPitch;
    const u32x2 part = arch::read_transposed(lds.units + unit);
    fragment[2 * half] = part[0], fragment[2 * half + 1] = part[1];
  }
  return fragment;
}

}  // namespace rotquant::hip
