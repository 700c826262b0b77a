// SPDX-License-Identifier: MIT
// The kernels of the GEMM over gate and up: which tile, product, activation, quantised store.
#pragma once

#include "hip/device/pipeline.h"
#include "hip/moe_gemm1/epilogue.h"
#include "hip/moe_gemm1/quantised_tokens.h"

namespace rotquant::hip {

// Sums of the waves along K but the first. A wave's fragments follow each other, a lane's 16 bytes
// beside its neighbour's.
template <class Tile>
struct PartialSums {
  static constexpr int kParts = Tile::kWavesK - 1;
  f32x4 values[kParts > 0 ? kParts : 1][Tile::kWavesN][Tile::kTokenFrags * Tile::kWeightFrags]
              [arch::kWaveSize];
};

// Adds up the waves along K, in their order. False for a wave that has given its sums away.
template <class Tile, int kTokens, int kWeights>
RQ_DEVICE bool sum_over_waves(PartialSums<Tile>& lds, uint32_t wave_n, uint32_t wave_k,
                              uint32_t lane, f32x4 (&acc)[kTokens][kWeights]) {
  if (wave_k > 0) {
    RQ_UNROLL
    for (int f = 0; f < kTokens * kWeights; ++f)
      lds.values[wave_k - 1][wave_n][f][lane] = acc[f / kWeights][f % kWeights];
  }
  arch::barrier();
  if (wave_k > 0) return false;
  RQ_UNROLL
  for (int part = 0; part < Tile::kWavesK - 1; ++part) {
    RQ_UNROLL
    for (int f = 0; f < kTokens * kWeights; ++f)
      acc[f / kWeights][f % kWeights] += lds.values[part][wave_n][f][lane];
  }
  return true;
}

// What follows the product where waves may split K.
template <class Tile>
RQ_DEVICE void finish_direct(const ExpertTile& tile, uint32_t wave_n, uint32_t wave_k,
                             uint32_t lane, f32x4 (&acc)[Tile::kTokenFrags][Tile::kWeightFrags]) {
  const MoeGemm1Params& p = arch::late_argument<MoeGemm1Args>().params;
  alignas(16) RQ_SHARED static Activated<Tile> activated;
  bool has_sums = true;
  if constexpr (Tile::kWavesK > 1) {
    alignas(16) RQ_SHARED static PartialSums<Tile> partial;
    has_sums = sum_over_waves<Tile>(partial, wave_n, wave_k, lane, acc);
  }
  if (has_sums)
    activate<Tile>(p, tile, 0, wave_n * (Tile::kWeightFrags / kUnitFrags), lane, acc, activated);
  arch::barrier();
  finish<Tile>(p, tile, activated);
}

// NOTE: at least 4 waves on each SIMD: what hides the latency here is loads in flight.
template <class Tile>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Tile::kThreads,
                           4) void moe_gemm1_direct_kernel(const MoeGemm1Args args) {
  const MoeGemm1Params& p = args.params;
  const ExpertTile tile = device::expert_tile_of<Tile::kTileM>(p.sorting, p.experts, args.tiles_n);
  if (!tile.any) return;
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const uint32_t wave_n = wave % Tile::kWavesN, wave_k = wave / Tile::kWavesN;
  const auto groups = static_cast<uint32_t>(p.k / kGroup);

  const device::DirectOperands<Tile::kTokenFrags, Tile::kWeightFrags> operands(
      operands_of(p, tile), rows_of(p, tile), token_scales_of(tile), weights_of<Tile>(p, tile),
      wave_n * Tile::kWeightFrags, groups, lane);
  f32x4 acc[Tile::kTokenFrags][Tile::kWeightFrags] = {};
  device::direct_product<Tile::kDepth>(operands, wave_k, steps_of(groups), Tile::kWavesK, acc);
  finish_direct<Tile>(tile, wave_n, wave_k, lane, acc);
}

// NOTE: two waves on each SIMD: a wave holds two groups of x in float32 beside its weights.
template <class Tile>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Tile::kThreads,
                           2) void moe_gemm1_inline_kernel(const MoeGemm1Args args) {
  static_assert(Tile::kTokenFrags == 1 && Tile::kDepth == 1);
  const MoeGemm1Params& p = args.params;
  const ExpertTile tile = device::expert_tile_of<Tile::kTileM>(p.sorting, p.experts, args.tiles_n);
  if (!tile.any) return;
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const uint32_t wave_n = wave % Tile::kWavesN, wave_k = wave / Tile::kWavesN;
  const auto groups = static_cast<uint32_t>(p.k / kGroup);

  const QuantisedTokens tokens(p, rows_of(p, tile)(device::frag_row(lane)), lane);
  const device::DirectWeights<Tile::kWeightFrags> weights(
      operands_of(p, tile), weights_of<Tile>(p, tile), wave_n * Tile::kWeightFrags, groups, lane);
  f32x4 acc[1][Tile::kWeightFrags] = {};
  inline_product(p.rotation.size, tokens, weights, wave_k, steps_of(groups), Tile::kWavesK, acc);
  finish_direct<Tile>(tile, wave_n, wave_k, lane, acc);
}

// NOTE: two waves on each SIMD, as in hip/gemm_a4w4.
template <class Tile>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Tile::kThreads,
                           2) void moe_gemm1_staged_kernel(const MoeGemm1Args args) {
  using Staged =
      device::StagedOperands<Tile::kTokenFrags, Tile::kWeightFrags, Tile::kWavesM, Tile::kWavesN>;
  union Lds {
    typename Staged::Tiles tiles;
    Activated<Tile> activated;
  };
  alignas(16) RQ_SHARED static Lds lds;
  const MoeGemm1Params& p = args.params;
  const ExpertTile tile = device::expert_tile_of<Tile::kTileM>(p.sorting, p.experts, args.tiles_n);
  if (!tile.any) return;
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const auto groups = static_cast<uint32_t>(p.k / kGroup);

  Staged operands(operands_of(p, tile), rows_of(p, tile), token_scales_of(tile),
                  weights_of<Tile>(p, tile), lds.tiles, groups, wave, lane);
  f32x4 acc[Tile::kTokenFrags][Tile::kWeightFrags] = {};
  device::staged_product(operands, 0, steps_of(groups), acc);

  const MoeGemm1Params& late = arch::late_argument<MoeGemm1Args>().params;
  arch::barrier();
  activate<Tile>(late, tile, wave / Tile::kWavesN * (Tile::kTokenFrags * device::kFragRows),
                 wave % Tile::kWavesN * (Tile::kWeightFrags / kUnitFrags), lane, acc,
                 lds.activated);
  arch::barrier();
  finish<Tile>(late, tile, lds.activated);
}

}  // namespace rotquant::hip
