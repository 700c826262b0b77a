// SPDX-License-Identifier: MIT
// The one device, its properties, and errors. Figures are the MI355X's.
#include <stdio.h>
#include <string.h>

#include <atomic>

#include "runtime.h"

namespace gfx950 {
namespace {

thread_local hipError_t last = hipSuccess;
thread_local std::string explained;  // what hipGetErrorString returned last
std::atomic<int> unreported{hipSuccess};
std::string launch_message;

struct ErrorText {
  hipError_t error;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {hipSuccess, "hipSuccess", "no error"},
    {hipErrorInvalidValue, "hipErrorInvalidValue", "invalid argument"},
    {hipErrorOutOfMemory, "hipErrorOutOfMemory", "out of memory"},
    {hipErrorNotInitialized, "hipErrorNotInitialized", "initialization error"},
    {hipErrorInvalidConfiguration, "hipErrorInvalidConfiguration",
     "invalid configuration argument"},
    {hipErrorInvalidSymbol, "hipErrorInvalidSymbol", "invalid device symbol"},
    {hipErrorInvalidDeviceFunction, "hipErrorInvalidDeviceFunction", "invalid device function"},
    {hipErrorNoDevice, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {hipErrorInvalidDevice, "hipErrorInvalidDevice", "invalid device ordinal"},
    {hipErrorInvalidImage, "hipErrorInvalidImage", "device kernel image is invalid"},
    {hipErrorNoBinaryForGpu, "hipErrorNoBinaryForGpu",
     "no kernel image is available for execution on the device"},
    {hipErrorFileNotFound, "hipErrorFileNotFound", "file not found"},
    {hipErrorNotFound, "hipErrorNotFound", "named symbol not found"},
    {hipErrorNotReady, "hipErrorNotReady", "device not ready"},
    {hipErrorInvalidHandle, "hipErrorInvalidHandle", "invalid resource handle"},
    {hipErrorLaunchFailure, "hipErrorLaunchFailure", "unspecified launch failure"},
    {hipErrorNotSupported, "hipErrorNotSupported", "operation not supported"},
    {hipErrorUnknown, "hipErrorUnknown", "unknown error"},
};
const ErrorText& find(hipError_t error) {
  for (auto& e : kErrors)
    if (e.error == error) return e;
  return find(hipErrorUnknown);
}

void describe(hipDeviceProp_t& p) {
  memset(&p, 0, sizeof p);
  snprintf(p.name, sizeof p.name, "AMD Instinct MI355X (gfx950_emulator)");
  snprintf(p.gcnArchName, sizeof p.gcnArchName, "gfx950:sramecc+:xnack-");
  p.totalGlobalMem = size_t{288} << 30;
  p.sharedMemPerBlock = p.sharedMemPerMultiprocessor = p.maxSharedMemoryPerMultiProcessor = 163840;
  p.sharedMemPerBlockOptin = p.sharedMemPerBlock;
  p.regsPerBlock = p.regsPerMultiprocessor = 131072;
  p.warpSize = 64;
  p.memPitch = 2147483647;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  for (int& n : p.maxThreadsDim) n = 1024;
  p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65536;
  p.clockRate = 2400000;
  p.clockInstructionRate = 100000;
  p.memoryClockRate = 2000000;
  p.memoryBusWidth = 8192;
  p.l2CacheSize = 4 << 20;
  p.totalConstMem = 2147483647;
  p.major = 9;
  p.minor = 5;
  p.multiProcessorCount = 256;
  p.textureAlignment = p.texturePitchAlignment = p.surfaceAlignment = 256;
  p.concurrentKernels = p.canMapHostMemory = p.unifiedAddressing = p.managedMemory = 1;
  p.hostRegisterSupported = p.pageableMemoryAccess = p.concurrentManagedAccess = 1;
  p.memoryPoolsSupported = p.isLargeBar = 1;
  p.asyncEngineCount = 8;
}

bool attribute(const hipDeviceProp_t& p, hipDeviceAttribute_t which, int* out) {
  switch (which) {
    case hipDeviceAttributeWarpSize: *out = p.warpSize; break;
    case hipDeviceAttributeMultiprocessorCount: *out = p.multiProcessorCount; break;
    case hipDeviceAttributePhysicalMultiProcessorCount: *out = p.multiProcessorCount; break;
    case hipDeviceAttributeMaxThreadsPerBlock: *out = p.maxThreadsPerBlock; break;
    case hipDeviceAttributeMaxThreadsPerMultiProcessor: *out = p.maxThreadsPerMultiProcessor; break;
    case hipDeviceAttributeMaxBlocksPerMultiProcessor: *out = p.maxBlocksPerMultiProcessor; break;
    case hipDeviceAttributeMaxBlockDimX: *out = p.maxThreadsDim[0]; break;
    case hipDeviceAttributeMaxBlockDimY: *out = p.maxThreadsDim[1]; break;
    case hipDeviceAttributeMaxBlockDimZ: *out = p.maxThreadsDim[2]; break;
    case hipDeviceAttributeMaxGridDimX: *out = p.maxGridSize[0]; break;
    case hipDeviceAttributeMaxGridDimY: *out = p.maxGridSize[1]; break;
    case hipDeviceAttributeMaxGridDimZ: *out = p.maxGridSize[2]; break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
    case hipDeviceAttributeSharedMemPerBlockOptin:
    case hipDeviceAttributeSharedMemPerMultiprocessor:
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor:
      *out = static_cast<int>(p.sharedMemPerBlock);
      break;
    case hipDeviceAttributeMaxRegistersPerBlock:
    case hipDeviceAttributeMaxRegistersPerMultiprocessor: *out = p.regsPerBlock; break;
    case hipDeviceAttributeClockRate: *out = p.clockRate; break;
    case hipDeviceAttributeWallClockRate: *out = p.clockInstructionRate; break;
    case hipDeviceAttributeMemoryClockRate: *out = p.memoryClockRate; break;
    case hipDeviceAttributeMemoryBusWidth: *out = p.memoryBusWidth; break;
    case hipDeviceAttributeL2CacheSize: *out = p.l2CacheSize; break;
    case hipDeviceAttributeComputeCapabilityMajor: *out = p.major; break;
    case hipDeviceAttributeComputeCapabilityMinor: *out = p.minor; break;
    case hipDeviceAttributeNumberOfXccs: *out = 8; break;
    case hipDeviceAttributeConcurrentKernels:
    case hipDeviceAttributeCanMapHostMemory:
    case hipDeviceAttributeUnifiedAddressing:
    case hipDeviceAttributeManagedMemory:
    case hipDeviceAttributeHostRegisterSupported:
    case hipDeviceAttributeMemoryPoolsSupported: *out = 1; break;
    case hipDeviceAttributeCooperativeLaunch:
    case hipDeviceAttributeIntegrated: *out = 0; break;
    default: return false;
  }
  return true;
}

}  // namespace

hipError_t result(hipError_t error) {
  if (error) last = error;
  return error;
}
hipError_t launch_failed(hipError_t error, const std::string& message) {
  complain(message);
  launch_message = message;
  unreported = error;
  return result(error);
}
hipError_t pending() { return result(static_cast<hipError_t>(unreported.exchange(hipSuccess))); }
void complain(const std::string& message) {
  fprintf(stderr, "gfx950_emulator: %s\n", message.c_str());
}

}  // namespace gfx950

using namespace gfx950;

extern "C" {

hipError_t hipInit(unsigned int) { return hipSuccess; }
hipError_t hipGetLastError() {
  const hipError_t error = last;
  if (error) unreported = hipSuccess;
  last = hipSuccess;
  return error;
}
hipError_t hipExtGetLastError() { return hipGetLastError(); }
hipError_t hipPeekAtLastError() { return last; }
const char* hipGetErrorName(hipError_t error) { return find(error).name; }
// A launch failure is told with what the emulator found.
const char* hipGetErrorString(hipError_t error) {
  explained = find(error).text;
  if (error == hipErrorLaunchFailure && !launch_message.empty()) explained += ": " + launch_message;
  return explained.c_str();
}
hipError_t hipDrvGetErrorName(hipError_t error, const char** name) {
  *name = hipGetErrorName(error);
  return hipSuccess;
}
hipError_t hipDrvGetErrorString(hipError_t error, const char** text) {
  *text = hipGetErrorString(error);
  return hipSuccess;
}

hipError_t hipGetDeviceCount(int* count) {
  *count = kDevices;
  return hipSuccess;
}
hipError_t hipGetDevice(int* device) {
  *device = 0;
  return hipSuccess;
}
hipError_t hipSetDevice(int device) {
  return result(device == 0 ? hipSuccess : hipErrorInvalidDevice);
}
hipError_t hipDeviceGet(hipDevice_t* device, int ordinal) {
  *device = ordinal;
  return hipSetDevice(ordinal);
}
hipError_t hipGetDeviceProperties(hipDeviceProp_t* out, int device) {
  if (!out || device != 0) return result(out ? hipErrorInvalidDevice : hipErrorInvalidValue);
  describe(*out);
  return hipSuccess;
}
hipError_t hipDeviceGetName(char* name, int bytes, hipDevice_t device) {
  hipDeviceProp_t p;
  if (hipError_t e = hipGetDeviceProperties(&p, device)) return e;
  snprintf(name, static_cast<size_t>(bytes), "%s", p.name);
  return hipSuccess;
}
hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t device) {
  hipDeviceProp_t p;
  if (hipError_t e = hipGetDeviceProperties(&p, device)) return e;
  *bytes = p.totalGlobalMem;
  return hipSuccess;
}
hipError_t hipDeviceGetAttribute(int* out, hipDeviceAttribute_t which, int device) {
  hipDeviceProp_t p;
  if (hipError_t e = hipGetDeviceProperties(&p, device)) return e;
  if (out && attribute(p, which, out)) return hipSuccess;
  complain("hipDeviceGetAttribute: attribute " + std::to_string(which) + " is not known");
  return result(hipErrorInvalidValue);
}
hipError_t hipDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return hipSuccess;
}
hipError_t hipDriverGetVersion(int* version) {
  *version = HIP_VERSION;
  return hipSuccess;
}
hipError_t hipRuntimeGetVersion(int* version) { return hipDriverGetVersion(version); }
hipError_t hipDeviceSynchronize() { return pending(); }
hipError_t hipDeviceReset() { return pending(); }
hipError_t hipDeviceSetCacheConfig(hipFuncCache_t) { return hipSuccess; }
hipError_t hipSetDeviceFlags(unsigned int) { return hipSuccess; }

}  // extern "C"
