// SPDX-License-Identifier: MIT
// Only in the build against emulator/: torch's CPU allocator becomes the emulator's, so that a
// kernel that leaves a tensor's storage by one byte is caught.
#ifdef ROTQUANT_HIP_EMULATE
#include <c10/core/CPUAllocator.h>
#include <gfx950_emulator.h>

namespace rotquant::ops {
namespace {

struct GuardedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? gfx950_emulator_allocate(bytes, "CPU tensor") : nullptr;
    TORCH_CHECK(data || !bytes, "rotquant_hip: cannot allocate ", bytes, " bytes");
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static void release(void* data) {
    if (data) gfx950_emulator_free(data);
  }
};

const bool installed = [] {
  static GuardedAllocator* const allocator = new GuardedAllocator;  // outlives every tensor
  c10::SetCPUAllocator(allocator);
  return true;
}();

}  // namespace
}  // namespace rotquant::ops
#endif
