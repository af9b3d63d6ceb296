// act(x @ weight.T + bias) on Hopper's tensor cores, and the elementwise kernels around matrix
// products that cuBLASLt makes: parameters, configuration, launchers. Kernels:
// linear_act*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/activation.h"
#include "common/dtype.h"
#include "common/gemm_config.h"
#include "common/launch.h"
#include "common/one_output_bwd.h"

namespace fusedcuda {

// What is kept for the gradient of act at z = x @ weight.T + bias.
//   kMask: bit n % 8 of byte [m][n / 8] says that z > 0, or NaN (relu only); a row has
//     mask_row_bytes(n) bytes.
//   kPreActivation: z, rounded to the dtype; m x n, contiguous.
//   kDerivative: act'(z), likewise. The gradient multiplies by it on the way into its products.
enum class SavedForBackward { kNone, kMask, kPreActivation, kDerivative };

// cuBLASLt wants the rows of its mask 128 bits apart, or a multiple of that.
constexpr int64_t mask_row_bytes(int64_t n) { return (n + 127) / 128 * 16; }

// output[m, n] = act(sum_k a[m, k] * b[n, k] + bias[n]), one rounding at the end. With extra_k,
// sum_k extra_a[m, k] * extra_b[n, k] is added to the sum (Hopper only; extra factors lie as a and
// b do).
struct LinearActParams {
  DType dtype = DType::kBFloat16;  // of everything
  Activation activation = Activation::kNone;
  int64_t m = 0, n = 0, k = 0;
  GemmFactor a, b;
  int64_t extra_k = 0;
  GemmFactor extra_a, extra_b;
  const void* bias = nullptr;  // n elements, any alignment; or null
  GemmMatrix output;           // m x n
  SavedForBackward saves = SavedForBackward::kNone;
  void* saved = nullptr;
};

// dx = dz @ weight, dweight = dz.T @ x, dbias = sum of dz over m; dz = dy where a ReLU passed.
struct LinearActBwdParams {
  DType dtype = DType::kBFloat16;
  int64_t m = 0, n = 0, k = 0;
  GemmMatrix dy;               // m x n
  const void* mask = nullptr;  // kMask, as the forward left it
  GemmMatrix x;                // m x k; for dweight
  GemmMatrix weight;           // n x k; for dx
  GemmMatrix dx;               // m x k; null unless it is wanted
  void* dweight = nullptr;     // n x k, contiguous; likewise
  void* dbias = nullptr;       // n; likewise, and only with dweight
};

// Elementwise, over m x n elements whose rows may have a pitch.
//   forward: output = act(input), and what `saves` says of it to `saved` (kMask, kDerivative)
//   backward: output = input * act'(z), by what `saved` has of z
struct ActRowsParams {
  DType dtype = DType::kBFloat16;
  Activation activation = Activation::kRelu;
  bool backward = false;
  int64_t m = 0, n = 0;
  GemmMatrix input;
  GemmMatrix output;  // may be the input
  SavedForBackward saves = SavedForBackward::kNone;
  void* saved = nullptr;   // kDerivative: may be the input
  bool dependent = false;  // whether the GPU has programmatic dependent launch
};

// sums[b, n] = the sum over the rows of each of `batch` matrices, which lie below each other in the
// rows.m rows of `rows`: of what a backward of those makes, and writes unless its output is null;
// or, with nothing saved, of its input.
struct ColumnSumsParams {
  ActRowsParams rows;
  int64_t batch = 1;
  void* sums = nullptr;  // contiguous, of the dtype
};

// Copies the rows of a matrix of 2-byte elements to a contiguous one with more columns, which are
// 0: what the copy engine and the tensor cores want of rows that do not start at multiples of 16
// bytes.
struct PadRowsParams {
  int64_t rows = 0, columns = 0, padded_columns = 0;
  GemmMatrix input;
  void* output = nullptr;
  bool dependent = false;
};

// output[m] = sum_k x[m, k] weight[k] + bias + residual[m], one rounding at the end, `batch` times;
// 2-byte elements. The layer of one output: cuBLASLt's product rounds before it adds.
struct DotRowsParams {
  DType dtype = DType::kBFloat16;
  int64_t batch = 1, m = 0, k = 0;
  GemmFactor x;
  const void* weight = nullptr;
  int64_t weight_step = 1;     // elements from one k to the next
  const void* bias = nullptr;  // one element, or null
  GemmMatrix residual;         // null unless there is one
  GemmMatrix output;
  int64_t x_batch = 0, weight_batch = 0, bias_batch = 0, residual_batch = 0, output_batch = 0;
  bool dependent = false;
};

// The gradients of a layer of one output, of 2-byte elements; see one_output_can_run().
struct OneOutputBwdParams : OneOutputGradient {
  DType dtype = DType::kBFloat16;
  GemmMatrix dy;                                     // rows x 1
  SavedForBackward saves = SavedForBackward::kNone;  // without an activation
  const void* saved = nullptr;                       // as the forward left it
};

// The next length whose rows start at multiples of 16 bytes.
inline int64_t padded_columns(int64_t columns) { return (columns + 7) / 8 * 8; }

struct LinearActBwdConfig;  // linear_act_config.h
struct NarrowConfig;        // common/narrow_rows.h
struct ColumnSumsConfig;    // linear_act_columns_config.h

// What the choosers need to know about the current device.
cudaError_t linear_act_device_traits(DeviceTraits* traits);

// Enqueue on `stream`. The first two: of what hopper_can_run() accepts.
cudaError_t launch_linear_act(const LinearActParams& params, const GemmConfig& config,
                              cudaStream_t stream);
cudaError_t launch_linear_act_bwd(const LinearActBwdParams& params,
                                  const LinearActBwdConfig& config, void* workspace,
                                  cudaStream_t stream);
cudaError_t launch_act_rows(const ActRowsParams& params, cudaStream_t stream);
cudaError_t launch_column_sums(const ColumnSumsParams& params, const ColumnSumsConfig& config,
                               void* workspace, cudaStream_t stream);
cudaError_t launch_pad_rows(const PadRowsParams& params, cudaStream_t stream);
cudaError_t launch_dot_rows(const DotRowsParams& params, cudaStream_t stream);
cudaError_t launch_one_output_bwd(const OneOutputBwdParams& params, const OneOutputConfig& config,
                                  void* workspace, cudaStream_t stream);
// Of what narrow_can_run() accepts.
cudaError_t launch_linear_narrow(const LinearActParams& params, const NarrowConfig& config,
                                 bool dependent, cudaStream_t stream);

}  // namespace fusedcuda
