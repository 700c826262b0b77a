// SPDX-License-Identifier: MIT
// How moe_sort is cut on a GPU, from shapes alone. No HIP.
#pragma once

#include "core/moe.h"

namespace rotquant {

// A workgroup sorts so many routes at a time, a quarter of them in one step.
constexpr int kMoeSortTile = 4096;
constexpr int kMoeSortStep = kMoeSortTile / 4;

// One launch up to here, else three. Modelled, not measured: a step is 112 vector instructions
// (counted, 256 experts) in each of 16 waves, 0.75 us of a compute unit at 2.4 GHz; padding is 8
// bytes a row at no more than 64 bytes a clock, 1.7 us; two launches more cost 3 to 4 us.
constexpr int64_t kMoeSortAloneRoutes = kMoeSortTile;
constexpr int64_t kMoeSortAloneRows = 32768;

constexpr int64_t kMoeSortMaxGroups = 256;       // one for each compute unit
constexpr int64_t kMoeSortFillBytes = 16 << 10;  // of padding and of `zero`, a workgroup
constexpr int64_t kMoeSortMaxFillGroups = 8 * 256;

struct MoeSortPlan {
  bool alone;                // one workgroup sorts, in one launch
  int64_t groups;            // workgroups with routes
  int64_t routes_per_group;  // a multiple of a step
  int64_t fill_groups;       // workgroups more in the first launch
};

constexpr MoeSortPlan plan_moe_sort(int64_t routes, int64_t max_rows, int64_t zero_bytes) {
  const bool alone = routes <= kMoeSortAloneRoutes && max_rows <= kMoeSortAloneRows;
  const int64_t steps = routes ? round_up_to(routes, kMoeSortStep) / kMoeSortStep : 1;
  const int64_t most = alone ? 1 : kMoeSortMaxGroups;
  const int64_t steps_per_group = round_up_to(steps, most) / most;
  const int64_t fill = zero_bytes + (alone ? 0 : 8 * max_rows);
  const int64_t fill_groups = round_up_to(fill, kMoeSortFillBytes) / kMoeSortFillBytes;
  return {alone, round_up_to(steps, steps_per_group) / steps_per_group,
          steps_per_group * kMoeSortStep,
          fill_groups < kMoeSortMaxFillGroups ? fill_groups : kMoeSortMaxFillGroups};
}

// route / topk by a product. Exact because route * (reciprocal * topk - 2^32) stays below 2^32:
// routes are less than 2^28, and the bracket is less than topk <= 16.
constexpr uint64_t moe_sort_reciprocal(int topk) {
  return topk ? ((uint64_t{1} << 32) + static_cast<uint64_t>(topk) - 1) / topk : 0;
}
RQ_HOST_DEVICE constexpr uint32_t moe_sort_token(uint32_t route, uint64_t reciprocal) {
  return static_cast<uint32_t>(route * reciprocal >> 32);
}
static_assert(kMoeMaxTokens * kMoeMaxTopk * (kMoeMaxTopk - 1) < int64_t{1} << 32);

// The workspace of three launches: counts [groups + 1, columns], a column a local expert; the last
// row is for the sums.
RQ_HOST_DEVICE constexpr int64_t moe_sort_columns(int64_t local_experts) {
  return round_up_to(local_experts, 64);
}

constexpr int64_t moe_sort_workspace_bytes(const MoeSortParams& p) {
  const MoeSortPlan plan = plan_moe_sort(p.tokens * p.topk, p.max_rows, p.zero_bytes);
  return plan.alone ? 0 : (plan.groups + 1) * moe_sort_columns(p.local_experts) * 4;
}

}  // namespace rotquant
