// SPDX-License-Identifier: MIT
// The few runtime calls that csrc/hip makes, under their HIP names.
#pragma once

#include <cuda_runtime_api.h>

using hipError_t = cudaError_t;
using hipStream_t = cudaStream_t;
constexpr hipError_t hipSuccess = cudaSuccess;
inline const char* hipGetErrorString(hipError_t e) { return cudaGetErrorString(e); }
inline hipError_t hipGetDevice(int* device) { return cudaGetDevice(device); }
inline hipError_t hipLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t lds,
                                  hipStream_t s) {
  return cudaLaunchKernel(f, grid, block, args, lds, s);
}
