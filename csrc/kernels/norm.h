// RMSNorm and LayerNorm over the last dimension, forward and backward: parameters, configuration,
// launchers. Kernels: norm.cu, norm_bwd.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/row.h"
#include "common/row_pipeline.h"

namespace fusedcuda {

enum class NormKind { kRms, kLayer };

// A tensor of `columns` values, of the rows' dtype or float32.
struct NormParameter {
  void* data = nullptr;  // null: absent
  bool is_float32 = false;
};

// y = (h - mean) * rstd * (weight + weight_offset) + bias with h = x + residual; RMSNorm has
// neither mean nor bias.
struct NormParams {
  NormKind kind = NormKind::kRms;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int columns = 0;
  RowMatrix x;
  RowMatrix residual;
  RowMatrix sum;  // written where there is a residual
  RowMatrix y;
  NormParameter weight;
  NormParameter bias;
  double weight_offset = 0;
  double eps = 0;
  void* mean = nullptr;  // [rows], float32 (float64 for float64); null: not wanted
  void* rstd = nullptr;
};

struct NormBwdParams {
  NormKind kind = NormKind::kRms;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int columns = 0;
  RowMatrix h;
  RowMatrix dy;
  RowMatrix dh;  // what else flows into h: the gradient of the returned sum
  RowMatrix dx;  // absent: not wanted
  const void* mean = nullptr;
  const void* rstd = nullptr;
  NormParameter weight;
  double weight_offset = 0;
  NormParameter dweight;
  NormParameter dbias;
};

// A launch. On the pipeline path blocks are persistent: with the other blocks of its cluster, each
// takes every `groups`-th set of rows_per_block rows.
struct NormConfig {
  RowConfig row;
  bool narrow = false;  // a thread a row, of few columns
  RowAccess access = RowAccess::kShifted;
  int phases = 1;           // kPhased: places in a vector at which rows begin
  int stages = 0;           // sets of rows in shared memory, at work or on their way
  size_t shared_bytes = 0;  // of a block
  // Backward:
  int64_t partials = 0;  // partial sums a column
  // Stream path: the kernel of the weight gradients, apart from the one of dx.
  int64_t weight_blocks_x = 0;
  int64_t weight_blocks_y = 0;
  int64_t workspace_size = 0;  // float32 (float64) elements
};

// What the choosers need to know about the current device.
cudaError_t norm_device_traits(DeviceTraits* traits);

// Enqueue on `stream`. `workspace` has config.workspace_size elements and is not needed after the
// launch's kernels.
cudaError_t launch_norm(const NormParams& params, const NormConfig& config, cudaStream_t stream);
cudaError_t launch_norm_bwd(const NormBwdParams& params, const NormConfig& config, void* workspace,
                            cudaStream_t stream);

}  // namespace fusedcuda
