// SPDX-License-Identifier: MIT
// Shared by the files of the stand-in for libamdhip64. Everything runs synchronously on one device.
#pragma once
#define __HIP_PLATFORM_AMD__ 1
#include <hip/hip_runtime_api.h>
#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "gfx950_emulator.h"

namespace gfx950 {

constexpr int kDevices = 1;

// --- errors (device.cpp) -------------------------------------------------------------------------

// Remembers the error for hipGetLastError and returns it.
hipError_t result(hipError_t error);
// A failed launch, also reported by the next synchronisation; `message` ends up in
// hipGetErrorString.
hipError_t launch_failed(hipError_t error, const std::string& message);
// What a synchronisation returns.
hipError_t pending();
void complain(const std::string& message);  // one line on stderr

// --- memory (memory.cpp) -------------------------------------------------------------------------

// One piece of memory that kernels may touch at its host address; _Region in hip_host.py.
struct Region {
  uint64_t begin, bytes;
  uint64_t guard;    // distance on both sides in which nothing unknown may be touched
  uint8_t* written;  // a byte per byte, 1 where something was written; null: all counts as written
  const char* label;
};
// Everything allocated and registered, ascending; with what a launch points into, because the
// program may free memory meanwhile: Python's garbage collector does, between any two lines.
struct Regions {
  std::vector<Region> all;
  std::vector<std::shared_ptr<const void>> keep;
};
Regions regions();

// --- interpreter (python.cpp) --------------------------------------------------------------------

constexpr size_t kMessageBytes = 2048;

// What the runtime asks about a kernel; _Kernel in hip_host.py.
struct Kernel {
  int32_t vgprs, agprs, sgprs, lds_bytes, scratch_bytes, max_workgroup;
};

// _Launch in hip_host.py.
struct Launch {
  int32_t module;
  const char* name;
  uint32_t grid[3], block[3];  // workgroups; work items of one
  uint32_t dynamic_lds;
  void** args;          // one pointer per argument, or null with:
  const void* kernarg;  // the explicit arguments as they lie in the segment
  uint64_t kernarg_bytes;
  const Region* regions;
  uint64_t region_count;
  uint64_t instructions;        // out: executed wave instructions
  char message[kMessageBytes];  // out
};

// Functions that Python fills in (hip_host.attach). Each returns a hipError_t; all take the GIL.
struct Interpreter {
  int (*load)(const void* data, uint64_t bytes, int32_t* module, char* message);
  int (*kernel)(int32_t module, const char* name, Kernel* out, char* message);
  int (*symbol)(int32_t module, const char* name, uint64_t* address, uint64_t* bytes,
                char* message);
  int (*launch)(Launch* launch);
};
// Starts Python on first use, or joins the one that runs in this process. Null when there is none.
const Interpreter* interpreter();

}  // namespace gfx950
