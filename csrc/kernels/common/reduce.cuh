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

}  // namespace fusedcuda
