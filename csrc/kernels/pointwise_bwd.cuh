// Kernels of the pointwise backward: gradients of every operand from one read of operands and
// incoming gradient.
#pragma once

#include "common/launch.h"
#include "common/reduce.cuh"
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
__device__ __forceinline__ void store_partials(const Table<kBwdTensors<kOp>>& table, int64_t fixed,
                                               const PartialSums& sums,
                                               Compute<T> (&total)[Formula<kOp>::kSlots][kVec]) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  __shared__ C shared[kPointwiseSumThreads * kVec];
  const int num_threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) {
    const GradientKind kind = sums.kinds[k];
    if (kind == GradientKind::kNone || kind == GradientKind::kFull) continue;
    C* partials = static_cast<C*>(sums.partials[k]);
    C(&mine)[kVec] = total[F::slot_of(k)];
    if (kind == GradientKind::kColumns) {
      // One thread a column adds up what the block's rows of threads hold.
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kVec; ++j) shared[thread + j * num_threads] = mine[j];
      __syncthreads();
      for (int c = thread; c < blockDim.x * kVec; c += num_threads) {
        C sum = 0;
        for (int y = 0; y < blockDim.y; ++y) {
          sum += shared[y * blockDim.x + c / kVec + c % kVec * num_threads];
        }
        const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x * kVec + c;
        if (column < table.columns) partials[blockIdx.y * table.columns + column] = sum;
      }
      continue;
    }
    C sum = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += mine[j];
    if (table.down) {  // kTotal
      sum = block_sum(sum, shared, thread, num_threads);
      if (thread == 0) partials[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
    } else {  // kRows, or kTotal by rows; `fixed` is the row
      sum = blockDim.x > kWarpSize ? block_sum(sum, shared, thread, num_threads)
                                   : warp_sum(sum, blockDim.x);
      if (threadIdx.x == 0 && fixed < table.rows) partials[blockIdx.y * table.rows + fixed] = sum;
    }
  }
}

// Operands and incoming gradient at `offsets`.
template <PointwiseOp kOp, typename T, int kVec>
struct BackwardInputs {
  using F = Formula<kOp>;
  static constexpr int kTensors = kBwdTensors<kOp>;
  Loaded<T, kVec> in[F::kOperands + 1];

  __device__ void load_all(const Table<kTensors>& table, const int64_t (&offsets)[kTensors]) {
#pragma unroll
    for (int k = 0; k <= F::kOperands; ++k) load<T, kVec>(table, k, offsets[k], &in[k]);
  }

  // Computes the gradients and stores those that are full.
  __device__ void finish(const Table<kTensors>& table, const int64_t (&offsets)[kTensors],
                         Activation activation, Compute<T> (&g)[F::kSlots][kVec]) const {
    Compute<T> x[F::kOperands][kVec], grad[kVec];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) values_of<T, kVec>(table, k, in[k], x[k]);
    values_of<T, kVec>(table, F::kOperands, in[F::kOperands], grad);
    evaluate_gradients<kOp, T>(activation, x, grad, g);
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) {
      const int gradient = F::kOperands + 1 + k;
      store<T, kVec>(table, gradient, offsets[gradient], g[F::slot_of(k)]);
    }
  }
};

template <PointwiseOp kOp, typename T, int kVec>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_bwd_kernel(const __grid_constant__ Table<kBwdTensors<kOp>> table,
                         Activation activation) {
  constexpr int kTensors = kBwdTensors<kOp>;
  constexpr int kUnroll = kPointwiseUnroll<kVec>;
  const Place<kVec, kUnroll, kTensors> place(table);
  wait_for_previous_kernel();
  if (!place.exists()) return;
  BackwardInputs<kOp, T, kVec> inputs[kUnroll];
  int64_t offsets[kUnroll][kTensors];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    place.locate(u, offsets[u]);
    inputs[u].load_all(table, offsets[u]);
  }
  let_next_kernel_start();
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (u > 0 && !place.exists(u)) return;
    Compute<T> g[Formula<kOp>::kSlots][kVec];
    inputs[u].finish(table, offsets[u], activation, g);
  }
}

// The same, with sums: a thread's stay in registers until its slice of the walk ends.
template <PointwiseOp kOp, typename T, int kVec>
__global__ void __launch_bounds__(kPointwiseSumThreads, pointwise_sum_blocks(kOp))
    pointwise_bwd_sum_kernel(const __grid_constant__ Table<kBwdTensors<kOp>> table,
                             const __grid_constant__ PartialSums sums, Activation activation) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  Walk<kVec, kBwdTensors<kOp>> walk(table);
  C total[F::kSlots][kVec] = {};
  wait_for_previous_kernel();
  for (; !walk.done(); walk.advance()) {
    BackwardInputs<kOp, T, kVec> inputs;
    inputs.load_all(table, walk.offsets());
    C g[F::kSlots][kVec];
    inputs.finish(table, walk.offsets(), activation, g);
#pragma unroll
    for (int s = 0; s < F::kSlots; ++s) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) total[s][j] += g[s][j];
    }
  }
  let_next_kernel_start();
  store_partials<kOp, T, kVec>(table, walk.fixed(), sums, total);
}

struct SumPartialsParams {
  const void* partials[kMaxOperands];
  void* outputs[kMaxOperands];
  int64_t values[kMaxOperands];
  int64_t partials_per_value[kMaxOperands];
};

// out[v] = sum over p of partials[p, v]: blockDim.x threads along v, the others along p with
// several loads in flight each. The order of the additions is fixed. blockIdx.y is the operand.
template <typename T>
__global__ void __launch_bounds__(kSumPartialsThreads)
    sum_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  using C = Compute<T>;
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
    static_cast<T*>(p.outputs[blockIdx.y])[value] = from_compute<T>(shared[thread]);
  }
}

}  // namespace fusedcuda
