// SPDX-License-Identifier: MIT
#include "hip/gemm_a4w4/instantiate.h"

#define RQ_GEMM_DIRECT(name, m_frags, n_frags, waves_n, waves_k, depth) \
  RQ_INSTANTIATE_GEMM(gemm_direct_kernel,                               \
                      rotquant::hip::DirectTile<m_frags, n_frags, waves_n, waves_k, depth>)
#include "core/gemm_configs.def"
