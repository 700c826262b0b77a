// SPDX-License-Identifier: MIT
// How the GEMM is cut into items: tiles of the output, columns outermost.
#pragma once

#include "core/layout.h"
#include "core/params.h"

namespace rotquant::cpu {

constexpr int kGemmRows = 64;
constexpr int kGemmBlock = 16;     // columns of one weight block
constexpr int kGemmMaxBlocks = 8;  // of one item

struct GemmItems {
  int64_t row_tiles, columns;  // columns of an item
  int64_t count;
};

// Wide items unpack each activation fewer times; narrow ones give every thread something to do.
constexpr GemmItems gemm_items(const GemmParams& p) {
  constexpr int64_t kEnough = 64;
  const int64_t row_tiles = (p.m + kGemmRows - 1) / kGemmRows;
  int64_t columns = kGemmMaxBlocks * kGemmBlock;
  while (columns > 2 * kGemmBlock && row_tiles * (p.n / columns) < kEnough) columns /= 2;
  return {row_tiles, columns, row_tiles * ((p.n + columns - 1) / columns)};
}

}  // namespace rotquant::cpu
