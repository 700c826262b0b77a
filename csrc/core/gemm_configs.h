// SPDX-License-Identifier: MIT
// The GEMM's configurations by name, which one a problem gets, and how it is cut. No HIP.
#pragma once

#include "core/layout.h"
#include "core/params.h"

namespace rotquant {

// K is walked in steps of one shuffled scale tile.
constexpr int64_t kGemmStepK = kScaleTileGroups * kGroup;

// The GPU kernels count bytes within a tile in 31 bits.
constexpr int64_t kMaxGemmK = int64_t{1} << 23;

struct GemmTile {
  int m, n;  // tokens and weight rows of a workgroup
};

namespace gemm_tiles {
#define RQ_GEMM_DIRECT(name, m_frags, n_frags, waves_n, waves_k, steps) \
  constexpr GemmTile name{16 * m_frags, 16 * n_frags * waves_n};
#define RQ_GEMM_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  constexpr GemmTile name{16 * m_frags * waves_m, 16 * n_frags * waves_n};
#include "core/gemm_configs.def"
}  // namespace gemm_tiles

enum class GemmKind : int { direct, staged };

struct GemmConfig {
  const char* name;
  GemmKind kind;
  GemmTile tile;
  int splits;  // of K, at most
};

constexpr GemmConfig kGemmConfigs[] = {
#define RQ_GEMM_CONFIG(kind, tile, splits) \
  {splits == 1 ? #tile : #tile "_split" #splits, GemmKind::kind, gemm_tiles::tile, splits},
#include "core/gemm_configs.def"
};
constexpr int kGemmConfigCount = sizeof(kGemmConfigs) / sizeof(kGemmConfigs[0]);

struct GemmPlan {
  int config;
  int64_t tiles_m, tiles_n;
  int64_t splits;  // no more than there are steps of K

  constexpr int64_t workgroups() const { return tiles_m * tiles_n * splits; }
};

constexpr GemmPlan plan_gemm(int64_t m, int64_t n, int64_t k, int index) {
  const GemmConfig& config = kGemmConfigs[index];
  const int64_t steps = round_up_to(k, kGemmStepK) / kGemmStepK;
  const int64_t splits = config.splits < steps ? config.splits : steps;
  return {index, round_up_to(m, config.tile.m) / config.tile.m,
          round_up_to(n, config.tile.n) / config.tile.n, splits < 1 ? 1 : splits};
}

// The configuration for config = -1. Up to 64 tokens: one whose tile just holds them; beyond: one
// of the staged ones. Of these the first in the table with a workgroup for every compute unit, or
// else the one with the most.
constexpr int choose_gemm_config(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kComputeUnits = 256;  // MI355X, MI350X
  const int tokens = m <= 16 ? 16 : m <= 32 ? 32 : 64;
  int best = -1;
  int64_t most = 0;
  for (int i = 0; i < kGemmConfigCount && most < kComputeUnits; ++i) {
    const GemmConfig& config = kGemmConfigs[i];
    const bool direct = config.kind == GemmKind::direct;
    if (m <= 64 ? !direct || config.tile.m != tokens : direct) continue;
    const int64_t workgroups = plan_gemm(m, n, k, i).workgroups();
    if (best < 0 || workgroups > most) best = i, most = workgroups;
  }
  return best;
}

constexpr GemmPlan plan_gemm(const GemmParams& p) {
  return plan_gemm(p.m, p.n, p.k, p.config < 0 ? choose_gemm_config(p.m, p.n, p.k) : p.config);
}

// Partial sums of a split K: float32 [splits, m, stride].
constexpr int64_t gemm_workspace_stride(int64_t n) { return round_up_to(n, 8); }

constexpr int64_t gemm_workspace_bytes(const GemmParams& p) {
  const GemmPlan plan = plan_gemm(p);
  return plan.splits > 1 ? plan.splits * p.m * gemm_workspace_stride(p.n) * 4 : 0;
}

struct GemmTileIndex {
  uint32_t m, n;
};

// The tile of a workgroup. Workgroup ids go round the 8 dies (XCDs), each with its own L2: every
// die gets a run of tiles that follow each other. These go down kBandTiles tiles of tokens, then on
// to the next weights, so that what is resident at a time is about square and shares both operands.
RQ_HOST_DEVICE constexpr GemmTileIndex gemm_tile_of(uint32_t id, uint32_t tiles_m,
                                                    uint32_t tiles_n) {
  constexpr uint32_t kDies = 8, kBandTiles = 4;
  const uint32_t tiles = tiles_m * tiles_n;
  const uint32_t die = id % kDies, each = tiles / kDies, extra = tiles % kDies;
  const uint32_t tile = die * each + (die < extra ? die : extra) + id / kDies;
  const uint32_t band = tile / (kBandTiles * tiles_n), in_band = tile % (kBandTiles * tiles_n);
  const uint32_t rest = tiles_m - band * kBandTiles;
  const uint32_t height = rest < kBandTiles ? rest : kBandTiles;
  return {band * kBandTiles + in_band % height, in_band / height};
}

}  // namespace rotquant
