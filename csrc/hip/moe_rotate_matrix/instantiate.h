// SPDX-License-Identifier: MIT
// Included by inst/*.hip, one file per input dtype, so that the instances compile in parallel.
#pragma once

#include "hip/moe_rotate_matrix/kernel.h"
#include "hip/moe_rotate_matrix/kernel_impl.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

template <class Config, ElementFormat kElement, bool kMse>
void launch_moe_rotate_matrix(const MoeRotateMatrixArgs& args, hipStream_t stream) {
  const dim3 grid(args.plan.grid_strips, args.plan.grid_rows + args.padding_rows);
  launch(moe_rotate_matrix_kernel<Config, kElement, kMse>, grid, Config::kThreads, args, stream);
}

}  // namespace rotquant::hip
#endif

#define RQ_INSTANTIATE(...)                                                            \
  template RQ_GLOBAL void rotquant::hip::moe_rotate_matrix_kernel<__VA_ARGS__>(        \
      const rotquant::hip::MoeRotateMatrixArgs);                                       \
  RQ_HOST_LAUNCHER(template void rotquant::hip::launch_moe_rotate_matrix<__VA_ARGS__>( \
                       const rotquant::hip::MoeRotateMatrixArgs&, hipStream_t);)

#define RQ_CONFIG(dtype, size, tiles, waves) \
  rotquant::hip::RotateMatrixConfig<rotquant::DType::dtype, size, tiles, waves>

#define RQ_INSTANTIATE_QUANT(mse, ...) \
  RQ_INSTANTIATE(RQ_CONFIG(__VA_ARGS__), rotquant::ElementFormat::e2m1, mse)
#define RQ_INSTANTIATE_ROTATE(...)
