// Softmax and its logarithm over the last dimension, forward and backward: parameters,
// configuration, launchers. Kernels: softmax.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/row.h"

namespace fusedcuda {

// y = softmax(scale * x), or its logarithm.
struct SoftmaxParams {
  DType dtype = DType::kFloat32;
  bool log = false;
  double scale = 1;
  int64_t rows = 0;
  int columns = 0;
  RowMatrix x;
  RowMatrix y;
};

struct SoftmaxBwdParams {
  DType dtype = DType::kFloat32;
  bool log = false;
  double scale = 1;
  int64_t rows = 0;
  int columns = 0;
  RowMatrix dy;
  RowMatrix y;
  RowMatrix dx;
};

// Eight vectors of an unaligned row and their bounds would take more than the 64 registers of a
// thread. One block for as long a row as fits: 8192 x 32768 bf16 take 270 us with 512 threads, 288
// with two blocks of 256; above, more blocks of 256: 4096 x 65536 take 300 us with four, 320 with
// two of 512 (H200, bench/tuning/softmax_configs.cu).
inline RowConfig choose_softmax_config(const SoftmaxParams& params, const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.x, params.y};
  const bool aligned = rows_are_aligned(matrices, 2, params.columns, size_of(params.dtype));
  const int most_items = aligned ? 8 : 4;
  const int64_t most_of_block = int64_t{kRowThreads} * most_items * kVectorBytes;
  const bool fits = aligned && params.columns * size_of(params.dtype) <= most_of_block;
  return choose_row_config(params.rows, params.columns, params.dtype, aligned, most_items, device,
                           kRowThreads, fits ? kRowThreads : kRowThreads / 2);
}

// Two tensors are read, so a thread holds half as many vectors of each. With 512 threads a block
// instead of 256, and so half as many blocks a row, 16,384, 32,768 and 65,536 columns take 371, 376
// and 384 us instead of 377, 382 and 392 (2^28 elements).
inline RowConfig choose_softmax_bwd_config(const SoftmaxBwdParams& params,
                                           const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.dy, params.y, params.dx};
  const bool aligned = rows_are_aligned(matrices, 3, params.columns, size_of(params.dtype));
  return choose_row_config(params.rows, params.columns, params.dtype, aligned, 4, device,
                           kRowThreads, aligned ? kRowThreads : kRowThreads / 2);
}

// What the choosers need to know about the current device.
cudaError_t softmax_device_traits(DeviceTraits* traits);

// Enqueue on `stream`.
cudaError_t launch_softmax(const SoftmaxParams& params, const RowConfig& config,
                           cudaStream_t stream);
cudaError_t launch_softmax_bwd(const SoftmaxBwdParams& params, const RowConfig& config,
                               cudaStream_t stream);

}  // namespace fusedcuda
