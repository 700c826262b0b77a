// SPDX-License-Identifier: MIT
// Device and host memory. Both are host memory at its true address; what differs is what is known
// about them.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "runtime.h"

namespace gfx950 {
namespace {

constexpr size_t kGuard = 1 << 20;         // inaccessible bytes on either side of an allocation
constexpr size_t kRegisteredGuard = 4096;  // what kernels may not touch around registered memory

struct Block {
  size_t bytes;
  hipMemoryType type;
  std::shared_ptr<const std::string> label;
  std::shared_ptr<uint8_t> written;  // device memory: which bytes something wrote
  void* mapping;                     // null: not ours
  size_t mapping_bytes;
};

std::mutex mutex;
std::map<uint64_t, Block> blocks;  // by first byte
unsigned long long serial = 0;

uint64_t number(const void* p) { return reinterpret_cast<uint64_t>(p); }

// The block that an address is in, or whose guard distance it is in; end() if there is none.
auto near(uint64_t address) {
  auto next = blocks.upper_bound(address);
  if (next != blocks.begin()) {
    auto it = std::prev(next);
    if (address < it->first + it->second.bytes + (it->second.mapping ? kGuard : 0)) return it;
  }
  return next != blocks.end() && next->second.mapping && next->first - address <= kGuard
             ? next
             : blocks.end();
}

void* allocate(size_t bytes, hipMemoryType type, const char* label) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t usable = (bytes + page - 1) / page * page, total = usable + 2 * kGuard;
  void* mapping =
      mmap(nullptr, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  uint8_t* begin = static_cast<uint8_t*>(mapping) + kGuard;
  Block block{bytes, type, nullptr, nullptr, mapping, total};
  if (type == hipMemoryTypeDevice)
    block.written.reset(static_cast<uint8_t*>(calloc(bytes, 1)), &free);
  if (mprotect(begin, usable, PROT_READ | PROT_WRITE) ||
      (type == hipMemoryTypeDevice && !block.written)) {
    munmap(mapping, total);
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  block.label = std::make_shared<std::string>(std::string(label) + " #" + std::to_string(++serial));
  blocks.emplace(number(begin), std::move(block));
  return begin;
}

hipError_t allocate_into(void** out, size_t bytes, hipMemoryType type, const char* label) {
  if (!out) return result(hipErrorInvalidValue);
  *out = nullptr;
  if (!bytes) return hipSuccess;
  *out = allocate(bytes, type, label);
  return result(*out ? hipSuccess : hipErrorOutOfMemory);
}

bool release(void* begin) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto it = blocks.find(number(begin));
  if (it == blocks.end() || !it->second.mapping) return false;
  // The pages go, the addresses stay reserved: whoever uses them after this is caught.
  if (mmap(it->second.mapping, it->second.mapping_bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
    munmap(it->second.mapping, it->second.mapping_bytes);
  blocks.erase(it);
  return true;
}

hipError_t free_pointer(void* begin, const char* what) {
  if (!begin || release(begin)) return hipSuccess;
  complain(std::string(what) + ": not the start of an allocation");
  return result(hipErrorInvalidValue);
}

// Written-map of [p, p + bytes), or null where nothing is tracked. Complains about a range that
// leaves a block.
uint8_t* tracked(const void* p, size_t bytes, const char* what, bool* ok) {
  auto it = near(number(p));
  if (it == blocks.end()) return nullptr;
  const Block& block = it->second;
  if (number(p) < it->first || number(p) + bytes > it->first + block.bytes) {
    complain(std::string(what) + " of " + std::to_string(bytes) + " bytes leaves " + *block.label +
             " (" + std::to_string(block.bytes) + " bytes) at byte " +
             std::to_string(static_cast<int64_t>(number(p) - it->first)));
    *ok = false;
    return nullptr;
  }
  return block.written ? block.written.get() + (number(p) - it->first) : nullptr;
}

hipError_t copy(void* to, const void* from, size_t bytes) {
  if (!bytes) return hipSuccess;
  if (!to || !from) return result(hipErrorInvalidValue);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    bool ok = true;
    const uint8_t* known = tracked(from, bytes, "copy", &ok);
    uint8_t* mark = tracked(to, bytes, "copy", &ok);
    if (!ok) return result(hipErrorInvalidValue);
    if (mark && known)
      memmove(mark, known, bytes);
    else if (mark)
      memset(mark, 1, bytes);
  }
  memmove(to, from, bytes);
  return hipSuccess;
}

template <class Value>
hipError_t fill(void* to, Value value, size_t count) {
  if (!count) return hipSuccess;
  if (!to) return result(hipErrorInvalidValue);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    bool ok = true;
    uint8_t* mark = tracked(to, count * sizeof(Value), "memset", &ok);
    if (!ok) return result(hipErrorInvalidValue);
    if (mark) memset(mark, 1, count * sizeof(Value));
  }
  for (size_t i = 0; i < count; ++i)
    memcpy(static_cast<char*>(to) + i * sizeof(Value), &value, sizeof(Value));
  return hipSuccess;
}

template <class Row>
hipError_t rows(size_t height, Row&& row) {
  for (size_t y = 0; y < height; ++y)
    if (hipError_t e = row(y)) return e;
  return hipSuccess;
}

}  // namespace

Regions regions() {
  const std::lock_guard<std::mutex> lock(mutex);
  Regions out;
  for (auto& [begin, block] : blocks) {
    out.all.push_back({begin, block.bytes, block.mapping ? kGuard : kRegisteredGuard,
                       block.written.get(), block.label->c_str()});
    out.keep.push_back(block.label);
    if (block.written) out.keep.push_back(block.written);
  }
  return out;
}

}  // namespace gfx950

using namespace gfx950;

extern "C" {

void gfx950_emulator_register(void* begin, size_t bytes, const char* label) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto name = std::make_shared<std::string>(label ? label : "registered memory");
  blocks.insert_or_assign(number(begin),
                          Block{bytes, hipMemoryTypeHost, name, nullptr, nullptr, 0});
}
void gfx950_emulator_unregister(void* begin) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto it = blocks.find(number(begin));
  if (it != blocks.end() && !it->second.mapping) blocks.erase(it);
}
void* gfx950_emulator_allocate(size_t bytes, const char* label) {
  return allocate(bytes, hipMemoryTypeHost, label ? label : "allocation");
}
void gfx950_emulator_free(void* begin) { (void)free_pointer(begin, "gfx950_emulator_free"); }

hipError_t hipMalloc(void** p, size_t bytes) {
  return allocate_into(p, bytes, hipMemoryTypeDevice, "hipMalloc");
}
hipError_t hipExtMallocWithFlags(void** p, size_t bytes, unsigned int) {
  return hipMalloc(p, bytes);
}
hipError_t hipMallocAsync(void** p, size_t bytes, hipStream_t) { return hipMalloc(p, bytes); }
hipError_t hipMallocManaged(void** p, size_t bytes, unsigned int) {
  return allocate_into(p, bytes, hipMemoryTypeManaged, "hipMallocManaged");
}
hipError_t hipHostMalloc(void** p, size_t bytes, unsigned int) {
  return allocate_into(p, bytes, hipMemoryTypeHost, "hipHostMalloc");
}
hipError_t hipHostAlloc(void** p, size_t bytes, unsigned int flags) {
  return hipHostMalloc(p, bytes, flags);
}
hipError_t hipMallocHost(void** p, size_t bytes) { return hipHostMalloc(p, bytes, 0); }
hipError_t hipFree(void* p) { return free_pointer(p, "hipFree"); }
hipError_t hipFreeAsync(void* p, hipStream_t) { return free_pointer(p, "hipFreeAsync"); }
hipError_t hipHostFree(void* p) { return free_pointer(p, "hipHostFree"); }
hipError_t hipFreeHost(void* p) { return free_pointer(p, "hipFreeHost"); }

hipError_t hipHostRegister(void* p, size_t bytes, unsigned int) {
  gfx950_emulator_register(p, bytes, "hipHostRegister");
  return hipSuccess;
}
hipError_t hipHostUnregister(void* p) {
  gfx950_emulator_unregister(p);
  return hipSuccess;
}
hipError_t hipHostGetDevicePointer(void** device, void* host, unsigned int) {
  *device = host;
  return hipSuccess;
}
hipError_t hipPointerGetAttributes(hipPointerAttribute_t* out, const void* p) {
  const std::lock_guard<std::mutex> lock(mutex);
  *out = {};
  auto it = near(number(p));
  const bool inside =
      it != blocks.end() && number(p) >= it->first && number(p) < it->first + it->second.bytes;
  out->type = inside ? it->second.type : hipMemoryTypeUnregistered;
  out->hostPointer = inside && out->type == hipMemoryTypeDevice ? nullptr : const_cast<void*>(p);
  out->devicePointer = inside ? const_cast<void*>(p) : nullptr;
  out->isManaged = out->type == hipMemoryTypeManaged;
  return hipSuccess;
}
hipError_t hipMemGetInfo(size_t* free_bytes, size_t* total) {
  hipDeviceProp_t properties;
  if (hipError_t e = hipGetDeviceProperties(&properties, 0)) return e;
  size_t used = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& [begin, block] : blocks) used += block.type == hipMemoryTypeDevice ? block.bytes : 0;
  *total = properties.totalGlobalMem;
  *free_bytes = *total > used ? *total - used : 0;
  return hipSuccess;
}

// The direction follows from the addresses, so `kind` says nothing.
hipError_t hipMemcpy(void* to, const void* from, size_t n, hipMemcpyKind) {
  return copy(to, from, n);
}
hipError_t hipMemcpyAsync(void* to, const void* from, size_t n, hipMemcpyKind, hipStream_t) {
  return copy(to, from, n);
}
hipError_t hipMemcpyWithStream(void* to, const void* from, size_t n, hipMemcpyKind, hipStream_t) {
  return copy(to, from, n);
}
hipError_t hipMemcpyPeer(void* to, int, const void* from, int, size_t n) {
  return copy(to, from, n);
}
hipError_t hipMemcpyHtoD(hipDeviceptr_t to, const void* from, size_t n) {
  return copy(to, from, n);
}
hipError_t hipMemcpyDtoH(void* to, hipDeviceptr_t from, size_t n) { return copy(to, from, n); }
hipError_t hipMemcpyDtoD(hipDeviceptr_t to, hipDeviceptr_t from, size_t n) {
  return copy(to, from, n);
}
hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, const void* from, size_t n, hipStream_t) {
  return copy(to, from, n);
}
hipError_t hipMemcpyDtoHAsync(void* to, hipDeviceptr_t from, size_t n, hipStream_t) {
  return copy(to, from, n);
}
hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t to, hipDeviceptr_t from, size_t n, hipStream_t) {
  return copy(to, from, n);
}
hipError_t hipMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                       size_t height, hipMemcpyKind) {
  return rows(height, [&](size_t y) {
    return copy(static_cast<char*>(to) + y * to_pitch,
                static_cast<const char*>(from) + y * from_pitch, width);
  });
}
hipError_t hipMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                            size_t width, size_t height, hipMemcpyKind kind, hipStream_t) {
  return hipMemcpy2D(to, to_pitch, from, from_pitch, width, height, kind);
}

hipError_t hipMemset(void* to, int value, size_t n) {
  return fill(to, static_cast<uint8_t>(value), n);
}
hipError_t hipMemsetAsync(void* to, int value, size_t n, hipStream_t) {
  return hipMemset(to, value, n);
}
hipError_t hipMemsetD8(hipDeviceptr_t to, unsigned char value, size_t n) {
  return fill(to, value, n);
}
hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char value, size_t n, hipStream_t) {
  return fill(to, value, n);
}
hipError_t hipMemsetD16(hipDeviceptr_t to, unsigned short value, size_t n) {
  return fill(to, value, n);
}
hipError_t hipMemsetD16Async(hipDeviceptr_t to, unsigned short value, size_t n, hipStream_t) {
  return fill(to, value, n);
}
hipError_t hipMemsetD32(hipDeviceptr_t to, int value, size_t n) { return fill(to, value, n); }
hipError_t hipMemsetD32Async(hipDeviceptr_t to, int value, size_t n, hipStream_t) {
  return fill(to, value, n);
}
hipError_t hipMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  return rows(height, [&](size_t y) {
    return hipMemset(static_cast<char*>(to) + y * pitch, value, width);
  });
}
hipError_t hipMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                            hipStream_t) {
  return hipMemset2D(to, pitch, value, width, height);
}

}  // extern "C"
