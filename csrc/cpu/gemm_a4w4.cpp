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
RQ_DECLARE(baseline)
#if defined(__x86_64__)
RQ_DECLARE(avx2)
RQ_DECLARE(avx512)
#endif

int64_t gemm_a4w4_items(const GemmParams& p) { return gemm_items(p).count; }

void gemm_a4w4(const GemmParams& p, int64_t begin, int64_t end) {
  static const auto chosen = [] {
#if defined(__x86_64__)
    switch (best_isa()) {
      case Isa::avx512: return avx512::gemm_a4w4;
      case Isa::avx2: return avx2::gemm_a4w4;
      default: break;
    }
#endif
    return baseline::gemm_a4w4;
  }();
  chosen(p, begin, end);
}

}  // namespace rotquant::cpu
