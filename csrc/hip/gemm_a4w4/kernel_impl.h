// SPDX-License-Identifier: MIT
// The GEMM's kernels: which tile, which part of K, product, store; and the sum over the parts.
#pragma once

#include "hip/device/epilogue.h"
#include "hip/device/pipeline.h"
#include "hip/gemm_a4w4/config.h"

namespace rotquant::hip {

using device::f32x4;

// Where a workgroup works.
struct GemmWork {
  int64_t row0, column0;
  uint32_t first_step, end_step;
  uint32_t end_group;  // of the part of K
};

template <class Tile>
RQ_DEVICE GemmWork work_of(const GemmArgs& args) {
  const GemmTileIndex tile = gemm_tile_of(arch::block_index_x(), args.tiles_m, args.tiles_n);
  const uint32_t groups = static_cast<uint32_t>(args.params.k / kGroup);
  const uint32_t steps = (groups + kScaleTileGroups - 1) / kScaleTileGroups;
  const uint32_t split = arch::block_index_y(), splits = args.splits;
  const uint32_t end_step = (split + 1) * steps / splits;
  const uint32_t end_group = end_step * kScaleTileGroups;
  return {int64_t{tile.m} * Tile::kTileM, int64_t{tile.n} * Tile::kTileN, split * steps / splits,
          end_step, end_group < groups ? end_group : groups};
}

RQ_DEVICE device::Operands operands_of(const GemmParams& p) {
  return {p.a, p.b, p.a_scales, p.b_scales, p.k / 2, round_up_to(p.k / kGroup, kScaleTileGroups)};
}

RQ_DEVICE device::TokenScales token_scales_of(const GemmWork& work) {
  return {work.row0 / kScaleTileRows,
          static_cast<uint32_t>(work.row0 % kScaleTileRows / device::kFragRows * 8)};
}

RQ_DEVICE device::DenseWeights weights_of(const GemmParams& p, const GemmWork& work) {
  const int64_t first = work.column0 / device::kFragRows;
  return {first,
          static_cast<uint32_t>(round_up_to(p.n, device::kFragRows) / device::kFragRows - first)};
}

RQ_DEVICE device::DenseRows rows_of(const GemmParams& p, const GemmWork& work) {
  const int64_t left = p.m - work.row0;
  return {work.row0, static_cast<uint32_t>(left < 256 ? left : 256)};
}

RQ_DEVICE device::Output final_output(const GemmParams& p) {
  return {p.out, p.out_dtype, p.m, p.n, p.n, p.bias};
}

// The output, or this part of K's plane of the workspace.
RQ_DEVICE device::Output output_of(const GemmArgs& args) {
  const GemmParams& p = args.params;
  if (args.splits == 1) return final_output(p);
  const int64_t stride = gemm_workspace_stride(p.n);
  return {static_cast<float*>(p.workspace) + arch::block_index_y() * p.m * stride,
          DType::fp32,
          p.m,
          stride,
          stride,
          nullptr};
}

// NOTE: at least 4 waves on each SIMD: what hides the latency here is loads in flight.
template <class Tile>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Tile::kThreads, 4) void gemm_direct_kernel(const GemmArgs args) {
  using Sums = device::SumTile<Tile::kTokenFrags, Tile::kWeightFrags>;
  alignas(16) RQ_SHARED static Sums sums[Tile::kWavesK][Tile::kWavesN];
  const GemmParams& p = args.params;
  const GemmWork work = work_of<Tile>(args);
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const uint32_t wave_n = wave % Tile::kWavesN, wave_k = wave / Tile::kWavesN;
  const uint32_t first_weight = wave_n * Tile::kWeightFrags;

  const device::DirectOperands<Tile::kTokenFrags, Tile::kWeightFrags> operands(
      operands_of(p), rows_of(p, work), token_scales_of(work), weights_of(p, work), first_weight,
      work.end_group, lane);
  f32x4 acc[Tile::kTokenFrags][Tile::kWeightFrags] = {};
  device::direct_product<Tile::kDepth>(operands, work.first_step + wave_k, work.end_step,
                                       Tile::kWavesK, acc);
  sums[wave_k][wave_n].put(lane, acc);
  if constexpr (Tile::kWavesK > 1) {
    arch::barrier();
    if (wave_k > 0) return;
  }
  device::store_tiles<Tile::kWavesK>(output_of(args), &sums[0][wave_n], Tile::kWavesN, work.row0,
                                     work.column0 + first_weight * device::kFragRows, lane);
}

// NOTE: two waves on each SIMD, with half of its registers each: the more a wave's product reuses
// its fragments the better, and what hides the latency is the pipeline.
template <class Tile>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Tile::kThreads, 2) void gemm_staged_kernel(const GemmArgs args) {
  using Staged =
      device::StagedOperands<Tile::kTokenFrags, Tile::kWeightFrags, Tile::kWavesM, Tile::kWavesN>;
  // A wave stores its sums in parts of at most 64 tokens, through what was the operands' LDS.
  constexpr int kPart = Tile::kTokenFrags < 4 ? Tile::kTokenFrags : 4;
  using Sums = device::SumTile<kPart, Tile::kWeightFrags>;
  union Lds {
    typename Staged::Tiles tiles;
    Sums sums[Tile::kWaves];
  };
  alignas(16) RQ_SHARED static Lds lds;
  const GemmParams& p = args.params;
  const GemmWork work = work_of<Tile>(args);
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);

  Staged operands(operands_of(p), rows_of(p, work), token_scales_of(work), weights_of(p, work),
                  lds.tiles, work.end_group, wave, lane);
  f32x4 acc[Tile::kTokenFrags][Tile::kWeightFrags] = {};
  device::staged_product(operands, work.first_step, work.end_step, acc);

  arch::barrier();
  const int64_t row0 = work.row0 + wave / Tile::kWavesN * (Tile::kTokenFrags * device::kFragRows);
  const int64_t column0 = work.column0 + wave % Tile::kWavesN * Sums::kColumns;
  RQ_UNROLL
  for (int i = 0; i < Tile::kTokenFrags; i += kPart) {
    lds.sums[wave].put(lane, acc + i);
    device::store_tiles<1>(output_of(args), &lds.sums[wave], 0, row0 + i * device::kFragRows,
                           column0, lane);
  }
}

}  // namespace rotquant::hip
