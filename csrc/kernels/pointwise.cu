// Pointwise chains: act(a + b), act((a + b) * c), act(a) * b + c, act(a) * b, and their gradients.
//
// Bound by memory, so the design is the traffic: each operand is read once and each result written
// once, 16 bytes a thread and tensor at a time (a third of the bytes of the unfused (a + b) * c ->
// relu: 4 tensors moved instead of 8). An H200 needs about 30 KB in flight on each SM to run its
// memory at full speed; two or three 16-byte loads of each of 1024 or more resident threads are
// enough, so no kernel here stages data in shared memory, and none is persistent (measured 10 %
// slower).
//
// Forward, all operands laid out alike -> pointwise_linear_kernel: no index arithmetic at all.
// Forward, anything else               -> pointwise_broadcast_kernel: a vector's place costs one
// division a dimension. Backward                             -> pointwise_bwd_kernel: writes the
// full gradients and, in the same pass, sums
//     those of broadcast operands: down the columns for a bias ([N], or [C, 1, 1] of
//     channels-last), along the rows for a value per row ([M, 1], or [C, 1, 1] of NCHW) or a
//     scalar. It leaves partial sums, which sum_partials_kernel adds up in a fixed order; at 8
//     blocks an SM they are below 1 % of the traffic.

#include <algorithm>
#include <type_traits>

#include "common/activation.cuh"
#include "common/broadcast.cuh"
#include "common/convert.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "pointwise.h"
#include "pointwise_formulas.cuh"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernels
// ------------------------------------------------------------------------------------------------

// --- Forward

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
// are few (H200, bench/tuning).
template <PointwiseOp kOp, typename T>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_linear_kernel(const __grid_constant__ LinearParams<Formula<kOp>::kOperands> p) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVec;
  wait_for_previous_kernel();
  if (i >= p.numel) return;
  const int valid = valid_elements(p.numel - i, kVec);

  Vector<T, kVec> in[F::kOperands];
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) {
    if (p.data[k] != nullptr)
      in[k] = load_neighbours<T, kVec>(static_cast<const T*>(p.data[k]) + i, valid);
  }
  let_next_kernel_start();
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
  store_neighbours<T, kVec>(static_cast<T*>(p.output) + i, valid, pack<T, kVec>(y));
}

// Tensors: operands, output. One row of all elements.
template <PointwiseOp kOp, typename T>
__global__ void __launch_bounds__(kPointwiseThreads) pointwise_broadcast_kernel(
    const __grid_constant__ GeneralParams<Formula<kOp>::kOperands + 1> p) {
  using F = Formula<kOp>;
  constexpr int kVec = kVectorWidth<T>;
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVec;
  wait_for_previous_kernel();
  if (i >= p.columns) return;
  const auto at = locate<kVec>(p, 0, i);

  Vector<T, kVec> in[F::kOperands];
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) in[k] = load_tensor<T, kVec>(p, k, at);
  let_next_kernel_start();
  Compute<T> x[F::kOperands][kVec], y[kVec];
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) values_of<T, kVec>(p, k, in[k], x[k]);
  evaluate<kOp, T>(p.activation, x, y);
  store_neighbours<T, kVec>(static_cast<T*>(p.data[F::kOperands]) + i, at.valid, pack<T, kVec>(y));
}

// --- Backward

// Tensors of the backward kernel: operands, incoming gradient, one gradient an operand.
template <PointwiseOp kOp>
constexpr int kBwdTensors = 2 * Formula<kOp>::kOperands + 1;

// Loads what the gradients at `at` depend on and computes them.
template <PointwiseOp kOp, typename T, int kVec>
__device__ __forceinline__ void gradients_at(const GeneralParams<kBwdTensors<kOp>>& p,
                                             const Position<kBwdTensors<kOp>>& at,
                                             Compute<T> (&g)[Formula<kOp>::kSlots][kVec]) {
  using F = Formula<kOp>;
  Vector<T, kVec> in[F::kOperands + 1];
#pragma unroll
  for (int k = 0; k <= F::kOperands; ++k) in[k] = load_tensor<T, kVec>(p, k, at);
  Compute<T> x[F::kOperands][kVec], grad[kVec];
#pragma unroll
  for (int k = 0; k < F::kOperands; ++k) values_of<T, kVec>(p, k, in[k], x[k]);
  unpack<T, kVec>(in[F::kOperands], grad);
  evaluate_gradients<kOp, T>(p.activation, x, grad, g);
}

// Sums that pointwise_bwd_kernel leaves for sum_partials_kernel.
struct PartialSums {
  GradientKind kinds[kMaxOperands];
  void* partials[kMaxOperands];  // [partials, values]
  bool down_columns;             // how a thread walks
};

// What a thread summed over its walk becomes the block's partial sums. Called by every thread of
// the block.
template <PointwiseOp kOp, typename T>
__device__ __forceinline__ void store_partials(
    int64_t rows, int64_t columns, int64_t row, const PartialSums& sums,
    Compute<T> (&total)[Formula<kOp>::kSlots][kVectorWidth<T>]) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  __shared__ C shared[kPointwiseThreads * kVec];
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
        const int64_t out = static_cast<int64_t>(blockIdx.x) * blockDim.x * kVec + c;
        if (out < columns) partials[blockIdx.y * columns + out] = sum;
      }
      continue;
    }
    C sum = 0;
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += mine[j];
    if (sums.down_columns) {  // kTotal
      sum = block_sum(sum, shared, thread, num_threads);
      if (thread == 0) partials[static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
    } else {  // kRows, or kTotal by rows
      sum = blockDim.x > kWarpSize ? block_sum(sum, shared, thread, num_threads)
                                   : warp_sum(sum, blockDim.x);
      if (threadIdx.x == 0 && row < rows) partials[blockIdx.y * rows + row] = sum;
    }
  }
}

// Block (tile_x, threads / tile_x). A thread walks down a column of vectors (down_columns: its sums
// then stay in registers until its slice of the rows ends) or along a row; blockIdx.y is the slice
// of what it walks along.
template <PointwiseOp kOp, typename T, bool kSum>
__global__ void __launch_bounds__(kPointwiseThreads)
    pointwise_bwd_kernel(const __grid_constant__ GeneralParams<kBwdTensors<kOp>> p,
                         const __grid_constant__ PartialSums sums) {
  using F = Formula<kOp>;
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  const bool down = !kSum || sums.down_columns;
  int64_t row = static_cast<int64_t>(down ? blockIdx.y : blockIdx.x) * blockDim.y + threadIdx.y;
  int64_t column =
      (static_cast<int64_t>(down ? blockIdx.x : blockIdx.y) * blockDim.x + threadIdx.x) * kVec;
  const int64_t own_row = row;
  const int64_t row_step = down ? static_cast<int64_t>(gridDim.y) * blockDim.y : 0;
  const int64_t column_step = down ? 0 : static_cast<int64_t>(gridDim.y) * blockDim.x * kVec;

  wait_for_previous_kernel();
  C total[F::kSlots][kVec] = {};
  while (row < p.rows && column < p.columns) {
    const auto at = locate<kVec>(p, row, column);
    C g[F::kSlots][kVec];
    gradients_at<kOp, T, kVec>(p, at, g);
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) {
      store_tensor<T, kVec>(p, F::kOperands + 1 + k, at, g[F::slot_of(k)]);
    }
    if constexpr (kSum) {
#pragma unroll
      for (int s = 0; s < F::kSlots; ++s) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) total[s][j] += j < at.valid ? g[s][j] : C(0);
      }
      row += row_step;
      column += column_step;
    } else {
      break;
    }
  }
  let_next_kernel_start();
  if constexpr (kSum) store_partials<kOp, T>(p.rows, p.columns, own_row, sums, total);
}
struct SumPartialsParams {
  const void* partials[kMaxOperands];
  void* outputs[kMaxOperands];
  int64_t values[kMaxOperands];
  int64_t partials_per_value[kMaxOperands];
};

// out[v] = sum over p of partials[p, v], one warp row of threads along v and the block's other
// threads along p; the order of the additions is fixed by the shapes. blockIdx.y is the operand.
template <typename T>
__global__ void __launch_bounds__(kPointwiseThreads)
    sum_partials_kernel(const __grid_constant__ SumPartialsParams p) {
  using C = Compute<T>;
  __shared__ C shared[kPointwiseThreads];
  const int64_t values = p.values[blockIdx.y];
  const int64_t count = p.partials_per_value[blockIdx.y];
  const int64_t value = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const C* partials = static_cast<const C*>(p.partials[blockIdx.y]);
  wait_for_previous_kernel();
  C sum = 0;
  if (value < values) {
    for (int64_t i = threadIdx.y; i < count; i += blockDim.y) sum += partials[i * values + value];
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  shared[thread] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && value < values) {
    C result = 0;
    for (int y = 0; y < blockDim.y; ++y) result += shared[y * blockDim.x + threadIdx.x];
    static_cast<T*>(p.outputs[blockIdx.y])[value] = from_compute<T>(result);
  }
}

// ------------------------------------------------------------------------------------------------
// Launchers
// ------------------------------------------------------------------------------------------------

namespace pointwise {

// Calls Launcher<op, T>::run(args...) for the run-time op and dtype.
template <template <PointwiseOp, typename> class Launcher, typename T, typename... Args>
cudaError_t dispatch_op(PointwiseOp op, Args&&... args) {
  switch (op) {
    case PointwiseOp::kAddAct:
      return Launcher<PointwiseOp::kAddAct, T>::run(args...);
    case PointwiseOp::kAddMulAct:
      return Launcher<PointwiseOp::kAddMulAct, T>::run(args...);
    case PointwiseOp::kActScaleBias:
      return Launcher<PointwiseOp::kActScaleBias, T>::run(args...);
    default:
      return Launcher<PointwiseOp::kActMul, T>::run(args...);
  }
}

template <template <PointwiseOp, typename> class Launcher, typename... Args>
cudaError_t dispatch(PointwiseOp op, DType dtype, Args&&... args) {
  switch (dtype) {
    case DType::kFloat64:
      return dispatch_op<Launcher, double>(op, args...);
    case DType::kFloat32:
      return dispatch_op<Launcher, float>(op, args...);
    case DType::kFloat16:
      return dispatch_op<Launcher, __half>(op, args...);
    default:
      return dispatch_op<Launcher, __nv_bfloat16>(op, args...);
  }
}

template <int kTensors>
GeneralParams<kTensors> general_params(const PointwiseParams& params, const PointwisePlan& plan) {
  GeneralParams<kTensors> p;
  p.rows = plan.rows;
  p.columns = plan.columns;
  p.activation = params.activation;
  p.needs_offsets = plan.needs_offsets;
  p.num_dims = plan.space.num_dims;
  p.split = plan.split;
  for (int d = 0; d < plan.space.num_dims; ++d) {
    p.sizes[d] = plan.space.sizes[d];
    p.dividers[d] = Divider::make(plan.space.sizes[d]);
  }
  for (int t = 0; t < kTensors; ++t) {
    p.data[t] = params.tensors[t].data;
    p.number[t] = params.tensors[t].number;
    p.access[t] = plan.access[t];
    for (int d = 0; d < plan.space.num_dims; ++d) p.strides[t][d] = plan.space.strides[t][d];
  }
  return p;
}

template <PointwiseOp kOp, typename T>
struct Forward {
  static cudaError_t run(const PointwiseParams& params, const PointwisePlan& plan,
                         cudaStream_t stream) {
    constexpr int kOperands = Formula<kOp>::kOperands;
    const unsigned blocks = static_cast<unsigned>(plan.blocks_x);
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
        return launch(pointwise_linear_kernel<kOp, T>, blocks, plan.threads, plan.dependent_launch,
                      stream, p);
      }
    }
    return launch(pointwise_broadcast_kernel<kOp, T>, blocks, plan.threads, plan.dependent_launch,
                  stream, general_params<kOperands + 1>(params, plan));
  }
};

template <PointwiseOp kOp, typename T>
struct Backward {
  static cudaError_t run(const PointwiseParams& params, const PointwisePlan& plan, void* workspace,
                         cudaStream_t stream) {
    constexpr int kOperands = Formula<kOp>::kOperands;
    const auto p = general_params<kBwdTensors<kOp>>(params, plan);
    const dim3 grid(static_cast<unsigned>(plan.blocks_x), static_cast<unsigned>(plan.blocks_y));
    const dim3 block(plan.tile_x, plan.threads / plan.tile_x);
    PartialSums sums = {};
    sums.down_columns = plan.path != PointwisePath::kRows;
    if (plan.path == PointwisePath::kBroadcast) {
      constexpr bool kSum = std::is_same_v<T, double>;  // one kernel less to compile
      return launch(pointwise_bwd_kernel<kOp, T, kSum>, grid, block, plan.dependent_launch, stream,
                    p, sums);
    }

    SumPartialsParams finish = {};
    int64_t most_values = 0;
    unsigned num_reduced = 0;
    Compute<T>* next = static_cast<Compute<T>*>(workspace);
    for (int k = 0; k < kOperands; ++k) {
      const GradientKind kind = plan.gradients[k];
      const int64_t values = plan.num_values[k];
      sums.kinds[k] = kind;
      if (values == 0) continue;
      sums.partials[k] = next;
      finish.partials[num_reduced] = next;
      finish.outputs[num_reduced] = params.tensors[kOperands + 1 + k].data;
      finish.values[num_reduced] = values;
      finish.partials_per_value[num_reduced] = plan.num_partials[k];
      next += values * plan.num_partials[k];
      most_values = std::max(most_values, values);
      ++num_reduced;
    }

    const cudaError_t status = launch(pointwise_bwd_kernel<kOp, T, true>, grid, block,
                                      plan.dependent_launch, stream, p, sums);
    if (status != cudaSuccess) return status;

    const dim3 sum_block(plan.sum_tile_x, kPointwiseThreads / plan.sum_tile_x);
    const dim3 sum_grid(static_cast<unsigned>(ceil_div(most_values, plan.sum_tile_x)), num_reduced);
    return launch(sum_partials_kernel<T>, sum_grid, sum_block, plan.dependent_launch, stream,
                  finish);
  }
};

}  // namespace pointwise

cudaError_t launch_pointwise(const PointwiseParams& params, const PointwisePlan& plan,
                             cudaStream_t stream) {
  if (plan.path == PointwisePath::kEmpty) return cudaSuccess;
  return pointwise::dispatch<pointwise::Forward>(params.op, params.dtype, params, plan, stream);
}

// An empty space has gradients only of broadcast operands, all zero; the binding fills them.
cudaError_t launch_pointwise_bwd(const PointwiseParams& params, const PointwisePlan& plan,
                                 void* workspace, cudaStream_t stream) {
  if (plan.path == PointwisePath::kEmpty) return cudaSuccess;
  return pointwise::dispatch<pointwise::Backward>(params.op, params.dtype, params, plan, workspace,
                                                  stream);
}

}  // namespace fusedcuda
