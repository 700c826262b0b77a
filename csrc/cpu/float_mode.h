// SPDX-License-Identifier: MIT
// The arithmetic that the CPU back end is specified in, whatever mode a thread has been left in.
#pragma once

#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rotquant::cpu {

// While it lives, float arithmetic of this thread keeps subnormals and rounds to nearest even;
// then the thread's mode is as before. NOTE: torch.set_flush_denormal(True) sets the mode of the
// caller alone, but threads that it starts later inherit it: each has to be asked.
class FloatMode {
 public:
  FloatMode() : saved_(get()) { set(saved_ & ~kChanged); }
  ~FloatMode() { set(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kChanged = 0x8000 | 0x6000 | 0x0040;  // MXCSR: FTZ, rounding, DAZ
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kChanged = 1 << 24 | 3 << 22 | 1 << 19;  // FPCR: FZ, rounding, FZ16
  static uint64_t get() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }
#else
  static constexpr uint64_t kChanged = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif

  const uint64_t saved_;
};

}  // namespace rotquant::cpu
