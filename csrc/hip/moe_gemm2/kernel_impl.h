// SPDX-License-Identifier: MIT
// moe_gemm2's kernels: which expert's tile, product, and on to where each route wants its row.
#pragma once

#include "hip/device/expert_tile.h"
#include "hip/device/pipeline.h"
#include "hip/moe_gemm2/config.h"
#include "hip/moe_gemm2/finish.h"

namespace rotquant::hip {

// Of one expert. NOTE: 64 bits: all experts together pass 4 GiB.
RQ_DEVICE device::Operands operands_of(const MoeGemm2Params& p, uint32_t expert) {
  const int64_t row_bytes = p.inter / 2;
  const int64_t padded_groups = round_up_to(p.inter / kGroup, kScaleTileGroups);
  const int64_t first_row = expert * p.hidden;
  return {p.a,        p.w2 + first_row * row_bytes,
          p.a_scales, p.w2_scale + first_row * padded_groups,
          row_bytes,  padded_groups};
}

template <class Tile>
RQ_DEVICE device::ExpertTile expert_tile_of(const MoeGemm2Args& args) {
  const MoeGemm2Params& p = args.params;
  return device::expert_tile_of<Tile::kTileM>(p.sorting, p.experts, args.tiles_n);
}

// An expert's weights from `first` on. Nothing past them is read: behind the last expert there is
// nothing.
struct ExpertWeights {
  int64_t first;   // weight row / 16, even, that offsets count from; uniform
  uint32_t count;  // of fragments from there on that exist: even, >= 2

  RQ_DEVICE uint32_t block(uint32_t fragment) const {
    return fragment < count ? fragment : count - 1;
  }
  RQ_DEVICE uint32_t band(uint32_t pair) const { return pair < count / 2 ? pair : count / 2 - 1; }
  RQ_DEVICE uint32_t block_reach(uint32_t fragments) const {
    return fragments < count ? fragments : count;
  }
  RQ_DEVICE uint32_t band_reach(uint32_t pairs) const {
    return pairs < count / 2 ? pairs : count / 2;
  }
};

RQ_DEVICE ExpertWeights weights_of(const MoeGemm2Params& p, int64_t column0) {
  const int64_t first = column0 / device::kFragRows;
  return {first, static_cast<uint32_t>(p.hidden / device::kFragRows - first)};
}

RQ_DEVICE device::TokenScales token_scales_of(int64_t row0) {
  return {row0 / kScaleTileRows,
          static_cast<uint32_t>(row0 % kScaleTileRows / device::kFragRows * 8)};
}

// NOTE: at least 4 waves on each SIMD: what hides the latency here is loads in flight.
template <class Tile, MoeFinish kFinish>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Tile::kThreads,
                           4) void moe_gemm2_direct_kernel(const MoeGemm2Args args) {
  using Tiles = device::SumTile<Tile::kTokenFrags, Tile::kWeightFrags>;
  using Sums = WaveSums<Tile::kWavesK, Tiles>;
  alignas(16) RQ_SHARED static Tiles sums[Tile::kWavesK][Tile::kWavesN];
  using Routes = WaveRoutes<kFinish, Tile::kTileM>;
  RQ_SHARED static Routes routes[Tile::kWaves];
  const MoeGemm2Params& p = args.params;
  const device::ExpertTile tile = expert_tile_of<Tile>(args);
  if (!tile.any) return;
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const uint32_t wave_n = wave % Tile::kWavesN, wave_k = wave / Tile::kWavesN;
  const uint32_t first_weight = wave_n * Tile::kWeightFrags;
  const int64_t column0 = int64_t{tile.n} * Tile::kTileN;
  const uint32_t groups = static_cast<uint32_t>(p.inter / kGroup);
  const uint32_t steps = (groups + kScaleTileGroups - 1) / kScaleTileGroups;

  const Route route = fetch_route<kFinish>(p, tile.row0, Routes::row_of(lane));
  const device::DirectOperands<Tile::kTokenFrags, Tile::kWeightFrags> operands(
      operands_of(p, tile.expert), device::DenseRows{tile.row0, Tile::kTileM},
      token_scales_of(tile.row0), weights_of(p, column0), first_weight, groups, lane);
  f32x4 acc[Tile::kTokenFrags][Tile::kWeightFrags] = {};
  device::direct_product<Tile::kDepth>(operands, wave_k, steps, Tile::kWavesK, acc);
  routes[wave].put(p, route, lane);
  sums[wave_k][wave_n].put(lane, acc);
  if constexpr (Tile::kWavesK > 1) {
    arch::barrier();
    if (wave_k > 0) return;
  }
  finish<kFinish>(p, tile.expert, routes[wave], Sums{&sums[0][wave_n], Tile::kWavesN},
                  column0 + first_weight * device::kFragRows, lane);
}

// NOTE: two waves on each SIMD, with half of its registers each: the more a wave's product reuses
// its fragments the better, and what hides the latency is the pipeline.
template <class Tile, MoeFinish kFinish>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Tile::kThreads,
                           2) void moe_gemm2_staged_kernel(const MoeGemm2Args args) {
  using Staged =
      device::StagedOperands<Tile::kTokenFrags, Tile::kWeightFrags, Tile::kWavesM, Tile::kWavesN>;
  using Tiles = device::SumTile<Tile::kTokenFrags, Tile::kWeightFrags>;
  union Lds {
    typename Staged::Tiles tiles;
    Tiles sums[Tile::kWaves];
  };
  alignas(16) RQ_SHARED static Lds lds;
  using Routes = WaveRoutes<kFinish, Tiles::kRows>;
  RQ_SHARED static Routes routes[Tile::kWaves];
  const MoeGemm2Params& p = args.params;
  const device::ExpertTile tile = expert_tile_of<Tile>(args);
  if (!tile.any) return;
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const int64_t column0 = int64_t{tile.n} * Tile::kTileN;
  const uint32_t groups = static_cast<uint32_t>(p.inter / kGroup);
  const uint32_t steps = (groups + kScaleTileGroups - 1) / kScaleTileGroups;

  const int64_t wave_row0 = tile.row0 + wave / Tile::kWavesN * Tiles::kRows;
  const Route route = fetch_route<kFinish>(p, wave_row0, Routes::row_of(lane));
  Staged operands(operands_of(p, tile.expert), device::DenseRows{tile.row0, Tile::kTileM},
                  token_scales_of(tile.row0), weights_of(p, column0), lds.tiles, groups, wave,
                  lane);
  f32x4 acc[Tile::kTokenFrags][Tile::kWeightFrags] = {};
  device::staged_product(operands, 0, steps, acc);

  arch::barrier();
  routes[wave].put(p, route, lane);
  lds.sums[wave].put(lane, acc);
  finish<kFinish>(p, tile.expert, routes[wave], WaveSums<1, Tiles>{&lds.sums[wave], 0},
                  column0 + wave % Tile::kWavesN * Tiles::kColumns, lane);
}

}  // namespace rotquant::hip
