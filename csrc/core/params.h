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
