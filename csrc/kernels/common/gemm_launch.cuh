// Launching a Hopper product: tensor maps of what it reads and writes, blocks, clusters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "gemm_config.h"
#include "gemm_epilogue.cuh"
#include "gemm_stages.cuh"
#include "launch.h"
#include "tensor_map.h"

namespace fusedcuda {

template <typename EpilogueParams, typename Factors = GemmFactors>
struct GemmKernelParams {
  Factors factors;
  GemmTiles tiles;
  EpilogueParams epilogue;
};

namespace gemm {

inline BoxedMatrix boxed(const void* data, int64_t rows, int64_t columns, int64_t stride,
                         int box_rows) {
  BoxedMatrix matrix;
  matrix.data = const_cast<void*>(data);
  matrix.rows = rows;
  matrix.columns = columns;
  matrix.stride = stride;
  matrix.box_rows = box_rows;
  return matrix;
}

// A matrix that an epilogue stores chunk by chunk.
inline cudaError_t describe_stored(const void* data, int64_t rows, int64_t columns, int64_t stride,
                                   TensorMap* map) {
  return make_tensor_map(boxed(data, rows, columns, stride, kChunk), map);
}

// The factors of a product m x n x k of `Gemm`. What lies in memory row by row with k outermost is
// a matrix of k rows.
template <typename Gemm>
cudaError_t describe_a(const GemmFactor& a, int64_t m, int64_t k, TensorMap* map) {
  return make_tensor_map(a.k_is_inner ? boxed(a.data, m, k, a.stride, Gemm::kTileRows)
                                      : boxed(a.data, k, m, a.stride, kGemmK),
                         map);
}

template <typename Gemm>
cudaError_t describe_b(const GemmFactor& b, int64_t n, int64_t k, TensorMap* map) {
  return make_tensor_map(b.k_is_inner
                             ? boxed(b.data, n, k, b.stride, Gemm::kBBoxRows)
                             : boxed(b.data, k, n, b.stride, kGemmK / Gemm::kClusterBlocks),
                         map);
}

// The tiles of an m x n result of `Gemm`.
template <typename Gemm>
GemmTiles make_tiles(int64_t m, int64_t n, int64_t k, const GemmConfig& config) {
  return GemmTiles::make(ceil_div(m, Gemm::kTileRows * Gemm::kClusterBlocks),
                         ceil_div(n, Gemm::kResultColumns), ceil_div(k, kGemmK), config.splits,
                         config.group);
}

// `cooperative`: blocks wait for each other.
template <typename Gemm, typename Kernel, typename Params>
cudaError_t start(Kernel kernel, const GemmConfig& config, cudaStream_t stream,
                  const Params& params, bool cooperative = false) {
  LaunchOptions options;
  options.dependent = !cooperative;
  options.cooperative = cooperative;
  options.cluster = Gemm::kClusterBlocks;
  options.shared_bytes = GemmShared<Gemm>::kBytes;
  return launch(kernel, dim3(config.blocks), dim3(kGemmThreads), options, stream, params);
}

// Adds to `traits` whether `kernel`, one of the products, was compiled for Hopper's own
// instructions (for anything else it is empty: its registers say so), and how many of its clusters
// run at the same time.
template <typename... Params>
cudaError_t describe_products(void (*kernel)(Params...), DeviceTraits* traits) {
  constexpr int kRegistersOfNoCode = 64;
  cudaFuncAttributes attributes;
  traits->wgmma = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                  attributes.numRegs > kRegistersOfNoCode;
  cudaGetLastError();  // a GPU that there is no code for is no error
  cudaError_t status = cudaSuccess;
  for (int log2 = 1; log2 < 3 && traits->wgmma && status == cudaSuccess; ++log2) {
    status = fusedcuda::resident_clusters(kernel, kGemmThreads, 1 << log2,
                                          &traits->resident_clusters[0][log2]);
  }
  return status;
}

}  // namespace gemm
}  // namespace fusedcuda
