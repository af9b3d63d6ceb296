// The last linear layer of one output with its loss: z = x . w + bias for each row, and
//
//   loss = (1 - y) softplus(z) + pos_weight y softplus(-z)
//   dloss / dz = (1 - y) sigmoid(z) - pos_weight y sigmoid(-z)
//
// All terms of the loss are positive for targets y in [0, 1], so nothing cancels.
#pragma once

#include <cstdint>

#include "common/activation.cuh"
#include "common/reduce.cuh"
#include "common/row.cuh"
#include "common/vec.cuh"
#include "dlrm_layout.h"

namespace fusedcuda {

template <typename C>
__device__ __forceinline__ C loss_of(C z, C y, C pos_weight, C* dz) {
  C positive, negative;  // sigmoid(z), sigmoid(-z)
  Math<false>::sigmoid(z, &positive, &negative);
  *dz = (C(1) - y) * positive - pos_weight * y * negative;
  const C tail = log1p(exp(-fabs(z)));
  return (C(1) - y) * (max(z, C(0)) + tail) + pos_weight * y * (max(-z, C(0)) + tail);
}

// A warp a row, kBceRows rows at a time. `partials`: the sum of a block's losses goes there if the
// loss is reduced.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kBceThreads, kBceBlocksOfSm)
    linear_sigmoid_bce_kernel(const __grid_constant__ BceParams p, Compute<T>* partials) {
  using C = Compute<T>;
  constexpr int kVec = kAligned ? kVectorWidth<T> : 1;
  __shared__ C scratch[kBceThreads / kWarpSize];
  const int lane = threadIdx.x;
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t step = int64_t{gridDim.x} * blockDim.y * kBceRows;
  const int64_t start = (int64_t{blockIdx.x} * blockDim.y + threadIdx.y) * kBceRows;
  wait_for_previous_kernel();
  const C bias = p.bias == nullptr ? C(0) : to_compute(*static_cast<const T*>(p.bias));
  C total = 0;
  for (int64_t first = start; first < p.rows; first += step) {
    C sums[kBceRows] = {};
    for (int column = lane * kVec; column < p.columns; column += kWarpSize * kVec) {
      Vector<T, kVec> x[kBceRows];
#pragma unroll
      for (int r = 0; r < kBceRows; ++r) {
        const int64_t row = min(first + r, p.rows - 1);
        x[r] = load_vector<T, kVec>(row_of<T>(p.x, row) + column);
      }
      const Vector<T, kVec> w = load_vector<T, kVec>(weight + column);
#pragma unroll
      for (int r = 0; r < kBceRows; ++r) {
#pragma unroll
        for (int k = 0; k < kVec; ++k)
          sums[r] += to_compute(x[r].values[k]) * to_compute(w.values[k]);
      }
    }
    C z = 0;  // of the row that the lane finishes
#pragma unroll
    for (int r = 0; r < kBceRows; ++r) {
      const C sum = warp_sum(sums[r]);
      if (lane == r) z = sum + bias;
    }
    const int64_t row = first + lane;
    if (lane < kBceRows && row < p.rows) {
      C dz;
      const C y = static_cast<const C*>(p.target)[row];
      const C loss = loss_of(z, y, static_cast<C>(p.pos_weight), &dz);
      static_cast<C*>(p.logits)[row] = z;
      static_cast<C*>(p.dlogits)[row] = dz;
      if (!p.reduced) static_cast<C*>(p.loss)[row] = loss;
      total += loss;
    }
  }
  let_next_kernel_start();
  if (!p.reduced) return;
  const int thread = threadIdx.y * kWarpSize + lane;
  total = block_sum(total, scratch, thread, kBceThreads);
  if (thread == 0) partials[blockIdx.x] = total * static_cast<C>(p.scale);
}

// Partial sums of a block of linear_sigmoid_bce_bwd_kernel; null where nobody asks for them.
template <typename C>
struct BcePartials {
  C* dweight = nullptr;  // [blocks, columns]
  C* dbias = nullptr;    // [blocks]
};

// blockIdx.y and threadIdx.x: kVec columns; blockIdx.x and threadIdx.y: the rows, kBceRows at a
// time.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kBceThreads, kBceBlocksOfSm)
    linear_sigmoid_bce_bwd_kernel(const __grid_constant__ BceBwdParams p,
                                  BcePartials<Compute<T>> partials) {
  using C = Compute<T>;
  constexpr int kVec = kAligned ? kVectorWidth<T> : 1;
  using V = Vector<T, kVec>;
  __shared__ C shared[kBceThreads];
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * kVec;
  const bool exists = column < p.columns;
  const C* dlogits = static_cast<const C*>(p.dlogits);
  const C* grad_loss = static_cast<const C*>(p.grad_loss);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  wait_for_previous_kernel();
  const bool has_dx = p.dx.data != nullptr, has_dweight = partials.dweight != nullptr;
  V weight = {};
  if (has_dx && exists) weight = load_vector<T, kVec>(static_cast<const T*>(p.weight) + column);
  const C scale = p.reduced ? *grad_loss * static_cast<C>(p.scale) : C(1);
  C dweight[kVec] = {}, dbias = 0;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y + threadIdx.y; first < p.rows;
       first += kBceRows * step) {
    V x[kBceRows] = {};
    C g[kBceRows];
#pragma unroll
    for (int r = 0; r < kBceRows; ++r) {
      const int64_t row = first + r * step;
      g[r] = 0;
      if (row >= p.rows) continue;
      if (has_dweight && exists) x[r] = load_vector<T, kVec>(row_of<T>(p.x, row) + column);
      g[r] = dlogits[row] * (p.reduced ? scale : grad_loss[row]);
    }
#pragma unroll
    for (int r = 0; r < kBceRows; ++r) {
      const int64_t row = first + r * step;
      if (row >= p.rows) continue;
      dbias += g[r];
      V dx;
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        dweight[k] += g[r] * to_compute(x[r].values[k]);
        dx.values[k] = from_compute<T>(g[r] * to_compute(weight.values[k]));
      }
      if (has_dx && exists) store_vector<T, kVec>(row_of<T>(p.dx, row) + column, dx);
    }
  }
  let_next_kernel_start();
  // Over the block's rows; only the threads with threadIdx.y == 0 get the sum.
  auto sum_over_rows = [&](C sum) {
    __syncthreads();
    shared[threadIdx.y * blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0) {
      for (int y = 1; y < blockDim.y; ++y) sum += shared[y * blockDim.x + threadIdx.x];
    }
    return sum;
  };
  if (has_dweight) {
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      const C sum = sum_over_rows(dweight[k]);
      if (threadIdx.y == 0 && exists)
        partials.dweight[int64_t{blockIdx.x} * p.columns + column + k] = sum;
    }
  }
  if (partials.dbias != nullptr && blockIdx.y == 0) {
    const C sum = sum_over_rows(dbias);
    if (threadIdx.y == 0 && threadIdx.x == 0) partials.dbias[blockIdx.x] = sum;
  }
}

}  // namespace fusedcuda
