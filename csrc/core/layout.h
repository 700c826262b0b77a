// SPDX-License-Identifier: MIT
// Index maps of the layouts that the MXFP4 GEMMs read, each with its inverse; the Python twin is
// rotquant_hip/layouts.py. All offsets are bytes; scales and packed codes are bytes too.
#pragma once

#include <stdint.h>

#include "core/macros.h"

namespace rotquant {

RQ_HOST_DEVICE constexpr int64_t round_up_to(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

constexpr int64_t kScaleTileRows = 32;
constexpr int64_t kScaleTileGroups = 8;
constexpr int64_t kScaleTileBytes = kScaleTileRows * kScaleTileGroups;
constexpr int64_t kScaleRowPadding = 256;

struct Coord {
  int64_t row, column;  // column: scale group, or byte within a row of codes
};

// --- scales ---------------------------------------------------------------------------------
// A tile of 32 rows x 8 groups (K = 256) is 256 consecutive bytes = 64 dwords. Dword
// (group % 4) * 16 + row % 16 is the MFMA lane that owns that row and K block; its bytes are
// (group / 4 % 2, row / 16 % 2), so that op_sel = 2 * k_half + row_half picks one.

RQ_HOST_DEVICE constexpr uint32_t scale_tile_offset(uint32_t row, uint32_t group) {
  return (group % 4) * 64 + (row % 16) * 4 + (group / 4) * 2 + row / 16;
}

RQ_HOST_DEVICE constexpr int64_t scale_offset(int64_t row, int64_t group, int64_t padded_groups) {
  return row / kScaleTileRows * (kScaleTileRows * padded_groups) +
         group / kScaleTileGroups * kScaleTileBytes +
         scale_tile_offset(static_cast<uint32_t>(row % kScaleTileRows),
                           static_cast<uint32_t>(group % kScaleTileGroups));
}

RQ_HOST_DEVICE constexpr Coord scale_coord(int64_t offset, int64_t padded_groups) {
  const int64_t band = kScaleTileRows * padded_groups;
  const int64_t tile = offset % band / kScaleTileBytes;
  const int64_t in = offset % kScaleTileBytes;
  return {offset / band * kScaleTileRows + in % 2 * 16 + in / 4 % 16,
          tile * kScaleTileGroups + in / 2 % 2 * 4 + in / 64};
}

// Gate/up interleaved w1: rows 0..inter-1 are gate, inter..2*inter-1 up. 16-row tiles pair up, and
// the byte that is "row half" above selects gate or up: interleaving first, then the plain map.
RQ_HOST_DEVICE constexpr int64_t interleaved_row(int64_t row, int64_t inter) {
  const int64_t up = row / inter, q = row % inter;
  return (q / 16 * 2 + up) * 16 + q % 16;
}

RQ_HOST_DEVICE constexpr int64_t separated_row(int64_t row, int64_t inter) {
  const int64_t tile = row / 16;
  return tile % 2 * inter + tile / 2 * 16 + row % 16;
}

static_assert(separated_row(interleaved_row(0, 48), 48) == 0);
static_assert(separated_row(interleaved_row(47, 48), 48) == 47);
static_assert(separated_row(interleaved_row(95, 48), 48) == 95);

// --- packed weight codes ----------------------------------------------------------------------
// Blocks of 16 rows x 16 bytes (32 elements) are contiguous, so that one lane's MFMA operand is a
// 16-byte load. Valid for rows % 16 == 0 and row_bytes % 16 == 0.

RQ_HOST_DEVICE constexpr int64_t weight_offset(int64_t row, int64_t byte, int64_t row_bytes) {
  return row / 16 * (16 * row_bytes) + byte / 16 * 256 + row % 16 * 16 + byte % 16;
}

RQ_HOST_DEVICE constexpr Coord weight_coord(int64_t offset, int64_t row_bytes) {
  const int64_t in = offset % (16 * row_bytes);
  return {offset / (16 * row_bytes) * 16 + in / 16 % 16, in / 256 * 16 + in % 16};
}

static_assert(weight_offset(weight_coord(5000, 96).row, weight_coord(5000, 96).column, 96) == 5000);
static_assert(scale_offset(scale_coord(5000, 24).row, scale_coord(5000, 24).column, 24) == 5000);

}  // namespace rotquant
