// SPDX-License-Identifier: MIT
// Included by inst/*.hip, one file per input dtype, so that the instances compile in parallel.
#pragma once

#include "hip/rotate_quant/kernel.h"
#include "hip/rotate_quant/kernel_impl.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

template <class Config>
void launch_rotate_quant(const RotateQuantArgs& args, hipStream_t stream) {
  launch(rotate_quant_kernel<Config>, grid_of(args.plan), args.plan.threads, args, stream);
}

template <class Config>
void launch_rotate(const RotateArgs& args, hipStream_t stream) {
  launch(rotate_kernel<Config>, grid_of(args.plan), args.plan.threads, args, stream);
}

}  // namespace rotquant::hip
#endif

#define RQ_INSTANTIATE(kernel, launcher, Args, ...)                                               \
  template RQ_GLOBAL void rotquant::hip::kernel<__VA_ARGS__>(const rotquant::hip::Args);          \
  RQ_HOST_LAUNCHER(template void rotquant::hip::launcher<__VA_ARGS__>(const rotquant::hip::Args&, \
                                                                      hipStream_t);)

#define RQ_INSTANTIATE_QUANT(dtype, size)                                                \
  RQ_INSTANTIATE(rotate_quant_kernel, launch_rotate_quant, RotateQuantArgs,              \
                 rotquant::hip::RotateQuantConfig<rotquant::DType::dtype, size,          \
                                                  rotquant::ElementFormat::e2m1, false>) \
  RQ_INSTANTIATE(rotate_quant_kernel, launch_rotate_quant, RotateQuantArgs,              \
                 rotquant::hip::RotateQuantConfig<rotquant::DType::dtype, size,          \
                                                  rotquant::ElementFormat::e2m1, true>)

#define RQ_INSTANTIATE_ROTATE(dtype, size)                 \
  RQ_INSTANTIATE(rotate_kernel, launch_rotate, RotateArgs, \
                 rotquant::hip::RotateConfig<rotquant::DType::dtype, size>)
