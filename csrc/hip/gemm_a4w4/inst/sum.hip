// SPDX-License-Identifier: MIT
// Adds up the parts of a split K.
#include "hip/gemm_a4w4/kernel.h"
#include "hip/gemm_a4w4/kernel_impl.h"

namespace rotquant::hip {

// out = bias + the parts' sums, added in their order: the same bytes whatever ran first. A thread
// has eight neighbouring columns of a row.
RQ_GLOBAL RQ_LAUNCH_BOUNDS(kSumThreads, 4) void gemm_sum_kernel(const GemmArgs args) {
  const GemmParams& p = args.params;
  const device::Output out = final_output(p);
  const int64_t stride = gemm_workspace_stride(p.n), plane = p.m * stride;
  const uint32_t thread = arch::thread_index();
  const int64_t column =
      int64_t{arch::block_index_x()} * kSumColumns + thread % kSumLanes * device::kStoreColumns;
  if (column >= p.n) return;
  const device::Bias bias(out, column);
  for (int64_t row = int64_t{arch::block_index_y()} * kSumRows + thread / kSumLanes; row < p.m;
       row += int64_t{kMaxSumGrid} * kSumRows) {
    const float* part = static_cast<const float*>(p.workspace) + row * stride + column;
    f32x4 sum[2] = {};
    for (int s = 0; s < args.splits; ++s, part += plane) {
      sum[0] += *reinterpret_cast<const f32x4*>(part);
      sum[1] += *reinterpret_cast<const f32x4*>(part + 4);
    }
    bias.add_to(sum[0], sum[1]);
    device::store_row(out, row, column, sum[0], sum[1]);
  }
}

RQ_HOST_LAUNCHER(void launch_gemm_sum(const GemmArgs& args, hipStream_t stream) {
  const int64_t row_blocks = (args.params.m + kSumRows - 1) / kSumRows;
  const int64_t column_blocks = (args.params.n + kSumColumns - 1) / kSumColumns;
  const int64_t grid_rows = row_blocks < kMaxSumGrid ? row_blocks : kMaxSumGrid;
  launch(gemm_sum_kernel, dim3(column_blocks, grid_rows), kSumThreads, args, stream);
})

}  // namespace rotquant::hip
