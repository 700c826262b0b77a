// SPDX-License-Identifier: MIT
#include "hip/moe_rotate_matrix/instantiate.h"

#define RQ_IF_bf16(instance)
#define RQ_IF_fp16(instance) instance
#define RQ_IF_fp32(instance)
#include "hip/rotate_matrix/instances.def"
