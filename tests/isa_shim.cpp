// SPDX-License-Identifier: MIT
// The CPU kernels of one instruction set behind C functions; see isa.py, which defines RQ_SHIM_ISA
// and compiles this once for each.
#include "cpu/moe_items.cpp"
// NOTE: last, for it ends with a pragma that chooses the instruction set.
#include RQ_SHIM_SOURCE

using namespace rotquant;
namespace isa = rotquant::cpu::RQ_SHIM_ISA;

extern "C" void run_gemm_a4w4(const uint8_t* a, const uint8_t* b, const uint8_t* a_scales,
                              const uint8_t* b_scales, float* out, int64_t m, int64_t n,
                              int64_t k) {
  const GemmParams params{a, b, a_scales, b_scales, nullptr, out, DType::fp32,
                          m, n, k,        -1,       nullptr, 0};
  isa::gemm_a4w4(params, 0, cpu::gemm_items(params).count);
}

#define ACTIVATION \
  Activation { x, DType(dtype), rows, k, k }
#define ROTATION \
  Rotation { size, matrix, 0, prescale, nullptr }

extern "C" void run_rotate(const void* x, int dtype, int64_t rows, int64_t k, int size,
                           const float* matrix, const float* prescale, void* y, int y_dtype) {
  isa::rotate(RotateParams{ACTIVATION, ROTATION, y, DType(y_dtype)}, 0, rows * (k / size));
}

extern "C" void run_rotate_quant(const void* x, int dtype, int64_t rows, int64_t k, int size,
                                 const float* matrix, const float* prescale, int mode,
                                 bool via_bf16, bool shuffle, uint8_t* codes, uint8_t* scales) {
  const int item = size < kGroup ? kGroup : size;
  isa::rotate_quant(RotateQuantParams{ACTIVATION, ROTATION, ElementFormat::e2m1, ScaleMode(mode),
                                      via_bf16, shuffle, codes, scales},
                    0, rows * (k / item));
}

extern "C" void run_dequant(const uint8_t* codes, const uint8_t* scales, bool shuffled,
                            int64_t rows, int64_t k, void* y, int y_dtype) {
  isa::dequant(DequantParams{codes, scales, shuffled, rows, k, y, DType(y_dtype)}, 0,
               rows * (k / kGroup));
}

extern "C" void run_activate(int activation, float limit, const float* gate, const float* up,
                             float* out, int64_t count) {
  const MoeActivation kind{Activate(activation), limit, 1.702f};
  for (int64_t i = 0; i < count; i += isa::kLanes)
    isa::store(out + i,
               isa::activate(kind, isa::load<isa::f32v>(gate + i), isa::load<isa::f32v>(up + i)));
}

#define SORTING                                                                                \
  MoeSorting {                                                                                 \
    sorted_ids, sorted_weights, sorted_expert_ids, num_valid, nullptr, max_rows, tokens, topk, \
        block_m                                                                                \
  }
#define SORTING_ARGUMENTS                                                                   \
  const int32_t *sorted_ids, const float *sorted_weights, const int32_t *sorted_expert_ids, \
      const int32_t *num_valid, int64_t max_rows, int64_t tokens, int topk, int block_m

extern "C" void run_moe_gemm1(SORTING_ARGUMENTS, const uint8_t* a, const uint8_t* a_scales,
                              const uint8_t* w1, const uint8_t* w1_scale, const float* bias,
                              int64_t k, int64_t inter, int experts, int activation, float limit,
                              int rotation_size, uint8_t* codes, uint8_t* scales) {
  MoeGemm1Params p{};
  p.sorting = SORTING;
  p.a = a, p.a_scales = a_scales, p.w1 = w1, p.w1_scale = w1_scale, p.bias = bias;
  p.activation = {Activate(activation), limit, 1.702f};
  p.inter_rotation.size = rotation_size;
  p.k = k, p.inter = inter, p.experts = experts, p.codes = codes, p.scales = scales;
  const auto tiles = cpu::moe_tiles(p.sorting, experts);
  const int64_t count = std::ssize(tiles);
  isa::moe_gemm1(p, tiles.data(), count, 0, cpu::moe_gemm1_items(p, count).count);
}

extern "C" void run_moe_gemm2(SORTING_ARGUMENTS, const uint8_t* a, const uint8_t* a_scales,
                              const uint8_t* w2, const uint8_t* w2_scale, const float* bias,
                              int64_t inter, int64_t hidden, int experts, int finish, void* out,
                              int out_dtype, uint8_t* codes, uint8_t* scales) {
  MoeGemm2Params p{};
  p.sorting = SORTING;
  p.a = a, p.a_scales = a_scales, p.w2 = w2, p.w2_scale = w2_scale, p.bias = bias;
  p.inter = inter, p.hidden = hidden, p.experts = experts;
  p.finish = MoeFinish(finish), p.apply_weight = true;
  p.out = out, p.out_dtype = DType(out_dtype), p.codes = codes, p.scales = scales;
  const auto tiles = cpu::moe_tiles(p.sorting, experts);
  const int64_t count = std::ssize(tiles);
  isa::moe_gemm2(p, tiles.data(), count, 0, cpu::moe_gemm2_items(p, count).count);
}

extern "C" void run_moe_reduce(const void* rows, const uint8_t* codes, const uint8_t* scales,
                               int rows_dtype, const float* topk_weights,
                               const int32_t* reverse_sorted, const void* shared, int64_t tokens,
                               int64_t hidden, int topk, void* out, int out_dtype) {
  isa::moe_reduce(
      MoeReduceParams{rows, codes, scales, DType(rows_dtype), topk_weights, reverse_sorted, shared,
                      tokens, hidden, topk, out, DType(out_dtype)},
      0, tokens);
}
