// SPDX-License-Identifier: MIT
// The ops under autograd. A call with nothing to differentiate goes straight on. An argument that
// requires grad gets its gradient from `_<op>_backward`, or is refused: none is silently zero.
#include "ops/autograd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops/common.h"

namespace rotquant::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

void run_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

bool has_gradient(const std::string& op, const std::string& argument) {
  for (const Differentiable& each : kDifferentiable)
    if (op == each.op) return each.arguments.contains(argument);
  return false;
}

// The node of a call: keeps all arguments of the op, and hands them to its backward op.
struct ByBackwardOp : torch::autograd::Function<ByBackwardOp> {
  // tensors: those among the arguments, which are at these positions.
  static at::Tensor forward(AutogradContext* ctx, at::TensorList tensors,
                            const std::vector<int64_t>& positions, const c10::OperatorHandle& op,
                            c10::DispatchKeySet keys, Stack stack) {
    Stack others = stack;
    for (const int64_t position : positions) others[position] = {};
    ctx->save_for_backward(tensors.vec());
    ctx->saved_data["positions"] = positions;
    ctx->saved_data["others"] = c10::ivalue::Tuple::create(std::move(others));
    ctx->saved_data["op"] = op.operator_name().name;
    run_below_autograd(op, keys, &stack);
    return stack.back().toTensor();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list tensors = ctx->get_saved_variables();
    const std::vector<int64_t> positions = ctx->saved_data["positions"].toIntVector();
    Stack arguments = ctx->saved_data["others"].toTupleRef().elements();
    const std::string qualified = ctx->saved_data["op"].toStringRef();  // rotquant_hip::<op>
    const size_t name = qualified.rfind(':') + 1;
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto& schema = dispatcher.findSchemaOrThrow(qualified.c_str(), "").schema();

    c10::List<std::string> needs;
    for (size_t i = 0; i < tensors.size(); ++i) {
      arguments[positions[i]] = tensors[i];
      if (ctx->needs_input_grad(i)) needs.push_back(schema.arguments()[positions[i]].name());
    }
    Stack stack{grads[0], needs};
    stack.insert(stack.end(), arguments.begin(), arguments.end());
    const std::string backward = qualified.substr(0, name) + backward_of(qualified.substr(name));
    dispatcher.findSchemaOrThrow(backward.c_str(), "").callBoxed(&stack);

    const variable_list needed = stack.back().toTensorVector();
    variable_list result(tensors.size() + 4);  // of what else `forward` takes there is none
    for (size_t i = 0, next = 0; i < tensors.size(); ++i)
      if (ctx->needs_input_grad(i)) result[i] = needed[next++];
    return result;
  }
};

void autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto values = torch::jit::last(*stack, count);
  bool record = false;
  for (size_t i = 0; i < count; ++i) {
    if (!values[i].isTensor()) continue;
    const at::Tensor& t = values[i].toTensor();
    const std::string& argument = schema.arguments()[i].name();
    TORCH_CHECK(!t._fw_grad(0).defined(), argument, ": expected no forward-mode gradient, as ",
                schema.name(), " has none, got a dual tensor; take its primal or use reverse mode");
    if (!t.requires_grad() || !at::GradMode::is_enabled()) continue;
    const std::string name = schema.name().substr(schema.name().rfind(':') + 1);
    TORCH_CHECK(name != "_fused_moe_backward",
                "fused_moe: expected no second derivative to be asked for, as it has none, got a "
                "backward pass with create_graph=True");
    TORCH_CHECK(has_gradient(name, argument), argument,
                ": expected a tensor that does not require grad, as ", schema.name(),
                " has no gradient, got one that does (call it under torch.no_grad() or pass ",
                argument, ".detach(); fake_quant, RotQuantLinear and fused_moe have a ",
                "straight-through gradient)");
    record = true;
  }
  if (!record) return run_below_autograd(op, keys, stack);
  variable_list tensors;
  std::vector<int64_t> positions;
  for (size_t i = 0; i < count; ++i) {
    if (!values[i].isTensor()) continue;
    tensors.push_back(values[i].toTensor());
    positions.push_back(static_cast<int64_t>(i));
  }
  Stack arguments = torch::jit::pop(*stack, count);
  stack->emplace_back(
      ByBackwardOp::apply(at::TensorList(tensors), positions, op, keys, std::move(arguments)));
}

// What is written to counts as written to, or a backward pass would use a changed tensor unnoticed.
void count_writes(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  variable_list written;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (arguments[i].alias_info() && arguments[i].alias_info()->isWrite())
      written.push_back(torch::jit::peek(*stack, i, arguments.size()).toTensor());
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& t : written)
    if (!t.is_inference()) torch::autograd::impl::bump_version(t);
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, Autograd, m) {
  for (const char* op :
       {"quant",          "rotate",           "rotate_quant",       "dequant",
        "shuffle_scales", "unshuffle_scales", "shuffle_weight",     "unshuffle_weight",
        "fake_quant",     "gemm_a4w4",        "_linear_a4w4",       "moe_sort",
        "moe_sort_zero_", "moe_rotate_quant", "moe_sort_scales",    "moe_gemm1",
        "moe_gemm2",      "moe_gemm2_mxfp4",  "moe_gemm2_atomic_",  "moe_reduce",
        "fused_moe",      "_fused_moe",       "_fused_moe_backward"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&autograd>());
}

TORCH_LIBRARY_IMPL(rotquant_hip, ADInplaceOrView, m) {
  for (const char* op : {"moe_sort_zero_", "moe_gemm2_atomic_"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&count_writes>());
}

}  // namespace rotquant::ops
