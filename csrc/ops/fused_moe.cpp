// SPDX-License-Identifier: MIT
// _fused_moe: one of kPipelines, made of the ops in ops/moe.h. rotquant_hip/moe.py chooses it.
//
// All arguments are checked before the first launch. What is allocated depends on shapes alone and
// nothing is read back, so that a call can be captured in a graph on any device.
#include <torch/library.h>

#include <cmath>
#include <utility>

#include "core/moe_configs.h"
#include "ops/moe.h"

namespace rotquant::ops {
namespace {

enum class Finish { atomic, reduce, fp4_reduce };

struct Pipeline {
  const char* name;
  bool quantise_inside;  // gemm1 takes x and quantises it
  Finish finish;
};

constexpr Pipeline kPipelines[] = {
    {"inline_atomic", true, Finish::atomic},          {"inline_reduce", true, Finish::reduce},
    {"staged_atomic", false, Finish::atomic},         {"staged_reduce", false, Finish::reduce},
    {"staged_fp4_reduce", false, Finish::fp4_reduce},
};

const Pipeline& pipeline_of(std::string_view name) {
  std::string known;
  for (const Pipeline& pipeline : kPipelines) {
    if (name == pipeline.name) return pipeline;
    known += c10::str(known.empty() ? "'" : ", '", pipeline.name, "'");
  }
  RQ_CHECK(false, "pipeline", c10::str("one of ", known), "'", name, "'");
}

struct Named {
  const char* argument;
  OptionalTensor tensor;
};

// --- checks -------------------------------------------------------------------------------------

struct Sizes {
  int64_t tokens, topk, hidden, inter, experts;  // experts: local ones, shared ones too
};

Sizes check_shapes(const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2,
                   const at::Tensor& topk_weights, const at::Tensor& topk_ids) {
  dtype_of(x.scalar_type(), "x");
  RQ_CHECK(x.dim() == 2 && x.size(1) > 0 && x.size(1) % kGroup == 0, "x",
           c10::str("shape [M, H] with H divisible by ", kGroup), "shape ", x.sizes());
  // NOTE: flat ids are refused, not guessed at: [M * topk] would pass for [M, 1].
  RQ_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == x.size(0), "topk_ids",
           c10::str("shape [", x.size(0), ", topk]"), "shape ", topk_ids.sizes());
  RQ_CHECK(topk_ids.size(1) <= kMoeMaxTopk, "topk_ids",
           c10::str("at most ", kMoeMaxTopk, " routes a token"), "shape ", topk_ids.sizes());
  RQ_CHECK(x.size(0) < kMoeMaxTokens, "x", c10::str("less than ", kMoeMaxTokens, " tokens"),
           x.size(0));
  RQ_CHECK(topk_ids.scalar_type() == at::kInt || topk_ids.scalar_type() == at::kLong, "topk_ids",
           "dtype int32 or int64", topk_ids.scalar_type());
  RQ_CHECK(topk_weights.sizes() == topk_ids.sizes(), "topk_weights",
           c10::str("shape ", topk_ids.sizes(), ", the one of topk_ids"), "shape ",
           topk_weights.sizes());
  RQ_CHECK(is_float(topk_weights), "topk_weights", "a floating-point dtype",
           topk_weights.scalar_type());
  const int64_t hidden = x.size(1);
  RQ_CHECK(
      w1.dim() == 3 && w1.size(2) == hidden / 2 && w1.size(1) > 0 && w1.size(1) % (2 * kGroup) == 0,
      "w1",
      c10::str("shuffled codes of shape [E, 2I, ", hidden / 2, "] with I divisible by ", kGroup),
      "shape ", w1.sizes());
  const int64_t experts = w1.size(0), inter = w1.size(1) / 2;
  RQ_CHECK(experts <= kMoeMaxExperts, "w1", c10::str("at most ", kMoeMaxExperts, " experts"),
           "shape ", w1.sizes());
  const std::vector<int64_t> w2_shape{experts, hidden, inter / 2};
  RQ_CHECK(w2.sizes() == at::IntArrayRef(w2_shape), "w2",
           c10::str("shuffled codes of shape ", at::IntArrayRef(w2_shape)), "shape ", w2.sizes());
  check_bytes(w1, "w1");
  check_bytes(w2, "w2");
  return {x.size(0), topk_ids.size(1), hidden, inter, experts};
}

void check_scales(const at::Tensor& scales, const char* argument, int64_t experts, int64_t rows,
                  int64_t k) {
  const int64_t groups = round_up_to(k / kGroup, kScaleTileGroups);
  const bool fits = scales.dim() >= 1 && scales.size(-1) == groups;
  const int64_t all = experts * rows, held = fits ? rows_before_last(scales) : -1;
  RQ_CHECK(held == all || held == round_up_to(all, kScaleRowPadding), argument,
           c10::str("shuffled scales of shape [", round_up_to(all, kScaleRowPadding), ", ", groups,
                    "] or [", experts, ", ", rows, ", ", groups, "]"),
           "shape ", scales.sizes());
  check_bytes(scales, argument);
}

void check_bias(const OptionalTensor& bias, const char* argument, int64_t experts, int64_t rows) {
  if (!bias) return;
  const std::vector<int64_t> expected{experts, rows};
  RQ_CHECK(is_float(*bias), argument, "a floating-point dtype", bias->scalar_type());
  RQ_CHECK(bias->sizes() == at::IntArrayRef(expected), argument,
           c10::str("shape ", at::IntArrayRef(expected)), "shape ", bias->sizes());
}

void check_experts(const Sizes& sizes, const at::Tensor& topk_ids, const OptionalTensor& mask,
                   const OptionalTensor& map, int64_t shared, double shared_weight) {
  RQ_CHECK(shared >= 0 && shared <= sizes.experts, "num_shared_experts",
           c10::str("0 to ", sizes.experts, ", the experts of w1"), shared);
  RQ_CHECK(sizes.topk + shared <= kMoeMaxTopk, "num_shared_experts",
           c10::str("at most ", kMoeMaxTopk - sizes.topk, " beside a topk of ", sizes.topk),
           shared);
  RQ_CHECK(std::isfinite(shared_weight), "shared_weight", "a finite number", shared_weight);
  check_ownership(topk_ids, mask, map, std::nullopt, sizes.experts - shared);
  for (const auto& [argument, t] : {std::pair{"expert_mask", &mask}, std::pair{"expert_map", &map}})
    RQ_CHECK(!*t || (*t)->size(0) + shared <= kMoeMaxExperts, argument,
             c10::str("at most ", kMoeMaxExperts - shared, " experts beside ", shared, " shared"),
             "shape ", (*t)->sizes());
}

void check_shared(const at::Tensor& shared, const at::Tensor& x) {
  RQ_CHECK(is_float(shared), "shared", "a floating-point dtype", shared.scalar_type());
  RQ_CHECK(shared.sizes() == x.sizes(), "shared", c10::str("shape ", x.sizes(), ", as x"), "shape ",
           shared.sizes());
}

// Whether both GEMMs can do it: or the sort would run for nothing.
void check_pipeline(const Pipeline& pipeline, const at::Tensor& x, const OptionalTensor& rotation,
                    const Sizes& sizes, int64_t block_m, int64_t inter_rotation, int64_t gemm1,
                    int64_t gemm2) {
  RQ_CHECK(!pipeline.quantise_inside || (x.scalar_type() != at::kFloat && !rotation), "pipeline",
           c10::str("a staged one where x is float32 or `rotation` a matrix, as '", pipeline.name,
                    "' quantises inside gemm1"),
           x.scalar_type(), " x ", rotation ? "and a matrix" : "and no matrix");
  RQ_CHECK(block_m == 16 || block_m == 32 || block_m == 64 || block_m == 128, "block_m",
           "16, 32, 64 or 128", block_m);
  RQ_CHECK(gemm1 >= -1 && gemm1 < kMoeGemm1ConfigCount, "gemm1_config",
           c10::str("-1 (chosen by shape) or 0 to ", kMoeGemm1ConfigCount - 1), gemm1);
  RQ_CHECK(gemm2 >= -1 && gemm2 < kMoeGemm2ConfigCount, "gemm2_config",
           c10::str("-1 (chosen by shape) or 0 to ", kMoeGemm2ConfigCount - 1), gemm2);
  const int block = static_cast<int>(block_m), size = static_cast<int>(inter_rotation);
  const bool inside = pipeline.quantise_inside;
  const bool fits = gemm1 < 0 ? choose_moe_gemm1_config(1, block, sizes.inter, inside, size) >= 0
                              : moe_gemm1_fits(kMoeGemm1Configs[gemm1], block, inside, size);
  RQ_CHECK(
      fits, gemm1 < 0 ? "block_m" : "gemm1_config",
      c10::str("what gemm1 has a kernel for in pipeline '", pipeline.name,
               "' with inter_rotation_size ", size),
      gemm1 < 0 ? c10::str(block) : c10::str(kMoeGemm1Configs[gemm1].name, ", block_m ", block));
  RQ_CHECK(gemm2 < 0 || kMoeGemm2Configs[gemm2].tile.m == block, "gemm2_config",
           c10::str("one for blocks of ", block, " rows"), kMoeGemm2Configs[gemm2].name);
}

// --- shared experts -----------------------------------------------------------------------------

struct Routes {
  at::Tensor ids, weights;  // [tokens, topk + shared]
  OptionalTensor mask, map;
  int64_t experts;  // that an id can name
};

// Shared experts are the last `shared` ones of w1; every token has a route to each of them. Their
// ids follow the routed ones: E - shared .. E - 1, or, with a mask or a map of G routed experts,
// G .. G + shared - 1. They are always local. A caller's id never names one.
Routes with_shared_experts(const at::Tensor& ids, const at::Tensor& weights,
                           const OptionalTensor& mask, const OptionalTensor& map, int64_t routed,
                           int64_t shared, double shared_weight) {
  const int64_t first = mask ? mask->size(0) : map ? map->size(0) : routed;
  Routes routes{ids, weights, mask, map, first + shared};
  if (shared == 0) return routes;
  const auto options = ids.options();
  const at::Tensor shared_ids = at::arange(first, first + shared, options);
  const at::Tensor routed_ids = ids.masked_fill(ids.ge(first), -1);
  routes.ids = at::cat({routed_ids, shared_ids.expand({ids.size(0), shared})}, 1);
  routes.weights = at::constant_pad_nd(floats_of(weights), {0, shared}, shared_weight);
  if (mask) routes.mask = at::constant_pad_nd(mask->to(at::kLong), {0, shared}, 1);
  if (map) {
    // NOTE: an index past the routed experts would be a shared one's.
    const at::Tensor known = map->masked_fill(map->ge(routed), -1);
    routes.map = at::cat({known, at::arange(routed, routed + shared, map->options())});
  }
  return routes;
}

// --- the op -------------------------------------------------------------------------------------

at::Tensor fused_moe(
    const at::Tensor& x, const at::Tensor& w1, const at::Tensor& w2, const at::Tensor& topk_weights,
    const at::Tensor& topk_ids, const at::Tensor& w1_scale, const at::Tensor& w2_scale,
    const OptionalTensor& w1_bias, const OptionalTensor& w2_bias, std::string_view activation,
    std::optional<double> limit, double alpha, std::string_view gate_mode,
    const OptionalTensor& rotation, std::optional<int64_t> rotation_size,
    const OptionalTensor& prescale, const OptionalTensor& inter_rotation,
    std::optional<int64_t> inter_rotation_size, const OptionalTensor& inter_prescale,
    std::string_view scale_mode, const OptionalTensor& expert_mask,
    const OptionalTensor& expert_map, bool apply_weight_on_input, int64_t num_shared_experts,
    double shared_weight, const OptionalTensor& shared, std::optional<at::ScalarType> out_dtype,
    std::string_view pipeline_name, int64_t block_m, int64_t gemm1_config, int64_t gemm2_config) {
  const Pipeline& pipeline = pipeline_of(pipeline_name);
  const Sizes sizes = check_shapes(x, w1, w2, topk_weights, topk_ids);
  check_scales(w1_scale, "w1_scale", sizes.experts, 2 * sizes.inter, sizes.hidden);
  check_scales(w2_scale, "w2_scale", sizes.experts, sizes.hidden, sizes.inter);
  check_bias(w1_bias, "w1_bias", sizes.experts, 2 * sizes.inter);
  check_bias(w2_bias, "w2_bias", sizes.experts, sizes.hidden);
  if (shared) check_shared(*shared, x);
  for (const auto& [argument, tensor] :
       std::initializer_list<Named>{{"w1", w1},
                                    {"w2", w2},
                                    {"topk_weights", topk_weights},
                                    {"topk_ids", topk_ids},
                                    {"w1_scale", w1_scale},
                                    {"w2_scale", w2_scale},
                                    {"w1_bias", w1_bias},
                                    {"w2_bias", w2_bias},
                                    {"rotation", rotation},
                                    {"prescale", prescale},
                                    {"inter_rotation", inter_rotation},
                                    {"inter_prescale", inter_prescale},
                                    {"expert_mask", expert_mask},
                                    {"expert_map", expert_map},
                                    {"shared", shared}})
    if (tensor) check_device(*tensor, argument, x);
  check_experts(sizes, topk_ids, expert_mask, expert_map, num_shared_experts, shared_weight);
  const int64_t inter_size = check_moe_gemm1_options(
      x, sizes.inter, activation, limit, alpha, gate_mode, rotation, rotation_size, prescale,
      inter_rotation, inter_rotation_size, inter_prescale, scale_mode);
  check_pipeline(pipeline, x, rotation, sizes, block_m, inter_size, gemm1_config, gemm2_config);
  const at::ScalarType out_type = out_dtype.value_or(x.scalar_type());
  dtype_of(out_type, "out_dtype");

  const bool atomic = pipeline.finish == Finish::atomic;
  const int64_t topk = sizes.topk + num_shared_experts;
  const bool no_routes = sizes.tokens * topk * sizes.experts == 0;
  at::Tensor out;
  if (atomic || no_routes)
    out = at::empty({sizes.tokens, sizes.hidden}, x.options().dtype(out_type));
  if (out.defined() && shared) out.copy_(*shared);
  if (no_routes) return shared ? out : out.zero_();

  const Routes routes =
      with_shared_experts(topk_ids, topk_weights, expert_mask, expert_map,
                          sizes.experts - num_shared_experts, num_shared_experts, shared_weight);
  const OptionalTensor zero = atomic && !shared ? OptionalTensor(out) : std::nullopt;
  const Sorted s = moe_sort(zero, routes.ids, routes.weights, routes.experts, block_m, routes.mask,
                            routes.map, sizes.experts, /*all_here=*/true);

  at::Tensor codes, scales;
  if (pipeline.quantise_inside) {
    std::tie(codes, scales) =
        moe_gemm1(x, w1, w1_scale, s.sorted_ids, s.sorted_weights, s.sorted_expert_ids, s.num_valid,
                  std::nullopt, w1_bias, topk, activation, limit, alpha, gate_mode,
                  apply_weight_on_input, rotation, rotation_size, prescale, inter_rotation,
                  inter_rotation_size, inter_prescale, scale_mode, gemm1_config);
  } else {
    // A matrix brings its own size; the default, 0, is no wish beside it.
    const auto [a, a_scales] =
        moe_rotate_quant(x, s.sorted_ids, s.num_valid, s.reverse_sorted, rotation,
                         rotation ? std::nullopt : rotation_size, prescale, scale_mode, false);
    std::tie(codes, scales) =
        moe_gemm1(a, w1, w1_scale, s.sorted_ids, s.sorted_weights, s.sorted_expert_ids, s.num_valid,
                  a_scales, w1_bias, topk, activation, limit, alpha, gate_mode,
                  apply_weight_on_input, std::nullopt, 0, std::nullopt, inter_rotation,
                  inter_rotation_size, inter_prescale, scale_mode, gemm1_config);
  }

  // A weight that gemm1 has applied is 1 from here on.
  const bool weigh = !apply_weight_on_input;
  if (atomic) {
    moe_gemm2_atomic_(out, codes, scales, w2, w2_scale, s.sorted_ids,
                      weigh ? OptionalTensor(s.sorted_weights) : std::nullopt, s.sorted_expert_ids,
                      s.num_valid, topk, w2_bias, gemm2_config);
    return out;
  }
  at::Tensor rows;
  OptionalTensor row_scales;
  if (pipeline.finish == Finish::fp4_reduce) {
    std::tie(rows, row_scales) =
        moe_gemm2_mxfp4(codes, scales, w2, w2_scale, s.sorted_ids, s.sorted_expert_ids, s.num_valid,
                        sizes.tokens, topk, w2_bias, gemm2_config);
  } else {
    rows = moe_gemm2(codes, scales, w2, w2_scale, s.sorted_ids, s.sorted_expert_ids, s.num_valid,
                     sizes.tokens, topk, w2_bias, out_type, gemm2_config);
  }
  return moe_reduce(rows.view({sizes.tokens, topk, rows.size(-1)}),
                    weigh ? OptionalTensor(routes.weights) : std::nullopt, s.reverse_sorted,
                    row_scales, shared ? OptionalTensor(shared->to(out_type)) : std::nullopt,
                    out_type);
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { m.impl("_fused_moe", fused_moe); }
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { m.impl("_fused_moe", fused_moe); }
#endif

}  // namespace rotquant::ops
