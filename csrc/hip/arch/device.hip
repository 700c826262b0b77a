// SPDX-License-Identifier: MIT
#include <array>
#include <atomic>

#include "core/arch_list.h"
#include "hip/arch/launch.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

void require_current_device() {
#if !defined(__HIP_PLATFORM_NVIDIA__)  // the test bed is built for the GPU at hand
  static std::array<std::atomic<bool>, 64> known{};
  int device = 0;
  check(hipGetDevice(&device), "no current device");
  const bool cacheable = device >= 0 && device < static_cast<int>(known.size());
  if (cacheable && known[device].load(std::memory_order_relaxed)) return;
  hipDeviceProp_t properties;
  check(hipGetDeviceProperties(&properties, device), "cannot read the device's properties");
  require_arch(ROTQUANT_HIP_ARCHS, properties.gcnArchName);
  if (cacheable) known[device].store(true, std::memory_order_relaxed);
#endif
}

}  // namespace rotquant::hip
#endif
