// SPDX-License-Identifier: MIT
// Host side of a launch: error checks, the architecture check, one launch function.
#pragma once

#ifdef RQ_DEVICE_ONLY
// Kernels compiled without a HIP runtime (CMake target gfx950): nothing to launch with.
#define RQ_HOST_LAUNCHER(...)
#else
#define RQ_HOST_LAUNCHER(...) __VA_ARGS__

#include <stdexcept>
#include <string>

#include "hip/arch/runtime.h"

namespace rotquant::hip {

inline void check(hipError_t status, const char* what) {
  if (status != hipSuccess)
    throw std::runtime_error(std::string("rotquant_hip: ") + what + ": " +
                             hipGetErrorString(status));
}

// Throws unless this build has code for the current device. Cached per device.
void require_current_device();

inline int current_wave_size() {
#if defined(__HIP_PLATFORM_NVIDIA__)
  return 32;
#else
  return 64;
#endif
}

template <class Args>
void launch(void (*kernel)(Args), dim3 grid, int threads, const Args& args, hipStream_t stream) {
  void* kernel_args[] = {const_cast<Args*>(&args)};
  check(hipLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(threads), kernel_args, 0,
                        stream),
        "kernel launch failed");
}

}  // namespace rotquant::hip
#endif  // RQ_DEVICE_ONLY
