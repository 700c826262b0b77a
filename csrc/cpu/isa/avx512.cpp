// SPDX-License-Identifier: MIT
// The same kernels for avx512, called only where the CPU has it.
#if defined(__x86_64__)
// NOTE: headers of the library come before the pragma: their inline functions must stay baseline.
#include <stdint.h>
#include <string.h>

#include "core/hadamard.h"
#include "core/layout.h"
#include "core/params.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif
#define RQ_ISA avx512
#include "cpu/kernels.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
