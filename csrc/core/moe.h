// SPDX-License-Identifier: MIT
// What moe_sort makes and the MoE kernels agree on. Host and device; no HIP, no torch.
//
// Sorted rows: routes ordered by local expert, then token, then slot; every expert that has routes
// is padded to a multiple of block_m rows. sorted_ids[row] = slot << 24 | token; a padding row, and
// every row from num_valid[0] on, is topk << 24 | tokens with weight 0. Block b of block_m rows
// belongs to local expert sorted_expert_ids[b] (-1 from num_valid[0] / block_m on).
// num_valid = {rows in use, tokens}. reverse_sorted[token * topk + slot] is the route's row, -1 if
// the route was dropped: an id that is negative, not below `experts`, or of an expert that is not
// local; kMoeInvalid if it was not sorted, as the mask is none: see moe_sort.
//
// The buffers come back from the caller, who may have changed them, kept them from another sort, or
// have weights for fewer experts. Every kernel and the CPU read them alike, and nothing outside a
// buffer: of num_valid[0] what is in 0 .. max_rows counts, in 16s, and for a GEMM in whole blocks;
// a block of no expert and a row that is_route() denies contribute nothing. Only where sorted_ids
// and reverse_sorted contradict each other, a GPU's moe_rotate_quant leaves open which scales a row
// gets.
#pragma once

#include "core/layout.h"
#include "core/macros.h"
#include "core/params.h"

namespace rotquant {

constexpr int kMoeMaxExperts = 1024;
constexpr int kMoeMaxTopk = 16;
constexpr int64_t kMoeMaxTokens = int64_t{1} << 24;  // a token is 24 bits of a sorted id
constexpr int kMoeSlotShift = 24;
// NOTE: nothing is read back from a GPU, so a mask that holds other numbers than 0 and 1, or
// another number of ones than there are local experts, is answered with NaN: as the weight of every
// sorted row, and for moe_reduce as this in every element of reverse_sorted.
constexpr int32_t kMoeInvalid = -2;

RQ_HOST_DEVICE constexpr int32_t moe_token(int32_t sorted_id) { return sorted_id & 0xFFFFFF; }
RQ_HOST_DEVICE constexpr int32_t moe_slot(int32_t sorted_id) {
  return sorted_id >> kMoeSlotShift & 0xFF;
}
RQ_HOST_DEVICE constexpr int32_t moe_sorted_id(int64_t token, int slot) {
  return static_cast<int32_t>(token | static_cast<int64_t>(slot) << kMoeSlotShift);
}

// Whether a sorted row stands for one of the routes.
RQ_HOST_DEVICE constexpr bool is_route(const MoeSorting& s, int32_t sorted_id) {
  return moe_token(sorted_id) < s.tokens && moe_slot(sorted_id) < s.topk;
}

// Rows in use, from num_valid[0]: no less than 0, no more than there are, whole 16s.
RQ_HOST_DEVICE constexpr int32_t moe_rows_in_use(const MoeSorting& s, int32_t num_valid) {
  const auto most = static_cast<int32_t>(s.max_rows);
  return (num_valid < 0 ? 0 : num_valid < most ? num_valid : most) & -16;
}

// Rows that any routing can need: A experts with routes waste at most block_m - 1 rows each, and
// what is left of the routes after one each fills whole blocks.
constexpr int64_t moe_max_rows(int64_t routes, int64_t experts, int64_t block_m) {
  const int64_t active = experts < routes ? experts : routes;
  return active == 0 ? 0 : block_m * (active + (routes - active) / block_m);
}

// Rows of a sorted, shuffled scale tensor.
constexpr int64_t moe_scale_rows(int64_t max_rows) { return round_up_to(max_rows, kScaleTileRows); }

}  // namespace rotquant
