// Products of few rows of x, up to 64, with a large matrix of weights, as text is generated. All
// time goes into reading the weights: 33.5 MB of 4096 x 4096 are 8 us at copy speed.
//
// - The blocks of a cluster have the same rows of the weights, and each a part of the columns, of
//   which it keeps x in shared memory. So all of x is read once a cluster, not once a block.
// - A warp takes 16 rows of weights at a time from the memory to registers, and multiplies them by
//   all rows of x (mma.sync, with rows of weights as its columns). It has asked for the next ones
//   before that.
// - Blocks send their sums to the block that adds them up, in an order that the shapes decide, and
//   makes the result. No block waits for one outside of its cluster.
// - Common rows are rows more of the same columns, whose products every block of every cluster
//   gets: few ones that go into all results.
//
// The weights, and what becomes of the sums, are a functor's, Results:
//
//   using Element = T;                         // of 16 bits
//   static constexpr bool kHasCommon;
//   const T* row(tile, i)                      // of weights, 0 <= i < 16; of those that do not
//   const T* common_row(tile, i)               // exist any one that can be read
//   void ask(tiles)                            // before the products: what else it needs, by
//                                              // copy_async_16() or into members
//   void keep(tiles)                           // after them, before a __syncthreads()
//   void finish(block, tiles, own_tile, row_tile, sums)   // a warp: 16 rows of x
//   void finish_common(block)                  // a warp, once; with common rows
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

// A tile of 16 rows of weights, and the steps of it that a warp takes. A lane has eight neighbours
// of two rows in each step.
template <typename T>
struct Rows {
  const T* upper = nullptr;  // at the lane's first columns, in row l / 4
  const T* lower = nullptr;  // likewise in row l / 4 + 8
  int first_step = 0, count = 0;
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
        mailbox_(at<uint64_t>(c.mailbox_offset)),
        tiles_(min(c.tiles, all_tiles - first_tile_)) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) mailbox_.init();
    cluster_arrive_relaxed();
    wait_for_previous_kernel();
    unsigned round = 0;
    for (int first = 0; first < tiles_; first += c_.tiles_of_group, round ^= 1) {
      group_first_ = first;
      group_tiles_ = min(c_.tiles_of_group, tiles_ - first);
      const bool is_first = first == 0, is_last = first + c_.tiles_of_group >= tiles_;
      const OwnTiles own = own_tiles();
      multiply_rows(is_first, own);
      results_.keep(own);
      __syncthreads();
      if (Results::kHasCommon && is_first) send_common();
      if (is_last) let_next_kernel_start();
      mailbox_.wait(round);
      if constexpr (Results::kHasCommon) {
        if (is_first && blockIdx.x == 0) results_.finish_common(*this);
      }
      finish_rows(own);
      if (is_last) return;
      cluster_arrive();  // what was sent is not needed any more
      __syncthreads();   // neither is what the results have kept
    }
  }

  __device__ __forceinline__ int warp() const { return warp_; }
  __device__ __forceinline__ int lane() const { return lane_; }

  // Of common rows, 16 of them with 16 rows of x: the upper eight, or the lower ones.
  __device__ __forceinline__ void add_common(int common_tile, int row_tile, int half,
                                             float (&sums)[4]) const {
    const int place = common_tile * kSumVectors + (row_tile * 2 + half) * kWarpSize + lane_;
    add_parts(at<float4>(c_.common_of_blocks_offset) + place, cluster(), common_vectors(), sums);
  }

 private:
  static constexpr int kAhead = few_rows_steps_ahead(kRowTiles);
  static constexpr int kSumVectors = kRowTiles * 2 * kWarpSize;  // of a tile: float4

  template <typename U>
  static __device__ __forceinline__ U* at(int offset) {
    return reinterpret_cast<U*>(static_cast<char*>(dynamic_shared()) + offset);
  }

  __device__ __forceinline__ int cluster() const { return 1 << c_.cluster_log2; }
  // Of the warp, among those that share a tile.
  __device__ __forceinline__ int k_group() const { return warp_ & ((1 << c_.k_groups_log2) - 1); }

  __device__ __forceinline__ OwnTiles own_tiles() const {
    const int count = max(group_tiles_ - rank_ + cluster() - 1, 0) >> c_.cluster_log2;
    return {count, first_tile_ + group_first_ + rank_, c_.cluster_log2, at<char>(c_.own_offset)};
  }

  // --- x in shared memory

  // The order of k is another one than that of the columns, the same in both factors: a lane's
  // eight neighbours of a step are its part of one product, the first four, and of a second one.
  // Of step s and 16 rows of x, lane l has them of rows l / 4 and l / 4 + 8, in the order in which
  // it multiplies them. Where there are no rows, or columns, there are zeros.
  __device__ __forceinline__ void load_x() const {
    const int count = c_.steps * kRowTiles * kWarpSize;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kFewRowsThreads) {
      const int lane = i % kWarpSize, tile = i / kWarpSize % kRowTiles;
      const int step = i / (kWarpSize * kRowTiles), row = tile * 16 + lane / 4;
      const int column = first_column_ + step * kFewRowsStepK + lane % 4 * 8;
      const uint4 upper = load_x(row, column), lower = load_x(row + 8, column);
      uint4* const to = x_of(step, tile) + lane;
      to[0] = {upper.x, lower.x, upper.y, lower.y};
      to[kWarpSize] = {upper.z, lower.z, upper.w, lower.w};
    }
  }

  __device__ __forceinline__ uint4 load_x(int row, int column) const {
    if (row >= x_.rows || column >= x_.k) return {0, 0, 0, 0};
    return load_once(static_cast<const T*>(x_.data) + row * x_.stride + column);
  }

  // The factors of the first product of a step; those of the second are behind them.
  __device__ __forceinline__ uint4* x_of(int step, int tile) const {
    return at<uint4>(0) + (step * kRowTiles + tile) * 2 * kWarpSize;
  }

  // --- Products

  // The warp's tiles: first the common ones, then those of the group. All steps of all of them are
  // one sequence, whose weights are asked for kAhead steps before they are multiplied.
  __device__ __forceinline__ void multiply_rows(bool is_first, const OwnTiles& own) {
    const int common = Results::kHasCommon && is_first ? c_.common_tiles : 0;
    const int row_groups = kFewRowsWarps >> c_.k_groups_log2, first = warp_ >> c_.k_groups_log2;
    int count = common;
    while (first + (count - common) * row_groups < group_tiles_) ++count;
    auto tile_at = [&](int i) { return first + (i - common) * row_groups; };
    auto rows_at = [&](int i) {
      if (i >= count) return Rows<T>();
      return i < common ? common_rows(i) : rows_of_group(tile_at(i));
    };
    Rows<T> rows = rows_at(0);
    uint4 upper[kAhead], lower[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(rows, j, &upper[j], &lower[j]);
    if (is_first) load_x();
    results_.ask(own);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    cluster_wait();  // the blocks have started, or need nothing of the group before any more
    if (threadIdx.x == 0) mailbox_.expect(bytes_sent_here(own, common));
    for (int i = 0; i < count; ++i) {
      Sums<kRowTiles> sums = {};
      Rows<T> next = rows;
      for (int done = 0; done == 0 || done < rows.count; done += kAhead) {
        int ahead = done + kAhead;
        if (ahead >= rows.count) {
          next = rows_at(i + 1);
          ahead = 0;
        }
        const int step = rows.first_step + done;
        if (is_whole(rows, done) && is_whole(next, ahead)) {
          const T* const next_upper = next.upper + ahead * kFewRowsStepK;
          const T* const next_lower = next.lower + ahead * kFewRowsStepK;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            multiply(step + j, upper[j], lower[j], sums);
            upper[j] = load_once(next_upper + j * kFewRowsStepK);
            lower[j] = load_once(next_lower + j * kFewRowsStepK);
          }
        } else {
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            if (done + j < rows.count) multiply(step + j, upper[j], lower[j], sums);
            load(next, ahead + j, &upper[j], &lower[j]);
          }
        }
      }
      rows = next;
      if (i < common) {
        keep_common(i, sums);
      } else {
        send_sums(tile_at(i), sums);
      }
    }
  }

  // All warps, a part of the steps each.
  __device__ __forceinline__ Rows<T> common_rows(int tile) const {
    if constexpr (Results::kHasCommon) {
      const int steps = c_.steps_of_warp_of_common, row = lane_ / 4;
      return rows_from(results_.common_row(tile, row), results_.common_row(tile, row + 8),
                       warp_ * steps, steps);
    } else {
      return {};
    }
  }

  __device__ __forceinline__ Rows<T> rows_of_group(int tile) const {
    const int steps = c_.steps_of_warp, row = lane_ / 4,
              at_tile = first_tile_ + group_first_ + tile;
    return rows_from(results_.row(at_tile, row), results_.row(at_tile, row + 8), k_group() * steps,
                     steps);
  }

  __device__ __forceinline__ Rows<T> rows_from(const T* upper, const T* lower, int first_step,
                                               int steps) const {
    const int column = first_column_ + first_step * kFewRowsStepK + lane_ % 4 * 8;
    return {upper + column, lower + column, first_step, max(min(steps, c_.steps - first_step), 0)};
  }

  // Whether kAhead steps from step i on are all there, with all of their columns.
  __device__ __forceinline__ bool is_whole(const Rows<T>& rows, int i) const {
    return i + kAhead <= rows.count &&
           first_column_ + (rows.first_step + i + kAhead) * kFewRowsStepK <= x_.k;
  }

  // Weights pass by L1.
  static __device__ __forceinline__ uint4 load_once(const T* from) {
    return load_of_others(reinterpret_cast<const uint4*>(from));
  }

  __device__ __forceinline__ void load(const Rows<T>& rows, int i, uint4* upper,
                                       uint4* lower) const {
    const int column = first_column_ + (rows.first_step + i) * kFewRowsStepK + lane_ % 4 * 8;
    *upper = *lower = {0, 0, 0, 0};
    if (i >= rows.count || column >= x_.k) return;
    *upper = load_once(rows.upper + i * kFewRowsStepK);
    *lower = load_once(rows.lower + i * kFewRowsStepK);
  }

  __device__ __forceinline__ void multiply(int step, const uint4& upper, const uint4& lower,
                                           Sums<kRowTiles>& sums) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const uint4* const x = x_of(step, tile) + lane_;
      multiply_by(x[0], {upper.x, upper.y}, {lower.x, lower.y}, sums[tile]);
      multiply_by(x[kWarpSize], {upper.z, upper.w}, {lower.z, lower.w}, sums[tile]);
    }
  }

  static __device__ __forceinline__ void multiply_by(const uint4& x, const uint32_t (&upper)[2],
                                                     const uint32_t (&lower)[2],
                                                     float (&sums)[2][4]) {
    const uint32_t a[4] = {x.x, x.y, x.z, x.w};
    multiply_tiles<T>(sums[0], a, upper);
    multiply_tiles<T>(sums[1], a, lower);
  }

  // --- Sums

  static __device__ __forceinline__ float4 as_vector(const float (&sums)[4]) {
    return {sums[0], sums[1], sums[2], sums[3]};
  }

  // Adds `count` parts, which are `stride` vectors apart.
  static __device__ __forceinline__ void add_parts(const float4* parts, int count, int stride,
                                                   float (&sums)[4]) {
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float4 part = parts[i * stride];
      sums[0] += part.x;
      sums[1] += part.y;
      sums[2] += part.z;
      sums[3] += part.w;
    }
  }

  __device__ __forceinline__ void send_sums(int tile, const Sums<kRowTiles>& sums) const {
    const int part = (rank_ << c_.k_groups_log2) + k_group();
    float4* const to = parts_of(tile >> c_.cluster_log2) + part * kSumVectors + lane_;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i)
      mailbox_.send(to + i * kWarpSize, tile & (cluster() - 1), as_vector(sums[i / 2][i % 2]));
  }

  // Of a tile of this block.
  __device__ __forceinline__ float4* parts_of(int own_tile) const {
    return at<float4>(c_.sums_offset) + own_tile * c_.parts * kSumVectors;
  }

  __device__ __forceinline__ int bytes_sent_here(const OwnTiles& own, int common) const {
    const int parts = own.count * c_.parts + (common << c_.cluster_log2);
    return parts * kSumVectors * static_cast<int>(sizeof(float4));
  }

  __device__ __forceinline__ int common_vectors() const { return c_.common_tiles * kSumVectors; }

  __device__ __forceinline__ void keep_common(int tile, const Sums<kRowTiles>& sums) const {
    float4* const to = at<float4>(c_.common_of_warps_offset) + warp_ * common_vectors() +
                       tile * kSumVectors + lane_;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) to[i * kWarpSize] = as_vector(sums[i / 2][i % 2]);
  }

  // The block's part, to all blocks of the cluster.
  __device__ __forceinline__ void send_common() const {
    const float4* const from = at<float4>(c_.common_of_warps_offset);
    float4* const to = at<float4>(c_.common_of_blocks_offset) + rank_ * common_vectors();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < common_vectors(); i += kFewRowsThreads) {
      float sums[4] = {};
      add_parts(from + i, kFewRowsWarps, common_vectors(), sums);
#pragma unroll 1
      for (int block = 0; block < cluster(); ++block) mailbox_.send(to + i, block, as_vector(sums));
    }
  }

  // A warp 16 rows of weights with 16 rows of x at a time.
  __device__ __forceinline__ void finish_rows(const OwnTiles& own) const {
#pragma unroll 1
    for (int i = warp_; i < own.count * kRowTiles; i += kFewRowsWarps) {
      const int own_tile = i / kRowTiles, row_tile = i % kRowTiles;
      const float4* const parts = parts_of(own_tile) + row_tile * 2 * kWarpSize + lane_;
      float sums[2][4] = {};
      add_parts(parts, c_.parts, kSumVectors, sums[0]);
      add_parts(parts + kWarpSize, c_.parts, kSumVectors, sums[1]);
      results_.finish(*this, own, own_tile, row_tile, sums);
    }
  }

  const X& x_;
  const FewRowsConfig& c_;
  Results& results_;
  const int warp_, lane_;
  const int rank_;  // of the block in its cluster
  const int first_tile_, first_column_;
  const ClusterMailbox mailbox_;
  const int tiles_;  // of the cluster
  int group_first_ = 0, group_tiles_ = 0;
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

// How many clusters run at the same time, with two blocks on an SM and with one: of a kernel for 16
// rows, and of one for 64, which fill its registers.
template <typename Kernel>
cudaError_t describe_clusters(Kernel of_16_rows, Kernel of_64_rows, DeviceTraits* traits) {
  cudaError_t status = cudaSuccess;
  for (int log2 = 1; log2 < 4 && traits->clusters && status == cudaSuccess; ++log2) {
    int* const two = &traits->resident_clusters[few_rows_blocks_of_sm(1) - 1][log2];
    int* const one = &traits->resident_clusters[few_rows_blocks_of_sm(4) - 1][log2];
    status = resident_clusters(of_16_rows, kFewRowsThreads, 1 << log2, two);
    if (status == cudaSuccess)
      status = resident_clusters(of_64_rows, kFewRowsThreads, 1 << log2, one);
  }
  return status;
}

}  // namespace few_rows
}  // namespace fusedcuda
