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
// - pointwise_bwd_sum_kernel where operands were broadcast. It writes the full gradients and sums
//   the others in the same pass: down the columns for a bias ([N], or [C, 1, 1] of channels-last),
//   along the rows for a value per row ([M, 1], or [C, 1, 1] of NCHW) or a scalar. It leaves
//   partial sums, one for each block and value;
// - sum_partials_kernel adds those up, in an order fixed for a device and layout.
//
// kVec is the vector width of T where every tensor has whole aligned vectors (common/walk.cuh), or
// 1 for any strides and alignments (common/gather.cuh).

#include <algorithm>
#include <type_traits>

#include "common/gather.cuh"
#include "common/launch.h"
#include "common/walk.cuh"
#include "pointwise.h"
#include "pointwise_bwd.cuh"
#include "pointwise_formulas.cuh"

namespace fusedcuda {

// ------------------------------------------------------------------------------------------------
// Kernels (those of the backward are in pointwise_bwd.cuh)
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
    case PointwiseOp::kActMul:
      return Launcher<PointwiseOp::kActMul, T>::run(args...);
    default:
      return Launcher<PointwiseOp::kActMulRecompute, T>::run(args...);
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
    const int64_t* strides = plan.space.strides[t];
    const bool has_columns = plan.space.num_dims > plan.split;
    table.row_strides[t] = static_cast<uint32_t>(plan.split > 0 ? strides[0] : 0);
    table.column_strides[t] = static_cast<uint32_t>(has_columns ? strides[plan.split] : 0);
    table.steps[t] = has_columns ? strides[plan.space.num_dims - 1] : 0;
  }
  table.simple = plan.simple;
  table.flat = plan.path == PointwisePath::kFlat;
  table.line = plan.line;
  table.stretches = Divider::make(plan.stretches_in_line);
  table.num_stretches = plan.stretches_in_line * (plan.columns / plan.line);
  return table;
}

// Whether a launch is for walk.cuh; else it is for gather.cuh.
inline bool all_in_vectors(const PointwisePlan& plan) {
  return plan.vec > 1 && plan.path != PointwisePath::kFlat;
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

// The launch for the columns that plan.columns leaves out.
struct Rest {
  PointwiseParams params;
  PointwisePlan plan;

  Rest(const PointwiseParams& whole_params, const PointwisePlan& whole)
      : params(whole_params), plan(whole) {
    for (int t = 0; t < plan.space.num_tensors; ++t) {
      PointwiseTensor& tensor = params.tensors[t];
      if (tensor.data != nullptr) {
        const int64_t elements = whole.columns * plan.space.strides[t][0];
        tensor.data = static_cast<char*>(tensor.data) + elements * size_of(params.dtype);
      }
      Access& access = plan.access[t];
      if (access == Access::kVector) access = Access::kUnaligned;
      if (access == Access::kSplat) access = Access::kElement;
    }
    plan.space.sizes[0] = plan.columns = whole.rest;
    plan.rest = 0;
    plan.vec = 1;
    plan.tile_x = kPointwiseThreads;
    plan.blocks_x = plan.blocks_y = plan.blocks_z = 1;
  }
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

template <PointwiseOp kOp, typename T>
struct Backward {
  static cudaError_t run(const PointwiseParams& params, const PointwisePlan& plan, void* workspace,
                         cudaStream_t stream) {
    constexpr int kOperands = Formula<kOp>::kOperands;
    PartialSums sums = {};
    SumPartialsParams finish = {};
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
      ++num_reduced;
    }

    const LaunchShape shape(plan);
    const auto table = make_table<kBwdTensors<kOp>>(params, plan);
    auto start = [&](auto kernel, const auto&... args) {
      return launch(kernel, shape.grid, shape.block, plan.dependent_launch, stream, table, args...);
    };
    constexpr int kVec = kVectorWidth<T>;
    const bool vectors = all_in_vectors(plan);
    const Activation activation = params.activation;
    if (num_reduced == 0) {
      if (!vectors) return start(pointwise_bwd_kernel<kOp, T, 1>, activation);
      const cudaError_t status = start(pointwise_bwd_kernel<kOp, T, kVec>, activation);
      if (status != cudaSuccess || plan.rest == 0) return status;
      const Rest rest(params, plan);
      return run(rest.params, rest.plan, workspace, stream);
    }
    if constexpr (!Formula<kOp>::kHasSums) {
      return cudaErrorInvalidValue;
    } else {
      const cudaError_t status =
          vectors ? start(pointwise_bwd_sum_kernel<kOp, T, kVec>, sums, activation)
                  : start(pointwise_bwd_sum_kernel<kOp, T, 1>, sums, activation);
      if (status != cudaSuccess) return status;
      return launch_sum_partials<T>(finish, num_reduced, plan.sum_tile_x, plan.dependent_launch,
                                    stream);
    }
  }
};

}  // namespace pointwise

cudaError_t pointwise_device_traits(DeviceTraits* traits) {
  return describe_device(sum_partials_kernel<float>, traits);
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
