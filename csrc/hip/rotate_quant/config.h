// SPDX-License-Identifier: MIT
// What is fixed at compile time for one instance, and how a launch covers the activation.
#pragma once

#include "core/hadamard.h"
#include "core/layout.h"
#include "core/params.h"
#include "hip/device/tile_plan.h"

namespace rotquant::hip {

using device::TilePlan;

template <DType kInput, int kRotation, ElementFormat kFormat, bool kMseScale>
struct RotateQuantConfig {
  static constexpr DType kDType = kInput;
  static constexpr int kRotationSize = kRotation;  // 0: quantise only
  static constexpr ElementFormat kElement = kFormat;
  static constexpr bool kMse = kMseScale;  // costs registers, so not a run-time branch
  static_assert(kRotation == 0 || (kRotation >= kMinRotation && kRotation <= kMaxRotation));
};

template <DType kInput, int kRotation>
struct RotateConfig {
  static constexpr DType kDType = kInput;
  static constexpr int kRotationSize = kRotation;
  static_assert(kRotation >= kMinRotation && kRotation <= kMaxRotation);
};

// LDS of one workgroup that writes shuffled scales: two 32 x 8 tiles, so that the next tile can be
// filled while the last is still being stored (one barrier a tile, not two).
struct ScaleTiles {
  uint8_t bytes[2][kScaleTileBytes];
};
static_assert(sizeof(ScaleTiles) == 512);

struct RotateQuantArgs {
  RotateQuantParams params;
  TilePlan plan;
};

struct RotateArgs {
  RotateParams params;
  TilePlan plan;
};

}  // namespace rotquant::hip
