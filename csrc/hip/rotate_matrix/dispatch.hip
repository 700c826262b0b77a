// SPDX-License-Identifier: MIT
#include "hip/backend.h"
#include "hip/rotate_matrix/choose.h"
#include "hip/rotate_matrix/kernel.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {
void rotate_quant_by_matrix(const RotateQuantParams& params, hipStream_t stream) {
  const Activation& x = params.x;
  int64_t rows = x.rows, k = x.k;
  if (params.shuffle_scales) {
    rows = round_up_to(rows, kScaleRowPadding);
    k = round_up_to(k, kScaleTileGroups * kGroup);
  }
  with_matrix_config("rotate_quant", x, params.rotation.size, [&]<class Config>() {
    const RotateMatrixQuantArgs args{params, plan_matrix<Config>(k, rows)};
    if (params.scale_mode == ScaleMode::mse)
      launch_rotate_matrix_quant<Config, ElementFormat::e2m1, true>(args, stream);
    else
      launch_rotate_matrix_quant<Config, ElementFormat::e2m1, false>(args, stream);
  });
}

void rotate_by_matrix(const RotateParams& params, hipStream_t stream) {
  with_matrix_config("rotate", params.x, params.rotation.size, [&]<class Config>() {
    launch_rotate_matrix<Config>({params, plan_matrix<Config>(params.x.k, params.x.rows)}, stream);
  });
}

}  // namespace rotquant::hip
#endif
