// SPDX-License-Identifier: MIT
// moe_reduce: check -> allocate -> params -> run, the same checks on every device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "cpu/backend.h"
#include "ops/moe_sorting.h"

namespace rotquant::ops {
namespace {

// How many tokens the rows are of, from whichever argument tells.
int64_t tokens_of(const at::Tensor& rows, const OptionalTensor& topk_weights,
                  const OptionalTensor& shared) {
  if (rows.dim() == 3) return rows.size(0);
  if (topk_weights) {
    RQ_CHECK(topk_weights->dim() == 2, "topk_weights", "shape [M, topk]", "shape ",
             topk_weights->sizes());
    return topk_weights->size(0);
  }
  RQ_CHECK(shared && shared->dim() == 2, "rows",
           "shape [M, topk, H] where neither topk_weights nor shared tells M", "shape ",
           rows.sizes());
  return shared->size(0);
}

}  // namespace

at::Tensor moe_reduce(const at::Tensor& rows_in, const OptionalTensor& topk_weights,
                      const at::Tensor& reverse_sorted, const OptionalTensor& scales_in,
                      const OptionalTensor& shared, std::optional<at::ScalarType> out_dtype) {
  MoeReduceParams p{};
  const bool quantised = scales_in.has_value();
  RQ_CHECK(rows_in.dim() == 2 || rows_in.dim() == 3, "rows",
           "shape [M * topk, H] or [M, topk, H] (codes: H / 2)", "shape ", rows_in.sizes());
  at::Tensor rows, scales;
  if (quantised) {
    rows = aligned_bytes_of(rows_in, "rows");
    scales = aligned_bytes_of(*scales_in, "scales");
    check_device(scales, "scales", rows);
    p.codes = read_from<uint8_t>(rows);
    p.scales = read_from<uint8_t>(scales);
  } else {
    p.rows_dtype = dtype_of(rows_in.scalar_type(), "rows");
    rows = rows_in.contiguous();
    if (reinterpret_cast<uintptr_t>(read_from(rows)) % 16 != 0) rows = rows.clone();
    p.rows = read_from(rows);
  }
  p.hidden = rows.size(-1) * (quantised ? 2 : 1);
  RQ_CHECK(p.hidden > 0 && p.hidden % kGroup == 0, "rows", c10::str("H divisible by ", kGroup),
           "shape ", rows.sizes());
  p.tokens = tokens_of(rows, topk_weights, shared);
  const int64_t routes = rows_before_last(rows);
  const int64_t topk = p.tokens == 0 ? 1 : routes / p.tokens;
  RQ_CHECK(routes == p.tokens * topk, "rows", c10::str("M * topk rows for ", p.tokens, " tokens"),
           routes);
  RQ_CHECK(topk >= 1 && topk <= kMoeMaxTopk, "rows", c10::str("1 to ", kMoeMaxTopk, " a token"),
           topk);
  p.topk = static_cast<int>(topk);
  if (quantised)
    RQ_CHECK(scales.dim() >= 2 && rows_before_last(scales) == routes &&
                 scales.size(-1) == p.hidden / kGroup,
             "scales", c10::str("natural scales of shape [", routes, ", ", p.hidden / kGroup, "]"),
             "shape ", scales.sizes());

  const std::string shape = c10::str("[", routes, "]");
  const at::Tensor reverse = sorting_part(reverse_sorted, "reverse_sorted", shape, rows);
  RQ_CHECK(reverse.size(0) == routes, "reverse_sorted", c10::str("shape ", shape), "shape ",
           reverse.sizes());
  p.reverse_sorted = read_from<int32_t>(reverse);
  at::Tensor weights;
  if (topk_weights) {
    check_device(*topk_weights, "topk_weights", rows);
    RQ_CHECK(is_float(*topk_weights), "topk_weights", "a floating-point dtype",
             topk_weights->scalar_type());
    RQ_CHECK(topk_weights->dim() == 2 && topk_weights->size(0) == p.tokens &&
                 topk_weights->numel() == routes,
             "topk_weights", c10::str("shape [", p.tokens, ", ", topk, "]"), "shape ",
             topk_weights->sizes());
    weights = floats_of(*topk_weights);
    p.topk_weights = read_from<float>(weights);
  }
  const at::ScalarType out_type = out_dtype   ? *out_dtype
                                  : shared    ? shared->scalar_type()
                                  : quantised ? at::kBFloat16
                                              : rows.scalar_type();
  p.out_dtype = dtype_of(out_type, "out_dtype");
  at::Tensor added;
  if (shared) {
    check_device(*shared, "shared", rows);
    RQ_CHECK(shared->scalar_type() == out_type, "shared",
             c10::str("dtype ", out_type, ", the result's"), shared->scalar_type());
    RQ_CHECK(shared->dim() == 2 && shared->size(0) == p.tokens && shared->size(1) == p.hidden,
             "shared", c10::str("shape [", p.tokens, ", ", p.hidden, "]"), "shape ",
             shared->sizes());
    added = shared->contiguous();
    if (reinterpret_cast<uintptr_t>(read_from(added)) % 16 != 0) added = added.clone();
    p.shared = read_from(added);
  }

  at::Tensor out = at::empty({p.tokens, p.hidden}, rows.options().dtype(out_type));
  p.out = write_to(out);
  if (p.tokens == 0 || out.is_meta()) return out;
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(rows)) {
    on_device_of(rows, [&](hipStream_t stream) { hip::moe_reduce(p, stream); });
    return out;
  }
#endif
  parallel_items(p.tokens, topk * p.hidden,
                 [&](int64_t begin, int64_t end) { cpu::moe_reduce(p, begin, end); });
  return out;
}

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { m.impl("moe_reduce", moe_reduce); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { m.impl("moe_reduce", moe_reduce); }
#endif

}  // namespace rotquant::ops
