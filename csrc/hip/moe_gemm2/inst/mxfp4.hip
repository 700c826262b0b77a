// SPDX-License-Identifier: MIT
#define RQ_MOE_FINISH rotquant::MoeFinish::mxfp4
#include "hip/moe_gemm2/instantiate.h"
