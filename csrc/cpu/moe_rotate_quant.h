// SPDX-License-Identifier: MIT
// moe_rotate_quant on a CPU is rotate_quant (cpu/backend.h) and then this.
#pragma once

#include "core/params.h"

namespace rotquant::cpu {

// Item: a band of 32 sorted rows; every cell of it is written.
int64_t moe_sort_scales_items(const MoeSortScalesParams& params);
void moe_sort_scales(const MoeSortScalesParams& params, int64_t begin, int64_t end);

}  // namespace rotquant::cpu
