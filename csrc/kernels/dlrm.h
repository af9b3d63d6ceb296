// The ops of a DLRM that are no linear layers: the interaction of its vectors, and the head of one
// output with its loss. Parameters, configurations, launchers. Kernels: dlrm.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "common/launch.h"
#include "common/one_output_bwd.h"
#include "common/row.h"

namespace fusedcuda {

// --- Interaction

constexpr int kMaxDotVectors = 64;
constexpr int kMaxDotColumns = 256;
constexpr int kMaxDotPadding = 128;  // elements behind the last product, this one excluded

// What says which rows of a table are the vectors of each sample.
struct EmbeddingLookup {
  const void* indices = nullptr;  // [batch, vectors - 1]; null: the vectors are no rows of a table
  bool is_int32 = false;          // instead of int64
  int64_t sample_stride = 0;      // in indices
  int64_t vector_stride = 0;
  int64_t rows = 0;  // of the table
};

// The vectors of each sample: the dense one comes first.
struct DotVectors {
  DType dtype = DType::kFloat32;
  int64_t batch = 0;
  int vectors = 0;  // of a sample, the dense one included
  int columns = 0;  // elements of a vector, neighbours in memory
  int width = 0;    // elements of an output row: columns, products, padding
  bool upper =
      false;  // the order of the products: (0, 1), (0, 2), ... instead of (1, 0), (2, 0),...
  const void* dense = nullptr;
  int64_t dense_stride = 0;          // from sample to sample, in elements as all strides
  const void* embeddings = nullptr;  // with a lookup: the table
  int64_t sample_stride = 0;
  int64_t vector_stride = 0;  // with a lookup: from row to row
  EmbeddingLookup lookup;
};

struct DotParams : DotVectors {
  void* output = nullptr;  // [batch, width], contiguous
};

struct DotBwdParams : DotVectors {
  const void* grad = nullptr;  // [batch, width]
  int64_t grad_stride = 0;
  // With a lookup, null where nobody asked for it.
  void* dense_grad = nullptr;       // [batch, columns], contiguous
  void* embeddings_grad = nullptr;  // [batch, vectors - 1, columns], contiguous
};

enum class DotPath {
  kEmpty,        // no samples
  kTensorCores,  // a warp a sample; 16-bit types
  kThreads,      // a block a sample, products by its threads; float32 and float64
};

// One launch, as dlrm_config.h chooses it and dot_interaction_plan prints it.
struct DotConfig {
  DotPath path = DotPath::kEmpty;
  bool aligned = false;      // vectors consist of whole, aligned pieces of 16 bytes
  bool aligned_row = false;  // so do the rows of the output, or of the incoming gradient
  int tiles = 0;             // kTensorCores: of 16 vectors each
  int stages = 0;            // kTensorCores: samples of a warp that are in shared memory
  int threads = 0;           // of a block
  int64_t blocks = 0;
  size_t shared_bytes = 0;
  bool dependent_launch = false;
};

cudaError_t launch_dot_interaction(const DotParams& params, const DotConfig& config,
                                   cudaStream_t stream);
cudaError_t launch_dot_interaction_bwd(const DotBwdParams& params, const DotConfig& config,
                                       cudaStream_t stream);

// --- Head

struct BceParams {
  DType dtype = DType::kFloat32;  // of x, weight and bias; all else is in what is computed in
  int64_t rows = 0;
  int columns = 0;
  RowMatrix x;
  const void* weight = nullptr;  // [columns]
  const void* bias = nullptr;    // of one element; null: none
  const void* target = nullptr;  // [rows]
  double pos_weight = 1;
  bool reduced = false;     // to one loss
  double scale = 1;         // of each row's share of it
  void* loss = nullptr;     // [rows], or one
  void* logits = nullptr;   // [rows]
  void* dlogits = nullptr;  // [rows], of each row's own loss
};

struct BceBwdParams : OneOutputGradient {
  DType dtype = DType::kFloat32;
  const void* dlogits = nullptr;
  const void* grad_loss = nullptr;
  bool reduced = false;  // one incoming gradient instead of one a row
  double scale = 1;
};

struct BceConfig {
  bool aligned = false;
  int vec = 1;
  int threads_x = 0;           // along a row
  int threads_y = 0;           // rows
  int64_t blocks = 0;          // each leaves a partial sum
  int64_t workspace_size = 0;  // in elements of what is computed in
  bool dependent_launch = false;
};

cudaError_t launch_linear_sigmoid_bce(const BceParams& params, const BceConfig& config,
                                      void* workspace, cudaStream_t stream);
cudaError_t launch_linear_sigmoid_bce_bwd(const BceBwdParams& params, const OneOutputConfig& config,
                                          void* workspace, cudaStream_t stream);

// What the choosers need to know about the current device.
cudaError_t dlrm_device_traits(DeviceTraits* traits);

}  // namespace fusedcuda
