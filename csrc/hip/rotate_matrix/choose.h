// SPDX-License-Identifier: MIT
// Which row of configs.def a launch takes. Host only.
#pragma once

#include <stdexcept>
#include <string>

#include "hip/rotate_matrix/config.h"

namespace rotquant::hip {

#define RQ_MATRIX(dtype, size, tiles, waves, from_tokens) #dtype " RS " #size ", "
inline constexpr const char* kKnownMatrixKernels =
#include "hip/rotate_matrix/configs.def"
    ;
#undef RQ_MATRIX

// f.template operator()<Config>() for the last row of the table that fits.
template <class F>
void with_matrix_config(const char* op, const Activation& x, int size, F&& f) {
  void (*run)(F&) = nullptr;
#define RQ_MATRIX(dtype_, size_, tiles, waves, from_tokens)                            \
  if (x.dtype == DType::dtype_ && size == size_ && x.rows >= from_tokens)              \
    run = [](F& g) {                                                                   \
      g.template operator()<RotateMatrixConfig<DType::dtype_, size_, tiles, waves>>(); \
    };
#include "hip/rotate_matrix/configs.def"
#undef RQ_MATRIX
  if (run) return run(f);
  constexpr const char* kNames[] = {"bf16", "fp16", "fp32"};
  throw std::runtime_error(std::string(op) + ": no GPU kernel for a matrix and " +
                           kNames[static_cast<int>(x.dtype)] + " with rotation_size " +
                           std::to_string(size) + "; there are: " + kKnownMatrixKernels);
}

}  // namespace rotquant::hip
