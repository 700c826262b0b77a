// SPDX-License-Identifier: MIT
// moe_sort, moe_sort_zero_: check -> allocate -> params -> run, the same checks on every device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include <cstring>
#include <utility>

#include "core/moe_sort_plan.h"
#include "cpu/moe_sort.h"
#include "ops/moe.h"

namespace rotquant::ops {
namespace {

// NOTE: an id that int32 cannot hold must not wrap into the range of experts.
at::Tensor narrow_ids(const at::Tensor& ids, int64_t experts) {
  return (ids.scalar_type() == at::kInt ? ids : ids.clamp(-1, experts).to(at::kInt)).contiguous();
}

// NOTE: likewise. Numbers other than 0 and 1 stay such, for the kernel to notice.
at::Tensor narrow(const at::Tensor& t) {
  const at::Tensor narrow = t.scalar_type() == at::kLong ? t.clamp(-1, kMoeMaxExperts) : t;
  return narrow.to(at::kInt).contiguous();
}

void run([[maybe_unused]] const at::Tensor& t, const MoeSortParams& params,
         const OptionalTensor& zero) {
  if (t.is_meta()) return;
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(t)) {
    MoeSortParams p = params;
    const int64_t bytes = moe_sort_workspace_bytes(p);
    const at::Tensor workspace = at::empty({bytes / 4}, t.options().dtype(at::kInt));
    p.workspace = bytes ? write_to<int32_t>(workspace) : nullptr;
    return on_device_of(t, [&](hipStream_t stream) { hip::moe_sort(p, stream); });
  }
#endif
  if (zero) memset(write_to(*zero), 0, zero->nbytes());  // of any dtype
  constexpr int64_t kRoutesPerPart = 1 << 14, kMaxParts = 64;
  const int64_t routes = params.tokens * params.topk;
  const int64_t parts = std::clamp<int64_t>(routes / kRoutesPerPart, 1, kMaxParts);
  cpu::MoeSort sort(params, parts);
  const auto each_part = [&](auto f) { at::parallel_for(0, parts, 1, f); };
  each_part([&](int64_t begin, int64_t end) { sort.count(begin, end); });
  sort.scan();
  each_part([&](int64_t begin, int64_t end) { sort.place(begin, end); });
}

}  // namespace

void check_ownership(const at::Tensor& topk_ids, const OptionalTensor& mask,
                     const OptionalTensor& map, std::optional<int64_t> experts,
                     std::optional<int64_t> local) {
  RQ_CHECK(!mask || !map, "expert_map", "None beside an expert_mask", "a tensor");
  for (const auto& [argument, t] :
       {std::pair{"expert_mask", &mask}, std::pair{"expert_map", &map}}) {
    if (!*t) continue;
    check_device(**t, argument, topk_ids);
    const auto type = (*t)->scalar_type();
    const bool whole = type == at::kInt || type == at::kLong;
    const bool small = type == at::kBool || type == at::kByte || type == at::kChar;
    RQ_CHECK(whole || (t == &mask && (small || type == at::kShort)), argument,
             t == &mask ? "an integer dtype or bool" : "dtype int32 or int64", type);
    const int64_t size = (*t)->dim() == 1 ? (*t)->size(0) : -1;
    RQ_CHECK(size >= 0 && size == experts.value_or(size), argument,
             experts ? c10::str("shape [", *experts, "]") : "shape [routed experts of all ranks]",
             "shape ", (*t)->sizes());
    RQ_CHECK(size >= 1 && size <= kMoeMaxExperts, argument,
             c10::str("1 to ", kMoeMaxExperts, " experts"), "shape ", (*t)->sizes());
    RQ_CHECK(t != &mask || !local || size >= *local, argument,
             c10::str("at least as many experts as are on this rank, ", *local), "shape ",
             (*t)->sizes());
  }
  if (!mask || !mask->is_cpu() || runs_on_gpu(*mask)) return;
  RQ_CHECK(at::logical_or(mask->eq(0), mask->eq(1)).all().item<bool>(), "expert_mask",
           "1 for the experts of this rank and 0 for others (local indices go into expert_map)",
           "other numbers");
  const int64_t ones = mask->sum().item<int64_t>();
  RQ_CHECK(!local || ones == *local, "expert_mask",
           c10::str(*local, " ones, for the experts of this rank"), ones);
}

Sorted moe_sort(const OptionalTensor& zero, const at::Tensor& topk_ids,
                const at::Tensor& topk_weights, int64_t num_experts, int64_t block_m,
                const OptionalTensor& expert_mask, const OptionalTensor& expert_map,
                std::optional<int64_t> num_local_experts, bool all_here) {
  if (zero) {
    RQ_CHECK(zero->is_contiguous(), "zero", "a contiguous tensor",
             c10::str("shape ", zero->sizes(), " with strides ", zero->strides()));
    check_device(topk_ids, "topk_ids", *zero);
  }
  const auto id_type = topk_ids.scalar_type();
  RQ_CHECK(id_type == at::kInt || id_type == at::kLong, "topk_ids", "dtype int32 or int64",
           id_type);
  RQ_CHECK(topk_ids.dim() == 2, "topk_ids", "shape [M, topk]", "shape ", topk_ids.sizes());
  const int64_t tokens = topk_ids.size(0), topk = topk_ids.size(1);
  RQ_CHECK(tokens < kMoeMaxTokens, "topk_ids", c10::str("less than ", kMoeMaxTokens, " tokens"),
           tokens);
  RQ_CHECK(topk <= kMoeMaxTopk, "topk_ids", c10::str("a topk of at most ", kMoeMaxTopk), topk);
  check_device(topk_weights, "topk_weights", topk_ids);
  RQ_CHECK(is_float(topk_weights), "topk_weights", "a floating-point dtype",
           topk_weights.scalar_type());
  RQ_CHECK(topk_weights.sizes() == topk_ids.sizes(), "topk_weights",
           c10::str("shape ", topk_ids.sizes(), ", that of topk_ids"), "shape ",
           topk_weights.sizes());
  RQ_CHECK(num_experts >= 1 && num_experts <= kMoeMaxExperts, "num_experts",
           c10::str("1 to ", kMoeMaxExperts), num_experts);
  RQ_CHECK(block_m == 16 || block_m == 32 || block_m == 64 || block_m == 128, "block_m",
           "one of 16, 32, 64, 128", block_m);
  const int64_t local_experts = num_local_experts.value_or(num_experts);
  RQ_CHECK(local_experts >= 0 && local_experts <= num_experts, "num_local_experts",
           c10::str("0 to num_experts ", num_experts), local_experts);
  check_ownership(topk_ids, expert_mask, expert_map, num_experts, std::nullopt);
  const at::Tensor mask = expert_mask ? narrow(*expert_mask) : at::Tensor();
  const at::Tensor map = expert_map ? narrow(*expert_map) : at::Tensor();
  const at::Tensor ids = narrow_ids(topk_ids, num_experts);
  const at::Tensor weights = floats_of(topk_weights);

  const int64_t max_rows = moe_max_rows(tokens * topk, local_experts, block_m);
  const auto ints = ids.options();
  const Sorted sorted{at::empty({max_rows}, ints), at::empty({max_rows}, weights.options()),
                      at::empty({max_rows / block_m}, ints), at::empty({2}, ints),
                      at::empty({tokens * topk}, ints)};
  run(ids,
      MoeSortParams{.topk_ids = read_from<int32_t>(ids),
                    .topk_weights = read_from<float>(weights),
                    .expert_mask = expert_mask ? read_from<int32_t>(mask) : nullptr,
                    .expert_map = expert_map ? read_from<int32_t>(map) : nullptr,
                    .tokens = tokens,
                    .topk = static_cast<int>(topk),
                    .experts = static_cast<int>(num_experts),
                    .local_experts = static_cast<int>(local_experts),
                    .mask_ones = all_here ? static_cast<int>(local_experts) : -1,
                    .block_m = static_cast<int>(block_m),
                    .max_rows = max_rows,
                    .sorted_ids = write_to<int32_t>(sorted.sorted_ids),
                    .sorted_weights = write_to<float>(sorted.sorted_weights),
                    .sorted_expert_ids = write_to<int32_t>(sorted.sorted_expert_ids),
                    .num_valid = write_to<int32_t>(sorted.num_valid),
                    .reverse_sorted = write_to<int32_t>(sorted.reverse_sorted),
                    .zero = zero ? write_to(*zero) : nullptr,
                    .zero_bytes = zero ? static_cast<int64_t>(zero->nbytes()) : 0,
                    .workspace = nullptr},
      zero);
  return sorted;
}

namespace {

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Result as_tuple(const Sorted& s) {
  return {s.sorted_ids, s.sorted_weights, s.sorted_expert_ids, s.num_valid, s.reverse_sorted};
}

Result sort_op(const at::Tensor& topk_ids, const at::Tensor& topk_weights, int64_t num_experts,
               int64_t block_m, const OptionalTensor& expert_mask, const OptionalTensor& expert_map,
               std::optional<int64_t> num_local_experts) {
  return as_tuple(moe_sort(std::nullopt, topk_ids, topk_weights, num_experts, block_m, expert_mask,
                           expert_map, num_local_experts));
}

Result sort_zero_op(at::Tensor& zero, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                    int64_t num_experts, int64_t block_m, const OptionalTensor& expert_mask,
                    const OptionalTensor& expert_map, std::optional<int64_t> num_local_experts) {
  return as_tuple(moe_sort(zero, topk_ids, topk_weights, num_experts, block_m, expert_mask,
                           expert_map, num_local_experts));
}

void register_kernels(torch::Library& m) {
  m.impl("moe_sort", sort_op);
  m.impl("moe_sort_zero_", sort_zero_op);
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { register_kernels(m); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { register_kernels(m); }
#endif

}  // namespace rotquant::ops
