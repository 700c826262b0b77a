// SPDX-License-Identifier: MIT
// The runtime API under its HIP names; on the NVIDIA test bed the few that are used map to CUDA's.
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
using hipError_t = cudaError_t;
using hipStream_t = cudaStream_t;
constexpr hipError_t hipSuccess = cudaSuccess;
inline const char* hipGetErrorString(hipError_t e) { return cudaGetErrorString(e); }
inline hipError_t hipGetDevice(int* device) { return cudaGetDevice(device); }
inline hipError_t hipLaunchKernel(const void* f, dim3 grid, dim3 block, void** args, size_t lds, hipStream_t s) {
  return cudaLaunchKernel(f, grid, block, args, lds, s);
}
#else
#include <hip/hip_runtime.h>
#endif
