// SPDX-License-Identifier: MIT
// rotate, rotate_quant and dequant on a CPU, for the instruction set that RQ_ISA names.
#pragma once

#include "core/hadamard.h"
#include "core/layout.h"
#include "core/params.h"
#include "cpu/vector.h"

namespace rotquant::cpu::RQ_ISA {

// --- load and store ---------------------------------------------------------------------------

RQ_INLINE f32v load_as_float(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::bf16: return from_bf16(load<u16v>(static_cast<const uint16_t*>(data) + index));
    case DType::fp16: return from_fp16(load<u16v>(static_cast<const uint16_t*>(data) + index));
    default: return load<f32v>(static_cast<const float*>(data) + index);
  }
}

RQ_INLINE void store_as(void* data, DType dtype, int64_t index, f32v v) {
  switch (dtype) {
    case DType::bf16: return store(static_cast<uint16_t*>(data) + index, to_bf16(v));
    case DType::fp16: return store(static_cast<uint16_t*>(data) + index, to_fp16(v));
    default: return store(static_cast<float*>(data) + index, v);
  }
}

// --- rotate -----------------------------------------------------------------------------------

template <int kStep, int kVectors>
RQ_INLINE void butterfly(f32v (&v)[kVectors]) {
  if constexpr (kStep < kLanes) {
    for (int i = 0; i < kVectors; ++i)
      v[i] = xor_lanes<kStep>(v[i]) + v[i] * butterfly_signs<kStep>();
  } else {
    constexpr int kDistance = kStep / kLanes;
    for (int i = 0; i < kVectors; ++i) {
      if (i & kDistance) continue;
      const f32v a = v[i], b = v[i + kDistance];
      v[i] = a + b;
      v[i + kDistance] = a - b;
    }
  }
}

template <int kSize>
RQ_INLINE void fwht(f32v (&v)[kSize / kLanes]) {
  butterfly<1>(v);
  butterfly<2>(v);
  butterfly<4>(v);
  butterfly<8>(v);
  if constexpr (kSize > 16) butterfly<16>(v);
  if constexpr (kSize > 32) butterfly<32>(v);
  if constexpr (kSize > 64) butterfly<64>(v);
  if constexpr (kSize > 128) butterfly<128>(v);
}

// v @ matrix, input channels in ascending order; a product and a sum are rounded each.
template <int kSize>
RQ_INLINE void multiply(f32v (&v)[kSize / kLanes], const float* matrix) {
  float x[kSize];
  memcpy(x, v, sizeof(x));
  f32v sum[kSize / kLanes] = {};
  for (int i = 0; i < kSize; ++i)
    for (int j = 0; j < kSize / kLanes; ++j)
      sum[j] += x[i] * load<f32v>(matrix + i * kSize + j * kLanes);
  memcpy(v, sum, sizeof(sum));
}

// kSize channels of one row from channel k0 on. With `fold` the exact 2^-shift of the Hadamard is
// left to the scale exponent.
template <int kSize>
RQ_INLINE void load_rotated(const Activation& x, const Rotation& rotation, int64_t row, int64_t k0,
                            bool fold, f32v (&v)[kSize / kLanes]) {
  for (int i = 0; i < kSize / kLanes; ++i)
    v[i] = load_as_float(x.data, x.dtype, row * x.row_stride + k0 + i * kLanes);
  if (rotation.size == 0) return;
  if (rotation.prescale)
    for (int i = 0; i < kSize / kLanes; ++i)
      v[i] *= load<f32v>(rotation.prescale + k0 + i * kLanes);
  if (rotation.matrix)
    return multiply<kSize>(v, rotation.matrix + k0 / kSize * rotation.matrix_stride);
  fwht<kSize>(v);
  if (!Hadamard<kSize>::kExact || !fold)
    for (auto& part : v) part *= Hadamard<kSize>::kFactor;
}

// --- quantise ---------------------------------------------------------------------------------

RQ_INLINE float squared_error(f32v lo, f32v hi, float inverse_scale, float finer) {
  // Codes at scale / finer, their values back in units of scale.
  const f32v a = lo * inverse_scale, b = hi * inverse_scale;
  const f32v da = a - e2m1_values(e2m1_codes(a * finer)) / finer;
  const f32v db = b - e2m1_values(e2m1_codes(b * finer)) / finer;
  return tree_sum(da * da, db * db);
}

// One group; writes 16 code bytes and returns the scale byte.
RQ_INLINE uint8_t quantize_group(f32v lo, f32v hi, uint32_t bias, bool mse, int shift,
                                 uint8_t* codes) {
  const uint32_t amax = max_bits(as_bits(lo) & 0x7FFFFFFFu, as_bits(hi) & 0x7FFFFFFFu);
  if (!has_codes(amax)) {
    memset(codes, 0, kGroupBytes);
    return amax == 0 ? 0 : kScaleNaN;
  }
  int byte = scale_byte(amax, bias, shift);
  float inverse = exp2_int(127 - byte - shift);
  if (mse && byte > 0 &&
      squared_error(lo, hi, inverse, 2.0f) < squared_error(lo, hi, inverse, 1.0f)) {
    --byte;
    inverse = exp2_int(127 - byte - shift);
  }
  uint8_t code[kGroup];
  store(code, __builtin_convertvector(e2m1_codes(lo * inverse), u8v));
  store(code + kLanes, __builtin_convertvector(e2m1_codes(hi * inverse), u8v));
  const u16v pairs = load<u16v>(code);  // even element in the low byte
  store(codes, __builtin_convertvector(pairs | pairs >> 4, u8v));
  return static_cast<uint8_t>(byte);
}

// Values of one group's codes, in units of its scale.
RQ_INLINE void load_codes(const uint8_t* codes, f32v (&v)[2]) {
  uint16_t spread[kGroupBytes];  // low nibble to the low byte, high nibble to the high byte
  for (int i = 0; i < kGroupBytes; ++i)
    spread[i] = static_cast<uint16_t>((codes[i] & 15) | (codes[i] >> 4) << 8);
  for (int half = 0; half < 2; ++half) {
    const u8v code = load<u8v>(reinterpret_cast<const uint8_t*>(spread) + half * kLanes);
    v[half] = e2m1_values(__builtin_convertvector(code, u32v));
  }
}

// --- items ------------------------------------------------------------------------------------

template <int kSize>
RQ_INLINE void rotate_items(const RotateParams& p, int64_t begin, int64_t end) {
  const int64_t blocks = p.x.k / kSize;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / blocks, k0 = item % blocks * kSize;
    f32v v[kSize / kLanes];
    load_rotated<kSize>(p.x, p.rotation, row, k0, false, v);
    for (int i = 0; i < kSize / kLanes; ++i)
      store_as(p.y, p.y_dtype, row * p.x.k + k0 + i * kLanes, v[i]);
  }
}

// kSize 16 and 32 both work on a whole group; two RS 16 blocks make one.
template <int kSize>
RQ_INLINE void rotate_quant_items(const RotateQuantParams& p, int64_t begin, int64_t end) {
  constexpr int kItem = kSize < kGroup ? kGroup : kSize;
  const int64_t items_per_row = p.x.k / kItem, groups = p.x.k / kGroup;
  const int64_t padded_groups = round_up_to(groups, kScaleTileGroups);
  const bool fold = !p.bf16_intermediate;
  const bool hadamard = p.rotation.size && !p.rotation.matrix;
  const int shift = hadamard && fold && Hadamard<kSize>::kExact ? Hadamard<kSize>::kShift : 0;
  const uint32_t bias = scale_bias(p.scale_mode);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / items_per_row, k0 = item % items_per_row * kItem;
    f32v v[kItem / kLanes];
    for (int part = 0; part < kItem / kSize; ++part) {
      f32v block[kSize / kLanes];
      load_rotated<kSize>(p.x, p.rotation, row, k0 + part * kSize, fold, block);
      for (int i = 0; i < kSize / kLanes; ++i) v[part * (kSize / kLanes) + i] = block[i];
    }
    if (p.bf16_intermediate)
      for (auto& part : v) part = from_bf16(to_bf16(part));
    for (int g = 0; g < kItem / kGroup; ++g) {
      const int64_t group = k0 / kGroup + g, index = row * groups + group;
      const uint8_t byte =
          quantize_group(v[2 * g], v[2 * g + 1], bias, p.scale_mode == ScaleMode::mse, shift,
                         p.codes + index * kGroupBytes);
      p.scales[p.shuffle_scales ? scale_offset(row, group, padded_groups) : index] = byte;
    }
  }
}

RQ_INLINE void dequant_items(const DequantParams& p, int64_t begin, int64_t end) {
  const int64_t groups = p.k / kGroup, padded_groups = round_up_to(groups, kScaleTileGroups);
  for (int64_t item = begin; item < end; ++item) {
    const float scale = e8m0_value(
        p.scales[p.shuffled_scales ? scale_offset(item / groups, item % groups, padded_groups)
                                   : item]);
    f32v values[2];
    load_codes(p.codes + item * kGroupBytes, values);
    for (int half = 0; half < 2; ++half)
      store_as(p.y, p.y_dtype, item * kGroup + half * kLanes, values[half] * scale);
  }
}

void rotate(const RotateParams& p, int64_t begin, int64_t end) {
  for_rotation_size(p.rotation.size, [&]<int kSize>() { rotate_items<kSize>(p, begin, end); });
}

void rotate_quant(const RotateQuantParams& p, int64_t begin, int64_t end) {
  if (p.rotation.size == 0) return rotate_quant_items<kGroup>(p, begin, end);
  for_rotation_size(p.rotation.size,
                    [&]<int kSize>() { rotate_quant_items<kSize>(p, begin, end); });
}

void dequant(const DequantParams& p, int64_t begin, int64_t end) { dequant_items(p, begin, end); }

}  // namespace rotquant::cpu::RQ_ISA
