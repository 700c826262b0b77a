// SPDX-License-Identifier: MIT
// rotate_quant and rotate with a matrix: stage the matrices in LDS once, then for every tile of
// tokens load -> multiply -> quantise -> store. See config.h for the layout.
//
// In a wave, lane l works for token l % 16 of a tile: it loads the input channels
// 8 (l / 16) .. + 7 of every 32, and ends with output group l / 16 of every panel.
#pragma once

#include "hip/device/quantize.h"
#include "hip/rotate_matrix/product.h"

namespace rotquant::hip {

// --- the walk over tiles ------------------------------------------------------------------------

// The rows of a wave: `row0` steps over those of its workgroup's tiles.
template <class Config>
struct Walk {
  int64_t row0, step, end;
  RQ_DEVICE explicit Walk(const RotateMatrixPlan& plan)
      : row0(int64_t{arch::block_index_y()} * Config::kWorkgroupTokens +
             arch::uniform(arch::thread_index() / arch::kWaveSize) * Config::kWaveTokens),
        step(int64_t{plan.grid_rows} * Config::kWorkgroupTokens),
        end(plan.row_tiles * Config::kWorkgroupTokens) {}
  // Some row of the workgroup's first tile, and so of the workgroup, is inside x.
  RQ_DEVICE static bool any(int64_t rows) {
    return int64_t{arch::block_index_y()} * Config::kWorkgroupTokens < rows;
  }
};

// Calls finish(row0, panel's first group, lane, sums) for every panel of this wave's tiles that are
// inside x, and pad(row0, strip's first group) for those that are not. `kSpare`: finish() leaves
// registers for the next tile's tokens; `kResident`: and for the fragments, which must be few.
template <class Config, bool kSpare,
          bool kResident = kSpare && MatrixShape<Config::kRotationSize>::kSteps == 1, class Finish,
          class Pad>
RQ_DEVICE void for_each_product(const Activation& x, const Rotation& rotation,
                                const RotateMatrixPlan& plan, Finish&& finish, Pad&& pad) {
  constexpr int kSize = Config::kRotationSize;
  using Shape = MatrixShape<kSize>;
  constexpr int kLoads = Shape::kStrip / kGroup;
  static_assert(!kResident || Shape::kSteps == 1);
  alignas(16) RQ_SHARED static MatrixImages<kSize> images;
  const uint32_t thread_lane = arch::thread_index() % arch::kWaveSize;
  const int64_t groups = x.k / kGroup;

  for (int64_t strip = arch::block_index_x(); strip < plan.strips; strip += plan.grid_strips) {
    Walk<Config> walk(plan);
    const int64_t strip_group = strip * (Shape::kStrip / kGroup);
    const int64_t rows = strip_group < groups ? x.rows : 0;
    TokenFragment b[Config::kTokenTiles][kLoads];
    if (kSpare && walk.row0 < rows)
      load_tokens<Config>(x, rotation.prescale, walk.row0, strip_group, thread_lane, b);
    if (strip != arch::block_index_x()) arch::barrier();  // the last strip's matrices are done with
    if (walk.any(rows)) stage_matrices<Config>(rotation, strip, x.k / kSize, images);
    arch::barrier();

    const uint32_t unit = fragment_unit<kSize>(thread_lane);
    MatrixFragment<kSize> resident[Shape::kImages][Shape::kTiles];
    if (kResident && walk.row0 < rows) {
      RQ_UNROLL
      for (int image = 0; image < Shape::kImages; ++image) {
        RQ_UNROLL
        for (int t = 0; t < Shape::kTiles; ++t)
          resident[image][t] = read_fragment(images, unit, image, t, 0);
      }
    }

    for (; walk.row0 < rows; walk.row0 += walk.step) {
      // Opaque, or what follows from them would be kept in registers from one tile to the next.
      const uint32_t lane = arch::opaque(thread_lane), first_unit = arch::opaque(unit);
      if (!kSpare)
        load_tokens<Config>(x, rotation.prescale, walk.row0, arch::opaque_uniform(strip_group),
                            lane, b);
      RQ_UNROLL
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        Sums<Config> sums;
        multiply<Config>(
            b,
            [&](int image, int t, int s) {
              if constexpr (kResident)
                return resident[image][t];
              else
                return read_fragment(images, first_unit, panel * Shape::kImagesPerPanel + image, t,
                                     s);
            },
            sums);
        arch::keep_order();  // interleaved with the quantiser, the products spill
        // The next tokens are on their way while these are quantised.
        if (kSpare && panel == Shape::kPanels - 1 && walk.row0 + walk.step < rows)
          load_tokens<Config>(x, rotation.prescale, walk.row0 + walk.step,
                              arch::opaque_uniform(strip_group), lane, b);
        finish(arch::opaque_uniform(walk.row0),
               arch::opaque_uniform(strip_group + panel * (kPanelChannels / kGroup)), lane, sums);
      }
    }
    for (; walk.row0 < walk.end; walk.row0 += walk.step) pad(walk.row0, strip_group);
  }
}

// --- kernels ------------------------------------------------------------------------------------

// rotated -> quantised: the lane's group of one token tile. `p`: the parameters of an op that
// quantises.
template <class Config, ElementFormat kElement, bool kMse, class Params>
RQ_DEVICE device::Group quantized_group(const Params& p, TileSums<Config>& sums) {
  f32x2 y[kPairs];
  own_group<Config::kRotationSize>(sums, y);
  if (p.bf16_intermediate) device::round_to_bf16(y);
  return device::quantize_group<kElement, kMse>(y, scale_bias(p.scale_mode), 0);
}

// Scale bytes of this lane's token in each token tile, to their place among the shuffled ones. row0
// and group0 are those of the panel: multiples of 16 and 4, so that the offset is a sum.
template <class Config>
RQ_DEVICE void store_shuffled(uint8_t* scales, int64_t row0, int64_t group0, int64_t padded_groups,
                              uint32_t lane, uint32_t bytes) {
  uint8_t* out = scales + scale_offset(row0, group0, padded_groups) +
                 scale_tile_offset(token_of(lane), quarter_of(lane));
  // Rows 16 apart are neighbours.
  if constexpr (Config::kTokenTiles == 2)
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(bytes);
  else
    *out = static_cast<uint8_t>(bytes);
}

template <class Config, ElementFormat kElement, bool kMse>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Config::kThreads, Config::kMinWaves) void rotate_matrix_quant_kernel(
    const RotateMatrixQuantArgs args) {
  const RotateQuantParams& p = args.params;
  const int64_t groups = p.x.k / kGroup, padded_groups = round_up_to(groups, kScaleTileGroups);
  auto finish = [&](int64_t row0, int64_t group0, uint32_t lane, Sums<Config>& sums) {
    const uint32_t token = token_of(lane), quarter = quarter_of(lane);
    uint32_t scales = 0;
    RQ_UNROLL
    for (int i = 0; i < Config::kTokenTiles; ++i) {
      const device::Group quantised = quantized_group<Config, kElement, kMse>(p, sums.tile[i]);
      const int64_t row = row0 + i * kTileTokens;
      if (token < p.x.rows - row && quarter < groups - group0) {
        const int64_t first = row * groups + group0;
        const uint64_t index = uint64_t{token} * static_cast<uint32_t>(groups) + quarter;
        arch::store(p.codes + first * kGroupBytes + index * kGroupBytes, quantised.codes);
        if (!p.shuffle_scales) (p.scales + first)[index] = static_cast<uint8_t>(quantised.scale);
        scales |= quantised.scale << (8 * i);
      }
    }
    if (p.shuffle_scales && group0 < padded_groups)
      store_shuffled<Config>(p.scales, row0, group0, padded_groups, lane, scales);
  };
  auto pad = [&](int64_t row0, int64_t group0) {
    const uint32_t lane = arch::thread_index() % arch::kWaveSize;
    for (int panel = 0; panel < MatrixShape<Config::kRotationSize>::kPanels; ++panel) {
      const int64_t group = group0 + panel * (kPanelChannels / kGroup);
      if (p.shuffle_scales && group < padded_groups)
        store_shuffled<Config>(p.scales, row0, group, padded_groups, lane, 0);
    }
  };
  for_each_product<Config, !kMse>(p.x, p.rotation, args.plan, finish, pad);
}

// The panel's channels of one token, from the four lanes that have a group each.
RQ_DEVICE void store_panel(const RotateParams& p, int64_t row, int64_t group0, uint32_t lane,
                           const f32x2 (&y)[kPairs]) {
  const int64_t groups = p.x.k / kGroup;
  const uint32_t quarter = quarter_of(lane);
  // Groups of the panel that exist; as a vector value, because scalar registers are scarce here.
  const uint32_t inside = arch::opaque(row >= p.x.rows                     ? 0
                                       : groups - group0 < device::kChunks ? groups - group0
                                                                           : device::kChunks);
  // The four lanes have a group each; after the swap, neighbouring chunks of one group, and then of
  // the next: 64 contiguous bytes a token in every store.
  u32x4 v[device::kChunks];
  auto store_chunks = [&](auto* out, int chunk_channels) {
    device::swap_chunks(v);
    RQ_UNROLL
    for (uint32_t j = 0; j < device::kChunks; ++j)
      if (j < inside)
        arch::store(out + row * p.x.k + (group0 + j) * kGroup + quarter * chunk_channels, v[j]);
  };
  if (p.y_dtype == DType::fp32) {
    RQ_UNROLL
    for (int half = 0; half < 2; ++half) {
      RQ_UNROLL
      for (int i = 0; i < kGroup / 2; ++i)
        v[i / 4][i % 4] = float_to_bits(y[half * 8 + i / 2][i % 2]);
      store_chunks(static_cast<float*>(p.y) + half * (kGroup / 2), 4);
    }
  } else {
    RQ_UNROLL
    for (int i = 0; i < kPairs; ++i)
      v[i / 4][i % 4] = p.y_dtype == DType::bf16 ? arch::pack_bf16(y[i]) : arch::pack_fp16(y[i]);
    store_chunks(static_cast<uint16_t*>(p.y), 8);
  }
}

template <class Config>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(Config::kThreads, Config::kMinWaves) void rotate_matrix_kernel(
    const RotateMatrixArgs args) {
  const RotateParams& p = args.params;
  auto finish = [&](int64_t row0, int64_t group0, uint32_t lane, Sums<Config>& sums) {
    RQ_UNROLL
    for (int i = 0; i < Config::kTokenTiles; ++i) {
      f32x2 y[kPairs];
      own_group<Config::kRotationSize>(sums.tile[i], y);
      store_panel(p, row0 + i * kTileTokens + token_of(lane), group0, lane, y);
    }
  };
  for_each_product<Config, true>(p.x, p.rotation, args.plan, finish, [](int64_t, int64_t) {});
}

}  // namespace rotquant::hip
