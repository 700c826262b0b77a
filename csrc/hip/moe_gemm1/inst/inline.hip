// SPDX-License-Identifier: MIT
#include "hip/moe_gemm1/instantiate.h"

#define RQ_IF_inline_(...) \
  RQ_INSTANTIATE_MOE_GEMM1(inline_, moe_gemm1_inline_kernel, rotquant::hip::DirectTile<__VA_ARGS__>)
#define RQ_IF_direct(...)
#define RQ_MOE_DIRECT(kind, name, ...) RQ_IF_##kind(__VA_ARGS__)
#include "core/moe_gemm1_configs.def"
