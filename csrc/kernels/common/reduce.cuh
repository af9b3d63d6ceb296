// Sums over a warp and over a block, in a fixed order: the result does not depend on scheduling.
#pragma once

#include "launch.h"

namespace fusedcuda {

// Sum over groups of `width` neighbouring lanes (a power of two up to 32); every lane gets its
// group's sum.
template <typename C>
__device__ __forceinline__ C warp_sum(C value, int width = kWarpSize) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Sum over the block; thread 0 gets it. `scratch` holds one value a warp and may be reused after
// the next barrier.
template <typename C>
__device__ __forceinline__ C block_sum(C value, C* scratch, int thread, int num_threads) {
  value = warp_sum(value);
  const int lane = thread % kWarpSize;
  const int warp = thread / kWarpSize;
  __syncthreads();
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  const int num_warps = (num_threads + kWarpSize - 1) / kWarpSize;
  if (warp == 0) value = warp_sum(lane < num_warps ? scratch[lane] : C(0));
  return value;
}

// Sums over threadIdx.y, of a block of kThreads. The threads have kVec neighbouring columns each,
// and get the sums of these as they lie in memory, one a thread: the first kVec * blockDim.x ones,
// of which there must not be more than threads.
template <int kThreads, int kVec, typename C>
__device__ __forceinline__ C sum_block_columns(const C (&values)[kVec]) {
  __shared__ C shared[kVec][kThreads];
  const int along = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.y) * along + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int j = 0; j < kVec; ++j) shared[j][thread] = values[j];
  for (int half = static_cast<int>(blockDim.y) / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.y) < half) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared[j][thread] += shared[j][thread + half * along];
    }
  }
  __syncthreads();
  return shared[thread % kVec][thread / kVec];
}

}  // namespace fusedcuda
