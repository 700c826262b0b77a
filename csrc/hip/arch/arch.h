// SPDX-License-Identifier: MIT
// The one place that knows which GPU a kernel is compiled for.
#pragma once

#include "core/mxfp4.h"

#if defined(__HIP__)
#include "hip/arch/gfx950.h"
#define RQ_GLOBAL __attribute__((global))
#define RQ_SHARED __attribute__((shared))
// Registers for at least `min_waves` waves on each SIMD: these kernels live on memory parallelism.
#define RQ_LAUNCH_BOUNDS(max_threads, min_waves) \
  __attribute__((amdgpu_flat_work_group_size(64, max_threads), amdgpu_waves_per_eu(min_waves)))
#else
#include "hip/arch/nvidia.h"  // of the test bed, tests/nvidia
#endif
