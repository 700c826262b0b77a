// SPDX-License-Identifier: MIT
// What is fixed at compile time for one instance, the matrix in LDS, and how a launch covers x.
//
// The product is computed transposed, y^T = R^T x^T: MFMA rows are output channels, columns are
// tokens, so that a lane ends with many channels of one token, which is what shares a scale.
#pragma once

#include "core/hadamard.h"
#include "core/layout.h"
#include "core/params.h"
#include "hip/device/tile_plan.h"

namespace rotquant::hip {

constexpr int kTileTokens = 16;      // columns of an MFMA
constexpr int kTileChannels = 16;    // rows of an MFMA
constexpr int kPanelChannels = 128;  // a group for each quarter of the wave

// How the matrices of one strip of channels lie in LDS, and which output channel is which MFMA row.
//
// A strip is whole blocks of RS channels, at least a panel. Its matrices are images [RS][columns]
// (RS 256: two images, the left and the right half). A fragment of R^T wants 8 consecutive k of one
// channel, which is a column of the image: the hardware's transpose read fetches it from rows.
template <int kSize>
struct MatrixShape {
  static constexpr int kStrip = kSize > kPanelChannels ? kSize : kPanelChannels;
  static constexpr int kPanels = kStrip / kPanelChannels;
  static constexpr int kBlocks = kStrip / kSize;
  static constexpr int kColumns = kSize < kPanelChannels ? kSize : kPanelChannels;
  static constexpr int kImages = kBlocks * kPanels;
  static constexpr int kTiles = kColumns / kTileChannels;     // MFMAs along the channels
  static constexpr int kSteps = kSize > 32 ? kSize / 32 : 1;  // MFMAs along k
  static constexpr int kReads = kSize > 16 ? 2 : 1;           // transpose reads per fragment
  static constexpr int kImagesPerPanel = kImages / kPanels;
  static_assert(kSize >= kMinRotation && kSize <= kMaxRotation);
  static_assert(kImagesPerPanel * kTiles * kTileChannels == kPanelChannels);

  // LDS in units of 8 bytes, four channels of one k: what a lane of a transpose read fetches.
  static constexpr uint32_t kPitch = kColumns / 4;
  static constexpr uint32_t kImageUnits = kSize * kPitch;

  // Row 4u + e of tile t is channel 4 * unit_of(u, t) + e of the image: quarter u of the wave gets
  // consecutive channels. (RS 64: quarters 0 and 2 make a group, see own_groups().)
  RQ_HOST_DEVICE static constexpr uint32_t unit_of(uint32_t u, uint32_t tile) {
    if (kSize == 64) u = (u & 1) * 2 + u / 2;
    return u * kTiles + tile;
  }

  // XORed into the unit's index. A transpose read takes two clocks of 32 lanes and 256 bytes: k
  // differs in bits 0, 1 and 3, and u; the staging writes differ in all of k where rows are short.
  // With these masks every such access is spread over all 64 banks. Linear: the mask of a sum of
  // disjoint bits is the XOR of their masks.
  RQ_HOST_DEVICE static constexpr uint32_t swizzle(uint32_t k) {
    if (kSize == 16) return (k >> 3 & 1) * 17;
    if (kSize == 32) return (k >> 2 ^ k >> 3) & 1;
    if (kSize == 64) return (k >> 1 & 1) | (k >> 3 & 1) << 1;
    return (k & 3) | (k >> 3 & 1) << 2;
  }
  RQ_HOST_DEVICE static constexpr uint32_t unit_index(uint32_t k, uint32_t unit) {
    return (k * kPitch + unit) ^ swizzle(k);
  }
};

// LDS of one workgroup.
template <int kSize>
struct MatrixImages {
  static constexpr uint32_t kUnits = MatrixShape<kSize>::kImages * MatrixShape<kSize>::kImageUnits;
  uint64_t units[kUnits];
};
static_assert(sizeof(MatrixImages<16>) == 4096);
static_assert(sizeof(MatrixImages<128>) == 32768);
static_assert(sizeof(MatrixImages<256>) == 131072);

// A wave multiplies `kTiles` tiles of 16 tokens at once with each fragment of the matrix.
template <DType kInput, int kSize, int kTiles, int kWaves>
struct RotateMatrixConfig {
  static constexpr DType kDType = kInput;
  static constexpr int kRotationSize = kSize;
  static constexpr int kTokenTiles = kTiles;
  static constexpr int kThreads = kWaves * 64;
  static constexpr int kWaveTokens = kTiles * kTileTokens;
  static constexpr int kWorkgroupTokens = kWaves * kWaveTokens;
  // NOTE: RS 256 fills the LDS with one workgroup, whose waves are all that a CU has.
  static constexpr int kMinWaves = kSize > kPanelChannels ? kWaves / 4 : 4;
  // What a CU holds at once, about: 16 waves.
  static constexpr int kResidentWorkgroups = kSize > kPanelChannels ? 1 : 16 / kWaves;
  // A wave's tokens never straddle two 32-row tiles of shuffled scales.
  static_assert(kTiles == 1 || kTiles == 2);
  static_assert(kMinWaves >= 1);
};

struct RotateMatrixPlan {
  int64_t strips;     // of channels
  int64_t row_tiles;  // of a workgroup's tokens
  int grid_strips, grid_rows;
};

// One workgroup stages a strip's matrices once and then takes every grid_rows-th row tile: enough
// workgroups to fill the GPU, and no more, so that each staging pays for many tokens.
// k and rows: what must be written, padding of shuffled scales included.
template <class Config>
inline RotateMatrixPlan plan_matrix(int64_t k, int64_t rows) {
  constexpr int64_t strip = MatrixShape<Config::kRotationSize>::kStrip;
  constexpr int64_t kComputeUnits = 256, kMaxStrips = int64_t{1} << 20, kMaxGridRows = 65535;
  RotateMatrixPlan plan{};
  plan.strips = device::divide_up(k, strip);
  plan.row_tiles = device::divide_up(rows, Config::kWorkgroupTokens);
  plan.grid_strips = static_cast<int>(plan.strips < kMaxStrips ? plan.strips : kMaxStrips);
  int64_t wanted = device::divide_up(kComputeUnits * Config::kResidentWorkgroups, plan.grid_strips);
  if (wanted > kMaxGridRows) wanted = kMaxGridRows;
  // As many turns for each workgroup, or one less.
  const int64_t turns = device::divide_up(plan.row_tiles, wanted);
  plan.grid_rows = static_cast<int>(turns ? device::divide_up(plan.row_tiles, turns) : 0);
  return plan;
}

struct RotateMatrixQuantArgs {
  RotateQuantParams params;
  RotateMatrixPlan plan;
};

struct RotateMatrixArgs {
  RotateParams params;
  RotateMatrixPlan plan;
};

}  // namespace rotquant::hip
