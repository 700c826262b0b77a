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

}  // namespace rotquant::cpu
