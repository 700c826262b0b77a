// SPDX-License-Identifier: MIT
// shuffle / unshuffle of scales and weights.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "core/layout_ops.h"
#include "cpu/backend.h"
#include "ops/common.h"

namespace rotquant::ops {
namespace {

void run([[maybe_unused]] const at::Tensor& t, const ShuffleScalesParams& params) {
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(t))
    return on_device_of(t, [&](hipStream_t stream) { hip::shuffle_scales(params, stream); });
#endif
  parallel_items(shuffle_scale_items(params), 4,
                 [&](int64_t begin, int64_t end) { cpu::shuffle_scales(params, begin, end); });
}

void run([[maybe_unused]] const at::Tensor& t, const ShuffleWeightParams& params) {
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(t))
    return on_device_of(t, [&](hipStream_t stream) { hip::shuffle_weight(params, stream); });
#endif
  parallel_items(shuffle_weight_items(params), kWeightChunk,
                 [&](int64_t begin, int64_t end) { cpu::shuffle_weight(params, begin, end); });
}

int64_t check_interleaved_rows(int64_t rows, const char* argument) {
  RQ_CHECK(rows % 32 == 0, argument, "2 * I rows with I divisible by 16 for gate_mode 'interleave'",
           rows, " rows");
  return rows / 2;
}

at::Tensor shuffle_scales(const at::Tensor& scales_in, std::string_view gate_mode) {
  const bool interleave = interleaved(gate_mode);
  const at::Tensor scales = bytes_of(scales_in, "scales");
  RQ_CHECK(scales.dim() == 2 || scales.dim() == 3, "scales", "shape [M, K / 32] or [E, N, K / 32]",
           "shape ", scales.sizes());
  const int64_t groups = scales.size(-1), padded_groups = round_up_to(groups, kScaleTileGroups);
  const int64_t experts = scales.dim() == 3 ? scales.size(0) : 1;
  int64_t rows = scales.size(-2);

  ShuffleScalesParams params{read_from<uint8_t>(scales), nullptr, 1, rows, groups, 0, false};
  std::vector<int64_t> out_sizes;
  if (interleave) {
    params.experts = experts;
    params.inter = check_interleaved_rows(rows, "scales");
    out_sizes = with_last(scales, padded_groups);
  } else {
    RQ_CHECK(scales.dim() == 2 || rows % kScaleTileRows == 0, "scales",
             "N divisible by 32 for a stack of experts, so that each starts on a tile", "shape ",
             scales.sizes());
    params.rows = rows = experts * rows;
    out_sizes = {round_up_to(rows, kScaleRowPadding), padded_groups};
  }
  at::Tensor out = at::empty(out_sizes, scales.options());
  params.out = write_to<uint8_t>(out);
  if (out.numel() > 0 && !out.is_meta()) run(scales, params);
  return out;
}

at::Tensor unshuffle_scales(const at::Tensor& scales_in, int64_t rows, int64_t groups,
                            std::string_view gate_mode) {
  const bool interleave = interleaved(gate_mode);
  const at::Tensor scales = bytes_of(scales_in, "scales");
  RQ_CHECK(rows >= 0, "rows", "a count", rows);
  RQ_CHECK(groups >= 0, "groups", "a count", groups);
  const int64_t padded_groups = round_up_to(groups, kScaleTileGroups);
  ShuffleScalesParams params{read_from<uint8_t>(scales), nullptr, 1, rows, groups, 0, true};
  std::vector<int64_t> out_sizes{rows, groups};
  if (interleave) {
    params.inter = check_interleaved_rows(rows, "rows");
    const bool stacked = scales.dim() == 3;
    RQ_CHECK((scales.dim() == 2 || stacked) && scales.size(-2) == rows &&
                 scales.size(-1) == padded_groups,
             "scales", c10::str("shape [", rows, ", ", padded_groups, "] or a stack of them"),
             "shape ", scales.sizes());
    if (stacked) {
      params.experts = scales.size(0);
      out_sizes.insert(out_sizes.begin(), params.experts);
    }
  } else {
    const std::vector<int64_t> expected{round_up_to(rows, kScaleRowPadding), padded_groups};
    RQ_CHECK(scales.sizes() == at::IntArrayRef(expected), "scales",
             c10::str("shape ", at::IntArrayRef(expected)), "shape ", scales.sizes());
  }
  at::Tensor out = at::empty(out_sizes, scales.options());
  params.out = write_to<uint8_t>(out);
  if (out.numel() > 0 && !out.is_meta()) run(scales, params);
  return out;
}

at::Tensor map_weight(const at::Tensor& weight_in, std::string_view gate_mode, bool inverse) {
  const bool interleave = interleaved(gate_mode);
  const at::Tensor weight = bytes_of(weight_in, "weight");
  RQ_CHECK(weight.dim() == 2 || weight.dim() == 3, "weight",
           "packed codes of shape [N, K / 2] or [E, N, K / 2]", "shape ", weight.sizes());
  const int64_t rows = weight.size(-2), row_bytes = weight.size(-1);
  RQ_CHECK(rows % 16 == 0, "weight", "N divisible by 16", "shape ", weight.sizes());
  RQ_CHECK(row_bytes % kWeightChunk == 0, "weight", "K / 2 divisible by 16", "shape ",
           weight.sizes());
  const int64_t inter = interleave ? check_interleaved_rows(rows, "weight") : 0;
  at::Tensor out = at::empty(weight.sizes(), weight.options());
  if (out.numel() == 0 || out.is_meta()) return out;
  run(weight,
      ShuffleWeightParams{read_from<uint8_t>(weight), write_to<uint8_t>(out),
                          weight.dim() == 3 ? weight.size(0) : 1, rows, row_bytes, inter, inverse});
  return out;
}

at::Tensor shuffle_weight(const at::Tensor& weight, std::string_view gate_mode) {
  return map_weight(weight, gate_mode, false);
}

at::Tensor unshuffle_weight(const at::Tensor& weight, std::string_view gate_mode) {
  return map_weight(weight, gate_mode, true);
}

void register_kernels(torch::Library& m) {
  m.impl("shuffle_scales", shuffle_scales);
  m.impl("unshuffle_scales", unshuffle_scales);
  m.impl("shuffle_weight", shuffle_weight);
  m.impl("unshuffle_weight", unshuffle_weight);
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { register_kernels(m); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { register_kernels(m); }
#endif

}  // namespace rotquant::ops
