// SPDX-License-Identifier: MIT
#include "cpu/moe_sort.h"

#include <algorithm>

#include "core/moe.h"

namespace rotquant::cpu {

MoeSort::MoeSort(const MoeSortParams& params, int64_t parts)
    : p_(params),
      routes_(params.tokens * params.topk),
      parts_(parts),
      local_of_(static_cast<size_t>(params.experts), -1),
      counts_(static_cast<size_t>(parts * params.local_experts)) {
  int local = 0;
  for (int e = 0; e < p_.experts; ++e) {
    int& index = local_of_[static_cast<size_t>(e)];
    if (p_.expert_map)
      index = p_.expert_map[e];
    else if (!p_.expert_mask || p_.expert_mask[e])
      index = local++;
    if (index >= p_.local_experts) index = -1;
  }
}

void MoeSort::count(int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    int32_t* counts = counts_of(part);
    for (int64_t route = first_route(part); route < first_route(part + 1); ++route) {
      const int expert = local_expert(p_.topk_ids[route]);
      if (expert >= 0) ++counts[expert];
    }
  }
}

// Also writes whatever is no route: rows of padding, blocks, the rest of the buffers.
void MoeSort::scan() {
  const int32_t padding = moe_sorted_id(p_.tokens, p_.topk);
  const auto pad = [&](int64_t from, int64_t to) {
    std::fill(p_.sorted_ids + from, p_.sorted_ids + to, padding);
    std::fill(p_.sorted_weights + from, p_.sorted_weights + to, 0.0f);
  };
  int64_t row = 0;
  for (int expert = 0; expert < p_.local_experts; ++expert) {
    const int64_t first = row;
    for (int64_t part = 0; part < parts_; ++part) {
      int32_t& count = counts_of(part)[expert];
      const int32_t routes = count;
      count = static_cast<int32_t>(row);
      row += routes;
    }
    const int64_t next = round_up_to(row, p_.block_m);
    pad(row, next);
    row = next;
    std::fill(p_.sorted_expert_ids + first / p_.block_m, p_.sorted_expert_ids + row / p_.block_m,
              expert);
  }
  pad(row, p_.max_rows);
  std::fill(p_.sorted_expert_ids + row / p_.block_m,
            p_.sorted_expert_ids + p_.max_rows / p_.block_m, -1);
  p_.num_valid[0] = static_cast<int32_t>(row);
  p_.num_valid[1] = static_cast<int32_t>(p_.tokens);
}

void MoeSort::place(int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    int32_t* rows = counts_of(part);
    for (int64_t route = first_route(part); route < first_route(part + 1); ++route) {
      const int expert = local_expert(p_.topk_ids[route]);
      const int32_t row = expert < 0 ? -1 : rows[expert]++;
      p_.reverse_sorted[route] = row;
      if (row < 0) continue;
      p_.sorted_ids[row] = moe_sorted_id(route / p_.topk, static_cast<int>(route % p_.topk));
      p_.sorted_weights[row] = p_.topk_weights[route];
    }
  }
}

}  // namespace rotquant::cpu
