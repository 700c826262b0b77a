// SPDX-License-Identifier: MIT
#include "ops/rotation.h"

namespace rotquant::ops {
namespace {

// "0 (no rotation), 16, 32 or 64"
std::string sizes_of(const RotationArguments& arguments) {
  std::string sizes = arguments.or_none ? "0 (no rotation), " : "";
  for (int size = kMinRotation; size < arguments.largest; size *= 2)
    sizes += c10::str(size, 2 * size < arguments.largest ? ", " : " or ");
  return c10::str(sizes, arguments.largest);
}

}  // namespace

int64_t check_rotation_size(const RotationArguments& arguments, const at::Tensor& x, int64_t k,
                            const OptionalTensor& matrix, std::optional<int64_t> size_in,
                            const OptionalTensor& prescale) {
  const char* channels = arguments.x ? "K" : "channels";
  if (matrix) {
    const at::Tensor& r = *matrix;
    check_device(r, arguments.matrix, x);
    RQ_CHECK(is_float(r), arguments.matrix, "a floating-point dtype", r.scalar_type());
    RQ_CHECK((r.dim() == 2 || r.dim() == 3) && r.size(-1) == r.size(-2), arguments.matrix,
             c10::str("shape [RS, RS] or [", channels, " / RS, RS, RS]"), "shape ", r.sizes());
    RQ_CHECK(!size_in || *size_in == r.size(-1), arguments.size,
             c10::str(r.size(-1), ", the size of `", arguments.matrix, "`"), *size_in);
  }
  const int64_t size = matrix ? matrix->size(-1) : size_in.value_or(64);
  if (arguments.or_none && size == 0 && !matrix) {
    RQ_CHECK(!prescale, arguments.prescale,
             c10::str("None without a rotation (", arguments.size, " 0)"), "a tensor");
    return 0;
  }
  const bool in_range = size >= kMinRotation && size <= arguments.largest;
  RQ_CHECK(in_range && for_rotation_size(static_cast<int>(size), []<int>() {}), arguments.size,
           sizes_of(arguments), size);
  if (arguments.x)
    RQ_CHECK(k % size == 0, arguments.x,
             c10::str("last dimension divisible by ", arguments.size, " ", size), "shape ",
             x.sizes());
  RQ_CHECK(k % size == 0, arguments.size, c10::str("a divisor of the ", k, " channels"), size);
  RQ_CHECK(
      !matrix || matrix->dim() == 2 || matrix->size(0) == k / size, arguments.matrix,
      c10::str("one matrix, or ", k / size, " (", channels, " / ", arguments.size, ") of them"),
      "shape ", matrix->sizes());
  if (prescale) {
    check_device(*prescale, arguments.prescale, x);
    RQ_CHECK(is_float(*prescale), arguments.prescale, "a floating-point dtype",
             prescale->scalar_type());
    RQ_CHECK(prescale->dim() == 1 && prescale->size(0) == k, arguments.prescale,
             c10::str("shape [", k, "]"), "shape ", prescale->sizes());
  }
  return size;
}

CheckedRotation check_rotation(const RotationArguments& arguments, const at::Tensor& x, int64_t k,
                               const OptionalTensor& matrix, std::optional<int64_t> size_in,
                               const OptionalTensor& prescale) {
  const int64_t size = check_rotation_size(arguments, x, k, matrix, size_in, prescale);
  CheckedRotation checked;
  checked.params.size = static_cast<int>(size);
  if (matrix) {
    checked.params.matrix_stride = matrix->dim() == 3 ? size * size : 0;
    if (runs_on_gpu(x)) {
      const at::Tensor r = arguments.transposed ? matrix->transpose(-1, -2) : *matrix;
      checked.matrix = r.to(at::kBFloat16).contiguous();
      checked.params.matrix_bf16 = static_cast<const uint16_t*>(read_from(checked.matrix));
    } else {
      checked.matrix = floats_of(*matrix);
      checked.params.matrix = read_from<float>(checked.matrix);
    }
  }
  if (prescale) {
    checked.prescale = floats_of(*prescale);
    checked.params.prescale = read_from<float>(checked.prescale);
  }
  return checked;
}

}  // namespace rotquant::ops
