// SPDX-License-Identifier: MIT
// The MoE GEMMs' configurations by name, and which one a problem gets. No HIP.
#pragma once

#include "core/gemm_configs.h"
#include "core/moe.h"

namespace rotquant {

// inline_: x is quantised inside, tokens and weights go from memory to registers (few tokens).
enum class MoeGemmKind : int { inline_, direct, staged };

struct MoeGemmConfig {
  const char* name;
  MoeGemmKind kind;
  GemmTile tile;  // m is the block_m that it serves; n counts weight rows, gate and up together
};

namespace moe_gemm1_tiles {
#define RQ_MOE_DIRECT(kind, name, m_frags, n_frags, waves_n, waves_k, steps) \
  constexpr GemmTile name{16 * m_frags, 16 * n_frags * waves_n};
#define RQ_MOE_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  constexpr GemmTile name{16 * m_frags * waves_m, 16 * n_frags * waves_n};
#include "core/moe_gemm1_configs.def"
}  // namespace moe_gemm1_tiles

namespace moe_gemm2_tiles {
#define RQ_MOE_DIRECT(kind, name, m_frags, n_frags, waves_n, waves_k, steps) \
  constexpr GemmTile name{16 * m_frags, 16 * n_frags * waves_n};
#define RQ_MOE_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  constexpr GemmTile name{16 * m_frags * waves_m, 16 * n_frags * waves_n};
#include "core/moe_gemm2_configs.def"
}  // namespace moe_gemm2_tiles

constexpr MoeGemmConfig kMoeGemm1Configs[] = {
#define RQ_MOE_DIRECT(kind, name, ...) {#name, MoeGemmKind::kind, moe_gemm1_tiles::name},
#define RQ_MOE_STAGED(name, ...) {#name, MoeGemmKind::staged, moe_gemm1_tiles::name},
#include "core/moe_gemm1_configs.def"
};
constexpr int kMoeGemm1ConfigCount = sizeof(kMoeGemm1Configs) / sizeof(kMoeGemm1Configs[0]);

constexpr MoeGemmConfig kMoeGemm2Configs[] = {
#define RQ_MOE_DIRECT(kind, name, ...) {#name, MoeGemmKind::kind, moe_gemm2_tiles::name},
#define RQ_MOE_STAGED(name, ...) {#name, MoeGemmKind::staged, moe_gemm2_tiles::name},
#include "core/moe_gemm2_configs.def"
};
constexpr int kMoeGemm2ConfigCount = sizeof(kMoeGemm2Configs) / sizeof(kMoeGemm2Configs[0]);

// Whether a gemm1 configuration can do a problem: its block, where x is quantised, and a tile whose
// columns hold whole blocks of the intermediate's rotation.
constexpr bool moe_gemm1_fits(const MoeGemmConfig& config, int block_m, bool quantise_inside,
                              int inter_rotation) {
  return config.tile.m == block_m && (config.kind == MoeGemmKind::inline_) == quantise_inside &&
         config.tile.n / 2 >= inter_rotation;
}

// Of those that fit the first with a workgroup for every compute unit, or else the one with the
// most; -1 if none fits. `blocks`: of sorted rows.
constexpr int choose_moe_gemm1_config(int64_t blocks, int block_m, int64_t inter,
                                      bool quantise_inside, int inter_rotation) {
  constexpr int64_t kComputeUnits = 256;  // MI355X, MI350X
  int best = -1;
  int64_t most = 0;
  for (int i = 0; i < kMoeGemm1ConfigCount && most < kComputeUnits; ++i) {
    const MoeGemmConfig& config = kMoeGemm1Configs[i];
    if (!moe_gemm1_fits(config, block_m, quantise_inside, inter_rotation)) continue;
    const int64_t workgroups = blocks * (round_up_to(2 * inter, config.tile.n) / config.tile.n);
    if (best < 0 || workgroups > most) best = i, most = workgroups;
  }
  return best;
}

constexpr int choose_moe_gemm2_config(int64_t blocks, int block_m, int64_t hidden) {
  constexpr int64_t kComputeUnits = 256;
  int best = -1;
  int64_t most = 0;
  for (int i = 0; i < kMoeGemm2ConfigCount && most < kComputeUnits; ++i) {
    const MoeGemmConfig& config = kMoeGemm2Configs[i];
    if (config.tile.m != block_m) continue;
    const int64_t workgroups = blocks * (round_up_to(hidden, config.tile.n) / config.tile.n);
    if (best < 0 || workgroups > most) best = i, most = workgroups;
  }
  return best;
}

}  // namespace rotquant
