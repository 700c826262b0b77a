// SPDX-License-Identifier: MIT
#include "ops/rotation.h"

#include "core/hadamard.h"

namespace rotquant::ops {

CheckedRotation check_rotation(const at::Tensor& x, const OptionalTensor& rotation,
                               std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
                               RotationSizes sizes) {
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
  const bool or_none = sizes == RotationSizes::any_or_none;
  if (or_none && size == 0 && !rotation) {
    RQ_CHECK(!prescale, "prescale", "None with rotation_size 0, which only quantises", "a tensor");
    return {};
  }
  const bool is_int = size == static_cast<int>(size);
  RQ_CHECK(is_int && for_rotation_size(static_cast<int>(size), []<int>() {}), "rotation_size",
           or_none ? "0 (no rotation), 16, 32, 64, 128 or 256" : "16, 32, 64, 128 or 256", size);
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

}  // namespace rotquant::ops
