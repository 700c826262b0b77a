// SPDX-License-Identifier: MIT
// moe_gemm1, moe_gemm2 and its two other forms: check -> allocate -> params -> run, the same checks
// on every device.
#ifdef ROTQUANT_WITH_HIP
#include "hip/backend.h"
#endif
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "core/moe_configs.h"
#include "cpu/backend.h"
#include "ops/moe_sorting.h"
#include "ops/rotation.h"

namespace rotquant::ops {
namespace {

// --- checks of what the GEMMs share --------------------------------------------------------------

// With what the GEMMs read besides the ids: blocks of rows, each of one expert.
CheckedSorting check_blocks(const at::Tensor& a, const at::Tensor& sorted_ids,
                            const OptionalTensor& sorted_weights,
                            const at::Tensor& sorted_expert_ids, const at::Tensor& num_valid,
                            int64_t tokens, int64_t topk) {
  CheckedSorting s = check_sorting(a, sorted_ids, num_valid, tokens, topk);
  s.tensors.sorted_expert_ids =
      sorting_part(sorted_expert_ids, "sorted_expert_ids", "[max_rows / block_m]", a);
  const int64_t rows = s.params.max_rows, blocks = sorted_expert_ids.size(0);
  const int64_t block_m = blocks == 0 ? 0 : rows / blocks;
  const bool known = block_m == 16 || block_m == 32 || block_m == 64 || block_m == 128;
  RQ_CHECK(rows == blocks * block_m && (rows == 0 || known), "sorted_expert_ids",
           c10::str("one expert for every 16, 32, 64 or 128 of the ", rows, " rows of sorted_ids"),
           "shape ", sorted_expert_ids.sizes());
  s.params.sorted_expert_ids = read_from<int32_t>(s.tensors.sorted_expert_ids);
  s.params.block_m = static_cast<int>(block_m);
  if (sorted_weights) {
    check_device(*sorted_weights, "sorted_weights", a);
    RQ_CHECK(sorted_weights->scalar_type() == at::kFloat, "sorted_weights", "dtype float32",
             sorted_weights->scalar_type());
    RQ_CHECK(sorted_weights->dim() == 1 && sorted_weights->size(0) == rows, "sorted_weights",
             c10::str("shape [", rows, "]"), "shape ", sorted_weights->sizes());
    s.tensors.sorted_weights = sorted_weights->contiguous();
    s.params.sorted_weights = read_from<float>(s.tensors.sorted_weights);
  }
  return s;
}

// Sorted scales of an activation of `k` channels.
at::Tensor checked_scales(const at::Tensor& scales_in, const char* argument, int64_t max_rows,
                          int64_t k, const at::Tensor& a) {
  const at::Tensor scales = aligned_bytes_of(scales_in, argument);
  check_device(scales, argument, a);
  const std::vector<int64_t> expected = sorted_scales_shape(max_rows, k);
  RQ_CHECK(scales.sizes() == at::IntArrayRef(expected), argument,
           c10::str("sorted, shuffled scales of shape ", at::IntArrayRef(expected)), "shape ",
           scales.sizes());
  return scales;
}

// Codes [experts, rows, k / 2] and their scales.
struct CheckedWeight {
  at::Tensor codes, scales;
};

CheckedWeight check_weight(const at::Tensor& w_in, const at::Tensor& scales_in, const char* name,
                           const char* scales_name, int64_t row_unit, int64_t k,
                           const at::Tensor& a) {
  const at::Tensor w = aligned_bytes_of(w_in, name),
                   scales = aligned_bytes_of(scales_in, scales_name);
  check_device(w, name, a);
  check_device(scales, scales_name, a);
  RQ_CHECK(w.dim() == 3 && w.size(2) == k / 2 && w.size(1) > 0 && w.size(1) % row_unit == 0, name,
           c10::str("shuffled codes of shape [E, N, ", k / 2, "] with N divisible by ", row_unit),
           "shape ", w.sizes());
  RQ_CHECK(w.size(0) <= kMoeMaxExperts, name, c10::str("at most ", kMoeMaxExperts, " experts"),
           w.size(0));
  RQ_CHECK(w.size(1) * w.size(2) < int64_t{1} << 32, name, "less than 4 GiB of codes an expert",
           "shape ", w.sizes());
  const int64_t rows = w.size(0) * w.size(1);
  const int64_t columns = round_up_to(k / kGroup, kScaleTileGroups);
  const int64_t real = scales.dim() >= 2 ? rows_before_last(scales) : -1;
  RQ_CHECK(
      (real == rows || real == round_up_to(rows, kScaleRowPadding)) && scales.size(-1) == columns,
      scales_name,
      c10::str("what shuffle_scales returns for [", w.size(0), ", ", w.size(1), ", ", k / kGroup,
               "]: ", rows, " or ", round_up_to(rows, kScaleRowPadding), " rows of ", columns),
      "shape ", scales.sizes());
  return {w, scales};
}

// Bias [experts, n] in float32; undefined without one.
at::Tensor checked_bias(const OptionalTensor& bias, int64_t experts, int64_t n,
                        const at::Tensor& a) {
  if (!bias) return {};
  check_device(*bias, "bias", a);
  RQ_CHECK(is_float(*bias), "bias", "a floating-point dtype", bias->scalar_type());
  RQ_CHECK(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == n, "bias",
           c10::str("shape [", experts, ", ", n, "]"), "shape ", bias->sizes());
  return floats_of(*bias);
}

// config as an index; `problem` says in words what `fits` asks of it.
template <size_t kCount, class Fits>
int checked_config(int64_t config, const MoeGemmConfig (&configs)[kCount],
                   const std::string& problem, Fits fits) {
  const int64_t count = kCount;
  if (config == -1 || (config >= 0 && config < count && fits(configs[config])))
    return static_cast<int>(config);
  std::string known;
  for (int64_t i = 0; i < count; ++i)
    if (fits(configs[i])) known += c10::str(known.empty() ? "" : ", ", i, " ", configs[i].name);
  const std::string name = config >= 0 && config < count ? c10::str(" ", configs[config].name) : "";
  RQ_CHECK(false, "config", c10::str("-1 (chosen) or what fits ", problem, ": ", known), config,
           name);
}

// CPU: the back end's f(tiles, begin, end) over all items, which are `products` multiplications.
template <class F>
void run_items(const std::vector<cpu::MoeTile>& tiles, int64_t items, int64_t row_products, F&& f) {
  // As in gemm_a4w4: so many take as long as one element of the other ops.
  constexpr int64_t kProductsPerElement = 64;
  if (tiles.empty()) return;
  int64_t rows = 0;
  for (const cpu::MoeTile& tile : tiles) rows += tile.rows;
  parallel_items(items, std::max<int64_t>(1, rows * row_products / items / kProductsPerElement), f);
}

// --- gemm1 ---------------------------------------------------------------------------------------

Activate activation_of(std::string_view name) {
  if (name == "silu") return Activate::silu;
  if (name == "swiglu") return Activate::swiglu;
  if (name == "gelu") return Activate::gelu;
  if (name == "gelu_tanh") return Activate::gelu_tanh;
  TORCH_CHECK(false, "activation: expected one of 'silu', 'swiglu', 'gelu', 'gelu_tanh', got '",
              name, "'");
}

MoeActivation check_activation(std::string_view name, std::optional<double> limit, double alpha) {
  const Activate kind = activation_of(name);
  TORCH_CHECK(kind != Activate::swiglu || limit,
              "limit: expected a number for activation 'swiglu' (gpt-oss has 7.0), got None");
  RQ_CHECK(!limit || *limit > 0, "limit", "a positive number", *limit);
  RQ_CHECK(std::isfinite(alpha), "alpha", "a finite number", alpha);
  constexpr double kNone = std::numeric_limits<double>::infinity();
  return {kind, static_cast<float>(limit.value_or(kNone)), static_cast<float>(alpha)};
}

constexpr RotationArguments kOfTokens{.x = nullptr, .or_none = true};
constexpr RotationArguments kOfIntermediate{.matrix = "inter_rotation",
                                            .size = "inter_rotation_size",
                                            .prescale = "inter_prescale",
                                            .x = nullptr,
                                            .largest = 128,
                                            .or_none = true,
                                            .transposed = true};

// A matrix brings its own size: the default, 0, is no wish beside it.
std::optional<int64_t> size_beside(const OptionalTensor& matrix, std::optional<int64_t> size) {
  return matrix && size == 0 ? std::nullopt : size;
}

ScaleMode check_scale_mode(std::string_view name) {
  const ScaleMode mode = scale_mode_of(name);
  TORCH_CHECK(mode != ScaleMode::mse,
              "scale_mode: expected 'round_up', 'floor', 'even' or 'ceil', which the GEMM can do, "
              "got 'mse'");
  return mode;
}

}  // namespace

int64_t check_moe_gemm1_options(const at::Tensor& x, int64_t inter, std::string_view activation,
                                std::optional<double> limit, double alpha,
                                std::string_view gate_mode, const OptionalTensor& rotation,
                                std::optional<int64_t> rotation_size,
                                const OptionalTensor& prescale,
                                const OptionalTensor& inter_rotation,
                                std::optional<int64_t> inter_rotation_size,
                                const OptionalTensor& inter_prescale, std::string_view scale_mode) {
  check_activation(activation, limit, alpha);
  interleaved(gate_mode);
  check_scale_mode(scale_mode);
  check_rotation_size(kOfTokens, x, x.size(1), rotation, size_beside(rotation, rotation_size),
                      prescale);
  return check_rotation_size(kOfIntermediate, x, inter, inter_rotation,
                             size_beside(inter_rotation, inter_rotation_size), inter_prescale);
}

std::tuple<at::Tensor, at::Tensor> moe_gemm1(
    const at::Tensor& a_in, const at::Tensor& w1_in, const at::Tensor& w1_scale_in,
    const at::Tensor& sorted_ids, const at::Tensor& sorted_weights,
    const at::Tensor& sorted_expert_ids, const at::Tensor& num_valid,
    const OptionalTensor& a_scales_in, const OptionalTensor& bias_in, int64_t topk,
    std::string_view activation, std::optional<double> limit, double alpha,
    std::string_view gate_mode, bool apply_weight, const OptionalTensor& rotation_in,
    std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
    const OptionalTensor& inter_rotation_in, std::optional<int64_t> inter_rotation_size,
    const OptionalTensor& inter_prescale, std::string_view scale_mode, int64_t config) {
  const bool inside = !a_scales_in.has_value();
  RQ_CHECK(a_in.dim() == 2, "a", "shape [M, H / 2] (codes) or [M, H]", "shape ", a_in.sizes());
  MoeGemm1Params p{};
  at::Tensor a;
  if (inside) {
    RQ_CHECK(a_in.scalar_type() == at::kBFloat16 || a_in.scalar_type() == at::kHalf, "a",
             "dtype bfloat16 or float16, or codes together with a_scales", a_in.scalar_type());
    const Rows rows = rows_of(a_in, "a");
    a = rows.tensor;
    p.x = rows.params;
    p.k = p.x.k;
  } else {
    a = aligned_bytes_of(a_in, "a");
    RQ_CHECK(a.size(1) % kGroupBytes == 0, "a",
             c10::str("last dimension H / 2 divisible by ", kGroupBytes), "shape ", a.sizes());
    p.a = read_from<uint8_t>(a);
    p.k = a.size(1) * 2;
  }
  RQ_CHECK(p.k > 0, "a", "at least one group of channels", "shape ", a.sizes());
  const CheckedSorting sorting =
      check_blocks(a, sorted_ids, sorted_weights, sorted_expert_ids, num_valid, a.size(0), topk);
  p.sorting = sorting.params;
  const int64_t max_rows = p.sorting.max_rows;
  at::Tensor a_scales;
  if (!inside) {
    a_scales = checked_scales(*a_scales_in, "a_scales", max_rows, p.k, a);
    p.a_scales = read_from<uint8_t>(a_scales);
    RQ_CHECK(!runs_on_gpu(a) || a.numel() < int64_t{1} << 31, "a", "less than 2 GiB of codes",
             "shape ", a.sizes());
  }
  const auto [w1, w1_scale] =
      check_weight(w1_in, w1_scale_in, "w1", "w1_scale", 2 * kGroup, p.k, a);
  p.w1 = read_from<uint8_t>(w1);
  p.w1_scale = read_from<uint8_t>(w1_scale);
  p.experts = static_cast<int>(w1.size(0));
  p.inter = w1.size(1) / 2;
  const at::Tensor bias = checked_bias(bias_in, p.experts, 2 * p.inter, a);
  p.bias = bias.defined() ? read_from<float>(bias) : nullptr;
  p.interleaved = interleaved(gate_mode);
  p.apply_weight = apply_weight;
  p.activation = check_activation(activation, limit, alpha);

  RQ_CHECK(inside || !rotation_in, "rotation", "None: the codes in `a` are rotated already",
           "a tensor");
  RQ_CHECK(inside || rotation_size == 0, "rotation_size", "0: the codes in `a` are rotated already",
           rotation_size ? c10::str(*rotation_size) : "None");
  const CheckedRotation rotation = check_rotation(
      kOfTokens, a, p.k, rotation_in, size_beside(rotation_in, rotation_size), prescale);
  TORCH_CHECK(!rotation_in || !runs_on_gpu(a),
              "rotation: expected None on a GPU, where only the Hadamard is done inside the GEMM "
              "(moe_rotate_quant takes a matrix), got a tensor");
  p.rotation = rotation.params;
  const CheckedRotation inter_rotation =
      check_rotation(kOfIntermediate, a, p.inter, inter_rotation_in,
                     size_beside(inter_rotation_in, inter_rotation_size), inter_prescale);
  p.inter_rotation = inter_rotation.params;
  p.scale_mode = check_scale_mode(scale_mode);

  if (max_rows > 0 || config != -1) {
    const auto fits = [&](const MoeGemmConfig& c) {
      return moe_gemm1_fits(c, p.sorting.block_m, inside, p.inter_rotation.size);
    };
    const bool any = std::any_of(std::begin(kMoeGemm1Configs), std::end(kMoeGemm1Configs), fits);
    RQ_CHECK(any || max_rows == 0, "a",
             c10::str("codes and a_scales: blocks of ", p.sorting.block_m,
                      " rows are not quantised inside"),
             a.scalar_type());
    p.config = checked_config(
        config, kMoeGemm1Configs,
        c10::str("block_m ", p.sorting.block_m, inside ? ", quantising inside" : ", codes",
                 " and inter_rotation_size ", p.inter_rotation.size),
        [&](const MoeGemmConfig& c) { return max_rows == 0 || fits(c); });
  }

  const auto options = a.options().dtype(at::kByte);
  at::Tensor codes = at::empty({max_rows, p.inter / 2}, options);
  at::Tensor scales = at::empty(sorted_scales_shape(max_rows, p.inter), options);
  p.codes = write_to<uint8_t>(codes);
  p.scales = write_to<uint8_t>(scales);
  if (max_rows == 0 || codes.is_meta()) return {codes, scales};
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(a)) {
    on_device_of(a, [&](hipStream_t stream) { hip::moe_gemm1(p, stream); });
    return {codes, scales};
  }
#endif
  at::Tensor x_codes;
  if (inside) {
    std::tie(x_codes, a_scales) =
        rotate_quant_sorted(p.x, p.rotation, p.scale_mode, false, p.sorting, options);
    p.a = read_from<uint8_t>(x_codes);
    p.a_scales = read_from<uint8_t>(a_scales);
  }
  const std::vector<cpu::MoeTile> tiles = cpu::moe_tiles(p.sorting, p.experts);
  run_items(tiles, cpu::moe_gemm1_items(p, std::ssize(tiles)).count, 2 * p.inter * p.k,
            [&](int64_t begin, int64_t end) { cpu::moe_gemm1(p, tiles, begin, end); });
  return {codes, scales};
}

// --- gemm2 ---------------------------------------------------------------------------------------

namespace {

// gemm2's arguments after the checks, but for where it writes to.
struct CheckedGemm2 {
  at::Tensor a, a_scales, bias;
  CheckedWeight w2;
  CheckedSorting sorting;
  MoeGemm2Params params{};
};

CheckedGemm2 check_gemm2(const at::Tensor& a_in, const at::Tensor& a_scales, const at::Tensor& w2,
                         const at::Tensor& w2_scale, const at::Tensor& sorted_ids,
                         const OptionalTensor& sorted_weights, const at::Tensor& sorted_expert_ids,
                         const at::Tensor& num_valid, int64_t tokens, int64_t topk,
                         const OptionalTensor& bias, int64_t config) {
  CheckedGemm2 c;
  c.a = aligned_bytes_of(a_in, "a");
  c.sorting =
      check_blocks(c.a, sorted_ids, sorted_weights, sorted_expert_ids, num_valid, tokens, topk);
  const int64_t max_rows = c.sorting.params.max_rows;
  RQ_CHECK(c.a.dim() == 2 && c.a.size(0) == max_rows && c.a.size(1) > 0 &&
               c.a.size(1) % kGroupBytes == 0,
           "a",
           c10::str("shape [", max_rows,
                    ", I / 2], a row of codes for each of sorted_ids, with "
                    "I / 2 divisible by ",
                    kGroupBytes),
           "shape ", c.a.sizes());
  MoeGemm2Params& p = c.params;
  p.inter = c.a.size(1) * 2;
  c.a_scales = checked_scales(a_scales, "a_scales", max_rows, p.inter, c.a);
  c.w2 = check_weight(w2, w2_scale, "w2", "w2_scale", kGroup, p.inter, c.a);
  p.experts = static_cast<int>(c.w2.codes.size(0));
  p.hidden = c.w2.codes.size(1);
  c.bias = checked_bias(bias, p.experts, p.hidden, c.a);
  p.sorting = c.sorting.params;
  p.a = read_from<uint8_t>(c.a);
  p.a_scales = read_from<uint8_t>(c.a_scales);
  p.w2 = read_from<uint8_t>(c.w2.codes);
  p.w2_scale = read_from<uint8_t>(c.w2.scales);
  p.bias = bias ? read_from<float>(c.bias) : nullptr;
  p.apply_weight = sorted_weights.has_value();
  if (max_rows > 0 || config != -1)
    p.config = checked_config(config, kMoeGemm2Configs, c10::str("block_m ", p.sorting.block_m),
                              [&](const MoeGemmConfig& known) {
                                return max_rows == 0 || known.tile.m == p.sorting.block_m;
                              });
  return c;
}

void run_gemm2(const CheckedGemm2& c) {
  const MoeGemm2Params& p = c.params;
  if (p.sorting.max_rows == 0 || c.a.is_meta()) return;
#ifdef ROTQUANT_WITH_HIP
  if (runs_on_gpu(c.a))
    return on_device_of(c.a, [&](hipStream_t stream) { hip::moe_gemm2(p, stream); });
#endif
  const std::vector<cpu::MoeTile> tiles = cpu::moe_tiles(p.sorting, p.experts);
  run_items(tiles, cpu::moe_gemm2_items(p, std::ssize(tiles)).count, p.hidden * p.inter,
            [&](int64_t begin, int64_t end) { cpu::moe_gemm2(p, tiles, begin, end); });
}

}  // namespace

at::Tensor moe_gemm2(const at::Tensor& a, const at::Tensor& a_scales, const at::Tensor& w2,
                     const at::Tensor& w2_scale, const at::Tensor& sorted_ids,
                     const at::Tensor& sorted_expert_ids, const at::Tensor& num_valid,
                     int64_t tokens, int64_t topk, const OptionalTensor& bias,
                     at::ScalarType out_dtype, int64_t config) {
  CheckedGemm2 c = check_gemm2(a, a_scales, w2, w2_scale, sorted_ids, std::nullopt,
                               sorted_expert_ids, num_valid, tokens, topk, bias, config);
  c.params.finish = MoeFinish::rows;
  c.params.out_dtype = dtype_of(out_dtype, "out_dtype");
  at::Tensor out = at::empty({tokens * topk, c.params.hidden}, c.a.options().dtype(out_dtype));
  c.params.out = write_to(out);
  run_gemm2(c);
  return out;
}

std::tuple<at::Tensor, at::Tensor> moe_gemm2_mxfp4(const at::Tensor& a, const at::Tensor& a_scales,
                                                   const at::Tensor& w2, const at::Tensor& w2_scale,
                                                   const at::Tensor& sorted_ids,
                                                   const at::Tensor& sorted_expert_ids,
                                                   const at::Tensor& num_valid, int64_t tokens,
                                                   int64_t topk, const OptionalTensor& bias,
                                                   int64_t config) {
  CheckedGemm2 c = check_gemm2(a, a_scales, w2, w2_scale, sorted_ids, std::nullopt,
                               sorted_expert_ids, num_valid, tokens, topk, bias, config);
  c.params.finish = MoeFinish::mxfp4;
  const auto options = c.a.options();
  at::Tensor codes = at::empty({tokens * topk, c.params.hidden / 2}, options);
  at::Tensor scales = at::empty({tokens * topk, c.params.hidden / kGroup}, options);
  c.params.codes = write_to<uint8_t>(codes);
  c.params.scales = write_to<uint8_t>(scales);
  run_gemm2(c);
  return {codes, scales};
}

void moe_gemm2_atomic_(const at::Tensor& out, const at::Tensor& a, const at::Tensor& a_scales,
                       const at::Tensor& w2, const at::Tensor& w2_scale,
                       const at::Tensor& sorted_ids, const OptionalTensor& sorted_weights,
                       const at::Tensor& sorted_expert_ids, const at::Tensor& num_valid,
                       int64_t topk, const OptionalTensor& bias, int64_t config) {
  const DType dtype = dtype_of(out.scalar_type(), "out");
  RQ_CHECK(out.dim() == 2, "out", "shape [tokens, H]", "shape ", out.sizes());
  CheckedGemm2 c = check_gemm2(a, a_scales, w2, w2_scale, sorted_ids, sorted_weights,
                               sorted_expert_ids, num_valid, out.size(0), topk, bias, config);
  check_device(out, "out", c.a);
  RQ_CHECK(out.size(1) == c.params.hidden, "out", c10::str("shape [tokens, ", c.params.hidden, "]"),
           "shape ", out.sizes());
  // Pairs of 16-bit elements are added at once.
  RQ_CHECK(out.is_contiguous() && reinterpret_cast<uintptr_t>(read_from(out)) % 4 == 0, "out",
           "contiguous memory aligned to 4 bytes", "strides ", out.strides(), ", storage offset ",
           out.storage_offset());
  c.params.finish = MoeFinish::atomic;
  c.params.out_dtype = dtype;
  c.params.out = write_to(out);
  run_gemm2(c);
}

namespace {

template <size_t kCount>
std::vector<std::string> names_of(const MoeGemmConfig (&configs)[kCount]) {
  std::vector<std::string> names;
  for (const MoeGemmConfig& config : configs) names.emplace_back(config.name);
  return names;
}

void register_kernels(torch::Library& m) {
  m.impl("moe_gemm1", moe_gemm1);
  m.impl("moe_gemm2", moe_gemm2);
  m.impl("moe_gemm2_mxfp4", moe_gemm2_mxfp4);
  m.impl("moe_gemm2_atomic_", moe_gemm2_atomic_);
}

}  // namespace

TORCH_LIBRARY_IMPL(rotquant_hip, CPU, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(rotquant_hip, CompositeExplicitAutograd, m) {
  m.impl("_moe_gemm1_configs", [] { return names_of(kMoeGemm1Configs); });
  m.impl("_moe_gemm2_configs", [] { return names_of(kMoeGemm2Configs); });
}
#if defined(ROTQUANT_WITH_HIP) && !defined(ROTQUANT_HIP_EMULATE)
TORCH_LIBRARY_IMPL(rotquant_hip, CUDA, m) { register_kernels(m); }
#endif

}  // namespace rotquant::ops
