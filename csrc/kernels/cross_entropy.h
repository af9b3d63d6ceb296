// Cross-entropy over the last dimension, forward and backward: parameters, configuration,
// launchers. Kernels: cross_entropy.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/row.h"

namespace fusedcuda {

// The order is that of REDUCTIONS in fusedcuda/ops/_cross_entropy_reference.py.
enum class Reduction { kNone, kMean, kSum };

// Statistics, weights and losses are float32, or float64 for float64 logits.
struct CrossEntropyParams {
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int columns = 0;  // classes
  RowMatrix logits;
  RowMatrix gradient;            // absent: not wanted; may be the logits
  const void* target = nullptr;  // [rows]
  bool target_is_int32 = false;
  const void* weight = nullptr;  // [columns]; null: ones
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;  // 0: none
  Reduction reduction = Reduction::kMean;
  // These are some of the rows: the normalizer is that of all of them, and given.
  bool is_part = false;
  // [rows, 2]: the maximum of x' and the sum of exp(x' - maximum), aligned to both.
  void* statistics = nullptr;
  // [2]: the weights of the valid targets added up, and their number. Unused with kNone: nothing is
  // divided, and no kernel looks at all targets.
  void* normalizer = nullptr;
  void* loss = nullptr;  // one value where the rows are added up, else [rows]

#ifdef __CUDACC__
  __host__ __device__
#endif
      bool adds_up() const {
    return reduction != Reduction::kNone && !is_part;
  }
};

struct CrossEntropyBwdParams : CrossEntropyParams {
  const void* grad_loss = nullptr;
  int64_t grad_stride = 0;  // from row to row: 0 where the loss is reduced or its gradient expanded
  bool unless_one = false;  // leave the gradient as it is where grad_loss is 1
};

struct CrossEntropyConfig {
  RowConfig row;
  // Blocks, a cluster, of the kernel that adds up over the rows.
  int totals_cluster = 1;
  bool totals_first = false;   // the gradient needs the normalizer
  int64_t workspace_size = 0;  // float32 (float64) elements
};

struct CrossEntropyBwdConfig {
  RowConfig row;  // a block takes a tile of its rows: `cluster` is 1
  int tiles = 1;  // of a row
  int64_t workspace_size = 0;
};

// What the choosers need to know about the current device.
cudaError_t cross_entropy_device_traits(DeviceTraits* traits);

// Enqueue on `stream`. `workspace` has config.workspace_size elements and is not needed after the
// launch's kernels.
cudaError_t launch_cross_entropy(const CrossEntropyParams& params, const CrossEntropyConfig& config,
                                 void* workspace, cudaStream_t stream);
cudaError_t launch_cross_entropy_bwd(const CrossEntropyBwdParams& params,
                                     const CrossEntropyBwdConfig& config, void* workspace,
                                     cudaStream_t stream);

}  // namespace fusedcuda
