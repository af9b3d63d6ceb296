// The CUDA language and runtime for a CPU, as far as the kernels use them: first on the include
// path, it lets g++ -D__CUDACC__ compile a .cu file unchanged. execution.cpp runs the threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // blocks run one after another, so each has it to itself

struct uint3 {
  unsigned x, y, z;
};

struct dim3 : uint3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : uint3{x, y, z} {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulation {

// Runs `thread` for every thread of the grid. Throws std::runtime_error, with the thread and the
// block, for an access outside of guarded memory, for undefined behaviour, for threads that do not
// meet at the same barrier or shuffle, and, if `dependent`, for a thread of the first block that
// touches memory before it has waited for the kernel before.
void run_grid(dim3 grid, dim3 block, bool dependent, const std::function<void()>& thread);

void barrier(int line);
void wait_for_previous_kernel();
void shuffle_xor(unsigned participants, void* value, size_t size, int lane_mask, int line);

template <typename T>
T shuffle_xor(unsigned participants, T value, int lane_mask, int line) {
  shuffle_xor(participants, &value, sizeof(T), lane_mask, line);
  return value;
}

}  // namespace emulation

// Macros, because the line tells one barrier from another.
#define __syncthreads() ::emulation::barrier(__LINE__)
#define __shfl_xor_sync(participants, value, lane_mask) \
  ::emulation::shuffle_xor(participants, value, lane_mask, __LINE__)

inline void cudaGridDependencySynchronize() { emulation::wait_for_previous_kernel(); }
inline void cudaTriggerProgrammaticLaunchCompletion() {}

inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = void*;

struct cudaFuncAttributes {
  int ptxVersion;
};
template <typename... Params>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*)(Params...)) {
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Args&... args) {
  const dim3 &grid = config->gridDim, &block = config->blockDim;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const unsigned threads = block.x * block.y * block.z;
  const bool fits = grid.x < 1u << 31 && grid.y < 1u << 16 && grid.z < 1u << 16 && threads <= 1024;
  const bool parameters_fit = (sizeof(Params) + ... + 0) <= 4096;  // of any GPU
  if (blocks == 0 || threads == 0 || !fits || !parameters_fit) return cudaErrorInvalidConfiguration;
  const std::tuple<Params...> parameters(args...);
  const bool dependent = config->numAttrs > 0;
  emulation::run_grid(grid, block, dependent, [&] { std::apply(kernel, parameters); });
  return cudaSuccess;
}
