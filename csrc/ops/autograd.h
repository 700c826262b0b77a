// SPDX-License-Identifier: MIT
// Which ops have a gradient, and for which arguments. The gradient is an op of its own,
// `_<op>_backward(Tensor grad, str[] needs, <the op's arguments>) -> Tensor[]`: one for each
// argument named in `needs`. rotquant_hip/autograd.py implements them.
// The layers call ops with a gradient and not torch.autograd.Function, which an exported program
// would lack.
#pragma once

#include <set>
#include <string>

namespace rotquant::ops {

struct Differentiable {
  const char* op;
  std::set<std::string> arguments;
};

inline const Differentiable kDifferentiable[] = {
    {"rotate", {"x", "rotation", "prescale"}},
    {"fake_quant", {"x"}},
    {"gemm_a4w4", {"bias"}},
    {"_linear_a4w4", {"x", "bias", "rotation", "prescale"}},
    {"moe_gemm2", {"bias"}},
    {"moe_reduce", {"rows", "topk_weights", "shared"}},
    {"fused_moe",
     {"x", "topk_weights", "w1_bias", "w2_bias", "rotation", "prescale", "inter_rotation",
      "inter_prescale", "shared"}},
};

inline std::string backward_of(const std::string& op) {
  return (op[0] == '_' ? "" : "_") + op + "_backward";
}

}  // namespace rotquant::ops
