// SPDX-License-Identifier: MIT
// Every schema of torch.ops.rotquant_hip. The implementations register next to their code in ops/,
// the fake kernels in rotquant_hip/fake.py and fake_moe.py. An op mutates only what its schema
// marks and none aliases an argument. ops/autograd.h says which have a gradient. `_C` itself is an
// empty module: importing it runs the registrations.
#include <Python.h>
#include <torch/library.h>

#include "core/arch_list.h"
#include "ops/autograd.h"

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
  m.def("fake_quant(Tensor x, *, str scale_mode='round_up') -> Tensor", tags);
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
  // What a layer does where gradients are recorded, in one op, which has one.
  m.def(
      "_linear_a4w4(Tensor x, Tensor weight_codes, Tensor weight_scales, Tensor? bias=None, "
      "Tensor? "
      "rotation=None, *, int rotation_size, Tensor? prescale=None, str scale_mode='round_up', "
      "SymInt n) -> Tensor",
      tags);
  m.def("_gemm_configs() -> str[]");
  m.def(
      "moe_sort(Tensor topk_ids, Tensor topk_weights, *, SymInt num_experts, int block_m, Tensor? "
      "expert_mask=None, Tensor? expert_map=None, SymInt? num_local_experts=None) -> (Tensor "
      "sorted_ids, Tensor "
      "sorted_weights, Tensor sorted_expert_ids, Tensor num_valid, Tensor reverse_sorted)",
      tags);
  m.def(
      "moe_sort_zero_(Tensor(a!) zero, Tensor topk_ids, Tensor topk_weights, *, SymInt "
      "num_experts, int block_m, Tensor? expert_mask=None, Tensor? expert_map=None, SymInt? "
      "num_local_experts=None) -> "
      "(Tensor sorted_ids, Tensor sorted_weights, Tensor sorted_expert_ids, Tensor num_valid, "
      "Tensor reverse_sorted)",
      tags);
  m.def(
      "moe_rotate_quant(Tensor x, Tensor sorted_ids, Tensor num_valid, Tensor reverse_sorted, "
      "Tensor? rotation=None, *, int? rotation_size=None, Tensor? prescale=None, str "
      "scale_mode='round_up', bool bf16_intermediate=False) -> (Tensor codes, Tensor scales)",
      tags);
  m.def(
      "moe_sort_scales(Tensor scales, Tensor sorted_ids, Tensor num_valid, *, SymInt topk, bool "
      "by_route=False) -> Tensor",
      tags);
  m.def(
      "moe_gemm1(Tensor a, Tensor w1, Tensor w1_scale, Tensor sorted_ids, Tensor sorted_weights, "
      "Tensor sorted_expert_ids, Tensor num_valid, *, Tensor? a_scales=None, Tensor? bias=None, "
      "SymInt topk, str activation='silu', float? limit=None, float alpha=1.702, str "
      "gate_mode='separated', bool apply_weight=False, Tensor? rotation=None, int? "
      "rotation_size=0, Tensor? prescale=None, Tensor? inter_rotation=None, int? "
      "inter_rotation_size=0, Tensor? inter_prescale=None, str scale_mode='round_up', int "
      "config=-1) -> (Tensor codes, Tensor scales)",
      tags);
  m.def(
      "moe_gemm2(Tensor a, Tensor a_scales, Tensor w2, Tensor w2_scale, Tensor sorted_ids, Tensor "
      "sorted_expert_ids, Tensor num_valid, *, SymInt tokens, SymInt topk, Tensor? bias=None, "
      "ScalarType out_dtype=bfloat16, int config=-1) -> Tensor",
      tags);
  m.def(
      "moe_gemm2_mxfp4(Tensor a, Tensor a_scales, Tensor w2, Tensor w2_scale, Tensor sorted_ids, "
      "Tensor sorted_expert_ids, Tensor num_valid, *, SymInt tokens, SymInt topk, Tensor? "
      "bias=None, int config=-1) -> (Tensor codes, Tensor scales)",
      tags);
  m.def(
      "moe_gemm2_atomic_(Tensor(a!) out, Tensor a, Tensor a_scales, Tensor w2, Tensor w2_scale, "
      "Tensor sorted_ids, Tensor? sorted_weights, Tensor sorted_expert_ids, Tensor num_valid, *, "
      "SymInt topk, Tensor? bias=None, int config=-1) -> ()",
      tags);
  m.def(
      "moe_reduce(Tensor rows, Tensor? topk_weights, Tensor reverse_sorted, *, "
      "Tensor? scales=None, Tensor? shared=None, ScalarType? out_dtype=None) -> Tensor",
      tags);
  // rotquant_hip/moe.py chooses the pipeline for fused_moe and calls the second.
  m.def(
      "fused_moe(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, *, Tensor "
      "w1_scale, Tensor w2_scale, Tensor? w1_bias=None, Tensor? w2_bias=None, str "
      "activation='silu', float? limit=None, float alpha=1.702, str gate_mode='separated', Tensor? "
      "rotation=None, int? rotation_size=0, Tensor? prescale=None, Tensor? inter_rotation=None, "
      "int? inter_rotation_size=0, Tensor? inter_prescale=None, str scale_mode='round_up', Tensor? "
      "expert_mask=None, Tensor? expert_map=None, bool apply_weight_on_input=False, int "
      "num_shared_experts=0, float "
      "shared_weight=1.0, Tensor? shared=None, bool deterministic=False, bool "
      "fp4_intermediate=False, ScalarType? out_dtype=None) -> Tensor",
      tags);
  m.def(
      "_fused_moe(Tensor x, Tensor w1, Tensor w2, Tensor topk_weights, Tensor topk_ids, *, Tensor "
      "w1_scale, Tensor w2_scale, Tensor? w1_bias=None, Tensor? w2_bias=None, str "
      "activation='silu', float? limit=None, float alpha=1.702, str gate_mode='separated', Tensor? "
      "rotation=None, int? rotation_size=0, Tensor? prescale=None, Tensor? inter_rotation=None, "
      "int? inter_rotation_size=0, Tensor? inter_prescale=None, str scale_mode='round_up', Tensor? "
      "expert_mask=None, Tensor? expert_map=None, bool apply_weight_on_input=False, int "
      "num_shared_experts=0, float "
      "shared_weight=1.0, Tensor? shared=None, ScalarType? out_dtype=None, str pipeline, int "
      "block_m, int gemm1_config=-1, int gemm2_config=-1) -> Tensor",
      tags);
  for (const rotquant::ops::Differentiable& each : rotquant::ops::kDifferentiable) {
    const std::string op = each.op;
    const auto schema = c10::Dispatcher::singleton()
                            .findSchemaOrThrow(("rotquant_hip::" + op).c_str(), "")
                            .schema();
    std::vector<c10::Argument> arguments{{"grad"}, {"needs", c10::ListType::ofStrings()}};
    const auto& its = schema.arguments();
    arguments.insert(arguments.end(), its.begin(), its.end());
    m.def(c10::FunctionSchema(rotquant::ops::backward_of(op), "", std::move(arguments),
                              {{"", c10::ListType::ofTensors()}}),
          tags);
  }
  m.def("_moe_gemm1_configs() -> str[]");
  m.def("_moe_gemm2_configs() -> str[]");
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
