// SPDX-License-Identifier: MIT
// The best of the instruction sets that the kernels are compiled for and this CPU has.
#pragma once

namespace rotquant::cpu {

enum class Isa { baseline, avx2, avx512 };

inline Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Isa::avx2;
#endif
  return Isa::baseline;
}

template <class Function>
Function* of_best_isa(Function* avx512, Function* avx2, Function* baseline) {
  switch (best_isa()) {
    case Isa::avx512: return avx512;
    case Isa::avx2: return avx2;
    default: return baseline;
  }
}

// RQ_FOR_EACH_ISA(declare): declare(isa) for each that there is. RQ_OF_BEST_ISA(f): the f of the
// best one.
#if defined(__x86_64__)
#define RQ_FOR_EACH_ISA(declare) declare(baseline) declare(avx2) declare(avx512)
#define RQ_OF_BEST_ISA(f) of_best_isa(&avx512::f, &avx2::f, &baseline::f)
#else
#define RQ_FOR_EACH_ISA(declare) declare(baseline)
#define RQ_OF_BEST_ISA(f) of_best_isa(&baseline::f, &baseline::f, &baseline::f)
#endif

}  // namespace rotquant::cpu
