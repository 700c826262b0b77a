// SPDX-License-Identifier: MIT
// Streams and events. All work is done when the call that starts it returns, so they only keep
// count.
#include <chrono>

#include "runtime.h"

// HIP declares these two and never defines them.
struct ihipStream_t {
  unsigned int flags;
  int priority;
};
struct ihipEvent_t {
  std::chrono::steady_clock::time_point time;
  bool recorded = false;
};

using namespace gfx950;

namespace {

template <class T, class... Values>
hipError_t make(T** out, Values... values) {
  if (!out) return result(hipErrorInvalidValue);
  *out = new T{values...};
  return hipSuccess;
}
template <class T>
hipError_t drop(T* object) {
  if (!object) return result(hipErrorInvalidHandle);
  delete object;
  return hipSuccess;
}

}  // namespace

extern "C" {

hipError_t hipStreamCreate(hipStream_t* s) { return make(s, 0u, 0); }
hipError_t hipStreamCreateWithFlags(hipStream_t* s, unsigned int flags) {
  return make(s, flags, 0);
}
hipError_t hipStreamCreateWithPriority(hipStream_t* s, unsigned int flags, int priority) {
  return make(s, flags, priority);
}
hipError_t hipStreamDestroy(hipStream_t s) { return drop(s); }
hipError_t hipStreamQuery(hipStream_t) { return hipSuccess; }
hipError_t hipStreamSynchronize(hipStream_t) { return pending(); }
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned int) { return hipSuccess; }
hipError_t hipStreamGetFlags(hipStream_t s, unsigned int* flags) {
  *flags = s ? s->flags : 0;
  return hipSuccess;
}
hipError_t hipStreamGetPriority(hipStream_t s, int* priority) {
  *priority = s ? s->priority : 0;
  return hipSuccess;
}
hipError_t hipStreamGetDevice(hipStream_t, hipDevice_t* device) {
  *device = 0;
  return hipSuccess;
}
hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 1, *greatest = -1;
  return hipSuccess;
}
hipError_t hipStreamIsCapturing(hipStream_t, hipStreamCaptureStatus* status) {
  *status = hipStreamCaptureStatusNone;
  return hipSuccess;
}
hipError_t hipStreamAddCallback(hipStream_t s, hipStreamCallback_t callback, void* data,
                                unsigned int) {
  callback(s, hipSuccess, data);
  return hipSuccess;
}
hipError_t hipLaunchHostFunc(hipStream_t, hipHostFn_t f, void* data) {
  f(data);
  return hipSuccess;
}

hipError_t hipEventCreate(hipEvent_t* e) { return make(e); }
hipError_t hipEventCreateWithFlags(hipEvent_t* e, unsigned int) { return make(e); }
hipError_t hipEventDestroy(hipEvent_t e) { return drop(e); }
hipError_t hipEventRecord(hipEvent_t e, hipStream_t) {
  if (!e) return result(hipErrorInvalidHandle);
  e->time = std::chrono::steady_clock::now();
  e->recorded = true;
  return hipSuccess;
}
hipError_t hipEventRecordWithFlags(hipEvent_t e, hipStream_t s, unsigned int) {
  return hipEventRecord(e, s);
}
hipError_t hipEventSynchronize(hipEvent_t e) {
  return e ? pending() : result(hipErrorInvalidHandle);
}
hipError_t hipEventQuery(hipEvent_t e) { return result(e ? hipSuccess : hipErrorInvalidHandle); }
// Host time between the two: how long the emulator took, nothing about the hardware.
hipError_t hipEventElapsedTime(float* ms, hipEvent_t begin, hipEvent_t end) {
  if (!ms || !begin || !end || !begin->recorded || !end->recorded)
    return result(hipErrorInvalidHandle);
  *ms = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
  return hipSuccess;
}

}  // extern "C"
