// SPDX-License-Identifier: MIT
#define RQ_ISA baseline
#include "cpu/kernels.h"
