// SPDX-License-Identifier: MIT
// What the test bed has no kernels for, because they are made of gfx950's matrix instructions.
#include <stdexcept>

#include "hip/backend.h"
#include "hip/moe_rotate_matrix/kernel.h"
#include "hip/rotate_matrix/kernel.h"

namespace rotquant::hip {
namespace {

[[noreturn]] void needs_mfma(const char* what) {
  throw std::runtime_error(std::string(what) + ": needs gfx950's MFMA, not on the NVIDIA test bed");
}

}  // namespace

void rotate_by_matrix(const RotateParams&, hipStream_t) { needs_mfma("rotate by a matrix"); }
void rotate_quant_by_matrix(const RotateQuantParams&, hipStream_t) {
  needs_mfma("rotate_quant by a matrix");
}
void moe_rotate_quant_by_matrix(const MoeRotateQuantParams&, hipStream_t) {
  needs_mfma("moe_rotate_quant by a matrix");
}
void gemm_a4w4(const GemmParams&, hipStream_t) { needs_mfma("gemm_a4w4"); }
void moe_gemm1(const MoeGemm1Params&, hipStream_t) { needs_mfma("moe_gemm1"); }
void moe_gemm2(const MoeGemm2Params&, hipStream_t) { needs_mfma("moe_gemm2"); }

}  // namespace rotquant::hip
