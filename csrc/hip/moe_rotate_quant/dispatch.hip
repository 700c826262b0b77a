// SPDX-License-Identifier: MIT
#include "hip/backend.h"
#include "hip/moe_rotate_matrix/kernel.h"
#include "hip/moe_rotate_quant/kernel.h"
#include "hip/rotate_quant/known.h"

#ifndef RQ_DEVICE_ONLY
namespace rotquant::hip {

void moe_rotate_quant(const MoeRotateQuantParams& params, hipStream_t stream) {
  require_current_device();
  const Activation& x = params.x;
  if (x.rows == 0 || x.k == 0) return;  // no routes then, nor scales
  if (params.rotation.matrix_bf16) return moe_rotate_quant_by_matrix(params, stream);
  const MoeRotateQuantArgs args = plan_moe_rotate_quant(params, current_wave_size());
  const bool mse = params.scale_mode == ScaleMode::mse;

#define RQ_ROTATION(dtype_, size_)                                                                 \
  if (x.dtype == DType::dtype_ && params.rotation.size == size_) {                                 \
    return mse ? launch_moe_rotate_quant<                                                          \
                     RotateQuantConfig<DType::dtype_, size_, ElementFormat::e2m1, true>>(args,     \
                                                                                         stream)   \
               : launch_moe_rotate_quant<                                                          \
                     RotateQuantConfig<DType::dtype_, size_, ElementFormat::e2m1, false>>(args,    \
                                                                                          stream); \
  }
#define RQ_QUANT(dtype_) RQ_ROTATION(dtype_, 0)
#include "hip/rotate_quant/configs.def"
#undef RQ_QUANT
#undef RQ_ROTATION
  no_rotation_kernel("moe_rotate_quant", x.dtype, params.rotation.size);
}

}  // namespace rotquant::hip
#endif
