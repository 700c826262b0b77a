// SPDX-License-Identifier: MIT
// shuffle / unshuffle of scales and weights: one shuffled dword (scales) or 16-byte chunk (weights)
// a thread, read through the maps of core/layout.h. Load-time work, written for clarity.
#include "core/layout_ops.h"
#include "hip/arch/arch.h"
#include "hip/arch/launch.h"
#ifndef RQ_DEVICE_ONLY
#include "hip/backend.h"
#endif

namespace rotquant::hip {

constexpr int kLayoutThreads = 256;

RQ_DEVICE int64_t first_item() {
  return int64_t{arch::block_index_x()} * kLayoutThreads + arch::thread_index();
}

RQ_GLOBAL RQ_LAUNCH_BOUNDS(kLayoutThreads,
                           1) void shuffle_scales_kernel(const ShuffleScalesParams p, int64_t items,
                                                         int64_t stride) {
  for (int64_t i = first_item(); i < items; i += stride) shuffle_scale_dword_at(p, i);
}

RQ_GLOBAL RQ_LAUNCH_BOUNDS(kLayoutThreads,
                           1) void shuffle_weight_kernel(const ShuffleWeightParams p, int64_t items,
                                                         int64_t stride) {
  for (int64_t i = first_item(); i < items; i += stride) shuffle_weight_chunk_at(p, i);
}

#ifndef RQ_DEVICE_ONLY
namespace {
constexpr int64_t kMaxBlocks = int64_t{1} << 20;

template <class Params>
void launch_items(void (*kernel)(Params, int64_t, int64_t), Params params, int64_t items,
                  hipStream_t stream) {
  require_current_device();
  if (items == 0) return;
  const int64_t needed = (items + kLayoutThreads - 1) / kLayoutThreads;
  const int64_t blocks = needed < kMaxBlocks ? needed : kMaxBlocks;
  int64_t stride = blocks * kLayoutThreads;
  void* args[] = {&params, &items, &stride};
  check(hipLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                        dim3(kLayoutThreads), args, 0, stream),
        "kernel launch failed");
}
}  // namespace

void shuffle_scales(const ShuffleScalesParams& params, hipStream_t stream) {
  launch_items(shuffle_scales_kernel, params, shuffle_scale_items(params), stream);
}

void shuffle_weight(const ShuffleWeightParams& params, hipStream_t stream) {
  launch_items(shuffle_weight_kernel, params, shuffle_weight_items(params), stream);
}
#endif

}  // namespace rotquant::hip
