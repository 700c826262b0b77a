// SPDX-License-Identifier: MIT
// What moe_sort returns, as the ops take it back; sorted scales.
#pragma once

#include "core/moe.h"
#include "ops/moe.h"

namespace rotquant::ops {

// int32 as moe_sort returns it, 1-D, contiguous. `shape` is for the message.
at::Tensor sorting_part(const at::Tensor& t, const char* argument, std::string_view shape,
                        const at::Tensor& x);

// A sorting after the checks; owns what `params` points into.
struct CheckedSorting {
  Sorted tensors;
  MoeSorting params{};
};

// Of its ids; no weights, experts or block_m yet. x tells the device.
CheckedSorting check_sorting(const at::Tensor& x, const at::Tensor& sorted_ids,
                             const at::Tensor& num_valid, int64_t tokens, int64_t topk);

// [ceil32(max_rows), ceil8(k / 32)]
std::vector<int64_t> sorted_scales_shape(int64_t max_rows, int64_t k);

// CPU: codes of x and their sorted scales, in two passes; the second costs next to nothing.
std::tuple<at::Tensor, at::Tensor> rotate_quant_sorted(const Activation& x,
                                                       const Rotation& rotation,
                                                       ScaleMode scale_mode, bool bf16_intermediate,
                                                       const MoeSorting& sorting,
                                                       const at::TensorOptions& options);

}  // namespace rotquant::ops
