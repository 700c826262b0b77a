// SPDX-License-Identifier: MIT
// Included by inst/*.hip, one file for each way to finish, so that the instances compile in
// parallel: instantiates every tile of the table with RQ_MOE_FINISH.
#pragma once

#include "hip/moe_gemm2/kernel.h"
#include "hip/moe_gemm2/kernel_impl.h"

#define RQ_INSTANTIATE(kernel, finish, ...)                                                   \
  template RQ_GLOBAL void rotquant::hip::kernel<rotquant::hip::__VA_ARGS__, finish>(          \
      const rotquant::hip::MoeGemm2Args);                                                     \
  RQ_HOST_LAUNCHER(                                                                           \
      template <> void rotquant::hip::launch_moe_gemm2<rotquant::hip::__VA_ARGS__, finish>(   \
          const rotquant::hip::MoeGemm2Args& args, uint32_t workgroups, hipStream_t stream) { \
        using Tile = __VA_ARGS__;                                                             \
        launch(kernel<Tile, finish>, dim3(workgroups), Tile::kThreads, args, stream);         \
      })

#define RQ_MOE_DIRECT(kind, name, m_frags, n_frags, waves_n, waves_k, depth) \
  RQ_INSTANTIATE(moe_gemm2_direct_kernel, RQ_MOE_FINISH,                     \
                 DirectTile<m_frags, n_frags, waves_n, waves_k, depth>)
#define RQ_MOE_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  RQ_INSTANTIATE(moe_gemm2_staged_kernel, RQ_MOE_FINISH,        \
                 StagedTile<m_frags, n_frags, waves_m, waves_n>)
#include "core/moe_gemm2_configs.def"
