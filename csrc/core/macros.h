// SPDX-License-Identifier: MIT
// Function qualifiers for code that is shared by the host compiler, HIP and the NVIDIA test bed.
#pragma once

#if defined(__HIP__)
// Spelled as attributes, so that device code compiles without a single HIP header.
#define RQ_HOST_DEVICE __attribute__((host, device, always_inline)) inline
#define RQ_DEVICE __attribute__((device, always_inline)) inline
#define RQ_UNROLL _Pragma("unroll")
#elif defined(RQ_NVIDIA)  // tests/nvidia/build.py
#define RQ_HOST_DEVICE __host__ __device__ __forceinline__
#define RQ_DEVICE __device__ __forceinline__
#define RQ_UNROLL _Pragma("unroll")
#else
#define RQ_HOST_DEVICE __attribute__((always_inline)) inline
#define RQ_UNROLL
#endif
