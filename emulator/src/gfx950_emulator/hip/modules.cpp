// SPDX-License-Identifier: MIT
// Code objects, kernels and variables: what a compiled host program registers, modules loaded by
// hand, launches.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "runtime.h"

// HIP declares these two and never defines them: a code object or an offload bundle, decoded when
// something in it is first used; and a kernel in it.
struct ihipModule_t {
  const void* data;
  std::vector<char> copy;  // of an image whose owner may free it
  std::atomic<int32_t> id{-1};
  std::map<std::string, std::unique_ptr<ihipModuleSymbol_t>> functions;
};
struct ihipModuleSymbol_t {
  ihipModule_t* module;
  std::string name;
};

namespace gfx950 {
namespace {

using Module = ihipModule_t;

struct Dim {
  uint32_t x, y, z;
};

struct Variable {
  Module* module;
  std::string name;
};

struct CallConfiguration {
  dim3 grid, block;
  size_t dynamic_lds;
  hipStream_t stream;
};

// NOTE: not held while Python is called, which waits for the GIL: whoever has that may wait here.
std::mutex mutex;
std::vector<std::unique_ptr<Module>> modules;
std::unordered_map<const void*, ihipModuleSymbol_t*> kernels;  // by host stub
std::unordered_map<const void*, Variable> variables;           // by host shadow
thread_local std::vector<CallConfiguration> configurations;
std::atomic<unsigned long long> launches{0}, instructions{0};

template <class T>
T read(const void* data, size_t offset) {
  T value;
  memcpy(&value, static_cast<const char*>(data) + offset, sizeof value);
  return value;
}

// A registered image comes without its size.
uint64_t image_bytes(const void* data) {
  constexpr char kBundle[] = "__CLANG_OFFLOAD_BUNDLE__";
  constexpr size_t kBundleHead = sizeof kBundle - 1;
  constexpr char kElf[] = {0x7f, 'E', 'L', 'F'};
  if (!memcmp(data, kElf, 4))  // section headers come last: e_shoff, e_shentsize, e_shnum
    return read<uint64_t>(data, 40) + uint64_t{read<uint16_t>(data, 58)} * read<uint16_t>(data, 60);
  if (memcmp(data, kBundle, kBundleHead)) return 32;  // Python will say what is wrong with it
  uint64_t end = 0;
  size_t at = kBundleHead + 8;
  for (uint64_t n = read<uint64_t>(data, kBundleHead); n > 0; --n) {
    end = std::max(end, read<uint64_t>(data, at) + read<uint64_t>(data, at + 8));
    at += 24 + read<uint64_t>(data, at + 16);
  }
  return std::max<uint64_t>(end, at);
}

hipError_t told(int status, const char* message) {
  if (status) complain(message);
  return result(static_cast<hipError_t>(status));
}

hipError_t load(Module& m) {
  if (m.id >= 0) return hipSuccess;
  const Interpreter* python = interpreter();
  if (!python) return result(hipErrorNotInitialized);
  char message[kMessageBytes] = "";
  int32_t id = -1;  // two threads that come here together get the same one
  const int status = python->load(m.data, image_bytes(m.data), &id, message);
  m.id = id;
  return told(status, message);
}

// Called with the lock held.
hipFunction_t function(Module& m, const std::string& name) {
  auto& f = m.functions[name];
  if (!f) f.reset(new ihipModuleSymbol_t{&m, name});
  return f.get();
}

hipFunction_t kernel_of(const void* stub) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto it = kernels.find(stub);
  return it == kernels.end() ? nullptr : it->second;
}

hipError_t info(hipFunction_t f, Kernel* out) {
  if (!f) return result(hipErrorInvalidDeviceFunction);
  if (hipError_t e = load(*f->module)) return e;
  char message[kMessageBytes] = "";
  return told(interpreter()->kernel(f->module->id, f->name.c_str(), out, message), message);
}

hipError_t symbol(Module& m, const std::string& name, void** address, size_t* bytes) {
  if (hipError_t e = load(m)) return e;
  char message[kMessageBytes] = "";
  uint64_t at = 0, n = 0;
  const hipError_t e = told(interpreter()->symbol(m.id, name.c_str(), &at, &n, message), message);
  if (address) *address = reinterpret_cast<void*>(at);
  if (bytes) *bytes = n;
  return e;
}

hipError_t variable(const void* shadow, void** address, size_t* bytes) {
  Variable found{};
  {
    const std::lock_guard<std::mutex> lock(mutex);
    auto it = variables.find(shadow);
    if (it != variables.end()) found = it->second;
  }
  if (!found.module) return result(hipErrorInvalidSymbol);
  return symbol(*found.module, found.name, address, bytes);
}

hipError_t launch(hipFunction_t f, Dim grid, Dim block, size_t dynamic_lds, void** args,
                  const void* kernarg, size_t kernarg_bytes) {
  ++launches;
  if (!f)
    return launch_failed(hipErrorInvalidDeviceFunction,
                         "launch of a kernel that was never registered");
  if (hipError_t e = load(*f->module)) return e;
  const Regions memory = regions();
  Launch record{f->module->id,
                f->name.c_str(),
                {grid.x, grid.y, grid.z},
                {block.x, block.y, block.z},
                static_cast<uint32_t>(dynamic_lds),
                args,
                kernarg,
                kernarg_bytes,
                memory.all.data(),
                memory.all.size(),
                0,
                ""};
  const int status = interpreter()->launch(&record);
  instructions += record.instructions;
  return status ? launch_failed(static_cast<hipError_t>(status), record.message) : hipSuccess;
}

hipError_t unsupported(const char* what) {
  complain(std::string(what) + " is not supported");
  return result(hipErrorNotSupported);
}

Dim dim(dim3 d) { return {d.x, d.y, d.z}; }

// GFX950_EMULATOR_SUMMARY=1: proof on stderr, at exit, that kernels ran here.
struct Summary {
  ~Summary() {
    const char* wanted = getenv("GFX950_EMULATOR_SUMMARY");
    if (wanted && *wanted == '1')
      fprintf(stderr, "gfx950_emulator: %llu launches, %llu wave instructions executed\n",
              launches.load(), instructions.load());
  }
} summary;

hipError_t add_module(hipModule_t* out, std::vector<char> image) {
  auto m = std::make_unique<Module>();
  m->copy = std::move(image);
  m->data = m->copy.data();
  *out = m.get();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    modules.push_back(std::move(m));
  }
  return load(**out);
}

}  // namespace
}  // namespace gfx950

using namespace gfx950;

extern "C" {

unsigned long long gfx950_emulator_launches(void) { return launches; }

// --- what compiled host code calls before main and around <<<>>> ---------------------------------

struct FatBinary {  // clang's __CudaFatBinaryWrapper
  uint32_t magic, version;
  const void* image;
  void* unused;
};

void** __hipRegisterFatBinary(const void* wrapper) {
  const std::lock_guard<std::mutex> lock(mutex);
  modules.push_back(std::make_unique<Module>());
  modules.back()->data = static_cast<const FatBinary*>(wrapper)->image;
  return reinterpret_cast<void**>(modules.back().get());
}
// Runs at exit, when Python may be gone already; the process's end frees everything.
void __hipUnregisterFatBinary(void**) {}

void __hipRegisterFunction(void** handle, const void* stub, char*, const char* name, unsigned int,
                           void*, void*, void*, void*, int*) {
  const std::lock_guard<std::mutex> lock(mutex);
  kernels[stub] = function(*reinterpret_cast<Module*>(handle), name);
}
void __hipRegisterVar(void** handle, void* shadow, char*, const char* name, int, size_t, int, int) {
  const std::lock_guard<std::mutex> lock(mutex);
  variables[shadow] = {reinterpret_cast<Module*>(handle), name};
}
void __hipRegisterManagedVar(void*, void**, void*, const char* name, size_t, unsigned) {
  complain(std::string("__managed__ variable ") + name + " is not supported");
  abort();
}

hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t dynamic_lds,
                                      hipStream_t stream) {
  configurations.push_back({grid, block, dynamic_lds, stream});
  return hipSuccess;
}
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* dynamic_lds,
                                     hipStream_t* stream) {
  if (configurations.empty()) return result(hipErrorMissingConfiguration);
  const CallConfiguration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid, *block = c.block, *dynamic_lds = c.dynamic_lds, *stream = c.stream;
  return hipSuccess;
}

// --- launches ------------------------------------------------------------------------------------

hipError_t hipLaunchKernel(const void* stub, dim3 grid, dim3 block, void** args, size_t dynamic_lds,
                           hipStream_t) {
  return launch(kernel_of(stub), dim(grid), dim(block), dynamic_lds, args, nullptr, 0);
}
hipError_t hipExtLaunchKernel(const void* stub, dim3 grid, dim3 block, void** args,
                              size_t dynamic_lds, hipStream_t stream, hipEvent_t begin,
                              hipEvent_t end, int) {
  if (begin) (void)hipEventRecord(begin, stream);
  const hipError_t e = hipLaunchKernel(stub, grid, block, args, dynamic_lds, stream);
  if (end) (void)hipEventRecord(end, stream);
  return e;
}
hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned int gx, unsigned int gy, unsigned int gz,
                                 unsigned int bx, unsigned int by, unsigned int bz,
                                 unsigned int dynamic_lds, hipStream_t, void** args, void** extra) {
  const void* packed = nullptr;
  size_t bytes = 0;
  for (; extra && *extra != HIP_LAUNCH_PARAM_END; extra += 2) {
    if (*extra == HIP_LAUNCH_PARAM_BUFFER_POINTER)
      packed = extra[1];
    else if (*extra == HIP_LAUNCH_PARAM_BUFFER_SIZE)
      bytes = *static_cast<size_t*>(extra[1]);
    else
      return result(hipErrorInvalidValue);
  }
  return launch(f, {gx, gy, gz}, {bx, by, bz}, dynamic_lds, args, packed, bytes);
}
hipError_t hipLaunchCooperativeKernel(const void*, dim3, dim3, void**, unsigned int, hipStream_t) {
  return unsupported("hipLaunchCooperativeKernel");
}

// --- modules -------------------------------------------------------------------------------------

hipError_t hipModuleLoadData(hipModule_t* out, const void* image) {
  if (!out || !image) return result(hipErrorInvalidValue);
  const char* data = static_cast<const char*>(image);
  return add_module(out, std::vector<char>(data, data + image_bytes(image)));
}
hipError_t hipModuleLoadDataEx(hipModule_t* out, const void* image, unsigned int, hipJitOption*,
                               void**) {
  return hipModuleLoadData(out, image);
}
hipError_t hipModuleLoad(hipModule_t* out, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return result(hipErrorFileNotFound);
  return add_module(out, std::vector<char>(std::istreambuf_iterator<char>(file), {}));
}
hipError_t hipModuleUnload(hipModule_t) { return hipSuccess; }
hipError_t hipModuleGetFunction(hipFunction_t* out, hipModule_t m, const char* name) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    *out = function(*m, name);
  }
  Kernel unused;
  return info(*out, &unused);
}
hipError_t hipModuleGetGlobal(hipDeviceptr_t* address, size_t* bytes, hipModule_t m,
                              const char* name) {
  return symbol(*m, name, address, bytes);
}

// --- variables -----------------------------------------------------------------------------------

hipError_t hipGetSymbolAddress(void** address, const void* shadow) {
  return variable(shadow, address, nullptr);
}
hipError_t hipGetSymbolSize(size_t* bytes, const void* shadow) {
  return variable(shadow, nullptr, bytes);
}
hipError_t hipMemcpyToSymbol(const void* shadow, const void* from, size_t n, size_t offset,
                             hipMemcpyKind kind) {
  void* address;
  size_t bytes;
  if (hipError_t e = variable(shadow, &address, &bytes)) return e;
  if (offset > bytes || n > bytes - offset) return result(hipErrorInvalidValue);
  return hipMemcpy(static_cast<char*>(address) + offset, from, n, kind);
}
hipError_t hipMemcpyFromSymbol(void* to, const void* shadow, size_t n, size_t offset,
                               hipMemcpyKind kind) {
  void* address;
  size_t bytes;
  if (hipError_t e = variable(shadow, &address, &bytes)) return e;
  if (offset > bytes || n > bytes - offset) return result(hipErrorInvalidValue);
  return hipMemcpy(to, static_cast<char*>(address) + offset, n, kind);
}
hipError_t hipMemcpyToSymbolAsync(const void* shadow, const void* from, size_t n, size_t offset,
                                  hipMemcpyKind kind, hipStream_t) {
  return hipMemcpyToSymbol(shadow, from, n, offset, kind);
}
hipError_t hipMemcpyFromSymbolAsync(void* to, const void* shadow, size_t n, size_t offset,
                                    hipMemcpyKind kind, hipStream_t) {
  return hipMemcpyFromSymbol(to, shadow, n, offset, kind);
}

// --- what is known about a kernel ----------------------------------------------------------------

hipError_t hipFuncGetAttributes(hipFuncAttributes* out, const void* stub) {
  Kernel k;
  if (hipError_t e = info(kernel_of(stub), &k)) return e;
  *out = {};
  out->binaryVersion = out->ptxVersion = 95;
  out->numRegs = k.vgprs + k.agprs;
  out->sharedSizeBytes = static_cast<size_t>(k.lds_bytes);
  out->localSizeBytes = static_cast<size_t>(k.scratch_bytes);
  out->maxThreadsPerBlock = k.max_workgroup;
  out->maxDynamicSharedSizeBytes = 163840 - k.lds_bytes;
  return hipSuccess;
}
hipError_t hipFuncSetAttribute(const void*, hipFuncAttribute, int) { return hipSuccess; }
hipError_t hipFuncSetCacheConfig(const void*, hipFuncCache_t) { return hipSuccess; }

// From registers (512 per lane and SIMD, in eights), LDS (160 KiB) and 8 waves per SIMD.
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* stub, int threads,
                                                        size_t dynamic_lds) {
  Kernel k;
  if (hipError_t e = info(kernel_of(stub), &k)) return e;
  if (threads < 1) return result(hipErrorInvalidValue);
  const int registers = std::max(8, (k.vgprs + 7) / 8 * 8), waves = (threads + 63) / 64;
  const int resident = 4 * std::min(8, 512 / registers);
  const size_t lds = static_cast<size_t>(k.lds_bytes) + dynamic_lds;
  *blocks = resident / waves;
  if (lds) *blocks = std::min(*blocks, static_cast<int>(163840 / lds));
  return hipSuccess;
}
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* stub,
                                                                 int threads, size_t dynamic_lds,
                                                                 unsigned int) {
  return hipOccupancyMaxActiveBlocksPerMultiprocessor(blocks, stub, threads, dynamic_lds);
}

}  // extern "C"
