// SPDX-License-Identifier: MIT
#include "ops/common.h"

namespace rotquant::ops {

DType dtype_of(at::ScalarType type, const char* argument) {
  switch (type) {
    case at::kBFloat16: return DType::bf16;
    case at::kHalf: return DType::fp16;
    case at::kFloat: return DType::fp32;
    default:
      TORCH_CHECK(false, argument, ": expected dtype bfloat16, float16 or float32, got ", type);
  }
}

ScaleMode scale_mode_of(std::string_view name) {
  if (name == "round_up") return ScaleMode::round_up;
  if (name == "floor") return ScaleMode::floor;
  if (name == "even") return ScaleMode::even;
  if (name == "ceil") return ScaleMode::ceil;
  if (name == "mse") return ScaleMode::mse;
  TORCH_CHECK(false,
              "scale_mode: expected one of 'round_up', 'floor', 'even', 'ceil', 'mse', got '", name,
              "'");
}

bool interleaved(std::string_view gate_mode) {
  if (gate_mode == "separated") return false;
  if (gate_mode == "interleave") return true;
  TORCH_CHECK(false, "gate_mode: expected 'separated' or 'interleave', got '", gate_mode, "'");
}

void check_bytes(const at::Tensor& t, const char* argument) {
  const auto type = t.scalar_type();
  RQ_CHECK(type == at::kByte || type == at::ScalarType::Float4_e2m1fn_x2 ||
               type == at::ScalarType::Float8_e8m0fnu,
           argument, "dtype uint8 (or float4_e2m1fn_x2 / float8_e8m0fnu)", type);
}

at::Tensor bytes_of(const at::Tensor& t, const char* argument) {
  check_bytes(t, argument);
  return (t.scalar_type() == at::kByte ? t : t.view(at::kByte)).contiguous();
}

at::Tensor aligned_bytes_of(const at::Tensor& t, const char* argument) {
  const at::Tensor bytes = bytes_of(t, argument);
  return reinterpret_cast<uintptr_t>(read_from(bytes)) % 16 == 0 ? bytes : bytes.clone();
}

void check_device(const at::Tensor& t, const char* argument, const at::Tensor& x) {
  RQ_CHECK(t.device() == x.device(), argument,
           c10::str("device ", x.device(), ", the one of the first argument"), t.device());
}

namespace {

// The one stride between rows, if the leading dimensions have one. Dimensions of size 1 do not
// count.
std::optional<int64_t> row_stride(const at::Tensor& x) {
  if (x.stride(-1) != 1) return std::nullopt;
  std::optional<int64_t> innermost, next;
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (!innermost) innermost = x.stride(d);
    if (next && x.stride(d) != *next) return std::nullopt;
    next = x.stride(d) * x.size(d);
  }
  return innermost.value_or(x.size(-1));
}

}  // namespace

at::Tensor floats_of(const at::Tensor& t) {
  const cpu::FloatMode mode;
  return t.to(at::kFloat).contiguous();
}

Rows rows_of(const at::Tensor& x, const char* argument) {
  const DType dtype = dtype_of(x.scalar_type(), argument);
  RQ_CHECK(x.dim() >= 1, argument, "at least 1 dimension", "a scalar");
  const int64_t k = x.size(-1);
  RQ_CHECK(k % kGroup == 0, argument,
           c10::str("last dimension divisible by ", kGroup, ", the scale group"), "shape ",
           x.sizes());
  const int64_t rows = rows_before_last(x);
  std::optional<int64_t> stride = x.numel() == 0 ? k : row_stride(x);
  at::Tensor tensor = stride ? x : x.contiguous();
  return {tensor, {read_from(tensor), dtype, rows, k, stride.value_or(k)}};
}

int64_t rows_before_last(const at::Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
}

std::vector<int64_t> with_last(const at::Tensor& x, int64_t last) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

}  // namespace rotquant::ops
