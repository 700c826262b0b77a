// SPDX-License-Identifier: MIT
#define RQ_MOE_FINISH rotquant::MoeFinish::rows
#include "hip/moe_gemm2/instantiate.h"
