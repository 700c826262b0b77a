// SPDX-License-Identifier: MIT
// dequant: a lane decodes one group of 32 with the hardware's fp4 -> float32 converter.
#include "core/layout.h"
#include "hip/arch/launch.h"
#include "hip/device/tiles.h"
#ifndef RQ_DEVICE_ONLY
#include "hip/backend.h"
#endif

namespace rotquant::hip {

struct DequantArgs {
  DequantParams params;
  device::TilePlan plan;
};

RQ_DEVICE void decode_group(device::u32x4 codes, float scale, arch::f32x2 (&y)[device::kPairs]) {
  RQ_UNROLL
  for (int r = 0; r < 4; ++r) {
    y[4 * r] = arch::cvt_pk_f32_fp4<0>(codes[r], scale);
    y[4 * r + 1] = arch::cvt_pk_f32_fp4<1>(codes[r], scale);
    y[4 * r + 2] = arch::cvt_pk_f32_fp4<2>(codes[r], scale);
    y[4 * r + 3] = arch::cvt_pk_f32_fp4<3>(codes[r], scale);
  }
}

RQ_GLOBAL RQ_LAUNCH_BOUNDS(device::kMaxThreads,
                           device::kMinWaves) void dequant_kernel(const DequantArgs args) {
  const DequantParams& p = args.params;
  const int64_t groups = p.k / kGroup;
  device::for_each_wave_tile(
      args.plan, p.rows, groups, [&](const device::WaveTile& tile, uint32_t lane) {
        const int64_t row = tile.readable_row(lane), group = tile.readable_group(lane);
        const int64_t index = row * groups + group;
        const uint8_t byte =
            p.scales[p.shuffled_scales
                         ? scale_offset(row, group, round_up_to(groups, kScaleTileGroups))
                         : index];
        arch::f32x2 y[device::kPairs];
        decode_group(arch::load_stream(p.codes + index * kGroupBytes), 1.0f, y);
        const float scale = e8m0_value(byte);
        RQ_UNROLL
        for (int i = 0; i < device::kPairs; ++i) y[i] *= scale;
        device::store_group(p.y, p.y_dtype, tile, lane, y);
      });
}

#ifndef RQ_DEVICE_ONLY
void dequant(const DequantParams& params, hipStream_t stream) {
  require_current_device();
  if (params.rows == 0 || params.k == 0) return;
  const DequantArgs args{params,
                         device::plan_tiles(params.k, params.rows, false, current_wave_size())};
  launch(dequant_kernel, dim3(args.plan.grid_groups, args.plan.grid_rows), args.plan.threads, args,
         stream);
}
#endif

}  // namespace rotquant::hip
