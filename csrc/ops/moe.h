// SPDX-License-Identifier: MIT
// The MoE ops as functions, for fused_moe, which is made of them. Schemas: register.cpp.
#pragma once

#include "ops/common.h"

namespace rotquant::ops {

using OptionalTensor = std::optional<at::Tensor>;

struct Sorted {
  at::Tensor sorted_ids, sorted_weights, sorted_expert_ids, num_valid, reverse_sorted;
};

// `all_here`: a mask has as many ones as there are local experts, or is none (kMoeInvalid).
// `zero`: a contiguous tensor that is zeroed in the same launch.
Sorted moe_sort(const OptionalTensor& zero, const at::Tensor& topk_ids,
                const at::Tensor& topk_weights, int64_t num_experts, int64_t block_m,
                const OptionalTensor& expert_mask, const OptionalTensor& expert_map,
                std::optional<int64_t> num_local_experts, bool all_here = false);

// Of expert_mask and expert_map what can be told without reading a GPU's memory: at most one of
// them, of `experts` elements (of any number for nullopt); a mask on a CPU has `local` ones.
void check_ownership(const at::Tensor& topk_ids, const OptionalTensor& mask,
                     const OptionalTensor& map, std::optional<int64_t> experts,
                     std::optional<int64_t> local);

std::tuple<at::Tensor, at::Tensor> moe_rotate_quant(
    const at::Tensor& x, const at::Tensor& sorted_ids, const at::Tensor& num_valid,
    const at::Tensor& reverse_sorted, const OptionalTensor& rotation,
    std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
    std::string_view scale_mode, bool bf16_intermediate);

// Of moe_gemm1 what can be checked before there is a sorting, x [M, H]; the intermediate's rotation
// size.
int64_t check_moe_gemm1_options(const at::Tensor& x, int64_t inter, std::string_view activation,
                                std::optional<double> limit, double alpha,
                                std::string_view gate_mode, const OptionalTensor& rotation,
                                std::optional<int64_t> rotation_size,
                                const OptionalTensor& prescale,
                                const OptionalTensor& inter_rotation,
                                std::optional<int64_t> inter_rotation_size,
                                const OptionalTensor& inter_prescale, std::string_view scale_mode);

std::tuple<at::Tensor, at::Tensor> moe_gemm1(
    const at::Tensor& a, const at::Tensor& w1, const at::Tensor& w1_scale,
    const at::Tensor& sorted_ids, const at::Tensor& sorted_weights,
    const at::Tensor& sorted_expert_ids, const at::Tensor& num_valid,
    const OptionalTensor& a_scales, const OptionalTensor& bias, int64_t topk,
    std::string_view activation, std::optional<double> limit, double alpha,
    std::string_view gate_mode, bool apply_weight, const OptionalTensor& rotation,
    std::optional<int64_t> rotation_size, const OptionalTensor& prescale,
    const OptionalTensor& inter_rotation, std::optional<int64_t> inter_rotation_size,
    const OptionalTensor& inter_prescale, std::string_view scale_mode, int64_t config);

at::Tensor moe_gemm2(const at::Tensor& a, const at::Tensor& a_scales, const at::Tensor& w2,
                     const at::Tensor& w2_scale, const at::Tensor& sorted_ids,
                     const at::Tensor& sorted_expert_ids, const at::Tensor& num_valid,
                     int64_t tokens, int64_t topk, const OptionalTensor& bias,
                     at::ScalarType out_dtype, int64_t config);

std::tuple<at::Tensor, at::Tensor> moe_gemm2_mxfp4(const at::Tensor& a, const at::Tensor& a_scales,
                                                   const at::Tensor& w2, const at::Tensor& w2_scale,
                                                   const at::Tensor& sorted_ids,
                                                   const at::Tensor& sorted_expert_ids,
                                                   const at::Tensor& num_valid, int64_t tokens,
                                                   int64_t topk, const OptionalTensor& bias,
                                                   int64_t config);

void moe_gemm2_atomic_(const at::Tensor& out, const at::Tensor& a, const at::Tensor& a_scales,
                       const at::Tensor& w2, const at::Tensor& w2_scale,
                       const at::Tensor& sorted_ids, const OptionalTensor& sorted_weights,
                       const at::Tensor& sorted_expert_ids, const at::Tensor& num_valid,
                       int64_t topk, const OptionalTensor& bias, int64_t config);

at::Tensor moe_reduce(const at::Tensor& rows, const OptionalTensor& topk_weights,
                      const at::Tensor& reverse_sorted, const OptionalTensor& scales,
                      const OptionalTensor& shared, std::optional<at::ScalarType> out_dtype);

}  // namespace rotquant::ops
