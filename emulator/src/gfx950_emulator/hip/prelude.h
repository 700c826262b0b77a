// SPDX-License-Identifier: MIT
// Stands in for clang's __clang_hip_runtime_wrapper.h, on which <hip/hip_runtime.h> relies, where
// the clang is shipped without it (ziglang): qualifiers, work-item ids, device maths that needs no
// library. Included before every HIP source by gfx950_emulator.hipcc.
#pragma once
#pragma clang system_header
#if defined(__HIP__)
#define __CLANG_HIP_RUNTIME_WRAPPER_INCLUDED__ 1
#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __managed__ __attribute__((managed))

#include <cmath>
#include <cstdlib>

#define GFX950_DEVICE __attribute__((device, always_inline))
#define GFX950_XYZ(builtin) (axis == 0 ? builtin##_x() : axis == 1 ? builtin##_y() : builtin##_z())
extern "C" {
GFX950_DEVICE inline size_t __ockl_get_local_id(unsigned axis) {
  return GFX950_XYZ(__builtin_amdgcn_workitem_id);
}
GFX950_DEVICE inline size_t __ockl_get_group_id(unsigned axis) {
  return GFX950_XYZ(__builtin_amdgcn_workgroup_id);
}
GFX950_DEVICE inline size_t __ockl_get_local_size(unsigned axis) {
  return GFX950_XYZ(__builtin_amdgcn_workgroup_size);
}
// The first implicit arguments of code object v5 and v6: uint32 counts of workgroups.
GFX950_DEVICE inline size_t __ockl_get_num_groups(unsigned axis) {
  return (
      (const __attribute__((address_space(4))) unsigned*)__builtin_amdgcn_implicitarg_ptr())[axis];
}
}

#define GFX950_MATHS1(name) \
  GFX950_DEVICE inline float name(float a) { return __builtin_##name(a); }
#define GFX950_MATHS2(name) \
  GFX950_DEVICE inline float name(float a, float b) { return __builtin_##name(a, b); }
// clang-format off
GFX950_MATHS1(fabsf) GFX950_MATHS1(sqrtf) GFX950_MATHS1(floorf) GFX950_MATHS1(ceilf)
GFX950_MATHS1(truncf) GFX950_MATHS1(rintf) GFX950_MATHS1(roundf) GFX950_MATHS1(expf)
GFX950_MATHS1(exp2f) GFX950_MATHS1(logf) GFX950_MATHS1(log2f)
GFX950_MATHS2(fminf) GFX950_MATHS2(fmaxf) GFX950_MATHS2(copysignf)
    // clang-format on
    GFX950_DEVICE inline float fmaf(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
#undef GFX950_MATHS1
#undef GFX950_MATHS2
#undef GFX950_XYZ
#undef GFX950_DEVICE
#endif
