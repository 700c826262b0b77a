// SPDX-License-Identifier: MIT
// Operands for many tokens: the waves share both through LDS, two steps of 256 k deep.
//
// In LDS a step of weights has its memory order, in which a fragment is 1024 consecutive bytes. A
// step of tokens is rows of 128 bytes whose eight 16-byte chunks are permuted, so that the 16 lanes
// of one LDS phase find theirs in different banks: chunk c of row r is in place c ^ (r / 2 % 8).
// Loads write LDS in lane order, so the lanes ask for permuted addresses.
#pragma once

#include "hip/device/mma.h"

namespace rotquant::device {

constexpr uint32_t kChunk = 16;                            // bytes that a lane loads at once
constexpr uint32_t kWaveChunk = arch::kWaveSize * kChunk;  // and its wave
constexpr uint32_t kStepChunks = kStepBytes / kChunk;

RQ_DEVICE constexpr uint32_t chunk_place(uint32_t row, uint32_t chunk) {
  return chunk ^ (row / 2 % kStepChunks);
}

// The workgroup's LDS: everything of two steps.
template <int kTileM, int kTileN, int kWaves>
struct StagedTiles {
  static constexpr int kTokenBands = kTileM / kScaleTileRows,
                       kWeightBands = kTileN / kScaleTileRows;
  static constexpr int kBandsPerLoad = kWaveChunk / kScaleTileBytes;
  static constexpr int kTokenBandLoads = (kTokenBands + kBandsPerLoad - 1) / kBandsPerLoad;
  static constexpr int kWeightBandLoads = (kWeightBands + kBandsPerLoad - 1) / kBandsPerLoad;
  uint8_t tokens[2][kTileM * kStepBytes];
  uint8_t weights[2][kTileN * kStepBytes];
  // One load of each wave: tokens' bands, weights' bands, then copies of these (a branch among the
  // products would cost more).
  uint8_t scales[2][kWaves * kWaveChunk];
  static_assert(kTokenBandLoads + kWeightBandLoads <= kWaves);
};

template <int kTokenFrags, int kWeightFrags, int kWavesM, int kWavesN>
class StagedOperands {
 public:
  static constexpr uint32_t kWaves = kWavesM * kWavesN;
  static constexpr uint32_t kTileM = kFragRows * kTokenFrags * kWavesM;
  static constexpr uint32_t kTileN = kFragRows * kWeightFrags * kWavesN;
  static constexpr uint32_t kTokenLoads = kTileM * kStepBytes / kWaveChunk / kWaves;
  static constexpr uint32_t kWeightLoads = kTileN * kStepBytes / kWaveChunk / kWaves;
  static constexpr uint32_t kLoads = kTokenLoads + kWeightLoads + 1;
  static constexpr uint32_t kRun = 4;  // loads that share a target: the immediate reaches 4095
  using Tiles = StagedTiles<kTileM, kTileN, kWaves>;
  static_assert(sizeof(Tiles) <= 160 * 1024);
  static_assert(kTokenFrags % 2 == 0 && kWeightFrags % 2 == 0);

  struct Scales {
    uint32_t tokens[kTokenFrags / 2];
    uint32_t weights[kWeightFrags / 2];
  };

  // Groups from `end_group` on count as 0. NOTE: what rows and weights reach stays below 4 GiB.
  template <class Rows, class Weights>
  RQ_DEVICE StagedOperands(const Operands& in, const Rows& rows, const TokenScales& scales,
                           const Weights& weights, Tiles& lds, uint32_t end_group, uint32_t wave,
                           uint32_t lane)
      : lds_(arch::lds_address(&lds)),
        wave_(wave),
        a_(in.a + rows.first * in.row_bytes - kReach,
           rows.count * static_cast<uint32_t>(in.row_bytes) + kReach),
        b_(in.b + weights.first * (kFragRows * in.row_bytes) - kReach,
           weights.block_reach(kBlocks) * kFragRows * static_cast<uint32_t>(in.row_bytes) + kReach),
        scales_(scales_of(in, scales, weights, wave)),
        end_group_(end_group),
        lane_(lane) {
    const uint32_t row_bytes = static_cast<uint32_t>(in.row_bytes);
    RQ_UNROLL
    for (uint32_t j = 0; j < kTokenLoads; ++j)
      token_offset_[j] = rows(token_row(j)) * row_bytes + token_chunk(j) * kChunk + stay(j);
    RQ_UNROLL
    for (uint32_t j = 0; j < kWeightLoads; ++j) {
      const uint32_t load = wave * kWeightLoads + j;
      weight_offset_[j] = weights.block(load / kStepHalves) * kFragRows * row_bytes +
                          load % kStepHalves * kFragBytes + lane * kChunk + stay(j);
    }
    constexpr uint32_t kLanesPerBand = arch::kWaveSize / Tiles::kBandsPerLoad;
    const bool of_tokens = loads_token_scales(wave);
    const uint32_t last = (of_tokens ? Tiles::kTokenBands : Tiles::kWeightBands) - 1;
    const uint32_t mine = (wave - (of_tokens ? 0 : Tiles::kTokenBandLoads)) * Tiles::kBandsPerLoad +
                          lane / kLanesPerBand;
    const uint32_t band = mine < last ? mine : last;
    scale_offset_ = (of_tokens ? band : weights.band(band)) *
                        static_cast<uint32_t>(kScaleTileRows * in.padded_groups) +
                    lane % kLanesPerBand * kChunk + kReach;

    const uint32_t wave_m = wave / kWavesN, wave_n = wave % kWavesN;
    const uint32_t row = frag_row(lane);
    RQ_UNROLL
    for (uint32_t h = 0; h < kStepHalves; ++h)
      token_read_[h] = arch::lds_pointer(
          lds_ + token_place(0) + wave_m * (kTokenFrags * kFragRows * kStepBytes) +
          row * kStepBytes + chunk_place(row, frag_group(lane) + h * kHalfGroups) * kChunk);
    weight_read_ = arch::lds_pointer(lds_ + weight_place(0) +
                                     wave_n * (kWeightFrags * kWeightStep) + lane * kChunk);
    token_scale_read_ = arch::lds_pointer(lds_ + scale_place(0) +
                                          wave_m * (kTokenFrags / 2 * kScaleTileBytes) + lane * 4);
    weight_scale_read_ =
        arch::lds_pointer(lds_ + scale_place(0) + Tiles::kTokenBandLoads * kWaveChunk +
                          wave_n * (kWeightFrags / 2 * kScaleTileBytes) + lane * 4);
  }

  // Issues load number kIndex of this wave's kLoads for the step whose turn it is; the last one
  // moves on to the next step. Of the last step of K only a part may exist, and after it there may
  // be one more: then the codes are anything, and the scales too.
  template <uint32_t kIndex>
  RQ_DEVICE void load(uint32_t buffer) {
    if constexpr (kIndex < kTokenLoads) {
      constexpr uint32_t j = kIndex;
      if constexpr (j % kRun == 0)
        arch::set_lds_target(lds_ + token_place(buffer) + (wave_ * kTokenLoads + j) * kWaveChunk);
      arch::load_to_lds<j % kRun * kWaveChunk>(a_, token_offset_[j]);
      if constexpr (j + 1 == kTokenLoads) a_.advance(kStepBytes);
    } else if constexpr (kIndex < kTokenLoads + kWeightLoads) {
      constexpr uint32_t j = kIndex - kTokenLoads;
      if constexpr (j % kRun == 0)
        arch::set_lds_target(lds_ + weight_place(buffer) + (wave_ * kWeightLoads + j) * kWaveChunk);
      arch::load_to_lds<j % kRun * kWaveChunk>(b_, weight_offset_[j]);
      if constexpr (j + 1 == kWeightLoads) b_.advance(kWeightStep);
    } else {
      arch::set_lds_target(lds_ + scale_place(buffer) + wave_ * kWaveChunk);
      arch::load_to_lds<0>(scales_, scale_offset_);
      scales_.advance(kScaleTileBytes);
    }
  }

  RQ_DEVICE void load_all(uint32_t buffer) {
    unrolled<kLoads>([&](auto i) { load<i.value>(buffer); });
  }

  // Moves on to a step without loading.
  RQ_DEVICE void skip_to(uint32_t step) {
    a_.advance(step * kStepBytes);
    b_.advance(step * kWeightStep);
    scales_.advance(step * kScaleTileBytes);
  }

  template <int kHalf>
  RQ_DEVICE u32x4 token(uint32_t buffer, uint32_t i) const {
    return arch::read_lds<u32x4>(token_read_[kHalf] + (token_place(buffer) - token_place(0)) +
                                 i * (kFragRows * kStepBytes));
  }
  template <int kHalf>
  RQ_DEVICE u32x4 weight(uint32_t buffer, uint32_t j) const {
    return arch::read_lds<u32x4>(weight_read_ + (weight_place(buffer) - weight_place(0)) +
                                 j * kWeightStep + kHalf * kFragBytes);
  }
  RQ_DEVICE void read_scales(uint32_t buffer, Scales& to) const {
    const uint32_t offset = scale_place(buffer) - scale_place(0);
    RQ_UNROLL
    for (uint32_t i = 0; i < kTokenFrags / 2; ++i)
      to.tokens[i] = arch::read_lds<uint32_t>(token_scale_read_ + offset + i * kScaleTileBytes);
    RQ_UNROLL
    for (uint32_t j = 0; j < kWeightFrags / 2; ++j)
      to.weights[j] = arch::read_lds<uint32_t>(weight_scale_read_ + offset + j * kScaleTileBytes);
  }

  // All ones where the lane's group of a half step is real, else 0. NOTE: codes past the end go,
  // but 0 times a NaN scale is NaN: their scales have to go too.
  template <int kHalf>
  RQ_DEVICE uint32_t real(uint32_t step) const {
    const uint32_t group = step * kScaleTileGroups + kHalf * kHalfGroups + frag_group(lane_);
    return group < end_group_ ? 0xFFFFFFFFu : 0u;
  }
  RQ_DEVICE void mask(uint32_t step, Scales& scales) const {
    const uint32_t keep = (real<0>(step) & 0xFFFFu) | (real<1>(step) & 0xFFFF0000u);
    RQ_UNROLL
    for (int i = 0; i < kTokenFrags / 2; ++i) scales.tokens[i] &= keep;
    RQ_UNROLL
    for (int j = 0; j < kWeightFrags / 2; ++j) scales.weights[j] &= keep;
  }

 private:
  RQ_DEVICE uint32_t token_row(uint32_t load) const {
    return (wave_ * kTokenLoads + load) * (kWaveChunk / kStepBytes) + lane_ / kStepChunks;
  }
  // Which chunk of its row this lane asks for: the one whose place is the lane's.
  RQ_DEVICE uint32_t token_chunk(uint32_t load) const {
    return chunk_place(token_row(load), lane_ % kStepChunks);
  }
  // Added to the addresses in advance: the immediate of a run's j-th load moves the target on, and
  // the address must not move with it. Also what is left of a buffer stays positive that way, even
  // for the step after one that is the last by a single group, or when there is none.
  static constexpr uint32_t kReach = kRun * kWaveChunk;
  static_assert(kReach > 2 * kWeightStep - kFragRows * kGroupBytes);
  RQ_DEVICE static constexpr uint32_t stay(uint32_t j) { return kReach - j % kRun * kWaveChunk; }

  RQ_DEVICE static constexpr uint32_t token_place(uint32_t buffer) {
    return __builtin_offsetof(Tiles, tokens) + buffer * sizeof(Tiles::tokens[0]);
  }
  RQ_DEVICE static constexpr uint32_t weight_place(uint32_t buffer) {
    return __builtin_offsetof(Tiles, weights) + buffer * sizeof(Tiles::weights[0]);
  }
  RQ_DEVICE static constexpr uint32_t scale_place(uint32_t buffer) {
    return __builtin_offsetof(Tiles, scales) + buffer * sizeof(Tiles::scales[0]);
  }

  static constexpr uint32_t kBlocks = kTileN / kFragRows;
  RQ_DEVICE static bool loads_token_scales(uint32_t wave) { return wave < Tiles::kTokenBandLoads; }
  template <class Weights>
  RQ_DEVICE static arch::MovingBuffer scales_of(const Operands& in, const TokenScales& scales,
                                                const Weights& weights, uint32_t wave) {
    const uint32_t band_bytes = static_cast<uint32_t>(kScaleTileRows * in.padded_groups);
    if (loads_token_scales(wave))
      return {in.a_scales + scales.band * int64_t{band_bytes} - kReach,
              Tiles::kTokenBands * band_bytes + kReach};
    return {in.b_scales + weights.first / 2 * int64_t{band_bytes} - kReach,
            weights.band_reach(Tiles::kWeightBands) * band_bytes + kReach};
  }

  arch::LdsAddress lds_;
  uint32_t wave_;
  arch::MovingBuffer a_, b_, scales_;
  uint32_t token_offset_[kTokenLoads], weight_offset_[kWeightLoads], scale_offset_;
  arch::LdsPointer token_read_[kStepHalves], weight_read_, token_scale_read_, weight_scale_read_;
  uint32_t end_group_, lane_;
};

}  // namespace rotquant::device
