// SPDX-License-Identifier: MIT
// moe_rotate_quant, moe_sort_scales: check -> allocate -> params -> run, the same checks on every
// device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "cpu/backend.h"
#include "cpu/moe_rotate_quant.h"
#include "ops/moe_sorting.h"
#include "ops/rotation.h"

namespace rotquant::ops {
namespace {

void sort_scales_on_cpu(const MoeSortScalesParams& params) {
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
  const at::Tensor out =
      at::empty(sorted_scales_shape(sorting.params.max_rows, groups * kGroup), scales.options());
  const MoeSortScalesParams params{read_from<uint8_t>(scales), by_route, groups, sorting.params,
                                   write_to<uint8_t>(out)};
  if (out.is_meta()) return out;
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(scales)) {
    on_device_of(scales, [&](hipStream_t stream) { hip::moe_sort_scales(params, stream); });
    return out;
  }
#endif
  sort_scales_on_cpu(params);
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
  const int64_t tokens = rows.params.rows, k = rows.params.k;
  RQ_CHECK(k < int64_t{1} << 31, "x", "fewer than 2^31 channels", k);
  const CheckedRotation checked =
      check_rotation({.or_none = true}, x, k, rotation, rotation_size, prescale);
  const at::Tensor reverse = sorting_part(reverse_sorted, "reverse_sorted", "[M * topk]", x);
  const int64_t topk = tokens == 0 ? 1 : reverse.numel() / tokens;
  RQ_CHECK(reverse.numel() == (tokens == 0 ? 0 : tokens * topk) && topk >= 1 && topk <= kMoeMaxTopk,
           "reverse_sorted",
           c10::str("M * topk rows for the ", tokens, " rows of x, topk 1 to ", kMoeMaxTopk),
           "shape ", reverse_sorted.sizes());
  CheckedSorting sorting = check_sorting(x, sorted_ids, num_valid, tokens, topk);
  sorting.params.reverse_sorted = read_from<int32_t>(reverse);

  const auto options = x.options().dtype(at::kByte);
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(x)) {
    at::Tensor codes = at::empty({tokens, k / 2}, options);
    at::Tensor scales = at::empty(sorted_scales_shape(sorting.params.max_rows, k), options);
    const MoeRotateQuantParams params{
        rows.params,       checked.params, ElementFormat::e2m1,      mode,
        bf16_intermediate, sorting.params, write_to<uint8_t>(codes), write_to<uint8_t>(scales)};
    on_device_of(x, [&](hipStream_t stream) { hip::moe_rotate_quant(params, stream); });
    return {codes, scales};
  }
#endif
  return rotate_quant_sorted(rows.params, checked.params, mode, bf16_intermediate, sorting.params,
                             options);
}

std::tuple<at::Tensor, at::Tensor> rotate_quant_sorted(const Activation& x,
                                                       const Rotation& rotation, ScaleMode mode,
                                                       bool bf16_intermediate,
                                                       const MoeSorting& sorting,
                                                       const at::TensorOptions& options) {
  at::Tensor codes = at::empty({x.rows, x.k / 2}, options);
  at::Tensor scales = at::empty(sorted_scales_shape(sorting.max_rows, x.k), options);
  const at::Tensor natural = at::empty({x.rows, x.k / kGroup}, options);
  const RotateQuantParams params{x,
                                 rotation,
                                 ElementFormat::e2m1,
                                 mode,
                                 bf16_intermediate,
                                 false,
                                 write_to<uint8_t>(codes),
                                 write_to<uint8_t>(natural)};
  if (codes.is_meta()) return {codes, scales};
  parallel_items(cpu::rotate_quant_items(params), std::max(rotation.size, kGroup),
                 [&](int64_t begin, int64_t end) { cpu::rotate_quant(params, begin, end); });
  sort_scales_on_cpu({params.scales, false, x.k / kGroup, sorting, write_to<uint8_t>(scales)});
  return {codes, scales};
}

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { register_kernels(m); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { register_kernels(m); }
#endif

}  // namespace rotquant::ops
