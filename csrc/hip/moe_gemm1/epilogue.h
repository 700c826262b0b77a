// SPDX-License-Identifier: MIT
// From gate and up to the quantised intermediate: activation in registers, then through LDS, so
// that a lane gets a scale group of a token, which it rotates with its neighbours and quantises.
#pragma once

#include "hip/device/quantize.h"
#include "hip/moe_gemm1/activation.h"
#include "hip/moe_gemm1/hadamard.h"
#include "hip/moe_gemm1/operands.h"
#include "hip/rotate_matrix/product.h"

namespace rotquant::hip {

using device::ExpertTile;
using device::f32x4;

// The activated values of a workgroup's tile. The 16-byte chunks of a row are permuted, so that
// both the lanes that write, a row each, and those that read, neighbouring groups of a few rows,
// find different banks.
template <class Tile>
struct Activated {
  static constexpr uint32_t kRows = Tile::kTileM, kChannels = Tile::kTileN / 2;
  static constexpr uint32_t kGroups = kChannels / kGroup, kChunks = kChannels / 4;
  static constexpr uint32_t kGroupChunks = kGroup / 4;
  static constexpr uint32_t kBankRow = 16;  // chunks that all banks hold
  static_assert(kChunks <= 2 * kBankRow);
  float values[kRows][kChannels];

  RQ_DEVICE f32x4& chunk(uint32_t row, uint32_t index) {
    constexpr uint32_t kRowsPerBankRow = kChunks < kBankRow ? kBankRow / kChunks : 1;
    constexpr uint32_t kPlaces = kChunks < kBankRow ? kChunks : kBankRow;
    const uint32_t place = index ^ row / kRowsPerBankRow % kPlaces ^ index / kBankRow * 4;
    return *reinterpret_cast<f32x4*>(&values[row][place * 4]);
  }
};

// Activates this wave's sums into its part of the tile, whose first row and unit are given.
template <class Tile, int kTokens, int kWeights>
RQ_DEVICE void activate(const MoeGemm1Params& p, const ExpertTile& tile, uint32_t first_row,
                        uint32_t first_unit, uint32_t lane, f32x4 (&acc)[kTokens][kWeights],
                        Activated<Tile>& to) {
  static_assert(kWeights % kUnitFrags == 0);
  const uint32_t row = first_row + device::frag_row(lane), quarter = device::frag_group(lane);
  const GateUpWeights weights = weights_of<Tile>(p, tile);
  if (p.interleaved) {
    RQ_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      RQ_UNROLL
      for (int j = 0; j < kWeights; j += kUnitFrags) {
        const f32x4 up = acc[i][j + 1];
        acc[i][j + 1] = acc[i][j + 2], acc[i][j + 2] = up;
      }
    }
  }
  if (p.apply_weight) {
    RQ_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      const float weight = (p.sorting.sorted_weights +
                            tile.row0)[row + static_cast<uint32_t>(i) * device::kFragRows];
      RQ_UNROLL
      for (int j = 0; j < kWeights; ++j) acc[i][j] *= weight;
    }
  }
  if (p.bias) {
    const float* expert_bias = p.bias + 2 * p.inter * tile.expert;
    RQ_UNROLL
    for (int j = 0; j < kWeights; ++j) {
      const uint32_t channel = weights.unit(first_unit + j / kUnitFrags) * kGroup +
                               j % 2 * device::kFragRows + quarter * 4;
      const bool is_up = j / 2 % 2;
      const f32x4 bias =
          __builtin_bit_cast(f32x4, arch::load(expert_bias + (is_up ? p.inter : 0) + channel));
      RQ_UNROLL
      for (int i = 0; i < kTokens; ++i) acc[i][j] += bias;
    }
  }
  with_gate(p.activation, [&](auto gate) {
    RQ_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      RQ_UNROLL
      for (int j = 0; j < kWeights / 2; ++j) {  // 16 channels
        const f32x4 &g = acc[i][j / 2 * kUnitFrags + j % 2],
                    &u = acc[i][j / 2 * kUnitFrags + 2 + j % 2];
        f32x4 value;
        RQ_UNROLL
        for (int e = 0; e < 4; ++e) value[e] = gate(g[e], u[e]);
        to.chunk(row + static_cast<uint32_t>(i) * device::kFragRows,
                 first_unit * Activated<Tile>::kGroupChunks + j * 4 + quarter) = value;
      }
    }
  });
}

// A group of the tile, and a lane's result for it.
struct GroupPlace {
  uint32_t row, group;
};

// A block of 16 rows fills half of a band of scales. NOTE: gemm2 loads whole dwords of a band, so
// the last block writes zeros for the half that no block has.
template <class Tile>
RQ_DEVICE void store_scale(const MoeGemm1Params& p, const ExpertTile& tile, uint32_t row,
                           uint32_t group, uint32_t padded_groups, uint32_t scale) {
  uint8_t* to = p.scales + scale_offset(tile.row0 + row, group, padded_groups);
  to[0] = static_cast<uint8_t>(scale);
  if constexpr (Tile::kTileM < kScaleTileRows) {
    constexpr int64_t kNextHalf = scale_tile_offset(Tile::kTileM, 0);
    const bool lower = tile.row0 % kScaleTileRows == 0;
    if (lower && tile.row0 + Tile::kTileM == p.sorting.num_valid[0]) to[kNextHalf] = 0;
  }
}

// Groups that do not exist have no place; rows that are no route are zeros.
template <class Tile>
RQ_DEVICE void store_group(const MoeGemm1Params& p, const ExpertTile& tile, GroupPlace place,
                           const device::Group& result) {
  const uint32_t groups = static_cast<uint32_t>(p.inter / kGroup);
  const uint32_t group = tile.n * Activated<Tile>::kGroups + place.group;
  if (group >= groups) return;
  const int32_t id = (p.sorting.sorted_ids + tile.row0)[place.row];
  const bool real = is_route(p.sorting, id);
  const auto zeros = u32x4{0, 0, 0, 0};
  arch::store(
      p.codes + tile.row0 * (p.inter / 2) + (uint64_t{place.row} * groups + group) * kGroupBytes,
      real ? result.codes : zeros);
  store_scale<Tile>(p, tile, place.row, group, round_up_to(groups, kScaleTileGroups),
                    real ? result.scale : 0);
}

// The scale bytes of the groups that pad the intermediate to whole tiles, by who has its last
// group.
template <class Tile>
RQ_DEVICE void store_padding(const MoeGemm1Params& p, const ExpertTile& tile, uint32_t thread) {
  const uint32_t groups = static_cast<uint32_t>(p.inter / kGroup);
  if ((tile.n + 1) * Activated<Tile>::kGroups < groups) return;
  const auto padded = static_cast<uint32_t>(round_up_to(groups, kScaleTileGroups));
  constexpr uint32_t kMost = Tile::kTileM * (kScaleTileGroups - 1), kThreads = Tile::kThreads;
#pragma unroll 1
  for (uint32_t first = 0; first < kMost; first += kThreads) {
    const uint32_t row = (first + thread) % Tile::kTileM;
    const uint32_t group = groups + (first + thread) / Tile::kTileM;
    if (group < padded) store_scale<Tile>(p, tile, row, group, padded, 0);
  }
}

// A lane takes a group; the groups of a row are neighbours.
template <class Tile>
RQ_DEVICE void finish_by_lane(const MoeGemm1Params& p, const ExpertTile& tile, uint32_t thread,
                              Activated<Tile>& from) {
  using Values = Activated<Tile>;
  static_assert(Values::kRows * Values::kGroups <= Tile::kThreads);
  if (thread >= Values::kRows * Values::kGroups) return;
  const GroupPlace place{thread / Values::kGroups, thread % Values::kGroups};
  f32x2 y[kPairs];
  RQ_UNROLL
  for (uint32_t c = 0; c < Values::kGroupChunks; ++c) {
    const f32x4 v = from.chunk(place.row, place.group * Values::kGroupChunks + c);
    y[2 * c] = f32x2{v[0], v[1]}, y[2 * c + 1] = f32x2{v[2], v[3]};
  }
  const Rotation& rotation = p.inter_rotation;
  const HadamardNorm norm(rotation.size);
  if (rotation.size > 0) {
    if (rotation.prescale) {
      const uint32_t unit = weights_of<Tile>(p, tile).unit(place.group);
      prescale_group(rotation.prescale + unit * kGroup, y);
    }
    hadamard_in_lane(rotation.size, y);
    if constexpr (Values::kGroups >= 2) {
      if (rotation.size >= 64) device::butterfly_across_lanes<1>(y, thread);
    }
    if constexpr (Values::kGroups >= 4) {
      if (rotation.size >= 128) device::butterfly_across_lanes<2>(y, thread);
    }
    norm(y);
  }
  store_group<Tile>(
      p, tile, place,
      device::quantize_group<ElementFormat::e2m1, false>(y, scale_bias(p.scale_mode), norm.shift));
}

// What hip/rotate_matrix/product.h wants to know.
template <int kSize>
struct InterMatrix {
  static constexpr int kRotationSize = kSize, kTokenTiles = 1;
};

// With a matrix a wave takes a panel: four groups of 16 rows, all groups of a row before the next
// 16 rows. Lane l has row l % 16; it loads channels 8 (l / 16) .. + 7 of each group and ends with
// group l / 16. A panel of a narrow tile may reach beyond it; it repeats the last group then.
template <int kSize, class Tile>
RQ_DEVICE void finish_by_matrix(const MoeGemm1Params& p, const ExpertTile& tile, uint32_t wave,
                                uint32_t lane, Activated<Tile>& from) {
  using Values = Activated<Tile>;
  using Shape = MatrixShape<kSize>;
  constexpr uint32_t kPanelGroups = kPanelChannels / kGroup;
  constexpr uint32_t kAll = Values::kRows / kTileTokens * Values::kGroups;
  static_assert((kAll + kPanelGroups - 1) / kPanelGroups <= Tile::kWaves);
  if (wave * kPanelGroups >= kAll) return;
  const uint32_t row = token_of(lane), quarter = quarter_of(lane);
  const GateUpWeights weights = weights_of<Tile>(p, tile);
  const Rotation& rotation = p.inter_rotation;
  const auto place_of = [&](uint32_t g) {
    const uint32_t index = wave * kPanelGroups + g < kAll ? wave * kPanelGroups + g : kAll - 1;
    return GroupPlace{index / Values::kGroups * kTileTokens + row, index % Values::kGroups};
  };

  TokenFragment tokens[1][kPanelGroups];
  RQ_UNROLL
  for (uint32_t g = 0; g < kPanelGroups; ++g) {
    const GroupPlace place = place_of(g);
    const uint32_t chunk = place.group * Values::kGroupChunks + 2 * quarter;
    const u32x4 raw[2] = {__builtin_bit_cast(u32x4, from.chunk(place.row, chunk)),
                          __builtin_bit_cast(u32x4, from.chunk(place.row, chunk + 1))};
    const float* prescale =
        rotation.prescale ? rotation.prescale + weights.unit(place.group) * kGroup + 8 * quarter
                          : nullptr;
    tokens[0][g] = to_bf16<DType::fp32>(raw, prescale);
  }
  Sums<InterMatrix<kSize>> sums;
  multiply<InterMatrix<kSize>>(
      tokens,
      [&](uint32_t image, uint32_t t, uint32_t step) {
        const uint32_t channel = Shape::unit_of(lane % 16 / 4, t) * 4 + lane % 4;
        const uint32_t group = place_of(image * kSize / kGroup).group;
        const uint32_t block =
            weights.unit(group) * kGroup / kSize + (kSize < kGroup ? image % (kGroup / kSize) : 0);
        const uint16_t* matrix = rotation.matrix_bf16 + block * rotation.matrix_stride;
        if constexpr (kSize == 16)
          // In the order of k in which split_blocks() leaves the tokens.
          return *reinterpret_cast<const u32x2*>(matrix + channel * kSize + quarter % 2 * 8 +
                                                 quarter / 2 * 4);
        else
          return arch::load(matrix + channel * kSize + step * 32 + quarter * 8);
      },
      sums);
  f32x2 y[kPairs];
  own_group<kSize>(sums.tile[0], y);
  if (wave * kPanelGroups + quarter < kAll)
    store_group<Tile>(
        p, tile, place_of(quarter),
        device::quantize_group<ElementFormat::e2m1, false>(y, scale_bias(p.scale_mode), 0));
}

// The whole workgroup, after a barrier.
template <class Tile>
RQ_DEVICE void finish(const MoeGemm1Params& p, const ExpertTile& tile, Activated<Tile>& from) {
  const uint32_t thread = arch::thread_index(), lane = thread % arch::kWaveSize;
  const uint32_t wave = arch::uniform(thread / arch::kWaveSize);
  store_padding<Tile>(p, tile, thread);
  if (!p.inter_rotation.matrix_bf16) return finish_by_lane<Tile>(p, tile, thread, from);
  constexpr uint32_t kChannels = Activated<Tile>::kChannels;
  const int size = p.inter_rotation.size;
  if (size == 16) return finish_by_matrix<16, Tile>(p, tile, wave, lane, from);
  if (size == 32) return finish_by_matrix<32, Tile>(p, tile, wave, lane, from);
  if constexpr (kChannels >= 64) {
    if (size == 64) return finish_by_matrix<64, Tile>(p, tile, wave, lane, from);
  }
  if constexpr (kChannels >= 128) finish_by_matrix<128, Tile>(p, tile, wave, lane, from);
}

}  // namespace rotquant::hip
