// SPDX-License-Identifier: MIT
// gemm_a4w4: check -> allocate -> params -> run, the same checks on every device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "core/gemm_configs.h"
#include "cpu/backend.h"
#include "ops/common.h"

namespace rotquant::ops {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_scales(const at::Tensor& scales, const char* argument, int64_t rows, int64_t k) {
  const std::vector<int64_t> expected{round_up_to(rows, kScaleRowPadding),
                                      round_up_to(k / kGroup, kScaleTileGroups)};
  RQ_CHECK(scales.sizes() == at::IntArrayRef(expected), argument,
           c10::str("shuffled scales of shape ", at::IntArrayRef(expected)), "shape ",
           scales.sizes());
}

int checked_config(int64_t config) {
  if (config < -1 || config >= kGemmConfigCount) {
    std::string known;
    for (int i = 0; i < kGemmConfigCount; ++i)
      known += c10::str(i ? ", " : "", i, " ", kGemmConfigs[i].name);
    RQ_CHECK(false, "config", c10::str("-1 (chosen by shape) or one of ", known), config);
  }
  return static_cast<int>(config);
}

at::Tensor gemm_a4w4(const at::Tensor& a_in, const at::Tensor& b_in, const at::Tensor& a_scales_in,
                     const at::Tensor& b_scales_in, const OptionalTensor& bias,
                     std::optional<int64_t> n_in, at::ScalarType out_dtype, int64_t config) {
  const at::Tensor a = aligned_bytes_of(a_in, "a"), b = aligned_bytes_of(b_in, "b");
  const at::Tensor a_scales = aligned_bytes_of(a_scales_in, "a_scales");
  const at::Tensor b_scales = aligned_bytes_of(b_scales_in, "b_scales");
  check_device(b, "b", a);
  check_device(a_scales, "a_scales", a);
  check_device(b_scales, "b_scales", a);
  RQ_CHECK(a.dim() >= 1 && a.size(-1) % kGroupBytes == 0, "a",
           c10::str("last dimension K / 2 divisible by ", kGroupBytes), "shape ", a.sizes());
  const int64_t k = a.size(-1) * 2;
  const int64_t m = c10::multiply_integers(a.sizes().slice(0, a.dim() - 1));
  RQ_CHECK(b.dim() == 2 && b.size(1) == a.size(-1) && b.size(0) % 16 == 0, "b",
           c10::str("shuffled codes of shape [N, ", a.size(-1), "] with N divisible by 16"),
           "shape ", b.sizes());
  const int64_t n = n_in.value_or(b.size(0));
  RQ_CHECK(n >= 0 && round_up_to(n, 16) == b.size(0), "n",
           c10::str(b.size(0), " rows of b without up to 15 of padding"), n);
  check_scales(a_scales, "a_scales", m, k);
  check_scales(b_scales, "b_scales", b.size(0), k);
  at::Tensor bias_values;
  if (bias) {
    check_device(*bias, "bias", a);
    RQ_CHECK(is_float(*bias), "bias", "a floating-point dtype", bias->scalar_type());
    RQ_CHECK(bias->dim() == 1 && bias->size(0) == n, "bias", c10::str("shape [", n, "]"), "shape ",
             bias->sizes());
    bias_values = floats_of(*bias);
  }
  const DType dtype = dtype_of(out_dtype, "out_dtype");

  at::Tensor out = at::empty(with_last(a, n), a.options().dtype(out_dtype));
  GemmParams params{read_from<uint8_t>(a),
                    read_from<uint8_t>(b),
                    read_from<uint8_t>(a_scales),
                    read_from<uint8_t>(b_scales),
                    bias ? read_from<float>(bias_values) : nullptr,
                    write_to(out),
                    dtype,
                    m,
                    n,
                    k,
                    checked_config(config),
                    nullptr,
                    0};
  if (out.numel() == 0 || out.is_meta()) return out;
  if (k == 0) return bias ? out.copy_(bias_values.expand_as(out)) : out.zero_();
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(a)) {
    params.workspace_bytes = gemm_workspace_bytes(params);
    const at::Tensor workspace = at::empty({params.workspace_bytes}, a.options());
    params.workspace = params.workspace_bytes ? write_to(workspace) : nullptr;
    on_device_of(a, [&](hipStream_t stream) { hip::gemm_a4w4(params, stream); });
    return out;
  }
#endif
  // So many products take as long as one element of the other ops: a grain is about 40 us.
  constexpr int64_t kProductsPerElement = 64;
  const int64_t items = cpu::gemm_a4w4_items(params);
  parallel_items(items, std::max<int64_t>(1, out.numel() / items * k / kProductsPerElement),
                 [&](int64_t begin, int64_t end) { cpu::gemm_a4w4(params, begin, end); });
  return out;
}

std::vector<std::string> gemm_configs() {
  std::vector<std::string> names;
  for (const GemmConfig& config : kGemmConfigs) names.emplace_back(config.name);
  return names;
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { m.impl("gemm_a4w4", gemm_a4w4); }
TORCH_LIBRARY_IMPL(rotquant_hip, CompositeExplicitAutograd, m) {
  m.impl("_gemm_configs", gemm_configs);
}
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { m.impl("gemm_a4w4", gemm_a4w4); }
#endif

}  // namespace rotquant::ops
