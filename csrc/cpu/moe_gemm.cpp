// SPDX-License-Identifier: MIT
// moe_gemm1, moe_gemm2 and moe_reduce: picks the instruction set once, at the first call.
#include "cpu/backend.h"
#include "cpu/isa/choose.h"

namespace rotquant::cpu {

#define RQ_DECLARE(isa)                                                                            \
  namespace isa {                                                                                  \
  void moe_gemm1(const MoeGemm1Params& p, const MoeTile* tiles, int64_t tile_count, int64_t begin, \
                 int64_t end);                                                                     \
  void moe_gemm2(const MoeGemm2Params& p, const MoeTile* tiles, int64_t tile_count, int64_t begin, \
                 int64_t end);                                                                     \
  void moe_reduce(const MoeReduceParams& p, int64_t begin, int64_t end);                           \
  }
RQ_DECLARE(baseline)
#if defined(__x86_64__)
RQ_DECLARE(avx2)
RQ_DECLARE(avx512)
#endif

namespace {

struct Kernels {
  decltype(&baseline::moe_gemm1) gemm1;
  decltype(&baseline::moe_gemm2) gemm2;
  decltype(&baseline::moe_reduce) reduce;
};

const Kernels& kernels() {
  static const Kernels chosen = []() -> Kernels {
#if defined(__x86_64__)
    switch (best_isa()) {
      case Isa::avx512: return {avx512::moe_gemm1, avx512::moe_gemm2, avx512::moe_reduce};
      case Isa::avx2: return {avx2::moe_gemm1, avx2::moe_gemm2, avx2::moe_reduce};
      default: break;
    }
#endif
    return {baseline::moe_gemm1, baseline::moe_gemm2, baseline::moe_reduce};
  }();
  return chosen;
}

}  // namespace

void moe_gemm1(const MoeGemm1Params& p, const std::vector<MoeTile>& tiles, int64_t begin,
               int64_t end) {
  kernels().gemm1(p, tiles.data(), std::ssize(tiles), begin, end);
}

void moe_gemm2(const MoeGemm2Params& p, const std::vector<MoeTile>& tiles, int64_t begin,
               int64_t end) {
  kernels().gemm2(p, tiles.data(), std::ssize(tiles), begin, end);
}

void moe_reduce(const MoeReduceParams& p, int64_t begin, int64_t end) {
  kernels().reduce(p, begin, end);
}

}  // namespace rotquant::cpu
