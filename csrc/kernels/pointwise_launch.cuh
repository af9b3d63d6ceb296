// What the launchers of forward and backward share: the instantiation for an op and a dtype, and
// what a plan (pointwise_config.h) says as the kernels take it.
#pragma once

#include "common/gather.cuh"
#include "common/launch.h"
#include "pointwise.h"

namespace fusedcuda {
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

}  // namespace pointwise
}  // namespace fusedcuda
