// SPDX-License-Identifier: MIT
#include "hip/gemm_a4w4/instantiate.h"

#define RQ_GEMM_STAGED(name, m_frags, n_frags, waves_m, waves_n) \
  RQ_INSTANTIATE_GEMM(gemm_staged_kernel,                        \
                      rotquant::hip::StagedTile<m_frags, n_frags, waves_m, waves_n>)
#include "core/gemm_configs.def"
