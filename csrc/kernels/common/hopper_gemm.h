// How a matrix product is divided into tiles, for host and device. Kernels: hopper_gemm.cuh.
#pragma once

#include <cstdint>

#include "iteration.h"

#ifdef __CUDACC__
#define FUSEDCUDA_HOST_DEVICE __host__ __device__
#else
#define FUSEDCUDA_HOST_DEVICE
#endif

namespace fusedcuda {

constexpr int kGemmK = 64;              // values of k of a stage: rows of 128 bytes
constexpr int kGemmBufferBytes = 8192;  // of what an epilogue stores: a box of 64 x 64

constexpr int kGemmSharedBytes = 227 << 10;  // what a block may have

// What the elements of a are multiplied by before the products (gemm_scale.cuh).
enum class GemmScale { kNone, kMask };

// How far apart the parts of a result of so many values lie (sum_splits.cuh).
constexpr int kSumSplitsVec = 4;  // values of a thread
inline int64_t split_stride(int64_t values) {
  return ceil_div(values, kSumSplitsVec) * kSumSplitsVec;
}

struct GemmTile {
  int row, column;  // in tiles; rows in tiles of a whole cluster
  int split;        // which part of k
};

// The tiles in the order in which they are computed. Those that run at the same time should need
// few different rows of a and columns of b, which then come from the L2 cache: `group` rows of
// tiles are gone through column by column. With `splits`, a tile is computed in so many parts of k,
// by different blocks.
//
// Behind the k of the factors there may be `extra_blocks` of another pair of factors, whose product
// is added to the same sums.
struct GemmTiles {
  int splits = 1;
  int k_blocks = 0, extra_blocks = 0;  // of kGemmK
  int count = 0;                       // fits: a result of 2^31 tiles would not fit into memory

  static GemmTiles make(int64_t rows, int64_t columns, int64_t k_blocks, int splits, int group) {
    GemmTiles tiles;
    tiles.splits = splits;
    tiles.k_blocks = static_cast<int>(k_blocks);
    tiles.count = static_cast<int>(rows * columns * splits);
    tiles.rows_ = static_cast<int>(rows);
    tiles.of_split_ = Divider::make(rows * columns);
    tiles.of_group_ = Divider::make(group * columns);
    tiles.group_ = Divider::make(group);
    tiles.last_group_ = Divider::make(rows % group == 0 ? group : rows % group);
    return tiles;
  }

#ifdef __CUDACC__
  // (Divisions would take a thousand cycles, which nothing hides.)
  __device__ __forceinline__ GemmTile at(int index) const {
    uint32_t rest, row;
    const uint32_t split = of_split_.divide32(static_cast<uint32_t>(index), &rest);
    const uint32_t group = of_group_.divide32(rest, &rest);
    const int first = static_cast<int>(group * static_cast<uint32_t>(group_.divisor));
    const bool is_last = rows_ - first < group_.divisor;
    const uint32_t column = (is_last ? last_group_ : group_).divide32(rest, &row);
    return {first + static_cast<int>(row), static_cast<int>(column), static_cast<int>(split)};
  }
#endif

  // The blocks of k of a split: the first, and the one behind the last. None is empty when there
  // are no more splits than blocks. The extra ones belong to the last split.
  FUSEDCUDA_HOST_DEVICE int first_block(int split) const {
    return splits == 1 ? split * k_blocks : static_cast<int>(int64_t{k_blocks} * split / splits);
  }
  FUSEDCUDA_HOST_DEVICE int end_block(int split) const {
    return first_block(split + 1) + (split + 1 == splits ? extra_blocks : 0);
  }

 private:
  int rows_ = 0;
  Divider of_split_, of_group_, group_, last_group_;
};

}  // namespace fusedcuda
