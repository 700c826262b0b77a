// SPDX-License-Identifier: MIT
// moe_reduce on a CPU, for the instruction set that RQ_ISA names. A product and a sum are rounded
// each, in float32.
#pragma once

#include "cpu/kernels.h"

namespace rotquant::cpu::RQ_ISA {

void moe_reduce(const MoeReduceParams& p, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    for (int64_t column = 0; column < p.hidden; column += kGroup) {
      const int64_t index = token * p.hidden + column;
      f32v sum[2] = {};
      for (int half = 0; half < 2 && p.shared; ++half)
        sum[half] = load_as_float(p.shared, p.out_dtype, index + half * kLanes);
      for (int64_t route = token * p.topk; route < (token + 1) * p.topk; ++route) {
        if (p.reverse_sorted[route] < 0) continue;
        const int64_t at = route * p.hidden + column;
        f32v row[2];
        if (p.rows) {
          for (int half = 0; half < 2; ++half)
            row[half] = load_as_float(p.rows, p.rows_dtype, at + half * kLanes);
        } else {
          load_codes(p.codes + at / 2, row);
          for (f32v& part : row) part *= e8m0_value(p.scales[at / kGroup]);
        }
        const float weight = p.topk_weights ? p.topk_weights[route] : 1.0f;
        for (int half = 0; half < 2; ++half) sum[half] += weight * row[half];
      }
      for (int half = 0; half < 2; ++half)
        store_as(p.out, p.out_dtype, index + half * kLanes, sum[half]);
    }
}

}  // namespace rotquant::cpu::RQ_ISA
