// SPDX-License-Identifier: MIT
// Picks the instruction set once, at the first call.
#include "cpu/backend.h"
#include "cpu/gemm_items.h"
#include "cpu/isa/choose.h"

namespace rotquant::cpu {

#define RQ_DECLARE(isa)                                                 \
  namespace isa {                                                       \
  void gemm_a4w4(const GemmParams& params, int64_t begin, int64_t end); \
  }
RQ_FOR_EACH_ISA(RQ_DECLARE)

int64_t gemm_a4w4_items(const GemmParams& p) { return gemm_items(p).count; }

void gemm_a4w4(const GemmParams& p, int64_t begin, int64_t end) {
  static const auto chosen = RQ_OF_BEST_ISA(gemm_a4w4);
  chosen(p, begin, end);
}

}  // namespace rotquant::cpu
