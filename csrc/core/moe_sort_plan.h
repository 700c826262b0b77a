// SPDX-License-Identifier: MIT
// How moe_sort is cut on a GPU, from shapes alone. No HIP.
#pragma once

#include "core/moe.h"

namespace rotquant {

// A workgroup sorts so many routes at a time, a quarter of them in one step.
constexpr int kMoeSortTile = 4096;
constexpr int kMoeSortStep = kMoeSortTile / 4;

// One launch up to here, else three. Modelled, not measured: a step of 1024 routes is about 100
// vector instructions in each of 16 waves, 0.7 us of a compute unit at 2.4 GHz, and it fills 8
// bytes a sorted row at no more than 64 bytes a clock; two launches more cost 3 to 4 us.
constexpr int64_t kMoeSortAloneRoutes = kMoeSortTile;
constexpr int64_t kMoeSortAloneRows = 32768;

constexpr int64_t kMoeSortMaxGroups = 256;       // one for each compute unit
constexpr int64_t kMoeSortFillBytes = 64 << 10;  // of padding and of `zero`, a workgroup
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
