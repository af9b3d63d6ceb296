// One kernel for each kind of error the emulator has to find, and a correct one. Each works on
// n = 64 floats, a thread for each.
#include <cuda_runtime.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include "execution.h"

namespace {

constexpr int kThreads = 64;

struct alignas(16) Vector {
  float values[4];
};

// data[i] becomes data[63 - i]; the sum of each warp is added to it.
__global__ void correct(float* data) {
  __shared__ float shared[kThreads];
  cudaGridDependencySynchronize();
  shared[threadIdx.x] = data[threadIdx.x];
  float sum = data[threadIdx.x];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  __syncthreads();
  data[threadIdx.x] = shared[kThreads - 1 - threadIdx.x] + sum;
}

__global__ void reads_past_the_end(float* data) {
  cudaGridDependencySynchronize();
  data[threadIdx.x] = data[threadIdx.x + 1];
}

__global__ void writes_before_the_start(float* data) {
  cudaGridDependencySynchronize();
  data[static_cast<int>(threadIdx.x) - 2000] = 0;
}

__global__ void misaligned_vector(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x == 2) *reinterpret_cast<Vector*>(data + 2) = Vector();
}

__global__ void index_past_an_array(float* data) {
  cudaGridDependencySynchronize();
  float local[2] = {};
  data[threadIdx.x] = local[threadIdx.x / 30];
}

__global__ void barrier_in_a_branch(float* data) {
  cudaGridDependencySynchronize();
  if (data[threadIdx.x] > 5) __syncthreads();
}

__global__ void shuffle_in_a_branch(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x != 40) data[threadIdx.x] = __shfl_xor_sync(0xffffffff, 1.0f, 1);
}

__global__ void two_barriers(float*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void missing_barrier(float* data) {
  __shared__ float shared[kThreads];
  cudaGridDependencySynchronize();
  shared[threadIdx.x] = data[threadIdx.x];
  data[threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

__global__ void last_block_wins(float* data) {
  cudaGridDependencySynchronize();
  data[threadIdx.x] = static_cast<float>(blockIdx.x);
}

__global__ void does_not_wait(float* data) { data[threadIdx.x] += 1; }

struct Kernel {
  const char* name;
  void (*function)(float*);
};

#define KERNEL(name) {#name, name}
constexpr Kernel kKernels[] = {
    KERNEL(correct),
    KERNEL(reads_past_the_end),
    KERNEL(writes_before_the_start),
    KERNEL(misaligned_vector),
    KERNEL(index_past_an_array),
    KERNEL(barrier_in_a_branch),
    KERNEL(shuffle_in_a_branch),
    KERNEL(two_barriers),
    KERNEL(missing_barrier),
    KERNEL(last_block_wins),
    KERNEL(does_not_wait),
};

}  // namespace

// Runs two blocks of the kernel on 0, 1, ..., 63 and returns the result in `data`; what went wrong
// is in `error`, else it is empty.
extern "C" __attribute__((visibility("default"))) void run_kernel(const char* name, int reversed,
                                                                  float* data, char* error) {
  const emulation::GuardedMemory memory(kThreads * sizeof(float));
  float* values = reinterpret_cast<float*>(memory.data());
  for (int i = 0; i < kThreads; ++i) values[i] = static_cast<float>(i);
  emulation::set_reversed(reversed != 0);
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = 2;
  config.blockDim = kThreads;
  config.attrs = &attribute;
  config.numAttrs = 1;
  error[0] = 0;
  try {
    for (const Kernel& kernel : kKernels) {
      if (kernel.name == std::string(name)) cudaLaunchKernelEx(&config, kernel.function, values);
    }
    std::copy_n(values, kThreads, data);
  } catch (const std::exception& exception) {
    std::snprintf(error, 1000, "%s", exception.what());
  }
}
