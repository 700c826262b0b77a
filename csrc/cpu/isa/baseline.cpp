// SPDX-License-Identifier: MIT
#define RQ_ISA baseline
#include "cpu/gemm_a4w4.h"
#include "cpu/kernels.h"
#include "cpu/moe_gemm.h"
#include "cpu/moe_reduce.h"
