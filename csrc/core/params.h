// SPDX-License-Identifier: MIT
// The whole contract between csrc/ops and the back ends: one plain struct per op.
// Strides and sizes count elements unless a name says bytes. No torch here.
#pragma once

#include <stdint.h>

#include "core/mxfp4.h"

namespace rotquant {

enum class DType : int { bf16, fp16, fp32 };

struct Activation {
  const void* data;  // [rows, k], elements of `dtype`, last stride 1
  DType dtype;
  int64_t rows;        // product of the leading dimensions
  int64_t k;           // channels, a multiple of 32 and of the rotation size
  int64_t row_stride;  // elements from one row to the next; anything, 0 too
};

struct Rotation {
  int size;             // RS: 16, 32, 64, 128, 256; 0 = no rotation
  const float* matrix;  // null = Hadamard / sqrt(RS); else [RS, RS] or [k / RS, RS, RS], y = x @ R
  int64_t matrix_stride;  // elements from one block's matrix to the next; 0 = one matrix for all
  const float* prescale;  // [k] or null, multiplied in before the rotation
  // The matrix in bf16, for the GPU, whose matrix product takes no other; `matrix` is null there.
  const uint16_t* matrix_bf16;
};

struct RotateParams {
  Activation x;
  Rotation rotation;
  void* y;  // [rows, k] contiguous, elements of `y_dtype`
  DType y_dtype;
};

struct RotateQuantParams {
  Activation x;
  Rotation rotation;
  ElementFormat element;
  ScaleMode scale_mode;
  bool bf16_intermediate;  // round the rotated value to bf16 before quantising
  bool shuffle_scales;
  uint8_t* codes;   // [rows, k / 2] contiguous, element 2i in the low nibble of byte i
  uint8_t* scales;  // [rows, k / 32], or shuffled [ceil256(rows), ceil8(k / 32)] (core/layout.h)
};

struct DequantParams {
  const uint8_t* codes;   // [rows, k / 2] contiguous
  const uint8_t* scales;  // natural or shuffled, as above
  bool shuffled_scales;
  int64_t rows, k;
  void* y;  // [rows, k] contiguous, elements of `y_dtype`
  DType y_dtype;
};

// out[m, n] = sum over k of a[m, k] * b[n, k], plus bias[n]; float32 sums, rounded once.
struct GemmParams {
  const uint8_t* a;         // codes [m, k / 2] contiguous
  const uint8_t* b;         // codes [round_up(n, 16), k / 2] in weight_offset()'s order
  const uint8_t* a_scales;  // shuffled [ceil256(m), ceil8(k / 32)]
  const uint8_t* b_scales;  // shuffled [ceil256(n), ceil8(k / 32)]
  const float* bias;        // [n] or null
  void* out;                // [m, n] contiguous, elements of `out_dtype`
  DType out_dtype;
  int64_t m, n, k;  // k counts elements, a multiple of 32
  int config;       // index into kGemmConfigs (core/gemm_configs.h), or -1: choose_gemm_config()
  void* workspace;  // 16-byte aligned, gemm_workspace_bytes() of it; null if that is 0
  int64_t workspace_bytes;
};

// --- mixture of experts --------------------------------------------------------------------------

// A route is one (token, slot) pair. Sorted rows are routes by expert, each expert padded to
// block_m rows; see core/moe.h.

struct MoeSortParams {
  const int32_t* topk_ids;     // [tokens, topk] contiguous
  const float* topk_weights;   // [tokens, topk] contiguous
  const int32_t* expert_mask;  // [experts] 1 = local, 0 = not, or null
  const int32_t* expert_map;   // [experts] local index or -1, or null; not both
  int64_t tokens;              // < 2^24
  int topk;                    // <= 16
  int experts;                 // <= 1024, global
  int local_experts;           // local ids from here on are dropped
  int mask_ones;               // that expert_mask must hold; -1: any number
  int block_m;                 // 16, 32, 64, 128
  int64_t max_rows;            // moe_max_rows()
  int32_t* sorted_ids;         // [max_rows], 16-byte aligned
  float* sorted_weights;       // [max_rows], 16-byte aligned
  int32_t* sorted_expert_ids;  // [max_rows / block_m]
  int32_t* num_valid;          // [2]
  int32_t* reverse_sorted;     // [tokens * topk]
  void* zero;                  // zeroed as well, or null; any alignment
  int64_t zero_bytes;
  int32_t* workspace;  // moe_sort_workspace_bytes() of it; null if that is 0
};

// The result of moe_sort, for the ops that read it.
struct MoeSorting {
  const int32_t* sorted_ids;
  const float* sorted_weights;
  const int32_t* sorted_expert_ids;
  const int32_t* num_valid;
  const int32_t* reverse_sorted;  // null where the op does not take it
  int64_t max_rows, tokens;
  int topk, block_m;
};

struct MoeRotateQuantParams {
  Activation x;  // rows = tokens
  Rotation rotation;
  ElementFormat element;
  ScaleMode scale_mode;
  bool bf16_intermediate;
  MoeSorting sorting;
  uint8_t* codes;   // [tokens, k / 2] contiguous, token order
  uint8_t* scales;  // sorted, shuffled [ceil32(max_rows), ceil8(k / 32)]; all of it is written
};

struct MoeSortScalesParams {
  const uint8_t* in;  // natural [tokens, groups], or with `by_route` [tokens * topk, groups]
  bool by_route;
  int64_t groups;
  MoeSorting sorting;
  uint8_t* out;  // as MoeRotateQuantParams::scales
};

enum class Activate : int { silu, swiglu, gelu, gelu_tanh };

struct MoeActivation {
  Activate kind;
  float limit;  // g = min(g, limit), u = clamp(u, -limit, limit) first; infinity = none
  float alpha;  // of swiglu: g * sigmoid(alpha * g) * (u + 1)
};

// codes, scales = quantise(rotate(activate(a[token] @ w1[expert]^T + bias[expert]))).
struct MoeGemm1Params {
  MoeSorting sorting;
  // Either codes and sorted scales, or `x` to quantise inside (a is null then).
  const uint8_t* a;         // codes [tokens, k / 2] contiguous, token order
  const uint8_t* a_scales;  // sorted, shuffled [ceil32(max_rows), ceil8(k / 32)]
  Activation x;             // [tokens, k]
  Rotation rotation;        // of x
  const uint8_t* w1;        // codes [experts, 2 * inter, k / 2] in weight_offset()'s order
  const uint8_t* w1_scale;  // shuffled; expert e begins at row e * 2 * inter
  const float* bias;        // [experts, 2 * inter], gate rows first, or null
  bool interleaved;         // 16-row tiles of w1 alternate gate and up (core/layout.h)
  bool apply_weight;        // a @ w1 is multiplied by the route's weight, before the bias
  MoeActivation activation;
  Rotation inter_rotation;  // of the activated value; size 0 or 16 .. 128, inter % size == 0
  // On the GPU with a matrix: inter_rotation.matrix_bf16 is its transpose.
  ScaleMode scale_mode;  // of the intermediate and of x; not mse
  int64_t k, inter;      // hidden and intermediate size, multiples of 32
  int experts;           // local
  int config;            // index into kMoeGemm1Configs, or -1: chosen
  uint8_t* codes;        // [max_rows, inter / 2] contiguous, sorted rows
  uint8_t* scales;       // shuffled [ceil32(max_rows), ceil8(inter / 32)]
};

enum class MoeFinish : int { atomic, rows, mxfp4 };

// y = a @ w2[expert]^T + bias[expert] for every route: added, weighted, to out[token], or stored
// unweighted by route (row token * topk + slot; those of dropped routes are not written).
struct MoeGemm2Params {
  MoeSorting sorting;
  const uint8_t* a;         // codes [max_rows, inter / 2], sorted rows
  const uint8_t* a_scales;  // shuffled [ceil32(max_rows), ceil8(inter / 32)]
  const uint8_t* w2;        // codes [experts, hidden, inter / 2] in weight_offset()'s order
  const uint8_t* w2_scale;  // shuffled; expert e begins at row e * hidden
  const float* bias;        // [experts, hidden] or null
  int64_t inter, hidden;
  int experts;
  int config;  // index into kMoeGemm2Configs, or -1: chosen
  MoeFinish finish;
  bool apply_weight;  // atomic: multiply by sorted_weights, else by 1
  void* out;          // atomic [tokens, hidden], rows [tokens * topk, hidden]; of `out_dtype`
  DType out_dtype;
  uint8_t* codes;   // mxfp4: [tokens * topk, hidden / 2]
  uint8_t* scales;  // mxfp4: natural [tokens * topk, hidden / 32], round_up
};

// out[t] = shared[t] + sum over slots, ascending, of weight * rows[t, slot]; float32, rounded once.
struct MoeReduceParams {
  const void* rows;      // [tokens * topk, hidden] of `rows_dtype`, or null
  const uint8_t* codes;  // else MXFP4 rows
  const uint8_t* scales;
  DType rows_dtype;
  const float* topk_weights;      // [tokens * topk] or null: all 1
  const int32_t* reverse_sorted;  // [tokens * topk]; a negative one is a dropped route
  const void* shared;             // [tokens, hidden] contiguous of `out_dtype`, or null
  int64_t tokens, hidden;
  int topk;
  void* out;  // [tokens, hidden] contiguous
  DType out_dtype;
};

// Gate/up interleaving of a fused w1 (core/layout.h): `inter` is I of its 2I rows; 0 = separated.
struct ShuffleScalesParams {
  const uint8_t* in;
  uint8_t* out;
  int64_t experts;  // 1 unless interleaved
  int64_t rows, groups;
  int64_t inter;
  bool inverse;  // in is shuffled, out is [experts, rows, groups]
};

struct ShuffleWeightParams {
  const uint8_t* in;
  uint8_t* out;
  int64_t experts, rows, row_bytes;
  int64_t inter;
  bool inverse;
};

}  // namespace rotquant
