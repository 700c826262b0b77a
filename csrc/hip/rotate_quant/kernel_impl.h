// SPDX-License-Identifier: MIT
// rotate_quant, quant (kRotationSize 0) and rotate with the Hadamard: one pass over x, everything
// in registers. load -> rotate -> quantise -> store.
#pragma once

#include "hip/device/quantize.h"
#include "hip/device/tiles.h"
#include "hip/rotate_quant/config.h"

namespace rotquant::hip {

using arch::f32x2;
using device::kPairs;
using device::WaveTile;

// y = x * prescale, then H. With `fold` the caller puts the exact 2^-shift into the scale exponent.
template <int kRotationSize>
RQ_DEVICE void rotate_group(const Rotation& rotation, const WaveTile& tile, uint32_t lane,
                            bool fold, f32x2 (&y)[kPairs]) {
  if constexpr (kRotationSize > 0) {
    if (rotation.prescale) {
      const float* s = rotation.prescale + tile.readable_group(lane) * kGroup;
      RQ_UNROLL
      for (int i = 0; i < kPairs; ++i) y[i] *= f32x2{s[2 * i], s[2 * i + 1]};
    }
    using H = Hadamard<kRotationSize>;
    device::fwht<kRotationSize>(y, lane);
    if (!H::kExact || !fold) {
      RQ_UNROLL
      for (int i = 0; i < kPairs; ++i) y[i] *= H::kFactor;
    }
  }
}

template <int kRotationSize>
RQ_DEVICE constexpr int exponent_shift() {
  if constexpr (kRotationSize > 0)
    return Hadamard<kRotationSize>::kExact ? Hadamard<kRotationSize>::kShift : 0;
  return 0;
}

// load -> rotate -> quantise: the lane's group. `p`: the parameters of an op that does just that.
template <class Config, class Params>
RQ_DEVICE device::Group quantized_group(const Params& p, const WaveTile& tile, uint32_t lane) {
  constexpr int kRotationSize = Config::kRotationSize;
  const bool fold = !p.bf16_intermediate;
  f32x2 y[kPairs];
  device::load_group<Config::kDType>(p.x, tile, lane, y);
  rotate_group<kRotationSize>(p.rotation, tile, lane, fold, y);
  if (p.bf16_intermediate) device::round_to_bf16(y);
  return device::quantize_group<Config::kElement, Config::kMse>(
      y, scale_bias(p.scale_mode), fold ? exponent_shift<kRotationSize>() : 0);
}

// The 256 bytes of the workgroup's 32 x 8 tile of shuffled scales; null: zeros.
RQ_DEVICE void store_scale_tile(uint8_t* scales, const WaveTile& tile, const uint32_t* lds) {
  const uint32_t thread = arch::thread_index();
  if (thread >= kScaleTileBytes / 4) return;
  const int64_t padded_groups = round_up_to(tile.groups, kScaleTileGroups);
  const int64_t row0 = tile.row0 - tile.row0 % kScaleTileRows;
  auto* out = reinterpret_cast<uint32_t*>(scales + scale_offset(row0, tile.group0, padded_groups));
  out[thread] = lds ? lds[thread] : 0;
}

// Gathers that tile in LDS, one byte a lane, and stores it. Cells outside the activation are 0.
RQ_DEVICE void gather_scale_tile(uint8_t* scales, uint8_t (&lds)[kScaleTileBytes],
                                 const WaveTile& tile, uint32_t lane, uint32_t byte) {
  const uint32_t row = static_cast<uint32_t>(tile.row0) % kScaleTileRows + tile.row_in_tile(lane);
  lds[scale_tile_offset(row, tile.group_in_tile(lane))] = static_cast<uint8_t>(byte);
  arch::barrier();
  store_scale_tile(scales, tile, reinterpret_cast<const uint32_t*>(lds));
}

template <class Config>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(device::kMaxThreads,
                           device::kMinWaves) void rotate_quant_kernel(const RotateQuantArgs args) {
  alignas(16) RQ_SHARED static ScaleTiles scale_tiles;
  const RotateQuantParams& p = args.params;
  int parity = 0;

  device::for_each_wave_tile(
      args.plan, p.x.rows, p.x.k / kGroup, [&](const WaveTile& tile, uint32_t lane) {
        // Nothing but padding: the same for the whole workgroup, so no barrier is missed.
        if (p.shuffle_scales && tile.row0 - tile.row0 % kScaleTileRows >= tile.rows)
          return store_scale_tile(p.scales, tile, nullptr);
        uint32_t scale = 0;
        if (tile.row0 < tile.rows) {
          const device::Group group = quantized_group<Config>(p, tile, lane);
          if (tile.contains(lane)) {
            const int64_t index = tile.row(lane) * tile.groups + tile.group(lane);
            arch::store(p.codes + index * kGroupBytes, group.codes);
            if (!p.shuffle_scales) p.scales[index] = static_cast<uint8_t>(group.scale);
            scale = group.scale;
          }
        }
        if (p.shuffle_scales) {
          gather_scale_tile(p.scales, scale_tiles.bytes[parity], tile, lane, scale);
          parity ^= 1;
        }
      });
}

template <class Config>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(device::kMaxThreads,
                           device::kMinWaves) void rotate_kernel(const RotateArgs args) {
  const RotateParams& p = args.params;
  device::for_each_wave_tile(
      args.plan, p.x.rows, p.x.k / kGroup, [&](const WaveTile& tile, uint32_t lane) {
        if (tile.row0 >= tile.rows) return;
        f32x2 y[kPairs];
        device::load_group<Config::kDType>(p.x, tile, lane, y);
        rotate_group<Config::kRotationSize>(p.rotation, tile, lane, false, y);
        device::store_group(p.y, p.y_dtype, tile, lane, y);
      });
}

}  // namespace rotquant::hip
