// The second half of a matrix product that was split along k: adds up the parts. Many values of few
// parts each; sum_partials.cuh is for few values of many.
#pragma once

#include <cstdint>

#include "convert.cuh"
#include "hopper_gemm.h"
#include "launch.h"

namespace fusedcuda {

constexpr int kSumSplitsThreads = 256;

// A result, and its parts in float32.
struct SplitSum {
  const float* parts = nullptr;  // 16-byte aligned
  int64_t stride = 0;            // between parts; a multiple of kSumSplitsVec
  int64_t values = 0;
  void* output = nullptr;  // `values` elements of T, 16-byte aligned; or null
};

struct SumSplitsParams {
  SplitSum sums[2];
  unsigned first_blocks = 0;  // of the grid, for the first of them
  int splits = 1;
};

template <typename T>
__global__ void __launch_bounds__(kSumSplitsThreads)
    sum_splits_kernel(const __grid_constant__ SumSplitsParams p) {
  const bool is_second = blockIdx.x >= p.first_blocks;
  const SplitSum& sum = p.sums[is_second];
  const int64_t block = blockIdx.x - (is_second ? p.first_blocks : 0);
  const int64_t value = (block * kSumSplitsThreads + threadIdx.x) * kSumSplitsVec;
  wait_for_previous_kernel();
  if (value >= sum.values) return;
  const float* const parts = sum.parts + value;
  T* const output = static_cast<T*>(sum.output) + value;
  if (value + kSumSplitsVec > sum.values) {
    for (int i = 0; value + i < sum.values; ++i) {
      float total = 0;
      for (int s = 0; s < p.splits; ++s) total += parts[s * sum.stride + i];
      output[i] = from_compute<T>(total);
    }
    return;
  }
  float4 total = {};
#pragma unroll 8
  for (int s = 0; s < p.splits; ++s) {
    const float4 part = *reinterpret_cast<const float4*>(parts + s * sum.stride);
    total.x += part.x;
    total.y += part.y;
    total.z += part.z;
    total.w += part.w;
  }
  *reinterpret_cast<uint2*>(output) = {pack_pair<T>(total.x, total.y),
                                       pack_pair<T>(total.z, total.w)};
}

template <typename T>
cudaError_t launch_sum_splits(const SplitSum& first, const SplitSum& second, int splits,
                              bool dependent, cudaStream_t stream) {
  static_assert(sizeof(T) == 2);
  auto blocks = [](const SplitSum& sum) {
    return sum.output == nullptr ? 0 : ceil_div(sum.values, kSumSplitsThreads * kSumSplitsVec);
  };
  SumSplitsParams params;
  params.sums[0] = first;
  params.sums[1] = second;
  params.first_blocks = static_cast<unsigned>(blocks(first));
  params.splits = splits;
  const auto all = static_cast<unsigned>(blocks(first) + blocks(second));
  return launch(sum_splits_kernel<T>, dim3(all), dim3(kSumSplitsThreads), dependent, stream,
                params);
}

}  // namespace fusedcuda
