// Pointwise chains, forward and backward: parameters, configuration, launchers. Kernels:
// pointwise.cu.
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
constexpr int kSumPartialsThreads = 1024;  // a block of the small kernel behind it

// Vectors (on the scalar path: elements) a thread loads before it computes the first. More vectors
// take registers, and the resident threads they cost are worth more: two are 10 to 20 % slower,
// four 50 % (H200, bias_act and act_mul_packed of bf16). Single elements are 2 to 4 bytes and need
// company.
template <int kVec>
constexpr int kPointwiseUnroll = kVec > 1 ? 1 : 4;

enum class PointwiseOp {
  kAddAct,        // act(a + b)
  kAddMulAct,     // act((a + b) * c)
  kActScaleBias,  // act(a) * b + c
  kActMul,        // act(a) * b
};

constexpr int kMaxOperands = 3;

// Blocks an SM of the kernel with sums: as many as its registers allow without spilling. One wave
// of them is launched, because every block leaves partial sums to add up, and because five blocks
// an SM where four fit took act_scale_bias 213 us (ten: 180).
constexpr int pointwise_sum_blocks(PointwiseOp op) { return op == PointwiseOp::kAddAct ? 5 : 4; }

inline int num_operands(PointwiseOp op) {
  return op == PointwiseOp::kAddMulAct || op == PointwiseOp::kActScaleBias ? 3 : 2;
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
  kBroadcast,  // the general elementwise kernel
  kColumns,    // backward with column sums
  kRows,       // backward with row sums
};

// One launch, as pointwise_config.h chooses it and explain() prints it.
struct PointwisePlan {
  PointwisePath path = PointwisePath::kEmpty;
  int vec = 1;      // elements a thread handles at once
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
  int64_t rest = 0;  // columns behind the last whole vector, for a second launch on the scalar path
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

// Whether the kernels that the current device runs wait for the one before them, so that they may
// be launched early.
cudaError_t pointwise_dependent_launch(bool* supported);

// Enqueue on `stream`. `workspace` has plan.workspace_size elements and is not needed after the
// launch's kernels.
cudaError_t launch_pointwise(const PointwiseParams& params, const PointwisePlan& plan,
                             cudaStream_t stream);
cudaError_t launch_pointwise_bwd(const PointwiseParams& params, const PointwisePlan& plan,
                                 void* workspace, cudaStream_t stream);

}  // namespace fusedcuda
