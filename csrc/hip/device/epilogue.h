// SPDX-License-Identifier: MIT
// From the sums of a matrix instruction to the output: through LDS, so that neighbouring lanes
// store neighbouring 16 bytes of a row; then bias, one rounding, stores that stay inside the
// output.
#pragma once

#include "core/params.h"
#include "hip/device/mma.h"

namespace rotquant::device {

// A row-major matrix to write to. Columns past `columns` and rows past `rows` are never touched.
struct Output {
  void* data;
  DType dtype;
  int64_t rows, columns;
  int64_t stride;     // elements from row to row
  const float* bias;  // [columns] or null
};

constexpr int kStoreColumns = 8;  // of one row and lane

RQ_DEVICE uint32_t pack(DType dtype, float lo, float hi) {
  return dtype == DType::bf16 ? arch::pack_bf16({lo, hi}) : arch::pack_fp16({lo, hi});
}

// Eight neighbouring columns, all inside, where rows start 16-byte aligned.
RQ_DEVICE void store_columns(const Output& out, int64_t index, f32x4 lo, f32x4 hi) {
  if (out.dtype == DType::fp32) {
    f32x4* p = reinterpret_cast<f32x4*>(static_cast<float*>(out.data) + index);
    p[0] = lo, p[1] = hi;
  } else {
    arch::store(static_cast<uint16_t*>(out.data) + index,
                u32x4{pack(out.dtype, lo[0], lo[1]), pack(out.dtype, lo[2], lo[3]),
                      pack(out.dtype, hi[0], hi[1]), pack(out.dtype, hi[2], hi[3])});
  }
}

RQ_DEVICE void store_element(const Output& out, int64_t index, float value) {
  if (out.dtype == DType::fp32)
    static_cast<float*>(out.data)[index] = value;
  else
    static_cast<uint16_t*>(out.data)[index] = static_cast<uint16_t>(pack(out.dtype, value, value));
}

// Eight neighbouring columns of a row, or what part of them exists.
RQ_DEVICE void store_row(const Output& out, int64_t row, int64_t column, f32x4 lo, f32x4 hi) {
  const int64_t room = out.columns - column, index = row * out.stride + column;
  if (room >= kStoreColumns && out.stride % kStoreColumns == 0) {
    store_columns(out, index, lo, hi);
  } else {
    RQ_UNROLL
    for (int c = 0; c < kStoreColumns; ++c)
      if (c < room) store_element(out, index + c, c < 4 ? lo[c % 4] : hi[c % 4]);
  }
}

// The bias of eight neighbouring columns, of which at least the first exists.
struct Bias {
  bool any;
  f32x4 lo, hi;

  RQ_DEVICE Bias(const Output& out, int64_t column) : any(out.bias != nullptr), lo{}, hi{} {
    if (!any) return;
    RQ_UNROLL
    for (int c = 0; c < kStoreColumns; ++c) {
      const int64_t readable = column + c < out.columns ? column + c : column;
      (c < 4 ? lo : hi)[c % 4] = out.bias[readable];
    }
  }
  // NOTE: a bias that is not there must not be added as 0: -0 + 0 is +0.
  RQ_DEVICE void add_to(f32x4& first, f32x4& second) const {
    if (any) first += lo, second += hi;
  }
};

// A wave's part of a tile in LDS: rows are tokens. Its 16-byte chunks are permuted within the row:
// both the lanes of a matrix instruction, which write a column each, and those of a row, which read
// it, find different banks.
template <int kTokens, int kWeights>
struct SumTile {
  static constexpr uint32_t kRows = kTokens * kFragRows, kColumns = kWeights * kFragRows;
  static constexpr uint32_t kChunks = kColumns / 4, kBankRow = 16;  // chunks that all banks hold
  float values[kRows][kColumns];

  RQ_DEVICE f32x4& chunk(uint32_t row, uint32_t index) {
    constexpr uint32_t kRowsPerBankRow = kChunks < kBankRow ? kBankRow / kChunks : 1;
    const uint32_t place =
        index ^ (row / kRowsPerBankRow % (kChunks < kBankRow ? kChunks : kBankRow));
    return *reinterpret_cast<f32x4*>(&values[row][place * 4]);
  }

  RQ_DEVICE void put(uint32_t lane, const f32x4 (*acc)[kWeights]) {
    RQ_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      RQ_UNROLL
      for (int j = 0; j < kWeights; ++j)
        chunk(i * kFragRows + lane % kFragRows, j * 4 + lane / kFragRows) = acc[i][j];
    }
  }
};

// Stores the sum of `kParts` tiles, in their order; tile p is `stride` tiles behind the first.
template <int kParts, class Tile>
RQ_DEVICE void store_tiles(const Output& out, Tile* first, int stride, int64_t row0,
                           int64_t column0, uint32_t lane) {
  constexpr uint32_t kLanesPerRow = Tile::kColumns / kStoreColumns;
  constexpr uint32_t kRowsAtOnce = arch::kWaveSize / kLanesPerRow;
  const uint32_t place = lane % kLanesPerRow;
  const int64_t column = column0 + place * kStoreColumns;
  const auto sum = [&](uint32_t row, uint32_t chunk) {
    f32x4 value = first->chunk(row, chunk);
    RQ_UNROLL
    for (int p = 1; p < kParts; ++p) value += first[p * stride].chunk(row, chunk);
    return value;
  };
  if (column >= out.columns) return;
  const Bias bias(out, column);
#pragma unroll 1
  for (uint32_t r = lane / kLanesPerRow; r < Tile::kRows; r += kRowsAtOnce) {
    const int64_t row = row0 + r;
    if (row < out.rows) {
      f32x4 lo = sum(r, 2 * place), hi = sum(r, 2 * place + 1);
      bias.add_to(lo, hi);
      store_row(out, row, column, lo, hi);
    }
  }
}

}  // namespace rotquant::device
