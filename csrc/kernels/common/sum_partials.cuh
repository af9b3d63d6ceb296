// The second half of a sum over many blocks: adds up the partial sums that they left.
#pragma once

#include <cstdint>

#include "convert.cuh"
#include "iteration.h"
#include "launch.h"

namespace fusedcuda {

constexpr int kMaxSums = 3;
constexpr int kSumPartialsThreads = 1024;

struct SumPartialsParams {
  const void* partials[kMaxSums];  // [partials_per_value, values] of C
  void* outputs[kMaxSums];         // [values] of T
  int64_t values[kMaxSums];
  int64_t partials_per_value[kMaxSums];
};

// out[v] = sum over p of partials[p, v]: blockDim.x threads along v, the others along p with
// several loads in flight each. The order of the additions is fixed. blockIdx.y is the sum.
template <typename T, typename C = Compute<T>>
__global__ void __launch_bounds__(kSumPartialsThreads)
    sum_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  constexpr int kUnroll = 4;
  __shared__ C shared[kSumPartialsThreads];
  const int64_t values = p.values[blockIdx.y];
  const int64_t count = p.partials_per_value[blockIdx.y];
  const int64_t value = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const C* partials = static_cast<const C*>(p.partials[blockIdx.y]);
  wait_for_previous_kernel();
  C sums[kUnroll] = {};
  if (value < values) {
    for (int64_t i = threadIdx.y; i < count; i += kUnroll * blockDim.y) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t row = i + u * blockDim.y;
        if (row < count) sums[u] += partials[row * values + value];
      }
    }
  }
  C sum = 0;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) sum += sums[u];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  shared[thread] = sum;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) shared[thread] += shared[thread + half * blockDim.x];
  }
  if (threadIdx.y == 0 && value < values) {
    const Compute<T> result = static_cast<Compute<T>>(shared[thread]);
    static_cast<T*>(p.outputs[blockIdx.y])[value] = from_compute<T>(result);
  }
}

// The first `count` sums of `p`, `along` threads of a block along the values.
template <typename T, typename C = Compute<T>>
cudaError_t launch_sum_partials(const SumPartialsParams& p, unsigned count, int along,
                                bool dependent, cudaStream_t stream) {
  int64_t most = 0;
  for (unsigned i = 0; i < count; ++i) most = p.values[i] > most ? p.values[i] : most;
  const dim3 grid(static_cast<unsigned>(ceil_div(most, along)), count);
  const dim3 block(along, kSumPartialsThreads / along);
  return launch(sum_partials_kernel<T, C>, grid, block, dependent, stream, p);
}

}  // namespace fusedcuda
