// What the producer of a Hopper product (hopper_gemm.cuh) asks the copy engine for: the part of a
// stage that is a's or b's, as tensor_map.h says how it lies.
#pragma once

#include <cuda_runtime.h>

#include "gemm_stages.cuh"
#include "hopper_gemm.h"
#include "mbarrier.cuh"
#include "tma.cuh"

namespace fusedcuda {
namespace gemm {

template <typename Gemm>
__device__ __forceinline__ void load_a(const TensorMap& map, unsigned char* shared, Mbarrier* full,
                                       int row, int k) {
  if constexpr (Gemm::kAIsKInner) {
    load_box(&map, shared, full, row, k);
  } else {
#pragma unroll
    for (int r = 0; r < Gemm::kTileRows; r += kGemmK)
      load_box(&map, shared + r * kSwizzleBytes, full, k, row + r);
  }
}

// For all blocks of the cluster.
template <typename Gemm>
__device__ __forceinline__ void load_shared(const TensorMap& map, unsigned char* shared,
                                            Mbarrier* full, int row, int column) {
  if constexpr (Gemm::kClusterBlocks == 1) {
    load_box(&map, shared, full, row, column);
  } else {
    load_box_to_blocks(&map, shared, full, row, column, (1u << Gemm::kClusterBlocks) - 1);
  }
}

// This block's share; of a rows-inner factor that is a part of the k, because 64 columns of b are
// the least that can be copied.
template <typename Gemm>
__device__ __forceinline__ void load_b(const TensorMap& map, unsigned char* shared, Mbarrier* full,
                                       int column, int k, unsigned rank) {
  if constexpr (Gemm::kBIsKInner) {
    const int first = static_cast<int>(rank) * Gemm::kBShare;
    load_shared<Gemm>(map, shared + first * kSwizzleBytes, full, column + first, k);
  } else {
    constexpr int kShare = kGemmK / Gemm::kClusterBlocks;
    const int first = static_cast<int>(rank) * kShare;
#pragma unroll
    for (int c = 0; c < Gemm::kTileColumns; c += kGemmK)
      load_shared<Gemm>(map, shared + c * kSwizzleBytes + first * kSwizzleBytes, full, k + first,
                        column + c);
  }
}

// This block's share of a pair of b. (With clusters of two a block has one of the matrices.)
template <typename Gemm>
__device__ __forceinline__ void load_pair(const PairedGemmFactors& factors, unsigned char* shared,
                                          Mbarrier* full, int column, int k, unsigned rank) {
#pragma unroll
  for (int i = 0; i < Gemm::kBShare; i += Gemm::kBBoxRows) {
    const int first = static_cast<int>(rank) * Gemm::kBShare + i;
    const bool is_second = first >= Gemm::kResultColumns;
    load_shared<Gemm>(is_second ? factors.second_b : factors.b, shared + first * kSwizzleBytes,
                      full, column + first % Gemm::kResultColumns, k);
  }
}

}  // namespace gemm
}  // namespace fusedcuda
