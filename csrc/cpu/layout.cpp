// SPDX-License-Identifier: MIT
#include "core/layout_ops.h"
#include "cpu/backend.h"

namespace rotquant::cpu {

void shuffle_scales(const ShuffleScalesParams& params, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) shuffle_scale_dword_at(params, i);
}

void shuffle_weight(const ShuffleWeightParams& params, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) shuffle_weight_chunk_at(params, i);
}

}  // namespace rotquant::cpu
