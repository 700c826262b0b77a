// SPDX-License-Identifier: MIT
#include "hip/backend.h"
#include "hip/rotate_matrix/kernel.h"
#include "hip/rotate_quant/kernel.h"
#include "hip/rotate_quant/known.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {
namespace {

// Rows that follow each other in memory may be cut anew, so that any K fills every lane: into rows
// of one wave if that comes out even, else into one long row.
Activation flatten(Activation x) {
  if (x.row_stride != x.k && x.rows != 1) return x;
  constexpr int64_t kWaveRow = 64 * kGroup;
  const int64_t total = x.rows * x.k;
  x.k = total % kWaveRow == 0 ? kWaveRow : total;
  x.rows = total / x.k;
  x.row_stride = x.k;
  return x;
}

}  // namespace

void rotate_quant(const RotateQuantParams& params, hipStream_t stream) {
  require_current_device();
  if (params.x.rows == 0 || params.x.k == 0) return;
  if (params.rotation.matrix_bf16) return rotate_quant_by_matrix(params, stream);
  RotateQuantArgs args{params, {}};
  Activation& x = args.params.x;
  if (!params.shuffle_scales && !params.rotation.prescale) x = flatten(x);
  const int64_t rows = params.shuffle_scales ? round_up_to(x.rows, kScaleRowPadding) : x.rows;
  args.plan = device::plan_tiles(x.k, rows, params.shuffle_scales, current_wave_size());
  const bool mse = params.scale_mode == ScaleMode::mse;

#define RQ_ROTATION(dtype_, size_)                                                                 \
  if (x.dtype == DType::dtype_ && params.rotation.size == size_) {                                 \
    return mse ? launch_rotate_quant<                                                              \
                     RotateQuantConfig<DType::dtype_, size_, ElementFormat::e2m1, true>>(args,     \
                                                                                         stream)   \
               : launch_rotate_quant<                                                              \
                     RotateQuantConfig<DType::dtype_, size_, ElementFormat::e2m1, false>>(args,    \
                                                                                          stream); \
  }
#define RQ_QUANT(dtype_) RQ_ROTATION(dtype_, 0)
#include "hip/rotate_quant/configs.def"
#undef RQ_QUANT
#undef RQ_ROTATION
  no_rotation_kernel("rotate_quant", x.dtype, params.rotation.size);
}

void rotate(const RotateParams& params, hipStream_t stream) {
  require_current_device();
  if (params.x.rows == 0 || params.x.k == 0) return;
  if (params.rotation.matrix_bf16) return rotate_by_matrix(params, stream);
  RotateArgs args{params, {}};
  Activation& x = args.params.x;
  if (!params.rotation.prescale) x = flatten(x);
  args.plan = device::plan_tiles(x.k, x.rows, false, current_wave_size());

#define RQ_QUANT(dtype_)
#define RQ_ROTATION(dtype_, size_)                               \
  if (x.dtype == DType::dtype_ && params.rotation.size == size_) \
    return launch_rotate<RotateConfig<DType::dtype_, size_>>(args, stream);
#include "hip/rotate_quant/configs.def"
  no_rotation_kernel("rotate", x.dtype, params.rotation.size);
}

}  // namespace rotquant::hip
#endif
