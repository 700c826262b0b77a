// SPDX-License-Identifier: MIT
// moe_sort on a CPU: a counting sort in which each part of the routes is counted and placed on its
// own, in any order and on any thread. No torch here.
#pragma once

#include <stddef.h>

#include <vector>

#include "core/params.h"

namespace rotquant::cpu {

// count() of every part, then scan(), then place() of every part. `zero` is the caller's to clear.
class MoeSort {
 public:
  MoeSort(const MoeSortParams& params, int64_t parts);

  void count(int64_t begin, int64_t end);  // parts [begin, end)
  void scan();
  void place(int64_t begin, int64_t end);

 private:
  int64_t first_route(int64_t part) const { return routes_ * part / parts_; }
  int32_t* counts_of(int64_t part) { return counts_.data() + part * p_.local_experts; }
  int local_expert(int32_t id) const {
    return id < 0 || id >= p_.experts ? -1 : local_of_[static_cast<size_t>(id)];  // < 0: dropped
  }

  const MoeSortParams p_;
  const int64_t routes_, parts_;
  std::vector<int> local_of_;    // [experts], -1 = not local
  std::vector<int32_t> counts_;  // [parts, local_experts]; after scan() the next route's row
};

}  // namespace rotquant::cpu
