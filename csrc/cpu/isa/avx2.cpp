// SPDX-License-Identifier: MIT
// The same kernels for avx2, called only where the CPU has it.
#if defined(__x86_64__)
// NOTE: headers of the library come before the pragma: their inline functions must stay baseline.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "core/hadamard.h"
#include "core/layout.h"
#include "core/params.h"
#include "cpu/gemm_items.h"
#include "cpu/moe_items.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#define RQ_ISA avx2
#define RQ_ISA_AVX2
#include "cpu/gemm_a4w4.h"
#include "cpu/kernels.h"
#include "cpu/moe_gemm.h"
#include "cpu/moe_reduce.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
