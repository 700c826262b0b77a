// SPDX-License-Identifier: MIT
// Included by inst/*.hip, one file per kind of tile, so that the instances compile in parallel.
#pragma once

#include "hip/gemm_a4w4/kernel.h"
#include "hip/gemm_a4w4/kernel_impl.h"

#define RQ_INSTANTIATE_GEMM(kernel, ...)                                                       \
  template RQ_GLOBAL void rotquant::hip::kernel<__VA_ARGS__>(const rotquant::hip::GemmArgs);   \
  RQ_HOST_LAUNCHER(template <> void rotquant::hip::launch_gemm<__VA_ARGS__>(                   \
      const rotquant::hip::GemmArgs& args, hipStream_t stream) {                               \
    using Tile = __VA_ARGS__;                                                                  \
    launch(kernel<Tile>, dim3(args.tiles_m * args.tiles_n, args.splits), Tile::kThreads, args, \
           stream);                                                                            \
  })
