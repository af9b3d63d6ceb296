// Pointwise chains: act(a + b), act((a + b) * c), act(a) * b + c, act(a) * b, and their gradients.
//
// Bound by memory, so the design is the traffic: each operand is read once and each result written
// once, 16 bytes a thread and tensor at a time (relu((a + b) * c) moves 4 tensors where three
// kernels move 8). An H200 needs about 30 KB in flight on each SM to run its memory at full speed;
// two or three 16-byte loads of each of 1024 or more resident threads are enough, so no kernel here
// stages data in shared memory.
//
// Forward:
// - pointwise_linear_kernel where all operands are laid out alike: no index arithmetic at all;
// - pointwise_broadcast_kernel for anything else.
//
// Backward (pointwise_bwd.cu):
// - pointwise_bwd_kernel where no gradient has to be summed;
// - pointwise_bwd_sum_kernel where operands were broadcast. It writes the full gradients and sums
//   the others in the same pass: down the columns for a bias ([N], or [C, 1, 1] of channels-last),
//   along the rows for a value per row ([M, 1], or [C, 1, 1] of NCHW) or a scalar. It leaves
//   partial sums, one for each block and value;
// - sum_partials_kernel adds those up, in an order fixed for a device and layout.
//
// kVec is the vector width of T where every tensor has whole aligned vectors (common/walk.cuh), or
// 1 for any strides and alignments (common/gather.cuh).

#include <type_traits>

#include "common/gather.cuh"
#include "common/launch.h"
#include "common/walk.cuh"
#include "pointwise.h"
#include "pointwise_formulas.cuh"
#include "pointwise_launch.cuh"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernels
// ------------------------------------------------------------------------------------------------

template <int kOperands>
struct LinearParams {
  const void* data[kOperands];  // null: the number
  double number[kOperands];
  void* output;
  int64_t numel;
  Activation activation;
};

// One vector of each operand a thread: two or three loads in flight for each of 1536 threads an SM.
// Two or four vectors a thread are no faster on 1.2 GB and 5 to 15 % slower on 4 MB, where blocks
// are few; a persistent grid is 10 % slower (H200, bench/tuning/pointwise_linear.cu).
template <PointwiseOp kOp, typename T>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_linear_kernel(const __grid_constant__ LinearParams<Formula<kOp>::kOperands> p) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVec;
  T* output = static_cast<T*>(p.output);

  wait_for_previous_kernel();
  if (i + kVec > p.numel) {  // the rest, element by element
#pragma unroll 1
    for (int64_t j = i; j < p.numel; ++j) {
      C x[F::kOperands][1], y[1];
#pragma unroll
      for (int k = 0; k < F::kOperands; ++k) {
        const T* data = static_cast<const T*>(p.data[k]);
        x[k][0] = data != nullptr ? to_compute(data[j]) : static_cast<C>(p.number[k]);
      }
      evaluate<kOp, T>(p.activation, x, y);
      output[j] = from_compute<T>(y[0]);
    }
    return;
  }

  // All loads are issued before the first value is used.
  Vector<T, kVec> in[F::kOperands];
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) {
    if (p.data[k] != nullptr) in[k] = load_vector<T, kVec>(static_cast<const T*>(p.data[k]) + i);
  }
  // Starting the next kernel this early gains 8 % on 2 MB of bf16 and loses 4 % on 4 MB of float32.
  if constexpr (sizeof(T) == 2) let_next_kernel_start();
  C x[F::kOperands][kVec], y[kVec];
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) {
    if (p.data[k] != nullptr) {
      unpack<T, kVec>(in[k], x[k]);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) x[k][j] = static_cast<C>(p.number[k]);
    }
  }
  evaluate<kOp, T>(p.activation, x, y);
  store_vector<T, kVec>(output + i, pack<T, kVec>(y));
}

// Tensors: operands, output.
template <PointwiseOp kOp, typename T, int kVec>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_broadcast_kernel(const __grid_constant__ Table<Formula<kOp>::kOperands + 1> table,
                               Activation activation) {
  using F = Formula<kOp>;
  Place<T, kVec, F::kOperands + 1> place(table);
  wait_for_previous_kernel();
  if (!place.exists()) return;
  const auto& at = place.locate();
  Loaded<T, kVec> in[F::kOperands];
  load(table, at, in);
  let_next_kernel_start();
  Compute<T> x[F::kOperands][kHeld<T, kVec>], y[kHeld<T, kVec>];
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) values_of<T, kVec>(table, k, at, in[k], x[k]);
  evaluate<kOp, T>(activation, x, y);
  store<T, kVec>(table, F::kOperands, at, y);
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace pointwise {

template <PointwiseOp kOp, typename T>
struct Forward {
  static cudaError_t run(const PointwiseParams& params, const PointwisePlan& plan,
                         cudaStream_t stream) {
    constexpr int kOperands = Formula<kOp>::kOperands;
    const LaunchShape shape(plan);
    auto start = [&](auto kernel, const auto&... args) {
      return launch(kernel, shape.grid, shape.block, plan.dependent_launch, stream, args...);
    };
    if constexpr (!std::is_same_v<T, double>) {
      if (plan.path == PointwisePath::kLinear) {
        LinearParams<kOperands> p;
        for (int k = 0; k < kOperands; ++k) {
          p.data[k] = params.tensors[k].data;
          p.number[k] = params.tensors[k].number;
        }
        p.output = params.tensors[kOperands].data;
        p.numel = plan.columns;
        p.activation = params.activation;
        return start(pointwise_linear_kernel<kOp, T>, p);
      }
    }
    const auto table = make_table<kOperands + 1>(params, plan);
    if (!all_in_vectors(plan)) {
      return start(pointwise_broadcast_kernel<kOp, T, 1>, table, params.activation);
    }
    const cudaError_t status =
        start(pointwise_broadcast_kernel<kOp, T, kVectorWidth<T>>, table, params.activation);
    if (status != cudaSuccess || plan.rest == 0) return status;
    const Rest rest(params, plan);
    return run(rest.params, rest.plan, stream);
  }
};

// A backward: the forward is that of kActMul.
template <typename T>
struct Forward<PointwiseOp::kActMulRecompute, T> {
  static cudaError_t run(const PointwiseParams&, const PointwisePlan&, cudaStream_t) {
    return cudaErrorInvalidValue;
  }
};

}  // namespace pointwise

cudaError_t pointwise_device_traits(DeviceTraits* traits) {
  return describe_device(pointwise_broadcast_kernel<PointwiseOp::kAddAct, float, 1>, traits);
}

cudaError_t launch_pointwise(const PointwiseParams& params, const PointwisePlan& plan,
                             cudaStream_t stream) {
  if (plan.path == PointwisePath::kEmpty) return cudaSuccess;
  return pointwise::dispatch<pointwise::Forward>(params.op, params.dtype, params, plan, stream);
}

}  // namespace fusedcuda
