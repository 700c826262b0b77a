// SPDX-License-Identifier: MIT
#include "hip/backend.h"
#include "hip/gemm_a4w4/kernel.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {
namespace {

// Launcher of each configuration, in the table's order.
namespace tiles {
#define RQ_GEMM_DIRECT(name, m_frags, n_frags, waves_n, waves_k, depth) \
  using name = DirectTile<m_frags, n_frags, waves_n, waves_k, depth>;
#define RQ_GEMM_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  using name = StagedTile<m_frags, n_frags, waves_m, waves_n>;
#include "core/gemm_configs.def"
}  // namespace tiles

constexpr void (*kLaunchers[])(const GemmArgs&, hipStream_t) = {
#define RQ_GEMM_CONFIG(kind, tile, splits) launch_gemm<tiles::tile>,
#include "core/gemm_configs.def"
};

}  // namespace

void gemm_a4w4(const GemmParams& params, hipStream_t stream) {
  require_current_device();
  if (params.m == 0 || params.n == 0) return;
  if (params.k > kMaxGemmK)
    throw std::runtime_error("gemm_a4w4: expected k of at most " + std::to_string(kMaxGemmK) +
                             " on a GPU, got " + std::to_string(params.k));
  if (params.workspace_bytes < gemm_workspace_bytes(params))
    throw std::runtime_error("gemm_a4w4: expected a workspace of " +
                             std::to_string(gemm_workspace_bytes(params)) + " bytes, got " +
                             std::to_string(params.workspace_bytes));
  const GemmPlan plan = plan_gemm(params);
  const GemmArgs args{params, static_cast<int>(plan.tiles_m), static_cast<int>(plan.tiles_n),
                      static_cast<int>(plan.splits)};
  kLaunchers[plan.config](args, stream);
  if (plan.splits > 1) launch_gemm_sum(args, stream);
}

}  // namespace rotquant::hip
#endif
