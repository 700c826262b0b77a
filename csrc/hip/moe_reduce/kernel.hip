// SPDX-License-Identifier: MIT
// moe_reduce: the weighted sum of a token's rows, in the order of its slots: the same bytes on
// every run. A lane has eight neighbouring columns of a token; its rows are read once.
#include "core/moe.h"
#include "hip/arch/launch.h"
#include "hip/device/tiles.h"
#ifndef RQ_DEVICE_ONLY
#include "hip/backend.h"
#endif

namespace rotquant::hip {

using arch::f32x2;
using device::u32x4;

// What the rows are: values of a DType, or MXFP4.
enum class RowFormat : int { bf16, fp16, fp32, mxfp4 };

struct MoeReduceArgs {
  MoeReduceParams params;
  int grid_tokens;  // NOTE: the grid is clamped and strides over the rest
};

constexpr int kReduceThreads = 256;
constexpr int kReduceColumns = 8;   // of a lane: 16 bytes of 16-bit values
constexpr int kReduceInFlight = 8;  // rows
static_assert(kMoeMaxTopk % kReduceInFlight == 0 && kMoeMaxTopk <= arch::kWaveSize);

// A lane's columns of a row as they lie in memory.
struct RowPart {
  u32x4 data[2];  // 16-bit values: the first; MXFP4: its first word
  uint32_t scale;
};

template <RowFormat kFormat>
RQ_DEVICE constexpr uint32_t row_bytes(uint32_t columns) {
  return kFormat == RowFormat::mxfp4  ? columns / 2
         : kFormat == RowFormat::fp32 ? columns * 4
                                      : columns * 2;
}

// The routes of one token: lane `slot` holds where that slot's row begins, relative to the token's
// first, and its weight.
// NOTE: the row of a dropped route was never written: it must not even be read. It begins beyond
// the buffer, so that it loads as zeros, and -1 times 0 is -0, whose addition changes nothing.
template <RowFormat kFormat>
struct TokenRoutes {
  arch::Buffer data, scales;
  uint32_t data_offset, scale_offset, weight;

  RQ_DEVICE TokenRoutes(const MoeReduceParams& p, int64_t token, uint32_t lane)
      : data(arch::make_buffer(row0(p, token))),
        scales(arch::make_buffer(p.scales + token * p.topk * (p.hidden / kGroup))) {
    const uint32_t topk = static_cast<uint32_t>(p.topk);
    const uint32_t slot = lane < topk ? lane : topk - 1;
    const int64_t route = token * p.topk + slot;
    const int32_t sorted = p.reverse_sorted[route];
    const float given = p.topk_weights ? p.topk_weights[route] : 1.0f;
    const bool kept = lane < topk && sorted >= 0;
    const uint32_t hidden = static_cast<uint32_t>(p.hidden);
    data_offset = kept ? slot * row_bytes<kFormat>(hidden) : arch::kNowhere;
    scale_offset = kept ? slot * (hidden / kGroup) : arch::kNowhere;
    const float dropped = sorted == kMoeInvalid ? __builtin_nanf("") : -1.0f;
    weight = float_to_bits(kept ? given : dropped);
  }

  RQ_DEVICE RowPart load(uint32_t slot, uint32_t column) const {
    const uint32_t offset = arch::read_lane(data_offset, slot) + row_bytes<kFormat>(column);
    RowPart part{};
    if constexpr (kFormat == RowFormat::mxfp4) {
      part.data[0][0] = arch::load_4(data, offset);
      part.scale = arch::load_1(scales, arch::read_lane(scale_offset, slot) + column / kGroup);
    } else {
      part.data[0] = arch::load_16<arch::Cache::stream>(data, offset);
      if constexpr (kFormat == RowFormat::fp32)
        part.data[1] = arch::load_16<arch::Cache::stream>(data, offset + 16);
    }
    return part;
  }

  RQ_DEVICE float weight_of(uint32_t slot) const {
    return bits_to_float(arch::read_lane(weight, slot));
  }

 private:
  RQ_DEVICE static const uint8_t* row0(const MoeReduceParams& p, int64_t token) {
    const int64_t index = token * p.topk * p.hidden;
    if constexpr (kFormat == RowFormat::mxfp4) return p.codes + index / 2;
    return static_cast<const uint8_t*>(p.rows) + index * (kFormat == RowFormat::fp32 ? 4 : 2);
  }
};

template <RowFormat kFormat>
RQ_DEVICE void decode_part(const RowPart& part, f32x2 (&y)[kReduceColumns / 2]) {
  if constexpr (kFormat == RowFormat::mxfp4) {
    const uint32_t codes = part.data[0][0];
    y[0] = arch::cvt_pk_f32_fp4<0>(codes, 1.0f);
    y[1] = arch::cvt_pk_f32_fp4<1>(codes, 1.0f);
    y[2] = arch::cvt_pk_f32_fp4<2>(codes, 1.0f);
    y[3] = arch::cvt_pk_f32_fp4<3>(codes, 1.0f);
    const float scale = e8m0_value(part.scale);
    RQ_UNROLL
    for (int i = 0; i < kReduceColumns / 2; ++i) y[i] *= scale;
  } else if constexpr (kFormat == RowFormat::fp32) {
    RQ_UNROLL
    for (int i = 0; i < kReduceColumns / 2; ++i)
      y[i] = f32x2{bits_to_float(part.data[i / 2][i % 2 * 2]),
                   bits_to_float(part.data[i / 2][i % 2 * 2 + 1])};
  } else {
    constexpr DType kDType = kFormat == RowFormat::bf16 ? DType::bf16 : DType::fp16;
    RQ_UNROLL
    for (int i = 0; i < kReduceColumns / 2; ++i) y[i] = device::unpack<kDType>(part.data[0][i]);
  }
}

RQ_DEVICE void load_shared(const MoeReduceParams& p, int64_t index,
                           f32x2 (&y)[kReduceColumns / 2]) {
  RowPart part{};
  if (p.out_dtype == DType::fp32) {
    const float* from = static_cast<const float*>(p.shared) + index;
    part.data[0] = arch::load_stream(from), part.data[1] = arch::load_stream(from + 4);
    decode_part<RowFormat::fp32>(part, y);
  } else {
    part.data[0] = arch::load_stream(static_cast<const uint16_t*>(p.shared) + index);
    if (p.out_dtype == DType::bf16)
      decode_part<RowFormat::bf16>(part, y);
    else
      decode_part<RowFormat::fp16>(part, y);
  }
}

RQ_DEVICE void store_sum(const MoeReduceParams& p, int64_t index,
                         const f32x2 (&y)[kReduceColumns / 2]) {
  if (p.out_dtype == DType::fp32) {
    float* to = static_cast<float*>(p.out) + index;
    RQ_UNROLL
    for (int i = 0; i < 2; ++i)
      arch::store(to + 4 * i, u32x4{float_to_bits(y[2 * i].x), float_to_bits(y[2 * i].y),
                                    float_to_bits(y[2 * i + 1].x), float_to_bits(y[2 * i + 1].y)});
  } else {
    u32x4 packed{};
    RQ_UNROLL
    for (int i = 0; i < kReduceColumns / 2; ++i)
      packed[i] = p.out_dtype == DType::bf16 ? arch::pack_bf16(y[i]) : arch::pack_fp16(y[i]);
    arch::store(static_cast<uint16_t*>(p.out) + index, packed);
  }
}

// sum += weight * row for a token's slots in ascending order, kReduceInFlight rows at a time.
template <RowFormat kFormat>
RQ_DEVICE void add_rows(const MoeReduceParams& p, int64_t token, uint32_t column, uint32_t lane,
                        f32x2 (&sum)[kReduceColumns / 2]) {
  const TokenRoutes<kFormat> routes(p, token, lane);
#pragma unroll 1
  for (int first = 0; first < p.topk; first += kReduceInFlight) {
    RowPart part[kReduceInFlight];
    RQ_UNROLL
    for (int j = 0; j < kReduceInFlight; ++j) part[j] = routes.load(first + j, column);
    RQ_UNROLL
    for (int j = 0; j < kReduceInFlight; ++j) {
      const float weight = routes.weight_of(first + j);
      f32x2 y[kReduceColumns / 2];
      decode_part<kFormat>(part[j], y);
      RQ_UNROLL
      for (int i = 0; i < kReduceColumns / 2; ++i) sum[i] = sum[i] + y[i] * weight;
    }
  }
}

// Waves on each SIMD, by the registers that eight rows take.
template <RowFormat kFormat>
constexpr int kReduceWaves = kFormat == RowFormat::fp32 ? 5 : 6;

template <RowFormat kFormat>
RQ_GLOBAL RQ_LAUNCH_BOUNDS(kReduceThreads,
                           kReduceWaves<kFormat>) void moe_reduce_kernel(const MoeReduceArgs args) {
  const MoeReduceParams& p = args.params;
  const uint32_t lane = arch::thread_index() % arch::kWaveSize;
  const uint32_t wave = arch::uniform(arch::thread_index() / arch::kWaveSize);
  const uint32_t first =
      (arch::block_index_x() * kReduceThreads + wave * arch::kWaveSize) * kReduceColumns;
  if (first >= p.hidden) return;
  // Lanes past the edge compute the last columns again: the others need their routes.
  const uint32_t last = static_cast<uint32_t>(p.hidden) - kReduceColumns;
  const bool exists = first + lane * kReduceColumns <= last;
  const uint32_t column = exists ? first + lane * kReduceColumns : last;
  for (int64_t token = arch::block_index_y(); token < p.tokens; token += args.grid_tokens) {
    f32x2 sum[kReduceColumns / 2] = {};
    if (p.shared) load_shared(p, token * p.hidden + column, sum);
    add_rows<kFormat>(p, token, column, lane, sum);
    if (exists) store_sum(p, token * p.hidden + column, sum);
  }
}

#ifdef RQ_DEVICE_ONLY
template RQ_GLOBAL void moe_reduce_kernel<RowFormat::bf16>(const MoeReduceArgs);
template RQ_GLOBAL void moe_reduce_kernel<RowFormat::fp16>(const MoeReduceArgs);
template RQ_GLOBAL void moe_reduce_kernel<RowFormat::fp32>(const MoeReduceArgs);
template RQ_GLOBAL void moe_reduce_kernel<RowFormat::mxfp4>(const MoeReduceArgs);
#else
void moe_reduce(const MoeReduceParams& params, hipStream_t stream) {
  require_current_device();
  if (params.tokens == 0 || params.hidden == 0) return;
  if (params.topk < 1 || params.topk > kMoeMaxTopk)
    throw std::runtime_error("moe_reduce: expected topk from 1 to " + std::to_string(kMoeMaxTopk) +
                             ", got " + std::to_string(params.topk));
  // Offsets within a token's rows have 31 bits.
  constexpr int64_t kMaxHidden = (int64_t{1} << 31) / (4 * kMoeMaxTopk) - 1;
  if (params.hidden > kMaxHidden)
    throw std::runtime_error("moe_reduce: expected a hidden size of at most " +
                             std::to_string(kMaxHidden) + " on a GPU, got " +
                             std::to_string(params.hidden));
  const int64_t threads = params.hidden / kReduceColumns;
  constexpr int64_t kMaxGridTokens = 65535;
  const int64_t tokens = params.tokens < kMaxGridTokens ? params.tokens : kMaxGridTokens;
  const MoeReduceArgs args{params, static_cast<int>(tokens)};
  // In the order of RowFormat.
  void (*const kKernels[])(MoeReduceArgs) = {
      moe_reduce_kernel<RowFormat::bf16>, moe_reduce_kernel<RowFormat::fp16>,
      moe_reduce_kernel<RowFormat::fp32>, moe_reduce_kernel<RowFormat::mxfp4>};
  const int format = static_cast<int>(params.rows ? RowFormat{static_cast<int>(params.rows_dtype)}
                                                  : RowFormat::mxfp4);
  launch(kKernels[format], dim3(device::divide_up(threads, kReduceThreads), tokens), kReduceThreads,
         args, stream);
}
#endif

}  // namespace rotquant::hip
