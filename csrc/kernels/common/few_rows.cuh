// Products of few rows of x, up to 32, with a large matrix of weights, as text is generated. All
// time goes into reading the weights: 33.5 MB of 4096 x 4096 are 8 us at copy speed.
//
// - The blocks of a cluster have the same rows of the weights, and each a part of the columns, of
//   which it keeps x in shared memory. So all of x is read once a cluster, not once a block.
// - A warp reads 16 rows of weights at a time from memory into registers, and multiplies them by
//   all rows of x (mma.sync, weights as its columns). It has asked for the next ones
//   before that. The warps of a block have equal shares of all its weights, whole rows or not.
// - A block adds up the parts of its warps. Then each block reads those of all blocks, of the rows
//   whose results it makes, and adds them in an order that the shapes decide. No block waits for
//   one outside of its cluster.
// - Common rows are rows more of the same columns, whose products every block of every cluster
//   gets: few ones that go into all results.
//
// The weights, and what becomes of the sums, are a functor's, Results:
//
//   using Element = T;                         // of 16 bits
//   const T* row(tile, i)                      // of weights, 0 <= i < 16; of those that do not
//   const T* common_row(tile, i)               // exist any one that can be read
//   void ask(tiles)                            // before the products: what else it needs, by
//                                              // copy_async_16() or into members
//   void keep(tiles)                           // after them, before a __syncthreads()
//   void finish(block, tiles, own_tile, row_tile, sums)   // a warp: 16 rows of x
//   void finish_common(block)                  // a warp, once
//
// `tiles`: those of the block, see OwnTiles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "async_copy.cuh"
#include "cluster.cuh"
#include "few_rows_config.h"
#include "grid_counter.cuh"
#include "launch.h"
#include "mma.cuh"

namespace fusedcuda {
namespace few_rows {

// A tile of 16 rows of weights, from the lane's first columns on: eight neighbours in each step.
template <typename T>
struct Rows {
  const T* upper = nullptr;  // row l / 4
  const T* lower = nullptr;  // row l / 4 + 8
};

// The products of 16 rows of x (kRowTiles times) and 16 rows of weights. Of lane l, sums[m][n] are
// those of row l / 4 of x with rows 2 (l % 4) and the next of the weights, and the same of row
// l / 4 + 8; n: of the upper eight rows of weights, of the lower ones.
template <int kRowTiles>
using Sums = float[kRowTiles][2][4];

struct X {
  const void* data = nullptr;
  int64_t stride = 0;
  int rows = 0, k = 0;
};

// The tiles of a group whose results are this block's: the blocks of a cluster take them in turn.
struct OwnTiles {
  int count = 0;
  int first = 0, log2_step = 0;
  void* memory = nullptr;  // shared: bytes_of_own_tile for each

  __device__ __forceinline__ int tile(int own_tile) const {
    return first + (own_tile << log2_step);
  }
};

template <typename Results, int kRowTiles>
class Block {
 public:
  using T = typename Results::Element;

  // `all_tiles`: of all clusters.
  __device__ __forceinline__ Block(const X& x, const FewRowsConfig& c, int all_tiles,
                                   Results& results)
      : x_(x),
        c_(c),
        results_(results),
        warp_(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpSize, 0)),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        rank_(static_cast<int>(cluster_rank())),
        first_tile_((static_cast<int>(blockIdx.x) >> c.cluster_log2) * c.tiles),
        first_column_(rank_ * c.steps * kFewRowsStepK),
        tiles_(min(c.tiles, all_tiles - first_tile_)) {}

  __device__ __forceinline__ void run() {
    wait_for_previous_kernel();
    for (int first = 0; first < tiles_; first += c_.tiles_of_group) {
      const bool is_first = first == 0, is_last = first + c_.tiles_of_group >= tiles_;
      group_first_ = first;
      group_tiles_ = min(c_.tiles_of_group, tiles_ - first);
      common_tiles_ = is_first ? c_.common_tiles : 0;
      share_ =
          ((group_tiles_ + common_tiles_) * pieces_of_tile() + kFewRowsWarps - 1) / kFewRowsWarps;
      const OwnTiles own = own_tiles();
      multiply_rows(is_first, own);
      results_.keep(own);
      copy_async_wait<0>();  // and what they have asked for
      __syncthreads();
      add_parts_of_warps();
      if (is_last) let_next_kernel_start();
      if (c_.cluster_log2 > 0) cluster_arrive();
      wait_for_cluster();
      finish_rows(own, is_last);
      if (!is_last) __syncthreads();  // what the results have kept is not needed any more
    }
    wait_for_cluster();  // others may still read what this block has
  }

  __device__ __forceinline__ int warp() const { return warp_; }
  __device__ __forceinline__ int lane() const { return lane_; }

  // Of common rows, 16 of them with 16 rows of x: the upper eight, or the lower ones.
  __device__ __forceinline__ float4 common(int common_tile, int row_tile, int half) const {
    return at<float4>(
        c_.common_offset)[common_tile * kSumVectors + (row_tile * 2 + half) * kWarpSize + lane_];
  }

 private:
  static constexpr int kAhead = kFewRowsAhead;
  static constexpr int kSumVectors = kRowTiles * 2 * kWarpSize;  // of a tile: float4

  template <typename U>
  static __device__ __forceinline__ U* at(int offset) {
    return reinterpret_cast<U*>(static_cast<char*>(dynamic_shared()) + offset);
  }

  __device__ __forceinline__ int cluster() const { return 1 << c_.cluster_log2; }
  __device__ __forceinline__ int pieces_of_tile() const { return c_.steps / kAhead; }

  __device__ __forceinline__ OwnTiles own_tiles() const {
    const int count = max(group_tiles_ - rank_ + cluster() - 1, 0) >> c_.cluster_log2;
    return {count, first_tile_ + group_first_ + rank_, c_.cluster_log2, at<char>(c_.own_offset)};
  }

  // --- x in shared memory

  // The order of k is another one than that of the columns, the same in both factors: a lane's
  // eight neighbours of a step are its part of one product, the first four, and of a second one.
  // Of step s and 16 rows of x, lane l has those of row l / 4, and behind all lanes' of row
  // l / 4 + 8. Where there are no rows, or columns, there are zeros.
  __device__ __forceinline__ void load_x() const {
    const int count = c_.steps * kRowTiles * 2 * kWarpSize;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kFewRowsThreads) {
      const int lane = i % kWarpSize, eight = i / kWarpSize % (2 * kRowTiles);
      const int step = i / (kWarpSize * 2 * kRowTiles), row = eight * 8 + lane / 4;
      const int column = first_column_ + step * kFewRowsStepK + lane % 4 * 8;
      uint4* const to = at<uint4>(0) + i;
      if (row < x_.rows && column < x_.k) {
        copy_async_16(to, static_cast<const T*>(x_.data) + row * x_.stride + column);
      } else {
        *to = {0, 0, 0, 0};
      }
    }
  }

  // Of the upper eight rows; those of the lower ones are behind them.
  __device__ __forceinline__ const uint4* x_of(int step, int tile) const {
    return at<const uint4>(0) + (step * kRowTiles + tile) * 2 * kWarpSize;
  }

  // --- Products

  // Tiles are read in pieces of kAhead steps, each asked for before the last one is multiplied. All
  // of the group, and behind them the common ones, are one sequence, in which a warp has a share.
  __device__ __forceinline__ void multiply_rows(bool is_first, const OwnTiles& own) {
    const int all = (group_tiles_ + common_tiles_) * pieces_of_tile();
    const int first = min(warp_ * share_, all), count = min(share_, all - first);
    int tile = first / pieces_of_tile();
    int step = (first - tile * pieces_of_tile()) * kAhead;
    // Before the weights, behind which it would arrive.
    if (is_first) load_x();
    copy_async_commit();
    Rows<T> rows = count > 0 ? rows_of(tile) : Rows<T>();
    uint4 upper[kAhead], lower[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(count > 0, rows, step + j, &upper[j], &lower[j]);
    results_.ask(own);
    copy_async_commit();
    copy_async_wait<1>();  // x is there
    __syncthreads();
    if (!is_first) wait_for_cluster();  // nobody needs the sums of the group before any more
    Sums<kRowTiles> sums = {};
    for (int i = 1; i <= count; ++i) {
      const bool ends = step + kAhead == c_.steps, is_last = i == count;
      const int next_step = ends ? 0 : step + kAhead;
      if (ends && !is_last) rows = rows_of(tile + 1);
      const int columns_end = first_column_ + (next_step + kAhead) * kFewRowsStepK;
      if (!is_last && columns_end <= x_.k) {
        const T* const next_upper = rows.upper + next_step * kFewRowsStepK;
        const T* const next_lower = rows.lower + next_step * kFewRowsStepK;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          multiply(step + j, upper[j], lower[j], sums);
          upper[j] = load_once(next_upper + j * kFewRowsStepK);
          lower[j] = load_once(next_lower + j * kFewRowsStepK);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          multiply(step + j, upper[j], lower[j], sums);
          load(!is_last, rows, next_step + j, &upper[j], &lower[j]);
        }
      }
      if (ends || is_last) keep(tile, &sums);
      tile += ends;
      step = next_step;
    }
  }

  // Behind those of the group are the common ones.
  __device__ __forceinline__ Rows<T> rows_of(int tile) const {
    const int row = lane_ / 4, column = first_column_ + lane_ % 4 * 8;
    const int common = tile - group_tiles_;
    if (common >= 0)
      return {results_.common_row(common, row) + column,
              results_.common_row(common, row + 8) + column};
    const int at_tile = first_tile_ + group_first_ + tile;
    return {results_.row(at_tile, row) + column, results_.row(at_tile, row + 8) + column};
  }

  // Weights pass by L1.
  static __device__ __forceinline__ uint4 load_once(const T* from) {
    return load_of_others(reinterpret_cast<const uint4*>(from));
  }

  __device__ __forceinline__ void load(bool exists, const Rows<T>& rows, int step, uint4* upper,
                                       uint4* lower) const {
    const int column = first_column_ + step * kFewRowsStepK + lane_ % 4 * 8;
    *upper = *lower = {0, 0, 0, 0};
    if (!exists || column >= x_.k) return;
    *upper = load_once(rows.upper + step * kFewRowsStepK);
    *lower = load_once(rows.lower + step * kFewRowsStepK);
  }

  __device__ __forceinline__ void multiply(int step, const uint4& upper, const uint4& lower,
                                           Sums<kRowTiles>& sums) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const uint4* const x = x_of(step, tile) + lane_;
      const uint4 high = x[0], low = x[kWarpSize];
      multiply_by({high.x, low.x, high.y, low.y}, {upper.x, upper.y}, {lower.x, lower.y},
                  sums[tile]);
      multiply_by({high.z, low.z, high.w, low.w}, {upper.z, upper.w}, {lower.z, lower.w},
                  sums[tile]);
    }
  }

  static __device__ __forceinline__ void multiply_by(const uint32_t (&x)[4],
                                                     const uint32_t (&upper)[2],
                                                     const uint32_t (&lower)[2],
                                                     float (&sums)[2][4]) {
    multiply_tiles<T>(sums[0], x, upper);
    multiply_tiles<T>(sums[1], x, lower);
  }

  // --- Sums

  // All threads of the cluster: what the block has written can be read; or, in turn, what it has
  // read can be overwritten.
  __device__ __forceinline__ void wait_for_cluster() const {
    if (c_.cluster_log2 > 0) {
      cluster_wait();
    } else {
      __syncthreads();
    }
  }

  static __device__ __forceinline__ void add(const float4& part, float4* sum) {
    sum->x += part.x;
    sum->y += part.y;
    sum->z += part.z;
    sum->w += part.w;
  }

  // Of warp `warp`, and of a tile of which it has a share: the warps before it have tiles before.
  __device__ __forceinline__ float4* part(int tile, int warp) const {
    return at<float4>(c_.sums_offset) + (tile + warp) * kSumVectors;
  }
  __device__ __forceinline__ int first_warp(int tile) const {
    return tile * pieces_of_tile() / share_;
  }
  __device__ __forceinline__ int last_warp(int tile) const {
    return ((tile + 1) * pieces_of_tile() - 1) / share_;
  }
  // Where their sum is.
  __device__ __forceinline__ float4* sum(int tile) const { return part(tile, first_warp(tile)); }

  __device__ __forceinline__ void keep(int tile, Sums<kRowTiles>* sums) const {
    float4* const to = part(tile, warp_) + lane_;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      float (&from)[4] = (*sums)[i / 2][i % 2];
      to[i * kWarpSize] = {from[0], from[1], from[2], from[3]};
#pragma unroll
      for (float& value : from) value = 0;
    }
  }

  // A warp a tile at a time.
  __device__ __forceinline__ void add_parts_of_warps() const {
#pragma unroll 1
    for (int tile = warp_; tile < group_tiles_ + common_tiles_; tile += kFewRowsWarps) {
      const int first = first_warp(tile), count = last_warp(tile) - first;
      if (count == 0) continue;
      float4* const parts = part(tile, first) + lane_;
      float4 sums[2 * kRowTiles];
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) sums[i] = parts[i * kWarpSize];
#pragma unroll 1
      for (int j = 1; j <= count; ++j) {
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; ++i)
          add(parts[j * kSumVectors + i * kWarpSize], &sums[i]);
      }
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) parts[i * kWarpSize] = sums[i];
    }
  }

  // The sum of what every block of the cluster has at one place, in the order of the blocks: four
  // are asked for before the first one is added.
  __device__ __forceinline__ float4 add_blocks(const float4* at_place) const {
    if (c_.cluster_log2 == 0) return *at_place;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 1
    for (int first = 0; first < cluster(); first += 4) {
      float4 parts[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        parts[i] = {0, 0, 0, 0};
        if (first + i < cluster()) parts[i] = load_from_cluster(at_place, first + i);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) add(parts[i], &sum);
    }
    return sum;
  }

  // By the last warps, as the first ones have own tiles.
  __device__ __forceinline__ void add_common_of_blocks() const {
    const int count = common_tiles_ * kSumVectors;
#pragma unroll 1
    for (int i = kFewRowsThreads - 1 - static_cast<int>(threadIdx.x); i < count;
         i += kFewRowsThreads) {
      const float4* const sums = sum(group_tiles_ + i / kSumVectors);
      at<float4>(c_.common_offset)[i] = add_blocks(sums + i % kSumVectors);
    }
  }

  // A warp 16 rows of weights with 16 rows of x at a time.
  __device__ __forceinline__ void finish_rows(const OwnTiles& own, bool is_last) const {
    const int count = own.count * kRowTiles;
    float sums[2][4] = {};
    if (common_tiles_ > 0) add_common_of_blocks();
    if (warp_ < count) add_blocks(warp_, sums);
    if (common_tiles_ > 0) __syncthreads();
#pragma unroll 1
    for (int i = warp_; i < count; i += kFewRowsWarps) {
      if (i > warp_) add_blocks(i, sums);
      // Rather than when the results have been written.
      if (i + kFewRowsWarps >= count) arrive_when_read(is_last, sums);
      results_.finish(*this, own, i / kRowTiles, i % kRowTiles, sums);
    }
    if (warp_ >= count) arrive_when_read(is_last, sums);
    if (common_tiles_ > 0 && blockIdx.x == 0) results_.finish_common(*this);
  }

  // The last time nothing is written where others have read: it is enough that all has come from
  // there before their blocks may end, which is so when it has been added up.
  __device__ __forceinline__ void arrive_when_read(bool is_last, const float (&sums)[2][4]) const {
    if (c_.cluster_log2 == 0) return;
    if (is_last) {
      cluster_arrive_behind((sums[0][0] + sums[0][1]) + (sums[1][0] + sums[1][1]));
    } else {
      cluster_arrive();
    }
  }

  __device__ __forceinline__ void add_blocks(int i, float (&sums)[2][4]) const {
    const float4* const parts =
        sum((i / kRowTiles << c_.cluster_log2) + rank_) + i % kRowTiles * 2 * kWarpSize + lane_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 of_half = add_blocks(parts + half * kWarpSize);
      sums[half][0] = of_half.x;
      sums[half][1] = of_half.y;
      sums[half][2] = of_half.z;
      sums[half][3] = of_half.w;
    }
  }

  const X& x_;
  const FewRowsConfig& c_;
  Results& results_;
  const int warp_, lane_;
  const int rank_;  // of the block in its cluster
  const int first_tile_, first_column_;
  const int tiles_;  // of the cluster
  int group_first_ = 0, group_tiles_ = 0, common_tiles_ = 0;
  int share_ = 0;  // of a warp, in pieces of tiles
};

// ------------------------------------------------------------------------------------------------
// Launch
// ------------------------------------------------------------------------------------------------

template <typename Kernel, typename... Args>
cudaError_t start(Kernel kernel, const FewRowsConfig& c, cudaStream_t stream, const Args&... args) {
  LaunchOptions options;
  options.dependent = c.dependent_launch;
  options.cluster = c.cluster();
  options.shared_bytes = c.shared_bytes;
  return launch(kernel, dim3(c.blocks()), dim3(kFewRowsThreads), options, stream, args...);
}

}  // namespace few_rows
}  // namespace fusedcuda
