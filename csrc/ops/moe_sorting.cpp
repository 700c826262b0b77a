// SPDX-License-Identifier: MIT
#include "ops/moe_sorting.h"

namespace rotquant::ops {

at::Tensor sorting_part(const at::Tensor& t, const char* argument, std::string_view shape,
                        const at::Tensor& x) {
  check_device(t, argument, x);
  RQ_CHECK(t.scalar_type() == at::kInt, argument, "dtype int32, as moe_sort returns it",
           t.scalar_type());
  RQ_CHECK(t.dim() == 1, argument, c10::str("shape ", shape), "shape ", t.sizes());
  return t.contiguous();
}

CheckedSorting check_sorting(const at::Tensor& x, const at::Tensor& sorted_ids,
                             const at::Tensor& num_valid, int64_t tokens, int64_t topk) {
  RQ_CHECK(topk >= 1 && topk <= kMoeMaxTopk, "topk", c10::str("1 to ", kMoeMaxTopk), topk);
  RQ_CHECK(tokens >= 0 && tokens < kMoeMaxTokens, "tokens", c10::str("0 to ", kMoeMaxTokens - 1),
           tokens);
  CheckedSorting s;
  s.tensors.sorted_ids = sorting_part(sorted_ids, "sorted_ids", "[max_rows]", x);
  s.tensors.num_valid = sorting_part(num_valid, "num_valid", "[2]", x);
  const int64_t max_rows = s.tensors.sorted_ids.numel();
  RQ_CHECK(max_rows % 16 == 0, "sorted_ids", "whole blocks of 16 rows or more", max_rows, " rows");
  RQ_CHECK(tokens > 0 || max_rows == 0, "sorted_ids", "no rows for no tokens", max_rows, " rows");
  RQ_CHECK(num_valid.numel() == 2, "num_valid", "shape [2]", "shape ", num_valid.sizes());
  s.params.sorted_ids = read_from<int32_t>(s.tensors.sorted_ids);
  s.params.num_valid = read_from<int32_t>(s.tensors.num_valid);
  s.params.max_rows = max_rows;
  s.params.tokens = tokens;
  s.params.topk = static_cast<int>(topk);
  return s;
}

std::vector<int64_t> sorted_scales_shape(int64_t max_rows, int64_t k) {
  return {moe_scale_rows(max_rows), round_up_to(k / kGroup, kScaleTileGroups)};
}

}  // namespace rotquant::ops
