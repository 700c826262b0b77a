// SPDX-License-Identifier: MIT
// The error for a rotation that configs.def has no row for. Host only.
#pragma once

#include <stdexcept>
#include <string>

#include "core/params.h"

namespace rotquant::hip {

#define RQ_QUANT(dtype) #dtype " quantise only, "
#define RQ_ROTATION(dtype, size) #dtype " RS " #size ", "
inline constexpr const char* kKnownRotationKernels =
#include "hip/rotate_quant/configs.def"
    ;
#undef RQ_QUANT
#undef RQ_ROTATION

[[noreturn]] inline void no_rotation_kernel(const char* op, DType dtype, int size) {
  constexpr const char* kNames[] = {"bf16", "fp16", "fp32"};
  throw std::runtime_error(std::string(op) + ": no GPU kernel for " +
                           kNames[static_cast<int>(dtype)] + " with rotation_size " +
                           std::to_string(size) + "; there are: " + kKnownRotationKernels);
}

}  // namespace rotquant::hip
