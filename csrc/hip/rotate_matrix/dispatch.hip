// SPDX-License-Identifier: MIT
#include "hip/backend.h"
#include "hip/rotate_matrix/kernel.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {
namespace {

#define RQ_MATRIX(dtype, size, tiles, waves, from_tokens) #dtype " RS " #size ", "
constexpr const char* kKnown =
#include "hip/rotate_matrix/configs.def"
    ;
#undef RQ_MATRIX

// f.template operator()<Config>() for the last row of the table that fits.
template <class F>
void with_config(const char* op, const Activation& x, int size, F&& f) {
  void (*run)(F&) = nullptr;
#define RQ_MATRIX(dtype_, size_, tiles, waves, from_tokens)                            \
  if (x.dtype == DType::dtype_ && size == size_ && x.rows >= from_tokens)              \
    run = [](F& g) {                                                                   \
      g.template operator()<RotateMatrixConfig<DType::dtype_, size_, tiles, waves>>(); \
    };
#include "hip/rotate_matrix/configs.def"
#undef RQ_MATRIX
  if (run) return run(f);
  constexpr const char* kNames[] = {"bf16", "fp16", "fp32"};
  throw std::runtime_error(std::string(op) + ": no GPU kernel for a matrix and " +
                           kNames[static_cast<int>(x.dtype)] + " with rotation_size " +
                           std::to_string(size) + "; there are: " + kKnown);
}

}  // namespace

void rotate_quant_by_matrix(const RotateQuantParams& params, hipStream_t stream) {
  const Activation& x = params.x;
  int64_t rows = x.rows, k = x.k;
  if (params.shuffle_scales) {
    rows = round_up_to(rows, kScaleRowPadding);
    k = round_up_to(k, kScaleTileGroups * kGroup);
  }
  with_config("rotate_quant", x, params.rotation.size, [&]<class Config>() {
    const RotateMatrixQuantArgs args{params, plan_matrix<Config>(k, rows)};
    if (params.scale_mode == ScaleMode::mse)
      launch_rotate_matrix_quant<Config, ElementFormat::e2m1, true>(args, stream);
    else
      launch_rotate_matrix_quant<Config, ElementFormat::e2m1, false>(args, stream);
  });
}

void rotate_by_matrix(const RotateParams& params, hipStream_t stream) {
  with_config("rotate", params.x, params.rotation.size, [&]<class Config>() {
    launch_rotate_matrix<Config>({params, plan_matrix<Config>(params.x.k, params.x.rows)}, stream);
  });
}

}  // namespace rotquant::hip
#endif
