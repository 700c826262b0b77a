// SPDX-License-Identifier: MIT
// One HIP program for test_hip_runtime.py; argv[1] chooses what it does. Nothing in it knows of the
// emulator but the two calls that register malloc'ed memory.
#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" void gfx950_emulator_register(void*, size_t, const char*);
extern "C" void gfx950_emulator_unregister(void*);

#define CHECK(call)                                                            \
  do {                                                                         \
    if (hipError_t e = (call); e != hipSuccess) {                              \
      printf("%s: %s: %s\n", #call, hipGetErrorName(e), hipGetErrorString(e)); \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

struct Args {  // pointers inside a struct by value
  const float* a;
  const float* b;
  float* c;
  int n;
};

// c[i] = a of the neighbour + b[i]; the neighbour's value comes through dynamic LDS.
__global__ void add_neighbour(const Args p) {
  extern __shared__ float row[];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  row[threadIdx.x] = i < p.n ? p.a[i] : 0.0f;
  __syncthreads();
  if (i < p.n) p.c[i] = row[threadIdx.x ^ 1] + p.b[i];
}

// No bounds check.
__global__ void scale(float* x, float factor) {
  x[blockIdx.x * blockDim.x + threadIdx.x] *= factor;
}

__global__ void three_dimensions(int* out) {
  const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  const int z = blockIdx.z * blockDim.z + threadIdx.z;
  const int width = gridDim.x * blockDim.x, height = gridDim.y * blockDim.y;
  out[(z * height + y) * width + x] = x + 100 * y + 10000 * z;
}

__device__ int counter;
__constant__ int step;
__global__ void count(int* seen) {
  if (threadIdx.x == 0) atomicAdd(&counter, step);
  if (seen && threadIdx.x == 0 && blockIdx.x == 0) *seen = step;
}

int add_test(int n) {
  hipStream_t stream;
  hipEvent_t begin, end;
  CHECK(hipStreamCreateWithFlags(&stream, hipStreamNonBlocking));
  CHECK(hipEventCreate(&begin));
  CHECK(hipEventCreateWithFlags(&end, hipEventDefault));
  std::vector<float> a(n), b(n), c(n);
  for (int i = 0; i < n; ++i) a[i] = 0.5f * i, b[i] = 1000.0f * i;
  const size_t bytes = n * sizeof(float);
  Args p{};
  float *da, *db;
  CHECK(hipMalloc(&da, bytes));
  CHECK(hipMallocAsync(&db, bytes, stream));
  CHECK(hipMalloc(&p.c, bytes));
  p.a = da, p.b = db, p.n = n;
  CHECK(hipMemcpy(da, a.data(), bytes, hipMemcpyHostToDevice));
  CHECK(hipMemcpyAsync(db, b.data(), bytes, hipMemcpyDefault, stream));
  CHECK(hipMemset(p.c, 0xff, bytes));
  CHECK(hipEventRecord(begin, stream));
  add_neighbour<<<(n + 63) / 64, 64, 64 * sizeof(float), stream>>>(p);
  CHECK(hipGetLastError());
  CHECK(hipEventRecord(end, stream));
  CHECK(hipStreamWaitEvent(nullptr, end, 0));
  CHECK(hipEventSynchronize(end));
  float ms = -1;
  CHECK(hipEventElapsedTime(&ms, begin, end));
  CHECK(hipMemcpyAsync(c.data(), p.c, bytes, hipMemcpyDeviceToHost, stream));
  CHECK(hipStreamSynchronize(stream));
  CHECK(hipStreamQuery(stream));
  int wrong = ms <= 0;
  for (int i = 0; i < n; ++i) wrong += c[i] != ((i ^ 1) < n ? a[i ^ 1] : 0.0f) + b[i];
  printf("add %d: %d wrong\n", n, wrong);
  CHECK(hipFree(da));
  CHECK(hipFreeAsync(db, stream));
  CHECK(hipFree(p.c));
  CHECK(hipEventDestroy(begin));
  CHECK(hipEventDestroy(end));
  CHECK(hipStreamDestroy(stream));
  return wrong;
}

int grid_test() {
  int *out, host[6 * 4 * 2];
  CHECK(hipHostMalloc(&out, sizeof host, 0));
  three_dimensions<<<dim3(3, 2, 1), dim3(2, 2, 2)>>>(out);
  CHECK(hipDeviceSynchronize());
  CHECK(hipMemcpy2D(host, 6 * 4, out, 6 * 4, 6 * 4, 8, hipMemcpyDeviceToHost));
  int wrong = 0;
  for (int z = 0; z < 2; ++z)
    for (int y = 0; y < 4; ++y)
      for (int x = 0; x < 6; ++x) wrong += host[(z * 4 + y) * 6 + x] != x + 100 * y + 10000 * z;
  printf("grid: %d wrong\n", wrong);
  CHECK(hipHostFree(out));
  return wrong;
}

int symbol_test() {
  const int first = 40, by = 3;
  int value = 0;
  void* address;
  size_t bytes;
  CHECK(hipMemcpyToSymbol(HIP_SYMBOL(counter), &first, sizeof first));
  CHECK(hipMemcpyToSymbol(HIP_SYMBOL(step), &by, sizeof by));
  count<<<5, 64>>>(nullptr);
  count<<<2, 64>>>(nullptr);
  CHECK(hipMemcpyFromSymbol(&value, HIP_SYMBOL(counter), sizeof value));
  CHECK(hipGetSymbolAddress(&address, HIP_SYMBOL(counter)));
  CHECK(hipGetSymbolSize(&bytes, HIP_SYMBOL(counter)));
  CHECK(hipMemset(address, 0, bytes));
  count<<<1, 64>>>(static_cast<int*>(address));  // a kernel may also be given the address
  int again = 0;
  CHECK(hipMemcpyFromSymbol(&again, HIP_SYMBOL(counter), sizeof again));
  printf("symbols: %d %zu %d\n", value, bytes, again);
  return value != 61 || bytes != 4 || again != 3;
}

int properties_test() {
  hipDeviceProp_t p;
  int count, device, wave, cus, blocks;
  CHECK(hipGetDeviceCount(&count));
  CHECK(hipSetDevice(0));
  CHECK(hipGetDevice(&device));
  CHECK(hipGetDeviceProperties(&p, 0));
  CHECK(hipDeviceGetAttribute(&wave, hipDeviceAttributeWarpSize, 0));
  CHECK(hipDeviceGetAttribute(&cus, hipDeviceAttributeMultiprocessorCount, 0));
  hipFuncAttributes f;
  CHECK(hipFuncGetAttributes(&f, reinterpret_cast<const void*>(add_neighbour)));
  CHECK(hipFuncSetAttribute(reinterpret_cast<const void*>(add_neighbour),
                            hipFuncAttributeMaxDynamicSharedMemorySize, 65536));
  CHECK(hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add_neighbour, 256, 80 << 10));
  printf("%d %d %s %d %d %zu\n", count, device, p.gcnArchName, wave, cus, p.sharedMemPerBlock);
  printf("%d %d %d\n", f.maxThreadsPerBlock, f.numRegs > 0, blocks);
  printf("%d %s\n", hipSetDevice(3), hipGetErrorName(hipGetLastError()));
  printf("%s\n", hipGetErrorString(hipPeekAtLastError()));
  return 0;
}

// Each of these is wrong and must be said to be.
int wrong_test(const std::string& what) {
  float* x;
  const int n = 100;
  const hipError_t expected = what == "copy" || what == "free" ? hipErrorInvalidValue
                              : what == "block"                ? hipErrorInvalidConfiguration
                                                               : hipErrorLaunchFailure;
  CHECK(hipMalloc(&x, n * sizeof(float)));
  if (what != "unwritten") CHECK(hipMemset(x, 0, n * sizeof(float)));
  hipError_t status = hipSuccess;
  if (what == "outside" || what == "unwritten") {
    scale<<<what == "outside" ? 2 : 1, 64>>>(x, 2.0f);
  } else if (what == "freed") {
    CHECK(hipFree(x));
    scale<<<1, 64>>>(x, 2.0f);
  } else if (what == "block") {
    scale<<<1, 4096>>>(x, 2.0f);
  } else if (what == "copy") {
    std::vector<float> host(n + 1);
    status = hipMemcpy(x, host.data(), (n + 1) * sizeof(float), hipMemcpyHostToDevice);
  } else if (what == "free") {
    status = hipFree(x + 1);
  } else if (what == "registered") {
    float* mine = static_cast<float*>(calloc(n, sizeof(float)));
    gfx950_emulator_register(mine, n * sizeof(float), "mine");
    scale<<<2, 64>>>(mine, 2.0f);
  }
  if (!status) status = hipGetLastError();
  printf("%s: %s %d\n", what.c_str(), hipGetErrorString(status), hipGetLastError());
  scale<<<1, 64>>>(nullptr, 1.0f);
  const bool reported = hipDeviceSynchronize() == hipErrorLaunchFailure;  // without hipGetLastError
  return status != expected || !reported || hipDeviceSynchronize() != hipSuccess;
}

// Memory that is not HIP's: works in the default mode, and registered in every mode.
int host_test(bool registered) {
  const int n = 128;
  float* x = static_cast<float*>(malloc(n * sizeof(float)));
  for (int i = 0; i < n; ++i) x[i] = float(i);
  if (registered) gfx950_emulator_register(x, n * sizeof(float), nullptr);
  scale<<<2, 64>>>(x, 2.0f);
  CHECK(hipDeviceSynchronize());
  if (registered) gfx950_emulator_unregister(x);
  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += x[i] != 2.0f * i;
  printf("host: %d wrong\n", wrong);
  free(x);
  return wrong;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  if (what == "all")
    return add_test(1000) + add_test(1) + add_test(64) + grid_test() + symbol_test();
  if (what == "properties") return properties_test();
  if (what == "host") return host_test(false);
  if (what == "host-registered") return host_test(true);
  return wrong_test(what);
}
