// SPDX-License-Identifier: MIT
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include "core/layout.h"
#include "cpu/backend.h"
#include "ops/common.h"

namespace rotquant::ops {
namespace {

at::Tensor dequant(const at::Tensor& codes_in, const at::Tensor& scales_in, at::ScalarType dtype,
                   bool shuffled_scales) {
  const at::Tensor codes = bytes_of(codes_in, "codes"), scales = bytes_of(scales_in, "scales");
  check_device(scales, "scales", codes);
  const DType y_dtype = dtype_of(dtype, "dtype");
  RQ_CHECK(codes.dim() >= 1 && codes.size(-1) % kGroupBytes == 0, "codes",
           c10::str("last dimension K / 2 divisible by ", kGroupBytes), "shape ", codes.sizes());
  const int64_t k = codes.size(-1) * 2, groups = k / kGroup;
  const int64_t rows = rows_before_last(codes);
  const std::vector<int64_t> expected =
      shuffled_scales ? std::vector<int64_t>{round_up_to(rows, kScaleRowPadding),
                                             round_up_to(groups, kScaleTileGroups)}
                      : with_last(codes, groups);
  RQ_CHECK(scales.sizes() == at::IntArrayRef(expected), "scales",
           c10::str("shape ", at::IntArrayRef(expected)), "shape ", scales.sizes());

  at::Tensor y = at::empty(with_last(codes, k), codes.options().dtype(dtype));
  const DequantParams params{read_from<uint8_t>(codes),
                             read_from<uint8_t>(scales),
                             shuffled_scales,
                             rows,
                             k,
                             write_to(y),
                             y_dtype};
  if (y.is_meta()) return y;
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(codes)) {
    on_device_of(codes, [&](hipStream_t stream) { hip::dequant(params, stream); });
    return y;
  }
#endif
  parallel_items(cpu::dequant_items(params), kGroup,
                 [&](int64_t begin, int64_t end) { cpu::dequant(params, begin, end); });
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { m.impl("dequant", dequant); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { m.impl("dequant", dequant); }
#endif

}  // namespace rotquant::ops
