// SPDX-License-Identifier: MIT
// What every op needs: checks that name the argument, views as plain params, where to run.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <string>

#include "core/params.h"
#include "cpu/float_mode.h"
#ifdef ROTQUANT_WITH_HIP
#include "hip/arch/runtime.h"
#endif

namespace rotquant::ops {

// --- checks: "<argument>: expected <what>, got <value>" -----------------------------------------

#define RQ_CHECK(condition, argument, expected, ...) \
  TORCH_CHECK(condition, argument, ": expected ", expected, ", got ", __VA_ARGS__)

DType dtype_of(at::ScalarType type, const char* argument);
ScaleMode scale_mode_of(std::string_view name);
bool interleaved(std::string_view gate_mode);

// uint8, or a torch dtype of the same width: float4_e2m1fn_x2, float8_e8m0fnu.
void check_bytes(const at::Tensor& t, const char* argument);

// The same as contiguous uint8.
at::Tensor bytes_of(const at::Tensor& t, const char* argument);

// Kernels load 16 bytes at a time; a view into a larger tensor may start anywhere.
at::Tensor aligned_bytes_of(const at::Tensor& t, const char* argument);

void check_device(const at::Tensor& t, const char* argument, const at::Tensor& x);

// Where a tensor's elements are; null for a meta tensor, which has none and is checked only.
template <class T = void>
const T* read_from(const at::Tensor& t) {
  return t.is_meta() ? nullptr : static_cast<const T*>(t.const_data_ptr());
}
template <class T = void>
T* write_to(const at::Tensor& t) {
  return t.is_meta() ? nullptr : static_cast<T*>(t.mutable_data_ptr());
}

// NOTE: torch counts float4_e2m1fn_x2 among the floating dtypes, and converts it to none.
inline bool is_float(const at::Tensor& t) {
  return t.is_floating_point() && t.scalar_type() != at::ScalarType::Float4_e2m1fn_x2;
}

// Any floating dtype as contiguous float32, rounded to nearest even, subnormals kept.
at::Tensor floats_of(const at::Tensor& t);

// --- activations --------------------------------------------------------------------------------

// x as rows of K channels. Leading dimensions that collapse to one row stride are taken as they
// are; anything else (x.t(), a slice in two dimensions) is copied.
struct Rows {
  at::Tensor tensor;  // keeps the memory alive
  Activation params;
};
Rows rows_of(const at::Tensor& x, const char* argument = "x");

// Product of all dimensions but the last, which may be 0.
int64_t rows_before_last(const at::Tensor& x);

// Sizes of x with its last dimension replaced.
std::vector<int64_t> with_last(const at::Tensor& x, int64_t last);

// --- where to run --------------------------------------------------------------------------------
// NOTE: nowhere for meta tensors. rotquant_hip/fake.py runs the CPU ops on them for their checks.

// CPU: f(begin, end) over [0, items) on torch's threads; `elements` per item sets the grain. All
// float arithmetic of the CPU back end passes here, so that the threads' modes change no byte.
template <class F>
void parallel_items(int64_t items, int64_t elements, F&& f) {
  constexpr int64_t kGrainElements = 1 << 15;
  at::parallel_for(0, items, std::max<int64_t>(1, kGrainElements / elements),
                   [&](int64_t begin, int64_t end) {
                     const cpu::FloatMode mode;
                     f(begin, end);
                   });
}

#if defined(ROTQUANT_HIP_EMULATE)
// The build against emulator/: a CPU tensor's op runs the gfx950 machine code, executed by the CPU.
inline bool runs_on_gpu(const at::Tensor& t) { return t.is_cpu(); }

template <class F>
void on_device_of(const at::Tensor&, F&& f) {
  f(nullptr);
}
#elif defined(ROTQUANT_WITH_HIP)
inline bool runs_on_gpu(const at::Tensor& t) { return t.is_cuda(); }

// GPU: guards the tensor's device, then f(its current stream). First thing in a GPU path, before
// anything asks for the current device.
template <class F>
void on_device_of(const at::Tensor& t, F&& f) {
  const c10::DeviceGuard guard(t.device());
  const c10::impl::VirtualGuardImpl impl(t.device().type());
  f(reinterpret_cast<hipStream_t>(impl.getStream(t.device()).native_handle()));
}
#else
inline bool runs_on_gpu(const at::Tensor&) { return false; }
#endif

}  // namespace rotquant::ops
