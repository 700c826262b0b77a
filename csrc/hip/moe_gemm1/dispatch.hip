// SPDX-License-Identifier: MIT
#include "hip/backend.h"
#include "hip/moe_gemm1/kernel.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {
namespace {

// Launcher of each configuration, in the table's order.
constexpr void (*kLaunchers[])(const MoeGemm1Args&, unsigned, hipStream_t) = {
#define RQ_MOE_DIRECT(kind, name, ...) launch_moe_gemm1<MoeGemmKind::kind, DirectTile<__VA_ARGS__>>,
#define RQ_MOE_STAGED(name, ...) launch_moe_gemm1<MoeGemmKind::staged, StagedTile<__VA_ARGS__>>,
#include "core/moe_gemm1_configs.def"
};

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error("moe_gemm1: " + why); }

std::string fitting(int block_m, bool inside, int inter_rotation) {
  std::string names;
  for (const MoeGemmConfig& config : kMoeGemm1Configs)
    if (moe_gemm1_fits(config, block_m, inside, inter_rotation))
      names += std::string(names.empty() ? "" : ", ") + config.name;
  return names.empty() ? "none" : names;
}

// The configuration of `params`, or the one that is chosen for -1.
int config_of(const MoeGemm1Params& p) {
  const bool inside = p.a == nullptr;
  const int block_m = p.sorting.block_m, rotation = p.inter_rotation.size;
  const int config = p.config >= 0 ? p.config
                                   : choose_moe_gemm1_config(p.sorting.max_rows / block_m, block_m,
                                                             p.inter, inside, rotation);
  if (config < 0 || config >= kMoeGemm1ConfigCount ||
      !moe_gemm1_fits(kMoeGemm1Configs[config], block_m, inside, rotation))
    refuse("no GPU kernel " + (config < 0 ? "" : "with config " + std::to_string(config) + " ") +
           "for block_m " + std::to_string(block_m) + ", " +
           (inside ? "x to quantise inside" : "quantised tokens") + " and inter_rotation_size " +
           std::to_string(rotation) + "; there are: " + fitting(block_m, inside, rotation));
  return config;
}

void check_limits(const MoeGemm1Params& p) {
  constexpr int64_t kReach = int64_t{1} << 31;  // of 32-bit offsets into a buffer
  if (p.k <= 0 || p.k > kMaxGemmK)
    refuse("expected a hidden size of 32 .. " + std::to_string(kMaxGemmK) + " on a GPU, got " +
           std::to_string(p.k));
  if (2 * p.inter * (p.k / 2) >= kReach)
    refuse("expected less than 2 GiB of w1 for each expert, got " +
           std::to_string(2 * p.inter * (p.k / 2)) + " bytes");
  if (p.a && p.sorting.tokens * (p.k / 2) >= kReach)
    refuse("expected less than 2 GiB of codes, got " +
           std::to_string(p.sorting.tokens * (p.k / 2)) + " bytes");
  if (p.scale_mode == ScaleMode::mse) refuse("scale_mode 'mse' has no kernel");
  if (p.a) return;
  if (p.rotation.matrix_bf16)
    refuse("a rotation matrix inside the GEMM has no kernel: quantise with moe_rotate_quant first");
  if (p.x.dtype == DType::fp32)
    refuse("expected x in bf16 or fp16, got fp32: quantise with moe_rotate_quant first");
}

}  // namespace

void moe_gemm1(const MoeGemm1Params& params, hipStream_t stream) {
  require_current_device();
  if (params.sorting.max_rows == 0 || params.inter == 0) return;
  check_limits(params);
  const int config = config_of(params);
  const GemmTile tile = kMoeGemm1Configs[config].tile;
  const int64_t tiles_n = round_up_to(2 * params.inter, tile.n) / tile.n;
  const int64_t workgroups = params.sorting.max_rows / tile.m * tiles_n;
  // NOTE: HIP counts the threads of a grid in 32 bits.
  constexpr int64_t kMaxThreads = 512, kMaxWorkgroups = (int64_t{1} << 32) / kMaxThreads - 1;
  if (workgroups > kMaxWorkgroups)
    refuse("expected at most " + std::to_string(kMaxWorkgroups) + " tiles, got " +
           std::to_string(workgroups) + ": give fewer tokens at once");
  kLaunchers[config]({params, static_cast<int>(tiles_n)}, static_cast<unsigned>(workgroups),
                     stream);
}

}  // namespace rotquant::hip
#endif
