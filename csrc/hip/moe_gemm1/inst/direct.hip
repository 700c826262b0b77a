// SPDX-License-Identifier: MIT
#include "hip/moe_gemm1/instantiate.h"

#define RQ_IF_inline_(...)
#define RQ_IF_direct(...) \
  RQ_INSTANTIATE_MOE_GEMM1(direct, moe_gemm1_direct_kernel, rotquant::hip::DirectTile<__VA_ARGS__>)
#define RQ_MOE_DIRECT(kind, name, ...) RQ_IF_##kind(__VA_ARGS__)
#include "core/moe_gemm1_configs.def"
