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

constexpr int kGemmK = 64;                   // values of k of a stage: rows of 128 bytes
constexpr int kGemmBuffersBytes = 2 * 8192;  // of a warpgroup's epilogue: two boxes of 64 x 64

constexpr int kGemmSharedBytes = 227 << 10;  // what a block may have

// What the elements of a are multiplied by before the products (gemm_scale.cuh).
enum class GemmScale { kNone, kMask, kElements };

struct GemmTile {
  int row, column;  // in tiles; rows in tiles of a whole cluster
  int split;        // which part of k
};

// The tiles in the order in which they are computed. Those that run at the same time should need
// few different rows of a and columns of b, which then come from the L2 cache: `group` rows of
// tiles are gone through column by column. With `splits`, a tile is computed in so many parts of k,
// by different blocks.
struct GemmTiles {
  int rows = 0, columns = 0, splits = 1;
  int group = 8;
  int k_blocks = 0;  // of kGemmK

  FUSEDCUDA_HOST_DEVICE int64_t count() const { return int64_t{rows} * columns * splits; }

  FUSEDCUDA_HOST_DEVICE GemmTile at(int64_t index) const {
    const int64_t of_split = int64_t{rows} * columns;
    const int64_t of_group = int64_t{group} * columns;
    const int split = static_cast<int>(index / of_split);
    index %= of_split;
    const int first = static_cast<int>(index / of_group) * group;
    const int here = rows - first < group ? rows - first : group;
    const int within = static_cast<int>(index % of_group);
    return {first + within % here, within / here, split};
  }

  // The blocks of k of a split: the first, and the one behind the last. None is empty when there
  // are no more splits than blocks.
  FUSEDCUDA_HOST_DEVICE int first_block(int split) const {
    return static_cast<int>(int64_t{k_blocks} * split / splits);
  }
};

}  // namespace fusedcuda
