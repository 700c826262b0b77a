// SPDX-License-Identifier: MIT
#include "hip/moe_rotate_matrix/kernel.h"
#include "hip/rotate_matrix/choose.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

void moe_rotate_quant_by_matrix(const MoeRotateQuantParams& params, hipStream_t stream) {
  with_matrix_config("moe_rotate_quant", params.x, params.rotation.size, [&]<class Config>() {
    const MoeRotateMatrixArgs args = plan_moe_rotate_matrix<Config>(params);
    if (params.scale_mode == ScaleMode::mse)
      launch_moe_rotate_matrix<Config, ElementFormat::e2m1, true>(args, stream);
    else
      launch_moe_rotate_matrix<Config, ElementFormat::e2m1, false>(args, stream);
  });
}

}  // namespace rotquant::hip
#endif
