// SPDX-License-Identifier: MIT
// Tokens that become operands on their way in: x is rotated and quantised in the registers that the
// matrix instruction reads, to the bytes of moe_rotate_quant.
//
// In the operand's layout a lane holds 32 consecutive k of one token, which is a scale group, and
// needs that group's scale. So nothing is exchanged but the rotation's steps beyond 32: h = 32 goes
// to the next quarter of the wave, h = 64 to the one after, h = 128 to the other half step.
#pragma once

#include "hip/device/direct_operands.h"
#include "hip/device/quantize.h"
#include "hip/device/tiles.h"
#include "hip/moe_gemm1/config.h"
#include "hip/moe_gemm1/hadamard.h"

namespace rotquant::hip {

using arch::u32x4;
using device::kStepHalves;

// One step of h across the wave's quarters: kLaneBit apart, the lower lane gets the sum and the
// upper one the difference. Two registers at a time: after the swap one lane has both values of the
// first and its partner both of the second.
template <int kLaneBit>
RQ_DEVICE void butterfly_across_quarters(f32x2 (&y)[kPairs]) {
  RQ_UNROLL
  for (int i = 0; i < kPairs; ++i) {
    uint32_t a = float_to_bits(y[i].x), b = float_to_bits(y[i].y);
    arch::swap_lane_bit<kLaneBit>(a, b);
    const float lower = bits_to_float(a), upper = bits_to_float(b);
    a = float_to_bits(lower + upper), b = float_to_bits(lower - upper);
    arch::swap_lane_bit<kLaneBit>(a, b);
    y[i] = f32x2{bits_to_float(a), bits_to_float(b)};
  }
}

class QuantisedTokens {
 public:
  struct Raw {
    u32x4 chunks[kStepHalves][device::kChunks];
  };
  struct Step {
    u32x4 codes[kStepHalves];
    uint32_t scales;  // as in a shuffled tile: half 0 in byte 0, half 1 in byte 2
  };

  RQ_DEVICE QuantisedTokens(const MoeGemm1Params& p, uint32_t token, uint32_t lane)
      : p_(p),
        row_(static_cast<const uint16_t*>(p.x.data) + token * p.x.row_stride +
             device::chunk_of(lane) * device::kChunkChannels),
        groups_(static_cast<uint32_t>(p.k / kGroup)),
        lane_group_(device::frag_group(lane)),
        bias_(scale_bias(p.scale_mode)) {}

  // Four lanes load a group of their token, then the next one (device/tiles.h says why).
  RQ_DEVICE void load(uint32_t step, Raw& to) const {
    RQ_UNROLL
    for (uint32_t h = 0; h < kStepHalves; ++h) {
      RQ_UNROLL
      for (uint32_t j = 0; j < device::kChunks; ++j)
        to.chunks[h][j] = arch::load(row_ + readable(first_group(step, h) + j) * kGroup);
    }
  }

  // kSize: of the Hadamard, 0 = none.
  template <int kSize>
  RQ_DEVICE Step quantise(uint32_t step, Raw& raw) const {
    f32x2 y[kStepHalves][kPairs];
    RQ_UNROLL
    for (uint32_t h = 0; h < kStepHalves; ++h) {
      device::swap_chunks(raw.chunks[h]);
      unpack(raw.chunks[h], y[h]);
      if constexpr (kSize > 0) {
        if (p_.rotation.prescale)
          prescale_group(p_.rotation.prescale + readable(own_group(step, h)) * kGroup, y[h]);
        constexpr int kInLane = kSize < kGroup ? kSize : kGroup;
        device::fwht<kInLane>(y[h], 0);
      }
      if constexpr (kSize >= 64) butterfly_across_quarters<16>(y[h]);
      if constexpr (kSize >= 128) butterfly_across_quarters<32>(y[h]);
    }
    if constexpr (kSize == 256) {
      RQ_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        const f32x2 a = y[0][i], b = y[1][i];
        y[0][i] = a + b, y[1][i] = a - b;
      }
    }
    const HadamardNorm norm(kSize);
    Step result{{}, 0};
    RQ_UNROLL
    for (uint32_t h = 0; h < kStepHalves; ++h) {
      norm(y[h]);
      const auto group =
          device::quantize_group<ElementFormat::e2m1, false>(y[h], bias_, norm.shift);
      const bool real = own_group(step, h) < groups_;
      result.codes[h] = real ? group.codes : u32x4{0, 0, 0, 0};
      result.scales |= (real ? group.scale : 0) << (16 * h);
    }
    return result;
  }

 private:
  RQ_DEVICE static uint32_t first_group(uint32_t step, uint32_t h) {
    return step * kScaleTileGroups + h * device::kHalfGroups;
  }
  RQ_DEVICE uint32_t own_group(uint32_t step, uint32_t h) const {
    return first_group(step, h) + lane_group_;
  }
  // Groups past the end read the last one again, so that no load needs a predicate.
  RQ_DEVICE uint32_t readable(uint32_t group) const {
    return group < groups_ ? group : groups_ - 1;
  }
  RQ_DEVICE void unpack(const u32x4 (&chunks)[device::kChunks], f32x2 (&y)[kPairs]) const {
    if (p_.x.dtype == DType::bf16) {
      RQ_UNROLL
      for (int i = 0; i < kPairs; ++i) y[i] = arch::unpack_bf16(chunks[i / 4][i % 4]);
    } else {
      RQ_UNROLL
      for (int i = 0; i < kPairs; ++i) y[i] = arch::unpack_fp16(chunks[i / 4][i % 4]);
    }
  }

  const MoeGemm1Params& p_;
  const uint16_t* row_;  // of this lane's token, from the chunk that it loads
  uint32_t groups_, lane_group_;
  uint32_t bias_;  // of the scale mode
};

// acc += steps first, first + stride, ... below end. A step's weights are on their way while its
// tokens are quantised, and the next step's tokens too.
template <int kSize, int kWeights>
RQ_DEVICE void inline_product(const QuantisedTokens& tokens,
                              const device::DirectWeights<kWeights>& weights, uint32_t first,
                              uint32_t end, uint32_t stride, device::f32x4 (&acc)[1][kWeights]) {
  QuantisedTokens::Raw raw;
  tokens.load(first, raw);
#pragma unroll 1
  for (uint32_t step = first; step < end; step += stride) {
    u32x4 codes[kWeights][kStepHalves];
    uint32_t scales[kWeights / 2];
    RQ_UNROLL
    for (uint32_t h = 0; h < kStepHalves; ++h) weights.load_half(step, h, codes);
    weights.load_scales(step, scales);
    const auto token = tokens.quantise<kSize>(step, raw);
    tokens.load(step + stride, raw);
    arch::keep_order();  // or the loads end up behind the products
    RQ_UNROLL
    for (int j = 0; j < kWeights / 2; ++j) scales[j] &= weights.scale_mask(step);
    device::unrolled<kStepHalves>([&](auto h) {
      device::unrolled<kWeights>([&](auto j) {
        device::multiply_fragment<h.value, 0, j.value>(acc[0][j.value], token.codes[h.value],
                                                       codes[j.value][h.value], token.scales,
                                                       scales[j.value / 2]);
      });
    });
  }
}

// One loop for each size: with their branches inside, a seventh of its instructions would be copies
// where they meet.
template <int kWeights>
RQ_DEVICE void inline_product(int size, const QuantisedTokens& tokens,
                              const device::DirectWeights<kWeights>& weights, uint32_t first,
                              uint32_t end, uint32_t stride, device::f32x4 (&acc)[1][kWeights]) {
  const auto run = [&](auto constant) {
    inline_product<constant.value>(tokens, weights, first, end, stride, acc);
  };
  switch (size) {
    case 0: return run(device::Index<0>{});
    case 16: return run(device::Index<16>{});
    case 32: return run(device::Index<32>{});
    case 64: return run(device::Index<64>{});
    case 128: return run(device::Index<128>{});
    default: return run(device::Index<256>{});
  }
}

}  // namespace rotquant::hip
