// SPDX-License-Identifier: MIT
// Included by inst/*.hip, one file per kind of tile, so that the instances compile in parallel.
#pragma once

#include "hip/moe_gemm1/kernel.h"
#include "hip/moe_gemm1/kernel_impl.h"

#define RQ_INSTANTIATE_MOE_GEMM1(kind, kernel, ...)                                               \
  template RQ_GLOBAL void rotquant::hip::kernel<__VA_ARGS__>(const rotquant::hip::MoeGemm1Args);  \
  RQ_HOST_LAUNCHER(                                                                               \
      template <> void rotquant::hip::launch_moe_gemm1<rotquant::MoeGemmKind::kind, __VA_ARGS__>( \
          const rotquant::hip::MoeGemm1Args& args, unsigned workgroups, hipStream_t stream) {     \
        using Tile = __VA_ARGS__;                                                                 \
        launch(kernel<Tile>, dim3(workgroups), Tile::kThreads, args, stream);                     \
      })
