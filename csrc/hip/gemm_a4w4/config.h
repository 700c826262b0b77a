// SPDX-License-Identifier: MIT
// What is fixed at compile time for one instance of the GEMM, its LDS, and what a launch passes.
#pragma once

#include "core/gemm_configs.h"
#include "core/params.h"

namespace rotquant::hip {

// Both operands straight to registers; kWavesK waves share an output and split K between them.
template <int kTokenFrags_, int kWeightFrags_, int kWavesN_, int kWavesK_, int kDepth_>
struct DirectTile {
  static constexpr int kTokenFrags = kTokenFrags_, kWeightFrags = kWeightFrags_;  // of a wave
  static constexpr int kWavesN = kWavesN_, kWavesK = kWavesK_;
  static constexpr int kDepth = kDepth_;  // steps of K in flight
  static constexpr int kTileM = 16 * kTokenFrags, kTileN = 16 * kWeightFrags * kWavesN;
  static constexpr int kWaves = kWavesN * kWavesK, kThreads = 64 * kWaves;
  // NOTE: shuffled scales are padded to 256 rows; a tile that divides 256 reads nothing beyond.
  static_assert(256 % kTileM == 0 && 256 % kTileN == 0 && kTileN % kScaleTileRows == 0);
};

// Both operands through LDS.
template <int kTokenFrags_, int kWeightFrags_, int kWavesM_, int kWavesN_>
struct StagedTile {
  static constexpr int kTokenFrags = kTokenFrags_, kWeightFrags = kWeightFrags_;  // of a wave
  static constexpr int kWavesM = kWavesM_, kWavesN = kWavesN_;
  static constexpr int kTileM = 16 * kTokenFrags * kWavesM, kTileN = 16 * kWeightFrags * kWavesN;
  static constexpr int kWaves = kWavesM * kWavesN, kThreads = 64 * kWaves;
  static_assert(256 % kTileM == 0 && 256 % kTileN == 0);
  static_assert(kTileM % kScaleTileRows == 0 && kTileN % kScaleTileRows == 0);
};

// The sum over the parts of a split K: a workgroup has kSumRows x kSumColumns outputs, eight
// columns a thread. NOTE: the grid is clamped and strides over the rest.
constexpr int kSumThreads = 256, kSumLanes = 32;
constexpr int kSumRows = kSumThreads / kSumLanes, kSumColumns = 8 * kSumLanes;
constexpr int kMaxSumGrid = 65535;

struct GemmArgs {
  GemmParams params;
  int tiles_m, tiles_n;
  int splits;  // of K; more than one write float32 sums to the workspace
};

}  // namespace rotquant::hip
