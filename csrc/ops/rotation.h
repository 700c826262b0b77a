// SPDX-License-Identifier: MIT
// The rotation arguments that ops have in common.
#pragma once

#include "core/hadamard.h"
#include "ops/common.h"

namespace rotquant::ops {

using OptionalTensor = std::optional<at::Tensor>;

// What an op calls the arguments of a rotation, and what it can do.
struct RotationArguments {
  const char* matrix = "rotation";
  const char* size = "rotation_size";
  const char* prescale = "prescale";
  // Whose last dimension is rotated, for messages; null: it is no argument's.
  const char* x = "x";
  int largest = kMaxRotation;
  bool or_none = false;  // size 0: no rotation
  // R^T on a GPU, where the values are the matrix product's second operand.
  bool transposed = false;
};

// The size of a rotation of k channels, 0 for none. The default, None, is the matrix's, or else 64.
// x tells the device.
int64_t check_rotation_size(const RotationArguments& arguments, const at::Tensor& x, int64_t k,
                            const OptionalTensor& matrix, std::optional<int64_t> size,
                            const OptionalTensor& prescale);

// A rotation after the checks; owns the copies in the back end's dtype.
struct CheckedRotation {
  at::Tensor matrix, prescale;
  Rotation params{};
};

CheckedRotation check_rotation(const RotationArguments& arguments, const at::Tensor& x, int64_t k,
                               const OptionalTensor& matrix, std::optional<int64_t> size,
                               const OptionalTensor& prescale);

}  // namespace rotquant::ops
