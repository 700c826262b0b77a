// SPDX-License-Identifier: MIT
#include "hip/backend.h"
#include "hip/moe_gemm2/kernel.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {
namespace {

// Launchers of each configuration, in the table's order, by MoeFinish.
#define RQ_LAUNCHERS(...)                            \
  {launch_moe_gemm2<__VA_ARGS__, MoeFinish::atomic>, \
   launch_moe_gemm2<__VA_ARGS__, MoeFinish::rows>,   \
   launch_moe_gemm2<__VA_ARGS__, MoeFinish::mxfp4>},
constexpr void (*kLaunchers[][3])(const MoeGemm2Args&, uint32_t, hipStream_t) = {
#define RQ_MOE_DIRECT(kind, name, m_frags, n_frags, waves_n, waves_k, depth) \
  RQ_LAUNCHERS(DirectTile<m_frags, n_frags, waves_n, waves_k, depth>)
#define RQ_MOE_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  RQ_LAUNCHERS(StagedTile<m_frags, n_frags, waves_m, waves_n>)
#include "core/moe_gemm2_configs.def"
};

[[noreturn]] void fail(const std::string& expected, int64_t got) {
  throw std::runtime_error("moe_gemm2: expected " + expected + ", got " + std::to_string(got));
}

int chosen_config(const MoeGemm2Params& p, int64_t blocks) {
  if (p.config >= kMoeGemm2ConfigCount)
    fail("config below " + std::to_string(kMoeGemm2ConfigCount), p.config);
  const int config =
      p.config < 0 ? choose_moe_gemm2_config(blocks, p.sorting.block_m, p.hidden) : p.config;
  if (config < 0) fail("block_m of 16, 32, 64 or 128", p.sorting.block_m);
  if (kMoeGemm2Configs[config].tile.m != p.sorting.block_m)
    fail(std::string("a sorting with block_m ") + std::to_string(kMoeGemm2Configs[config].tile.m) +
             " for " + kMoeGemm2Configs[config].name,
         p.sorting.block_m);
  return config;
}

}  // namespace

void moe_gemm2(const MoeGemm2Params& params, hipStream_t stream) {
  require_current_device();
  const MoeSorting& sorting = params.sorting;
  if (sorting.max_rows == 0 || params.hidden == 0) return;
  if (params.inter > kMaxGemmK)
    fail("an intermediate size of at most " + std::to_string(kMaxGemmK) + " on a GPU",
         params.inter);
  // NOTE: a pair of 16-bit values is added by one aligned instruction.
  if (params.finish == MoeFinish::atomic && reinterpret_cast<uintptr_t>(params.out) % 4)
    fail("out to be 4-byte aligned", static_cast<int64_t>(reinterpret_cast<uintptr_t>(params.out)));
  const int64_t blocks = sorting.max_rows / sorting.block_m;
  const int config = chosen_config(params, blocks);
  const int tile = kMoeGemm2Configs[config].tile.n;
  const int64_t tiles_n = round_up_to(params.hidden, tile) / tile;
  // NOTE: HIP counts a grid's threads in 32 bits, and the kernels their tiles.
  constexpr int64_t kMaxThreadsOfAnyTile = 512,
                    kMaxWorkgroups = (int64_t{1} << 32) / kMaxThreadsOfAnyTile - 1;
  if (blocks * tiles_n > kMaxWorkgroups)
    fail("at most " + std::to_string(kMaxWorkgroups) + " tiles in a launch", blocks * tiles_n);
  const MoeGemm2Args args{params, static_cast<int>(tiles_n)};
  kLaunchers[config][static_cast<int>(params.finish)](args, static_cast<uint32_t>(blocks * tiles_n),
                                                      stream);
}

}  // namespace rotquant::hip
#endif
