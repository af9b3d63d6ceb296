// Two blocks that run at the same time and tell each other by counters in global memory how far
// they are. Threads 0 to 31 of each have 32 of the numbers.
#include "kernels/common/grid_counter.cuh"
#include "toys.h"

namespace {

using namespace fusedcuda;

__device__ float exchanged[2][32];
__device__ unsigned arrived;  // even before a launch, and behind it

__device__ bool has_number() { return threadIdx.x < 32; }
__device__ float& number(float* data) { return data[blockIdx.x * 32 + threadIdx.x]; }

// Until both blocks have come.
__device__ void meet() {
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned both = add_acquire_release(&arrived, 1) / 2 * 2 + 2;
    while (load_acquire(&arrived) < both) {
    }
  }
  __syncthreads();
}

__global__ void exchange_through_memory(float* data) {
  cudaGridDependencySynchronize();
  if (has_number()) exchanged[blockIdx.x][threadIdx.x] = number(data);
  meet();
  if (has_number()) number(data) = exchanged[1 - blockIdx.x][threadIdx.x];
}
TOY(exchange_through_memory, 1, 0, true);

__global__ void polls_in_vain(float* data) {
  cudaGridDependencySynchronize();
  if (threadIdx.x == 9) {
    while (load_acquire(&arrived) % 2 == 0) {
    }
  }
}
TOY(polls_in_vain, 1, 0, true);

// What a block finds of the other one is of this launch or of the one before.
__global__ void reads_another_block_too_early(float* data) {
  cudaGridDependencySynchronize();
  if (!has_number()) return;
  exchanged[blockIdx.x][threadIdx.x] += 1;
  number(data) = exchanged[1 - blockIdx.x][threadIdx.x];
}
TOY(reads_another_block_too_early, 1, 0, true);

}  // namespace
