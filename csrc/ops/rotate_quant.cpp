// SPDX-License-Identifier: MIT
// rotate, quant, rotate_quant: check -> allocate -> params -> run, the same checks on every device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "core/layout.h"
#include "cpu/backend.h"
#include "ops/common.h"
#include "ops/rotation.h"

namespace rotquant::ops {
namespace {

std::tuple<at::Tensor, at::Tensor> run_quant(const at::Tensor& x, const Rows& rows,
                                             const Rotation& rotation, std::string_view scale_mode,
                                             bool shuffle_scales, bool bf16_intermediate) {
  const ScaleMode mode = scale_mode_of(scale_mode);
  const int64_t groups = rows.params.k / kGroup;

  const auto options = x.options().dtype(at::kByte);
  at::Tensor codes = at::empty(with_last(x, rows.params.k / 2), options);
  at::Tensor scales = shuffle_scales ? at::empty({round_up_to(rows.params.rows, kScaleRowPadding),
                                                  round_up_to(groups, kScaleTileGroups)},
                                                 options)
                                     : at::empty(with_last(x, groups), options);
  const RotateQuantParams params{
      rows.params,       rotation,       ElementFormat::e2m1,      mode,
      bf16_intermediate, shuffle_scales, write_to<uint8_t>(codes), write_to<uint8_t>(scales)};
  if (x.is_meta()) return {codes, scales};
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(x)) {
    on_device_of(x, [&](hipStream_t stream) { hip::rotate_quant(params, stream); });
    return {codes, scales};
  }
#endif
  if (shuffle_scales) scales.zero_();
  parallel_items(cpu::rotate_quant_items(params), std::max(rotation.size, kGroup),
                 [&](int64_t begin, int64_t end) { cpu::rotate_quant(params, begin, end); });
  return {codes, scales};
}

std::tuple<at::Tensor, at::Tensor> quant(const at::Tensor& x, std::string_view scale_mode,
                                         bool shuffle_scales) {
  return run_quant(x, rows_of(x), Rotation{}, scale_mode, shuffle_scales, false);
}

std::tuple<at::Tensor, at::Tensor> rotate_quant(const at::Tensor& x, const OptionalTensor& rotation,
                                                std::optional<int64_t> rotation_size,
                                                const OptionalTensor& prescale,
                                                std::string_view scale_mode, bool shuffle_scales,
                                                bool bf16_intermediate) {
  const Rows rows = rows_of(x);
  const CheckedRotation checked =
      check_rotation({}, x, rows.params.k, rotation, rotation_size, prescale);
  return run_quant(x, rows, checked.params, scale_mode, shuffle_scales, bf16_intermediate);
}

at::Tensor rotate(const at::Tensor& x, const OptionalTensor& rotation,
                  std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
                  std::optional<at::ScalarType> out_dtype) {
  const Rows rows = rows_of(x);
  const CheckedRotation checked =
      check_rotation({}, x, rows.params.k, rotation, rotation_size, prescale);
  const at::ScalarType out_type = out_dtype.value_or(x.scalar_type());
  const DType y_dtype = dtype_of(out_type, "out_dtype");
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(out_type));
  const RotateParams params{rows.params, checked.params, write_to(y), y_dtype};
  if (x.is_meta()) return y;
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(x)) {
    on_device_of(x, [&](hipStream_t stream) { hip::rotate(params, stream); });
    return y;
  }
#endif
  parallel_items(cpu::rotate_items(params), checked.params.size,
                 [&](int64_t begin, int64_t end) { cpu::rotate(params, begin, end); });
  return y;
}

void register_kernels(torch::Library& m) {
  m.impl("quant", quant);
  m.impl("rotate", rotate);
  m.impl("rotate_quant", rotate_quant);
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { register_kernels(m); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { register_kernels(m); }
#endif

}  // namespace rotquant::ops
