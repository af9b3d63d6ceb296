// Pointwise chains, forward and backward: parameters, configuration, launchers. Kernels:
// pointwise.cu, pointwise_bwd.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/access.h"
#include "common/activation.h"
#include "common/dtype.h"
#include "common/iteration.h"
#include "common/launch.h"

namespace fusedcuda {

constexpr int kPointwiseThreads = 256;     // a block
constexpr int kPointwiseSumThreads = 128;  // a block of the kernel with sums

enum class PointwiseOp {
  kAddAct,        // act(a + b)
  kAddMulAct,     // act((a + b) * c)
  kActScaleBias,  // act(a) * b + c
  kActMul,        // act(a) * b
  // Its backward, which writes act(a) * b again, too: as if that were a third operand's gradient.
  kActMulRecompute,
};

constexpr int kMaxOperands = 3;

// Blocks an SM of the kernel with sums: as many as its registers allow without spilling. One wave
// of them is launched, because every block leaves partial sums to add up, and because five blocks
// an SM where four fit took act_scale_bias 213 us (ten: 180).
constexpr int pointwise_sum_blocks(PointwiseOp op) { return op == PointwiseOp::kAddAct ? 5 : 4; }

inline int num_operands(PointwiseOp op) {
  return op == PointwiseOp::kAddAct || op == PointwiseOp::kActMul ? 2 : 3;
}

// A tensor, a number, or nothing.
struct PointwiseTensor {
  void* data = nullptr;
  double number = 0;  // the operand's value where data is null
};

// The raw iteration holds the tensors in this order: for the forward [operands, output]; for the
// backward [operands, grad, gradients of the operands]. A missing tensor has strides 0.
struct PointwiseParams {
  PointwiseOp op = PointwiseOp::kAddAct;
  Activation activation = Activation::kNone;
  DType dtype = DType::kFloat32;
  RawIteration space;
  PointwiseTensor tensors[kMaxTensors];
};

// How the gradient of one operand is made.
enum class GradientKind {
  kNone,     // not wanted
  kFull,     // written element by element
  kColumns,  // summed over the outer dimensions, one value a column
  kRows,     // summed over the inner dimensions, one value a row
  kTotal,    // summed over everything
};

enum class PointwisePath {
  kEmpty,      // no elements
  kLinear,     // every tensor is laid out alike or a number: no index arithmetic
  kFlat,       // results are contiguous: the general elementwise kernel, over the end of each row
  kBroadcast,  // the general elementwise kernel, row by row
  kColumns,    // backward with column sums
  kRows,       // backward with row sums
};

// One launch, as pointwise_config.h chooses it and explain() prints it.
struct PointwisePlan {
  PointwisePath path = PointwisePath::kEmpty;
  int vec = 1;      // elements of the widest access; 1: single elements of every tensor
  int threads = 0;  // a block
  bool dependent_launch = false;
  int tile_x = 0;     // threads of a block along the columns
  bool down = false;  // with sums: threads walk down the rows, else along the columns
  int64_t blocks_x = 0;
  int64_t blocks_y = 0;
  int64_t blocks_z = 1;
  int split = 0;  // leading dimensions of `space` that make up the rows
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t rest = 0;  // columns behind the last whole vector, for a second launch
  // With sums, without vectors: the innermost dimension of the columns, in what a block takes.
  int64_t line = 1;
  int64_t stretches_in_line = 1;
  bool simple = false;  // one dimension of rows, one of columns, sizes and strides below 2^31
  Iteration space;
  Access access[kMaxTensors] = {};
  GradientKind gradients[kMaxOperands] = {};
  // Sums: how many, and partial sums of each, for every operand of kind kColumns, kRows or kTotal.
  int64_t num_values[kMaxOperands] = {};
  int64_t num_partials[kMaxOperands] = {};
  int sum_tile_x = 0;          // threads along the values in sum_partials_kernel
  int64_t workspace_size = 0;  // float32 (float64 for float64) elements
};

// What the choosers need to know about the current device.
cudaError_t pointwise_device_traits(DeviceTraits* traits);

// Enqueue on `stream`. `workspace` has plan.workspace_size elements and is not needed after the
// launch's kernels.
cudaError_t launch_pointwise(const PointwiseParams& params, const PointwisePlan& plan,
                             cudaStream_t stream);
cudaError_t launch_pointwise_bwd(const PointwiseParams& params, const PointwisePlan& plan,
                                 void* workspace, cudaStream_t stream);

}  // namespace fusedcuda
