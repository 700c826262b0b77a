// SPDX-License-Identifier: MIT
// moe_rotate_quant, moe_sort_scales: check -> allocate -> params -> run, the same checks on every
// device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "core/moe.h"
#include "cpu/backend.h"
#include "cpu/moe_rotate_quant.h"
#include "ops/moe.h"
#include "ops/rotation.h"

namespace rotquant::ops {
namespace {

// One of moe_sort's results.
at::Tensor sorting_part(const at::Tensor& t, const char* argument, const char* shape,
                        const at::Tensor& x) {
  check_device(t, argument, x);
  RQ_CHECK(t.scalar_type() == at::kInt, argument, "dtype int32, as moe_sort returns it",
           t.scalar_type());
  RQ_CHECK(t.dim() == 1, argument, c10::str("shape ", shape), "shape ", t.sizes());
  return t.contiguous();
}

// What the ops here read of a sorting; owns what `params` points into.
struct CheckedSorting {
  at::Tensor sorted_ids, num_valid, reverse_sorted;
  MoeSorting params{};
};

CheckedSorting check_sorting(const at::Tensor& x, const at::Tensor& sorted_ids,
                             const at::Tensor& num_valid, int64_t tokens, int64_t topk) {
  RQ_CHECK(tokens < kMoeMaxTokens, "tokens", c10::str("less than ", kMoeMaxTokens), tokens);
  CheckedSorting s;
  s.sorted_ids = sorting_part(sorted_ids, "sorted_ids", "[max_rows]", x);
  s.num_valid = sorting_part(num_valid, "num_valid", "[2]", x);
  const int64_t max_rows = s.sorted_ids.numel();
  RQ_CHECK(max_rows % 16 == 0, "sorted_ids", "whole blocks of 16 rows or more", max_rows, " rows");
  RQ_CHECK(tokens > 0 || max_rows == 0, "sorted_ids", "no rows for no tokens", max_rows, " rows");
  RQ_CHECK(s.num_valid.numel() == 2, "num_valid", "shape [2]", "shape ", num_valid.sizes());
  s.params.sorted_ids = s.sorted_ids.const_data_ptr<int32_t>();
  s.params.num_valid = s.num_valid.const_data_ptr<int32_t>();
  s.params.max_rows = max_rows;
  s.params.tokens = tokens;
  s.params.topk = static_cast<int>(topk);
  return s;
}

at::Tensor empty_sorted_scales(const at::Tensor& like, int64_t max_rows, int64_t groups) {
  return at::empty({moe_scale_rows(max_rows), round_up_to(groups, kScaleTileGroups)},
                   like.options().dtype(at::kByte));
}

void sort_scales([[maybe_unused]] const at::Tensor& scales, const MoeSortScalesParams& params) {
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(scales))
    return on_device_of(scales, [&](hipStream_t stream) { hip::moe_sort_scales(params, stream); });
#endif
  const int64_t band = kScaleTileRows * round_up_to(params.groups, kScaleTileGroups);
  parallel_items(cpu::moe_sort_scales_items(params), std::max<int64_t>(1, band),
                 [&](int64_t begin, int64_t end) { cpu::moe_sort_scales(params, begin, end); });
}

at::Tensor moe_sort_scales(const at::Tensor& scales_in, const at::Tensor& sorted_ids,
                           const at::Tensor& num_valid, int64_t topk, bool by_route) {
  const at::Tensor scales = bytes_of(scales_in, "scales");
  RQ_CHECK(topk >= 1 && topk <= kMoeMaxTopk, "topk", c10::str("1 to ", kMoeMaxTopk), topk);
  RQ_CHECK(scales.dim() == 2, "scales",
           by_route ? "shape [M * topk, K / 32] with by_route" : "shape [M, K / 32]", "shape ",
           scales.sizes());
  RQ_CHECK(!by_route || scales.size(0) % topk == 0, "scales",
           c10::str("rows divisible by topk ", topk, " with by_route"), "shape ", scales.sizes());
  const int64_t groups = scales.size(1), tokens = scales.size(0) / (by_route ? topk : 1);
  const CheckedSorting sorting = check_sorting(scales, sorted_ids, num_valid, tokens, topk);
  const at::Tensor out = empty_sorted_scales(scales, sorting.params.max_rows, groups);
  sort_scales(scales, {scales.const_data_ptr<uint8_t>(), by_route, groups, sorting.params,
                       out.mutable_data_ptr<uint8_t>()});
  return out;
}

void register_kernels(torch::Library& m) {
  m.impl("moe_rotate_quant", moe_rotate_quant);
  m.impl("moe_sort_scales", moe_sort_scales);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> moe_rotate_quant(
    const at::Tensor& x, const at::Tensor& sorted_ids, const at::Tensor& num_valid,
    const at::Tensor& reverse_sorted, const OptionalTensor& rotation,
    std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
    std::string_view scale_mode, bool bf16_intermediate) {
  const ScaleMode mode = scale_mode_of(scale_mode);
  RQ_CHECK(x.dim() == 2, "x", "shape [M, K]", "shape ", x.sizes());
  const Rows rows = rows_of(x);
  const int64_t tokens = rows.params.rows, k = rows.params.k, groups = k / kGroup;
  RQ_CHECK(k < int64_t{1} << 31, "x", "fewer than 2^31 channels", k);
  const CheckedRotation checked =
      check_rotation(x, rotation, rotation_size, prescale, RotationSizes::any_or_none);
  const at::Tensor reverse = sorting_part(reverse_sorted, "reverse_sorted", "[M * topk]", x);
  const int64_t topk = tokens == 0 ? 1 : reverse.numel() / tokens;
  RQ_CHECK(reverse.numel() == (tokens == 0 ? 0 : tokens * topk) && topk >= 1 && topk <= kMoeMaxTopk,
           "reverse_sorted",
           c10::str("M * topk rows for the ", tokens, " rows of x, topk 1 to ", kMoeMaxTopk),
           "shape ", reverse_sorted.sizes());
  CheckedSorting sorting = check_sorting(x, sorted_ids, num_valid, tokens, topk);
  sorting.params.reverse_sorted = reverse.const_data_ptr<int32_t>();

  const auto options = x.options().dtype(at::kByte);
  at::Tensor codes = at::empty({tokens, k / 2}, options);
  at::Tensor scales = empty_sorted_scales(x, sorting.params.max_rows, groups);
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(x)) {
    const MoeRotateQuantParams params{rows.params,
                                      checked.params,
                                      ElementFormat::e2m1,
                                      mode,
                                      bf16_intermediate,
                                      sorting.params,
                                      codes.mutable_data_ptr<uint8_t>(),
                                      scales.mutable_data_ptr<uint8_t>()};
    on_device_of(x, [&](hipStream_t stream) { hip::moe_rotate_quant(params, stream); });
    return {codes, scales};
  }
#endif
  // Here a second pass over the scales costs next to nothing.
  const at::Tensor natural = at::empty({tokens, groups}, options);
  const RotateQuantParams params{rows.params,
                                 checked.params,
                                 ElementFormat::e2m1,
                                 mode,
                                 bf16_intermediate,
                                 false,
                                 codes.mutable_data_ptr<uint8_t>(),
                                 natural.mutable_data_ptr<uint8_t>()};
  parallel_items(cpu::rotate_quant_items(params), std::max(checked.params.size, kGroup),
                 [&](int64_t begin, int64_t end) { cpu::rotate_quant(params, begin, end); });
  sort_scales(natural, {natural.const_data_ptr<uint8_t>(), false, groups, sorting.params,
                        scales.mutable_data_ptr<uint8_t>()});
  return {codes, scales};
}

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { register_kernels(m); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { register_kernels(m); }
#endif

}  // namespace rotquant::ops
