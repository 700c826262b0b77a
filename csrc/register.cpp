// SPDX-License-Identifier: MIT
// Every schema of torch.ops.rotquant_hip. The implementations register next to their code in ops/,
// the fake kernels in rotquant_hip/fake.py. No op mutates or aliases an argument, none has a
// gradient. `_C` itself is an empty module: importing it runs the registrations.
#include <Python.h>
#include <torch/library.h>

#include "core/arch_list.h"

TORCH_LIBRARY(rotquant_hip, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "quant(Tensor x, *, str scale_mode='round_up', bool shuffle_scales=False) -> (Tensor codes, "
      "Tensor scales)",
      tags);
  m.def(
      "rotate(Tensor x, Tensor? rotation=None, *, int? rotation_size=None, Tensor? prescale=None, "
      "ScalarType? out_dtype=None) -> Tensor",
      tags);
  m.def(
      "rotate_quant(Tensor x, Tensor? rotation=None, *, int? rotation_size=None, Tensor? "
      "prescale=None, "
      "str scale_mode='round_up', bool shuffle_scales=False, bool bf16_intermediate=False) "
      "-> (Tensor codes, Tensor scales)",
      tags);
  m.def(
      "dequant(Tensor codes, Tensor scales, *, ScalarType dtype=bfloat16, bool "
      "shuffled_scales=False) -> Tensor",
      tags);
  m.def("shuffle_scales(Tensor scales, *, str gate_mode='separated') -> Tensor", tags);
  m.def(
      "unshuffle_scales(Tensor scales, *, SymInt rows, SymInt groups, str gate_mode='separated') "
      "-> Tensor",
      tags);
  m.def("shuffle_weight(Tensor weight, *, str gate_mode='separated') -> Tensor", tags);
  m.def("unshuffle_weight(Tensor weight, *, str gate_mode='separated') -> Tensor", tags);
  m.def(
      "gemm_a4w4(Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias=None, *, "
      "SymInt? n=None, ScalarType out_dtype=bfloat16, int config=-1) -> Tensor",
      tags);
  m.def("_gemm_configs() -> str[]");
  // Raises where `running` is not in the list `compiled`; what every launch asks first.
  m.def("_check_arch(str compiled, str running) -> ()",
        [](const std::string& compiled, const std::string& running) {
          rotquant::require_arch(compiled, running);
        });
}

PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
