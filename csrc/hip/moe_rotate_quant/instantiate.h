// SPDX-License-Identifier: MIT
// Included by inst/*.hip, one file per input dtype, so that the instances compile in parallel.
#pragma once

#include "hip/moe_rotate_quant/kernel.h"
#include "hip/moe_rotate_quant/kernel_impl.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

template <class Config>
void launch_moe_rotate_quant(const MoeRotateQuantArgs& args, hipStream_t stream) {
  const dim3 grid(args.plan.grid_groups, args.plan.grid_rows + args.padding_rows);
  launch(moe_rotate_quant_kernel<Config>, grid, args.plan.threads, args, stream);
}

}  // namespace rotquant::hip
#endif

#define RQ_INSTANTIATE(...)                                                           \
  template RQ_GLOBAL void rotquant::hip::moe_rotate_quant_kernel<__VA_ARGS__>(        \
      const rotquant::hip::MoeRotateQuantArgs);                                       \
  RQ_HOST_LAUNCHER(template void rotquant::hip::launch_moe_rotate_quant<__VA_ARGS__>( \
                       const rotquant::hip::MoeRotateQuantArgs&, hipStream_t);)

#define RQ_INSTANTIATE_QUANT(dtype, size)                                                \
  RQ_INSTANTIATE(rotquant::hip::RotateQuantConfig<rotquant::DType::dtype, size,          \
                                                  rotquant::ElementFormat::e2m1, false>) \
  RQ_INSTANTIATE(rotquant::hip::RotateQuantConfig<rotquant::DType::dtype, size,          \
                                                  rotquant::ElementFormat::e2m1, true>)
#define RQ_INSTANTIATE_ROTATE(dtype, size)
