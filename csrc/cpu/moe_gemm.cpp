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
RQ_FOR_EACH_ISA(RQ_DECLARE)

void moe_gemm1(const MoeGemm1Params& p, const std::vector<MoeTile>& tiles, int64_t begin,
               int64_t end) {
  static const auto chosen = RQ_OF_BEST_ISA(moe_gemm1);
  chosen(p, tiles.data(), std::ssize(tiles), begin, end);
}

void moe_gemm2(const MoeGemm2Params& p, const std::vector<MoeTile>& tiles, int64_t begin,
               int64_t end) {
  static const auto chosen = RQ_OF_BEST_ISA(moe_gemm2);
  chosen(p, tiles.data(), std::ssize(tiles), begin, end);
}

void moe_reduce(const MoeReduceParams& p, int64_t begin, int64_t end) {
  static const auto chosen = RQ_OF_BEST_ISA(moe_reduce);
  chosen(p, begin, end);
}

}  // namespace rotquant::cpu
