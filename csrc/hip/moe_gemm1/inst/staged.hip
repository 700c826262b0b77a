// SPDX-License-Identifier: MIT
#include "hip/moe_gemm1/instantiate.h"

#define RQ_MOE_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  RQ_INSTANTIATE_MOE_GEMM1(staged, moe_gemm1_staged_kernel,     \
                           rotquant::hip::StagedTile<m_frags, n_frags, waves_m, waves_n>)
#include "core/moe_gemm1_configs.def"
