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
// Backward:
// - pointwise_bwd_kernel where no gradient has to be summed;
// - pointwise_bwd_sum_kernel where operands were broadcast: it writes the full gradients and, in
// the same pass, sums the
//   others, down the columns for a bias ([N], or [C, 1, 1] of channels-last), along the rows for a
//   value per row
//   ([M, 1], or [C, 1, 1] of NCHW) or a scalar. It leaves partial sums, one for each block and
//   value;
// - sum_partials_kernel adds those up, in an order fixed for a device and layout.
//
// kVec is the vector width of T, or 1: the scalar path for strides and alignments that have no
// 16-byte access.

#include <algorithm>
#include <type_traits>

#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/walk.cuh"
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
  constexpr int kTensors = F::kOperands + 1;
  constexpr int kUnroll = kPointwiseUnroll<kVec>;
  const Place<kVec, kUnroll, kTensors> place(table);
  wait_for_previous_kernel();
  if (!place.exists()) return;
  Loaded<T, kVec> in[kUnroll][F::kOperands];
  int64_t offsets[kUnroll][kTensors];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    place.locate(u, offsets[u]);
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) load<T, kVec>(table, k, offsets[u][k], &in[u][k]);
  }
  let_next_kernel_start();
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    Compute<T> x[F::kOperands][kVec], y[kVec];
#pragma unroll
    for (int k = 0; k < F::kOperands; ++k) values_of<T, kVec>(table, k, in[u][k], x[k]);
    evaluate<kOp, T>(activation, x, y);
    if (u == 0 || place.exists(u)) store<T, kVec>(table, F::kOperands, offsets[u][F::kOperands], y);
  }
}

// --- Backward

// Tensors of the backward kernel: operands, incoming gradient, one gradient an operand.
template <PointwiseOp kOp>
constexpr int kBwdTensors = 2 * Formula<kOp>::kOperands + 1;

// Sums that pointwise_bwd_kernel leaves for sum_partials_kernel.
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
__global__ void __launch_bounds__(kPointwiseSumThreads, blocks_per_sm(kOp))
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
// several loads in flight each. The order of the additions is fixed. blockIdx.y
// is the operand.
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
Table<kTensors> make_table(const PointwiseParams& params, const PointwisePlan& plan) {
  Table<kTensors> table;
  table.rows = plan.rows;
  table.columns = plan.columns;
  table.down = plan.down;
  table.num_dims = plan.space.num_dims;
  table.split = plan.split;
  for (int d = 0; d < plan.space.num_dims; ++d) {
    table.dividers[d] = Divider::make(plan.space.sizes[d]);
  }
  for (int t = 0; t < kTensors; ++t) {
    table.data[t] = params.tensors[t].data;
    table.number[t] = params.tensors[t].number;
    table.access[t] = plan.access[t];
    for (int d = 0; d < plan.space.num_dims; ++d) table.strides[t][d] = plan.space.strides[t][d];
    table.row_strides[t] = static_cast<uint32_t>(plan.split > 0 ? plan.space.strides[t][0] : 0);
    table.column_strides[t] = static_cast<uint32_t>(
        plan.space.num_dims > plan.split ? plan.space.strides[t][plan.split] : 0);
  }
  table.simple = plan.simple;
  return table;
}

// Blocks of (tile_x, threads / tile_x).
struct LaunchShape {
  dim3 grid;
  dim3 block;

  explicit LaunchShape(const PointwisePlan& plan)
      : grid(static_cast<unsigned>(plan.blocks_x), static_cast<unsigned>(plan.blocks_y),
             static_cast<unsigned>(plan.blocks_z)),
        block(plan.tile_x, plan.threads / plan.tile_x) {}
};

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
    constexpr int kVec = kVectorWidth<T>;
    if (plan.vec == kVec)
      return start(pointwise_broadcast_kernel<kOp, T, kVec>, table, params.activation);
    return start(pointwise_broadcast_kernel<kOp, T, 1>, table, params.activation);
  }
};

template <PointwiseOp kOp, typename T>
struct Backward {
  static cudaError_t run(const PointwiseParams& params, const PointwisePlan& plan, void* workspace,
                         cudaStream_t stream) {
    constexpr int kOperands = Formula<kOp>::kOperands;
    PartialSums sums = {};
    SumPartialsParams finish = {};
    int64_t most_values = 0;
    unsigned num_reduced = 0;
    Compute<T>* next = static_cast<Compute<T>*>(workspace);
    for (int k = 0; k < kOperands; ++k) {
      const int64_t values = plan.num_values[k];
      sums.kinds[k] = plan.gradients[k];
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

    const LaunchShape shape(plan);
    const auto table = make_table<kBwdTensors<kOp>>(params, plan);
    auto start = [&](auto kernel, const auto&... args) {
      return launch(kernel, shape.grid, shape.block, plan.dependent_launch, stream, table, args...);
    };
    constexpr int kVec = kVectorWidth<T>;
    const bool vectors = plan.vec == kVec;
    const Activation activation = params.activation;
    if (num_reduced == 0) {
      return vectors ? start(pointwise_bwd_kernel<kOp, T, kVec>, activation)
                     : start(pointwise_bwd_kernel<kOp, T, 1>, activation);
    }
    const cudaError_t status = vectors
                                   ? start(pointwise_bwd_sum_kernel<kOp, T, kVec>, sums, activation)
                                   : start(pointwise_bwd_sum_kernel<kOp, T, 1>, sums, activation);
    if (status != cudaSuccess) return status;
    const dim3 sum_block(plan.sum_tile_x, kSumPartialsThreads / plan.sum_tile_x);
    const dim3 sum_grid(static_cast<unsigned>(ceil_div(most_values, plan.sum_tile_x)), num_reduced);
    return launch(sum_partials_kernel<T>, sum_grid, sum_block, plan.dependent_launch, stream,
                  finish);
  }
};

}  // namespace pointwise

cudaError_t pointwise_dependent_launch(bool* supported) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, sum_partials_kernel<float>);
  *supported = status == cudaSuccess && attributes.ptxVersion >= 90;
  return status;
}

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
