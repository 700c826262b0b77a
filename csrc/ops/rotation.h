// SPDX-License-Identifier: MIT
// The rotation arguments that ops have in common.
#pragma once

#include "ops/common.h"

namespace rotquant::ops {

using OptionalTensor = std::optional<at::Tensor>;

// Rotation arguments after the checks; owns the copies in the back end's dtype.
struct CheckedRotation {
  at::Tensor matrix, prescale;
  Rotation params{};
};

enum class RotationSizes { any, any_or_none };  // none: rotation_size 0, no rotation

// The rotation of the channels of x. rotation_size None is the matrix's, or else 64.
CheckedRotation check_rotation(const at::Tensor& x, const OptionalTensor& rotation,
                               std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
                               RotationSizes sizes = RotationSizes::any);

}  // namespace rotquant::ops
