// SPDX-License-Identifier: MIT
// rotate, quant, rotate_quant: check -> allocate -> params -> run, the same checks on every device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "core/hadamard.h"
#include "core/layout.h"
#include "cpu/backend.h"
#include "ops/common.h"

namespace rotquant::ops {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// Rotation arguments after the checks; owns the copies in the back end's dtype.
struct CheckedRotation {
  at::Tensor matrix, prescale;
  Rotation params;
};

CheckedRotation check_rotation(const at::Tensor& x, const OptionalTensor& rotation,
                               std::optional<int64_t> rotation_size,
                               const OptionalTensor& prescale) {
  const int64_t k = x.size(-1);
  if (rotation) {
    const at::Tensor& r = *rotation;
    check_device(r, "rotation", x);
    RQ_CHECK(r.is_floating_point(), "rotation", "a floating-point dtype", r.scalar_type());
    RQ_CHECK((r.dim() == 2 || r.dim() == 3) && r.size(-1) == r.size(-2), "rotation",
             "shape [RS, RS] or [K / RS, RS, RS]", "shape ", r.sizes());
    RQ_CHECK(!rotation_size || *rotation_size == r.size(-1), "rotation_size",
             c10::str(r.size(-1), ", the size of `rotation`"), *rotation_size);
  }
  const int64_t size = rotation ? rotation->size(-1) : rotation_size.value_or(64);
  const bool is_int = size == static_cast<int>(size);
  RQ_CHECK(is_int && for_rotation_size(static_cast<int>(size), []<int>() {}), "rotation_size",
           "16, 32, 64, 128 or 256", size);
  RQ_CHECK(k % size == 0, "x", c10::str("last dimension divisible by rotation_size ", size),
           "shape ", x.sizes());
  RQ_CHECK(!rotation || rotation->dim() == 2 || rotation->size(0) == k / size, "rotation",
           c10::str("one matrix, or ", k / size, " (K / rotation_size) of them"), "shape ",
           rotation->sizes());

  CheckedRotation checked;
  checked.params = {static_cast<int>(size), nullptr, 0, nullptr, nullptr};
  if (rotation) {
    checked.params.matrix_stride = rotation->dim() == 3 ? size * size : 0;
    if (runs_on_gpu(x)) {
      checked.matrix = rotation->to(at::kBFloat16).contiguous();
      checked.params.matrix_bf16 = static_cast<const uint16_t*>(checked.matrix.const_data_ptr());
    } else {
      checked.matrix = rotation->to(at::kFloat).contiguous();
      checked.params.matrix = checked.matrix.const_data_ptr<float>();
    }
  }
  if (prescale) {
    check_device(*prescale, "prescale", x);
    RQ_CHECK(prescale->is_floating_point(), "prescale", "a floating-point dtype",
             prescale->scalar_type());
    RQ_CHECK(prescale->dim() == 1 && prescale->size(0) == k, "prescale",
             c10::str("shape [", k, "]"), "shape ", prescale->sizes());
    checked.prescale = prescale->to(at::kFloat).contiguous();
    checked.params.prescale = checked.prescale.const_data_ptr<float>();
  }
  return checked;
}

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
  const RotateQuantParams params{rows.params,
                                 rotation,
                                 ElementFormat::e2m1,
                                 mode,
                                 bf16_intermediate,
                                 shuffle_scales,
                                 codes.mutable_data_ptr<uint8_t>(),
                                 scales.mutable_data_ptr<uint8_t>()};
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
  const CheckedRotation checked = check_rotation(x, rotation, rotation_size, prescale);
  return run_quant(x, rows, checked.params, scale_mode, shuffle_scales, bf16_intermediate);
}

at::Tensor rotate(const at::Tensor& x, const OptionalTensor& rotation,
                  std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
                  std::optional<at::ScalarType> out_dtype) {
  const Rows rows = rows_of(x);
  const CheckedRotation checked = check_rotation(x, rotation, rotation_size, prescale);
  const at::ScalarType out_type = out_dtype.value_or(x.scalar_type());
  const DType y_dtype = dtype_of(out_type, "out_dtype");
  at::Tensor y = at::empty(x.sizes(), x.options().dtype(out_type));
  const RotateParams params{rows.params, checked.params, y.mutable_data_ptr(), y_dtype};
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
