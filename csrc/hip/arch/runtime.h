// SPDX-License-Identifier: MIT
// The runtime API under its HIP names, on the NVIDIA test bed too (tests/nvidia).
#pragma once

#if defined(__HIP_PLATFORM_NVIDIA__)
#include "hip/arch/nvidia_runtime.h"
#else
#include <hip/hip_runtime.h>
#endif
