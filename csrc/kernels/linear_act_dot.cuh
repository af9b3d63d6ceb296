// A layer of one output: a dot product a row. Bound by the one read of x.
#pragma once

#include "common/convert.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "linear_act.h"

namespace fusedcuda {

constexpr int kDotRowsThreads = 256;

// A warp has kRows rows at a time, so that as many loads of a lane are under way. Elements of a row
// are neighbours where kVec > 1. blockIdx.y: of the batch.
template <typename T, int kVec>
__global__ void __launch_bounds__(kDotRowsThreads)
    dot_rows_kernel(const __grid_constant__ DotRowsParams p) {
  constexpr int kRows = 4;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int64_t matrix = blockIdx.y;
  const T* const x = static_cast<const T*>(p.x.data) + matrix * p.x_batch;
  const T* const weight = static_cast<const T*>(p.weight) + matrix * p.weight_batch;
  const int64_t row_step = p.x.k_is_inner ? p.x.stride : 1,
                k_step = p.x.k_is_inner ? 1 : p.x.stride;
  const int64_t warps = int64_t{gridDim.x} * (kDotRowsThreads / kWarpSize);
  const int64_t warp = (int64_t{blockIdx.x} * kDotRowsThreads + threadIdx.x) / kWarpSize;
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t first = warp * kRows; first < p.m; first += warps * kRows) {
    float sums[kRows] = {};
    for (int64_t k = lane * kVec; k < p.k; k += kWarpSize * kVec) {
      Vector<T, kVec> rows[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t row = first + r < p.m ? first + r : first;
        rows[r] = load_vector<T, kVec>(x + row * row_step + k * k_step);
      }
      float factors[kVec], values[kVec];
      if constexpr (kVec > 1) {
        unpack(load_vector<T, kVec>(weight + k), factors);
      } else {
        factors[0] = to_compute(weight[k * p.weight_step]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        unpack(rows[r], values);
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[r] += values[j] * factors[j];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) sums[r] = warp_sum(sums[r]);
    const int64_t row = first + lane;
    if (lane >= kRows || row >= p.m) continue;
    float sum = sums[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) sum = lane == r ? sums[r] : sum;
    if (p.bias != nullptr) sum += to_compute(static_cast<const T*>(p.bias)[matrix * p.bias_batch]);
    if (p.residual.data != nullptr) {
      const T* const residual = static_cast<const T*>(p.residual.data);
      sum += to_compute(residual[matrix * p.residual_batch + row * p.residual.stride]);
    }
    static_cast<T*>(p.output.data)[matrix * p.output_batch + row * p.output.stride] =
        from_compute<T>(sum);
  }
}

}  // namespace fusedcuda
