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
RQ_FOR_EACH_ISA(RQ_DECLARE)

int64_t rotate_items(const RotateParams& p) { return p.x.rows * (p.x.k / p.rotation.size); }

int64_t rotate_quant_items(const RotateQuantParams& p) {
  return p.x.rows * (p.x.k / (p.rotation.size > kGroup ? p.rotation.size : kGroup));
}

int64_t dequant_items(const DequantParams& p) { return p.rows * (p.k / kGroup); }

void rotate(const RotateParams& p, int64_t begin, int64_t end) {
  static const auto chosen = RQ_OF_BEST_ISA(rotate);
  chosen(p, begin, end);
}
void rotate_quant(const RotateQuantParams& p, int64_t begin, int64_t end) {
  static const auto chosen = RQ_OF_BEST_ISA(rotate_quant);
  chosen(p, begin, end);
}
void dequant(const DequantParams& p, int64_t begin, int64_t end) {
  static const auto chosen = RQ_OF_BEST_ISA(dequant);
  chosen(p, begin, end);
}

}  // namespace rotquant::cpu
