// SPDX-License-Identifier: MIT
// The main loops of the GEMMs: a tile's product over a range of steps of 256 k.
#pragma once

#include "hip/device/direct_operands.h"
#include "hip/device/staged_operands.h"

namespace rotquant::device {

// --- few tokens -------------------------------------------------------------------------------
// No barrier in the loop, and as many bytes in flight as registers hold.

// acc += steps first, first + stride, ... below end, kDepth of them in flight.
template <int kDepth, int kTokens, int kWeights>
RQ_DEVICE void direct_product(const DirectOperands<kTokens, kWeights>& operands, uint32_t first,
                              uint32_t end, uint32_t stride, f32x4 (&acc)[kTokens][kWeights]) {
  StepOperands<kTokens, kWeights> in_flight[kDepth];
  RQ_UNROLL
  for (int d = 0; d < kDepth; ++d) operands.load(first + d * stride, in_flight[d]);
  uint32_t step = first;
  for (; step + kDepth * stride < end; step += kDepth * stride) {
    RQ_UNROLL
    for (int d = 0; d < kDepth; ++d) {
      operands.multiply(step + d * stride, in_flight[d], acc);
      operands.load(step + (kDepth + d) * stride, in_flight[d]);
    }
  }
  // Steps past the end were loaded as zeros.
  RQ_UNROLL
  for (int d = 0; d < kDepth; ++d) operands.multiply(step + d * stride, in_flight[d], acc);
}

// --- many tokens ------------------------------------------------------------------------------
// A step is two halves, each the product of every token fragment with every weight fragment, token
// by token. A fragment is read half a step before it is used: weights into registers of their own,
// a token fragment into those of the one that has just been used up. One barrier a step, a little
// into the second half, tells that nobody reads the step's buffer any more and that the next step
// is there; then the step after that is loaded into the buffer, and has a whole step to arrive.

// acc += steps first .. end - 1. Steps are loaded in pairs: the last one, or without any k both,
// may not exist.
template <int kTokens, int kWeights, int kWavesM, int kWavesN>
RQ_DEVICE void staged_product(StagedOperands<kTokens, kWeights, kWavesM, kWavesN>& operands,
                              uint32_t first, uint32_t end, f32x4 (&acc)[kTokens][kWeights]) {
  using Staged = StagedOperands<kTokens, kWeights, kWavesM, kWavesN>;
  u32x4 tokens[kTokens], weights[2][kWeights];
  typename Staged::Scales scales[2];

  // The products of half a step. Before those of token fragment i: before_row(Index<i>).
  const auto multiply = [&](auto half, const auto& with, auto&& before_row) {
    unrolled<kTokens>([&](auto i) {
      before_row(i);
      unrolled<kWeights>([&](auto j) {
        multiply_fragment<half.value, i.value, j.value>(
            acc[i.value][j.value], tokens[i.value], weights[half.value][j.value],
            with.tokens[i.value / 2], with.weights[j.value / 2]);
        arch::keep_order(acc[i.value][j.value]);
      });
    });
  };
  // What is read before row i for the next half: a share of the weights and the tokens from kFrom
  // on that rows before i have used up.
  const auto read_ahead = [&](auto i, auto half, uint32_t buffer, auto from) {
    constexpr int kRow = i.value - from.value, kRows = kTokens - from.value;
    unrolled<(kRow + 1) * kWeights / kRows, kRow * kWeights / kRows>([&](auto j) {
      weights[half.value][j.value] = operands.template weight<half.value>(buffer, j.value);
    });
    unrolled<i.value, (kRow == 0 ? 0 : i.value - 1)>(
        [&](auto t) { tokens[t.value] = operands.template token<half.value>(buffer, t.value); });
  };

  constexpr int kBarrierRow = kTokens >= 4 ? 2 : 1;
  // One step, from the buffer and scales of its parity. Unless it is one of the last two, the loads
  // of the step after the next go among the products.
  const auto iterate = [&](uint32_t step, auto parity, auto more) {
    constexpr int kThis = parity.value, kNext = 1 - kThis, kLast = kTokens - 1;
    constexpr bool kReadNext = more.value || kThis == 0;
    if constexpr (!more.value) operands.mask(step, scales[kThis]);
    multiply(Index<0>{}, scales[kThis], [&](auto i) {
      if constexpr (i.value == 0) {
        arch::wait_lds_reads();
        tokens[kLast] = operands.template token<0>(kThis, kLast);
      }
      read_ahead(i, Index<1>{}, kThis, Index<0>{});
      if constexpr (!more.value) tokens[i.value] &= operands.template real<0>(step);
    });
    multiply(Index<1>{}, scales[kThis], [&](auto i) {
      if constexpr (i.value == 0) {
        arch::wait_lds_reads();
        tokens[kLast] = operands.template token<1>(kThis, kLast);
      }
      if constexpr (kReadNext && i.value >= kBarrierRow) {
        if constexpr (i.value == kBarrierRow) {
          arch::wait_lds_loads();
          arch::barrier();
          operands.read_scales(kNext, scales[kNext]);
        }
        read_ahead(i, Index<0>{}, kNext, Index<kBarrierRow>{});
        if constexpr (more.value) {
          constexpr int kRow = i.value - kBarrierRow, kRows = kTokens - kBarrierRow,
                        kLoads = Staged::kLoads;
          unrolled<(kRow + 1) * kLoads / kRows, kRow * kLoads / kRows>(
              [&](auto l) { operands.template load<l.value>(kThis); });
        }
      }
      if constexpr (!more.value) tokens[i.value] &= operands.template real<1>(step);
    });
  };

  operands.skip_to(first);
  operands.load_all(0);
  operands.load_all(1);
  arch::wait_lds_loads();
  arch::barrier();
  operands.read_scales(0, scales[0]);
  unrolled<kTokens - 1>([&](auto i) { tokens[i.value] = operands.template token<0>(0, i.value); });
  unrolled<kWeights>(
      [&](auto j) { weights[0][j.value] = operands.template weight<0>(0, j.value); });
  uint32_t step = first;
  for (; step + 2 < end; step += 2) {
    iterate(step, Index<0>{}, Index<1>{});
    iterate(step + 1, Index<1>{}, Index<1>{});
  }
  iterate(step, Index<0>{}, Index<0>{});
  if (step + 1 < end) iterate(step + 1, Index<1>{}, Index<0>{});
}

}  // namespace rotquant::device
