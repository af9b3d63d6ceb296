// Kernels of the pointwise backward: gradients of every operand from one read of operands and
// incoming gradient.
#pragma once

#include "common/gather.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/sum_partials.cuh"
#include "common/walk.cuh"
#include "pointwise.h"
#include "pointwise_formulas.cuh"

namespace fusedcuda {

// Tensors of the backward kernels: operands, incoming gradient, one gradient an operand.
template <PointwiseOp kOp>
constexpr int kBwdTensors = 2 * Formula<kOp>::kOperands + 1;

// Sums that pointwise_bwd_sum_kernel leaves for sum_partials_kernel.
struct PartialSums {
  GradientKind kinds[kMaxOperands];
  void* partials[kMaxOperands];  // [partials, values]
};

// What a thread summed over its walk becomes the block's partial sums. Called by every thread of
// the block.
template <PointwiseOp kOp, typename T, int kVec>
__device__ __forceinline__ void store_partials(
    const Table<kBwdTensors<kOp>>& table, const Walk<T, kVec, kBwdTensors<kOp>>& walk,
    const PartialSums& sums, Compute<T> (&total)[Formula<kOp>::kSlots][kHeld<T, kVec>]) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  constexpr int kCount = kHeld<T, kVec>;
  __shared__ C shared[kPointwiseSumThreads * kCount];
  const int num_threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) {
    const GradientKind kind = sums.kinds[k];
    if (kind == GradientKind::kNone || kind == GradientKind::kFull) continue;
    C* partials = static_cast<C*>(sums.partials[k]);
    C(&mine)[kCount] = total[F::slot_of(k)];
    if (kind == GradientKind::kColumns) {
      // One thread a column adds up what the block's rows of threads hold.
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kCount; ++j) shared[thread + j * num_threads] = mine[j];
      __syncthreads();
      for (int c = thread; c < blockDim.x * kCount; c += num_threads) {
        int x, j;
        const int64_t column = walk.column_of(table, c, &x, &j);
        C sum = 0;
        for (int y = 0; y < blockDim.y; ++y) {
          sum += shared[y * blockDim.x + x + j * num_threads];
        }
        if (column < table.columns) partials[blockIdx.y * table.columns + column] = sum;
      }
      continue;
    }
    C sum = 0;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum += mine[j];
    if (table.down) {  // kTotal
      sum = block_sum(sum, shared, thread, num_threads);
      if (thread == 0) partials[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
    } else {  // kRows, or kTotal by rows
      const int64_t row = walk.row();
      sum = blockDim.x > kWarpSize ? block_sum(sum, shared, thread, num_threads)
                                   : warp_sum(sum, blockDim.x);
      if (threadIdx.x == 0 && row < table.rows) partials[blockIdx.y * table.rows + row] = sum;
    }
  }
}

// Operands and incoming gradient of one place, and what becomes of them.
template <PointwiseOp kOp, typename T, int kVec>
struct BackwardInputs {
  using F = Formula<kOp>;
  static constexpr int kCount = kHeld<T, kVec>;
  Loaded<T, kVec> in[F::kOperands + 1];

  // Computes the gradients and stores those that are full.
  template <typename At>
  __device__ void finish(const Table<kBwdTensors<kOp>>& table, const At& at, Activation activation,
                         Compute<T> (&g)[F::kSlots][kCount]) const {
    Compute<T> x[F::kOperands][kCount], grad[kCount];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) values_of<T, kVec>(table, k, at, in[k], x[k]);
    values_of<T, kVec>(table, F::kOperands, at, in[F::kOperands], grad);
    evaluate_gradients<kOp, T>(activation, x, grad, g);
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) {
      store<T, kVec>(table, F::kOperands + 1 + k, at, g[F::slot_of(k)]);
    }
  }
};

template <PointwiseOp kOp, typename T, int kVec>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_bwd_kernel(const __grid_constant__ Table<kBwdTensors<kOp>> table,
                         Activation activation) {
  Place<T, kVec, kBwdTensors<kOp>> place(table);
  wait_for_previous_kernel();
  if (!place.exists()) return;
  const auto& at = place.locate();
  BackwardInputs<kOp, T, kVec> inputs;
  load(table, at, inputs.in);
  let_next_kernel_start();
  Compute<T> g[Formula<kOp>::kSlots][kHeld<T, kVec>];
  inputs.finish(table, at, activation, g);
}

// The same, with sums: a thread's stay in registers until its slice of the walk ends.
template <PointwiseOp kOp, typename T, int kVec>
__global__ void __launch_bounds__(kPointwiseSumThreads, pointwise_sum_blocks(kOp))
    pointwise_bwd_sum_kernel(const __grid_constant__ Table<kBwdTensors<kOp>> table,
                             const __grid_constant__ PartialSums sums, Activation activation) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  Walk<T, kVec, kBwdTensors<kOp>> walk(table);
  C total[F::kSlots][kHeld<T, kVec>] = {};
  wait_for_previous_kernel();
  for (; !walk.done(); walk.advance()) {
    BackwardInputs<kOp, T, kVec> inputs;
    load(table, walk.place(), inputs.in);
    C g[F::kSlots][kHeld<T, kVec>];
    inputs.finish(table, walk.place(), activation, g);
#pragma unroll
    for (int s = 0; s < F::kSlots; ++s) {
#pragma unroll
      for (int j = 0; j < kHeld<T, kVec>; ++j) {
        if (walk.has(j)) total[s][j] += g[s][j];
      }
    }
  }
  let_next_kernel_start();
  store_partials<kOp, T, kVec>(table, walk, sums, total);
}

}  // namespace fusedcuda
