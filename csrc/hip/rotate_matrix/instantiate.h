// SPDX-License-Identifier: MIT
// Included by inst/*.hip, one file per input dtype, so that the instances compile in parallel.
#pragma once

#include "hip/rotate_matrix/kernel.h"
#include "hip/rotate_matrix/kernel_impl.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

inline dim3 grid_of(const RotateMatrixPlan& plan) { return dim3(plan.grid_strips, plan.grid_rows); }

template <class Config, ElementFormat kElement, bool kMse>
void launch_rotate_matrix_quant(const RotateMatrixQuantArgs& args, hipStream_t stream) {
  launch(rotate_matrix_quant_kernel<Config, kElement, kMse>, grid_of(args.plan), Config::kThreads,
         args, stream);
}

template <class Config>
void launch_rotate_matrix(const RotateMatrixArgs& args, hipStream_t stream) {
  launch(rotate_matrix_kernel<Config>, grid_of(args.plan), Config::kThreads, args, stream);
}

}  // namespace rotquant::hip
#endif

#define RQ_INSTANTIATE(kernel, launcher, Args, ...)                                               \
  template RQ_GLOBAL void rotquant::hip::kernel<__VA_ARGS__>(const rotquant::hip::Args);          \
  RQ_HOST_LAUNCHER(template void rotquant::hip::launcher<__VA_ARGS__>(const rotquant::hip::Args&, \
                                                                      hipStream_t);)

#define RQ_CONFIG(dtype, size, tiles, waves) \
  rotquant::hip::RotateMatrixConfig<rotquant::DType::dtype, size, tiles, waves>

#define RQ_INSTANTIATE_QUANT(mse, ...)                                                          \
  RQ_INSTANTIATE(rotate_matrix_quant_kernel, launch_rotate_matrix_quant, RotateMatrixQuantArgs, \
                 RQ_CONFIG(__VA_ARGS__), rotquant::ElementFormat::e2m1, mse)

#define RQ_INSTANTIATE_ROTATE(...)                                             \
  RQ_INSTANTIATE(rotate_matrix_kernel, launch_rotate_matrix, RotateMatrixArgs, \
                 RQ_CONFIG(__VA_ARGS__))
