// SPDX-License-Identifier: MIT
// Picks the instruction set once, at the first call.
#include "cpu/backend.h"
#include "cpu/isa/choose.h"

namespace rotquant::cpu {

#define RQ_DECLARE(isa)                                                           \
  namespace isa {                                                                 \
  void rotate(const RotateParams& params, int64_t begin, int64_t end);            \
  void rotate_quant(const RotateQuantParams& params, int64_t begin, int64_t end); \
  void dequant(const DequantParams& params, int64_t begin, int64_t end);          \
  }
RQ_DECLARE(baseline)
#if defined(__x86_64__)
RQ_DECLARE(avx2)
RQ_DECLARE(avx512)
#endif

namespace {

struct Kernels {
  decltype(&baseline::rotate) rotate;
  decltype(&baseline::rotate_quant) rotate_quant;
  decltype(&baseline::dequant) dequant;
};

const Kernels& kernels() {
  static const Kernels chosen = []() -> Kernels {
#if defined(__x86_64__)
    switch (best_isa()) {
      case Isa::avx512: return {avx512::rotate, avx512::rotate_quant, avx512::dequant};
      case Isa::avx2: return {avx2::rotate, avx2::rotate_quant, avx2::dequant};
      default: break;
    }
#endif
    return {baseline::rotate, baseline::rotate_quant, baseline::dequant};
  }();
  return chosen;
}

}  // namespace

int64_t rotate_items(const RotateParams& p) { return p.x.rows * (p.x.k / p.rotation.size); }

int64_t rotate_quant_items(const RotateQuantParams& p) {
  return p.x.rows * (p.x.k / (p.rotation.size > kGroup ? p.rotation.size : kGroup));
}

int64_t dequant_items(const DequantParams& p) { return p.rows * (p.k / kGroup); }

void rotate(const RotateParams& p, int64_t begin, int64_t end) { kernels().rotate(p, begin, end); }
void rotate_quant(const RotateQuantParams& p, int64_t begin, int64_t end) {
  kernels().rotate_quant(p, begin, end);
}
void dequant(const DequantParams& p, int64_t begin, int64_t end) {
  kernels().dequant(p, begin, end);
}

}  // namespace rotquant::cpu
