// The last linear layer of one output with its loss: z = x . w + bias for each row, and
//
//   loss = (1 - y) softplus(z) + pos_weight y softplus(-z)
//   dloss / dz = (1 - y) sigmoid(z) - pos_weight y sigmoid(-z)
//
// All terms of the loss are positive for targets y in [0, 1], so nothing cancels.
#pragma once

#include <cstdint>

#include "common/activation.cuh"
#include "common/one_output_bwd.cuh"
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

// The gradient of a row's logit.
template <typename C>
struct LogitGradient {
  struct Loaded {
    C dlogit, scale;
  };

  const C* dlogits;
  const C* grad_loss;  // of each row; null where `scale` is that of all
  C scale;

  template <int kRows>
  __device__ void load(const int64_t (&rows)[kRows], Loaded (&loaded)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      loaded[i].dlogit = dlogits[rows[i]];
      loaded[i].scale = grad_loss == nullptr ? scale : grad_loss[rows[i]];
    }
  }
  __device__ C value(const Loaded& loaded) const { return loaded.dlogit * loaded.scale; }
};

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kOneOutputThreads, kOneOutputBlocksOfSm)
    linear_sigmoid_bce_bwd_kernel(const __grid_constant__ BceBwdParams p,
                                  const __grid_constant__ OneOutputRows rows) {
  using C = Compute<T>;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const C* const grad_loss = static_cast<const C*>(p.grad_loss);
  LogitGradient<C> gradient = {static_cast<const C*>(p.dlogits), grad_loss, C(1)};
  if (p.reduced) {
    gradient.grad_loss = nullptr;
    gradient.scale = *grad_loss * static_cast<C>(p.scale);
  }
  one_output_bwd<T, kAligned ? kVectorWidth<T> : 1>(p, rows, gradient);
}

}  // namespace fusedcuda
