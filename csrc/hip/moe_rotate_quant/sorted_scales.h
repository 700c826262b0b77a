// SPDX-License-Identifier: MIT
// Scale bytes on their way into the sorted, shuffled tensor, every cell of which is written once:
// a dword holds groups g and g + 4 of rows r and r + 16 (core/layout.h), and where
//   both rows are routes    each route's token stores its own bytes,
//   one is                  that token stores 16 bits, its byte and the padding row's 0,
//   none is                 clear_padding() stores the dword, most often four at a time.
//
// A token's bytes go from registers to up to topk rows. They are not gathered in LDS: what could be
// joined there are rows of one 16-row half of a tile, so routes of one expert, and of the tokens
// that a workgroup has at a time hardly two go to the same of many experts (32 tokens, top-8 of
// 128: two; decode has fewer tokens than experts). The price would be a sort in LDS and barriers,
// and the lines still meet in L2. A wave's store instruction touches 4 segments of 64 bytes per
// token and tile either way, for 512 bytes of x and 128 of codes. Nor does a workgroup own tiles of
// the output and fetch what it needs: it would have to quantise tokens again, or wait for others.
#pragma once

#include "core/moe.h"
#include "hip/arch/arch.h"

namespace rotquant::hip {

using arch::u32x4;

// Which lanes of a wave work for the same token.
struct AdjacentLanes {
  static constexpr uint32_t kCount = 8;
  RQ_DEVICE static uint32_t rank(uint32_t lane) { return lane % kCount; }
  RQ_DEVICE static uint32_t lane_of(uint32_t lane, uint32_t rank) {
    return lane - lane % kCount + rank;
  }
};
struct QuarterLanes {  // one in each quarter of the wave
  static constexpr uint32_t kCount = 4, kQuarter = arch::kWaveSize / kCount;
  RQ_DEVICE static uint32_t rank(uint32_t lane) { return lane / kQuarter; }
  RQ_DEVICE static uint32_t lane_of(uint32_t lane, uint32_t rank) {
    return lane % kQuarter + rank * kQuarter;
  }
};

// The destination. Rows and routes fit 32 bits (core/moe.h), bytes do not.
struct SortedScales {
  uint8_t* out;
  const int32_t *sorted_ids, *reverse_sorted;
  uint32_t tokens, topk, max_rows, rows_in_use, padded_groups;

  RQ_DEVICE SortedScales(const MoeRotateQuantParams& p)
      : out(p.scales),
        sorted_ids(p.sorting.sorted_ids),
        reverse_sorted(p.sorting.reverse_sorted),
        tokens(static_cast<uint32_t>(p.sorting.tokens)),
        topk(static_cast<uint32_t>(p.sorting.topk)),
        max_rows(static_cast<uint32_t>(p.sorting.max_rows)),
        rows_in_use(static_cast<uint32_t>(moe_rows_in_use(p.sorting, p.sorting.num_valid[0]))),
        padded_groups(static_cast<uint32_t>(round_up_to(p.x.k / kGroup, kScaleTileGroups))) {
    // What lanes without a row may read.
    if (max_rows == 0) sorted_ids = reverse_sorted;
  }

  // Opaque, or what is compared with it would be kept in scalar registers between tiles.
  RQ_DEVICE uint32_t slots() const { return static_cast<uint32_t>(arch::opaque_uniform(topk)); }
  RQ_DEVICE uint32_t band_bytes() const { return padded_groups * kScaleTileRows; }
  // The slot of a route is below topk, and the high byte of the id.
  RQ_DEVICE bool is_padding_id(uint32_t sorted_id) const {
    return static_cast<uint32_t>(moe_token(static_cast<int32_t>(sorted_id))) >= tokens ||
           sorted_id >= topk << kMoeSlotShift;
  }
};

// The sorted rows of this lane's token, spread over the lanes that share it, so that reading all of
// them takes two loads, one after the other, however many slots there are.
template <class Sharers>
class TokenRows {
  static constexpr uint32_t kRegisters = kMoeMaxTopk / Sharers::kCount;
  static constexpr uint32_t kNone = ~0u, kOneByte = 16;
  uint32_t rows_[kRegisters];  // row << 1 | (the dword's other row is padding), or kNone

 public:
  RQ_DEVICE TokenRows(const SortedScales& scales, int64_t token_index, uint32_t lane) {
    // Slots and tokens past the last are read from there, so that no load needs a predicate and all
    // of them are in flight together.
    const uint32_t last_token = scales.tokens - 1, last_slot = scales.slots() - 1;
    const uint32_t token = static_cast<uint32_t>(token_index);
    const uint32_t first = (token < last_token ? token : last_token) * (last_slot + 1);
    uint32_t slot[kRegisters], other_id[kRegisters];
    RQ_UNROLL
    for (uint32_t i = 0; i < kRegisters; ++i) {
      slot[i] = i * Sharers::kCount + Sharers::rank(lane);
      const uint32_t route = first + (slot[i] < last_slot ? slot[i] : last_slot);
      rows_[i] = static_cast<uint32_t>(scales.reverse_sorted[route]);
    }
    RQ_UNROLL
    for (uint32_t i = 0; i < kRegisters; ++i) {
      const uint32_t other = rows_[i] ^ 16;
      other_id[i] =
          static_cast<uint32_t>(scales.sorted_ids[other < scales.rows_in_use ? other : 0]);
    }
    RQ_UNROLL
    for (uint32_t i = 0; i < kRegisters; ++i) {
      const bool alone = (rows_[i] ^ 16) >= scales.rows_in_use || scales.is_padding_id(other_id[i]);
      // A dropped route is negative.
      const bool stored =
          token <= last_token && slot[i] <= last_slot && rows_[i] < scales.rows_in_use;
      rows_[i] = stored ? rows_[i] << 1 | alone : kNone;
    }
  }

  // Writes the scale byte of `group` of the token to all of its rows. All lanes of the wave must
  // take part; those with a group beyond the padded ones write nothing.
  RQ_DEVICE void scatter(const SortedScales& scales, uint32_t lane, int64_t group,
                         uint32_t byte) const {
    uint8_t* column = scales.out + scale_offset(0, group, scales.padded_groups);
    const uint32_t end = group < scales.padded_groups ? kNone : 0;
    const uint32_t topk = scales.slots();
    RQ_UNROLL
    for (uint32_t i = 0; i < kRegisters; ++i) {
      if (i * Sharers::kCount >= topk) break;
      // What does not depend on the group is worked out by the one lane that has the slot.
      const uint32_t row = rows_[i] >> 1, half = row / 16 % 2;
      const bool alone = rows_[i] & 1;
      const uint64_t cell =
          uint64_t{row / 32} * scales.band_bytes() + row % 16 * 4 + (alone ? 0 : half);
      const uint32_t low = static_cast<uint32_t>(cell);
      const uint32_t high = rows_[i] == kNone ? kNone : static_cast<uint32_t>(cell >> 32);
      const uint32_t shift = alone ? half * 8 : kOneByte;
      uint32_t lows[Sharers::kCount], highs[Sharers::kCount], shifts[Sharers::kCount];
      RQ_UNROLL
      for (uint32_t rank = 0; rank < Sharers::kCount; ++rank) {
        const uint32_t source = Sharers::lane_of(lane, rank);
        lows[rank] = arch::from_lane(low, source);
        highs[rank] = arch::from_lane(high, source);
        shifts[rank] = arch::from_lane(shift, source);
      }
      RQ_UNROLL
      for (uint32_t rank = 0; rank < Sharers::kCount; ++rank) {
        if (highs[rank] >= end) continue;
        uint8_t* at = column + (uint64_t{highs[rank]} << 32 | lows[rank]);
        if (shifts[rank] == kOneByte)
          *at = static_cast<uint8_t>(byte);
        else
          *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(byte << shifts[rank]);
      }
    }
  }
};

// Zeros to the dwords that have no route, by the `grid_rows` rows of the grid from `first_row` on.
// A wave does every so many-th band of 32 rows. A lane has 16 bytes, rows 4q .. 4q + 3 and the 16
// further ones of two groups, of every so many-th tile.
RQ_DEVICE void clear_padding(const SortedScales& scales, uint32_t first_row, uint32_t columns,
                             uint32_t grid_rows, uint32_t threads) {
  constexpr uint32_t kTileLanes = kScaleTileBytes / 16, kTiles = arch::kWaveSize / kTileLanes;
  const uint32_t workgroup = (arch::block_index_y() - first_row) * columns + arch::block_index_x();
  const uint32_t thread = arch::thread_index(), lane = thread % arch::kWaveSize;
  const uint32_t wave = arch::uniform((workgroup * threads + thread) / arch::kWaveSize);
  const uint32_t waves = grid_rows * columns * (threads / arch::kWaveSize);
  const uint32_t bands =
      static_cast<uint32_t>(round_up_to(scales.max_rows, kScaleTileRows) / kScaleTileRows);
  const uint32_t tiles = scales.padded_groups / kScaleTileGroups;
  for (uint32_t band = wave; band < bands; band += waves) {
    // Rows in use are whole blocks of at least 16.
    const uint32_t row = band * kScaleTileRows + lane % 4 * 4;
    const bool low_used = row < scales.rows_in_use, high_used = row + 16 < scales.rows_in_use;
    const int32_t* ids = scales.sorted_ids;
    const u32x4 low = arch::load(ids + (low_used ? row : 0));
    const u32x4 high = arch::load(ids + (high_used ? row + 16 : 0));
    bool none[4];
    RQ_UNROLL
    for (int i = 0; i < 4; ++i)
      none[i] = (!low_used || scales.is_padding_id(low[i])) &&
                (!high_used || scales.is_padding_id(high[i]));
    const bool all = none[0] && none[1] && none[2] && none[3];
    uint8_t* out = scales.out + uint64_t{band} * scales.band_bytes() + lane % kTileLanes * 16;
    for (uint32_t tile = lane / kTileLanes; tile < tiles; tile += kTiles) {
      uint8_t* at = out + uint64_t{tile} * kScaleTileBytes;
      if (all) {
        arch::store(at, u32x4{0, 0, 0, 0});
        continue;
      }
      RQ_UNROLL
      for (int i = 0; i < 4; ++i)
        if (none[i]) reinterpret_cast<uint32_t*>(at)[i] = 0;
    }
  }
}

}  // namespace rotquant::hip
