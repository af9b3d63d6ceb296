// A linear layer of few rows with its adapter in one launch, as text is generated:
//
//   y = act(x @ weight.T + bias + t @ up.T),   t = scale * x @ down.T
//
// All time goes into reading the weight: 33.5 MB of 4096 x 4096 are 8 us at copy speed, while a
// launch for t, one for its parts, one for the branch, and their ends, are 8 us more. Here every
// part of the work is next to what it needs, and no block waits for one outside its cluster:
//
// - The blocks of a cluster have the same rows of the weight, and each a part of the columns, of
//   which it keeps x in shared memory. So all of x is read once a cluster, not once a block.
// - `down` is rows more of the same columns. Every cluster makes t for itself, once again for each
//   hundred rows of the weight or so: 16 ranks are 16 rows.
// - A warp takes 16 rows of the weight at a time from the memory to registers, and multiplies them
//   by all rows of x (mma.sync, with rows of the weight as its columns). It has asked for the next
//   ones before that.
// - Blocks send their sums to the block that adds them up, in an order that the shapes decide; this
//   one adds the branch by a product more, bias and activation.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.cuh"
#include "common/async_copy.cuh"
#include "common/cluster.cuh"
#include "common/convert.cuh"
#include "common/grid_counter.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "lora.h"
#include "lora_decode_config.h"

namespace fusedcuda {
namespace lora_decode_detail {

// A tile of 16 rows, of the weight or of `down`, and the steps of it that a warp takes. A lane has
// eight neighbours of two rows in each step.
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

template <typename T, int kRowTiles>
class Block {
 public:
  __device__ __forceinline__ Block(const LoraProductParams& p, const LoraDecodeConfig& c)
      : p_(p),
        c_(c),
        warp_(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpSize, 0)),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize),
        rank_(static_cast<int>(cluster_rank())),
        first_tile_((static_cast<int>(blockIdx.x) >> c.cluster_log2) * c.tiles),
        first_column_(rank_ * c.steps * kLoraDecodeStepK),
        k_(static_cast<int>(p.linear.k)),
        mailbox_(at<uint64_t>(c.mailbox_offset)) {
    const int all = static_cast<int>((p.linear.n + kLoraDecodeTileRows - 1) / kLoraDecodeTileRows);
    tiles_ = min(c.tiles, all - first_tile_);
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) mailbox_.init();
    cluster_arrive_relaxed();
    wait_for_previous_kernel();
    unsigned round = 0;
    for (int first = 0; first < tiles_; first += c_.tiles_of_group, round ^= 1) {
      group_first_ = first;
      group_tiles_ = min(c_.tiles_of_group, tiles_ - first);
      const bool makes_t = first == 0, is_last = first + c_.tiles_of_group >= tiles_;
      const T bias = multiply_rows(makes_t);
      if (static_cast<int>(threadIdx.x) < c_.own_tiles * kLoraDecodeTileRows)
        at<float>(c_.bias_offset)[threadIdx.x] = to_compute(bias);
      __syncthreads();
      if (makes_t) send_t();
      if (is_last) let_next_kernel_start();
      mailbox_.wait(round);
      if (makes_t && blockIdx.x == 0) store_t();
      finish_rows();
      if (is_last) return;
      cluster_arrive();  // what was sent is not needed any more
      __syncthreads();   // neither are the rows of `up`
    }
  }

 private:
  static constexpr int kAhead = lora_decode_steps_ahead(kRowTiles);
  static constexpr int kSumVectors = kRowTiles * 2 * kWarpSize;  // of a tile: float4

  template <typename U>
  static __device__ __forceinline__ U* at(int offset) {
    return reinterpret_cast<U*>(static_cast<char*>(dynamic_shared()) + offset);
  }

  __device__ __forceinline__ int cluster() const { return 1 << c_.cluster_log2; }
  // Of the warp, among those that share a tile.
  __device__ __forceinline__ int k_group() const { return warp_ & ((1 << c_.k_groups_log2) - 1); }

  // --- What is there before the products

  // The order of k is another one than that of the columns, the same in both factors: a lane's
  // eight neighbours of a step are its part of one product, the first four, and of a second one.
  // Of step s and 16 rows of x, lane l has them of rows l / 4 and l / 4 + 8, in the order in which
  // it multiplies them. Where there are no rows, or columns, there are zeros.
  __device__ __forceinline__ void load_x() const {
    const int count = c_.steps * kRowTiles * kWarpSize;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kLoraDecodeThreads) {
      const int lane = i % kWarpSize, tile = i / kWarpSize % kRowTiles;
      const int step = i / (kWarpSize * kRowTiles), row = tile * 16 + lane / 4;
      const int column = first_column_ + step * kLoraDecodeStepK + lane % 4 * 8;
      const uint4 upper = load_x(row, column), lower = load_x(row + 8, column);
      uint4* const to = x_of(step, tile) + lane;
      to[0] = {upper.x, lower.x, upper.y, lower.y};
      to[kWarpSize] = {upper.z, lower.z, upper.w, lower.w};
    }
  }

  __device__ __forceinline__ uint4 load_x(int row, int column) const {
    if (row >= p_.linear.m || column >= k_) return {0, 0, 0, 0};
    const T* const x = static_cast<const T*>(p_.linear.a.data) + row * p_.linear.a.stride;
    return load_of_others(reinterpret_cast<const uint4*>(x + column));
  }

  // The factors of the first product of a step; those of the second are behind them.
  __device__ __forceinline__ uint4* x_of(int step, int tile) const {
    return at<uint4>(0) + (step * kRowTiles + tile) * 2 * kWarpSize;
  }

  // The rows of `up` that go with the sums that this block adds up. Where there are no ranks, or
  // rows, there are zeros.
  __device__ __forceinline__ void load_up() const {
    constexpr int kMostPieces = kLoraDecodeMostRank / 8;
    const T* const up = static_cast<const T*>(p_.linear.extra_b.data);
    const int count = c_.own_tiles * kLoraDecodeTileRows * kMostPieces;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kLoraDecodeThreads) {
      const int own_row = i / kMostPieces, first_rank = i % kMostPieces * 8;
      if (first_rank >= 16 * c_.rank_tiles) continue;
      const int64_t row = row_of(own_row);
      T* const to = at<T>(c_.up_offset) + own_row * c_.rank_pitch + first_rank;
      if (row < p_.linear.n && first_rank < p_.rank) {
        copy_async_16(to, up + row * p_.linear.extra_b.stride + first_rank);
      } else {
        *reinterpret_cast<uint4*>(to) = {};
      }
    }
    copy_async_commit();
  }

  // For the thread's row, if it has one.
  __device__ __forceinline__ T load_bias() const {
    const int own_row = static_cast<int>(threadIdx.x);
    const bool is_there = own_row < c_.own_tiles * kLoraDecodeTileRows &&
                          row_of(own_row) < p_.linear.n && p_.linear.bias != nullptr;
    return is_there ? static_cast<const T*>(p_.linear.bias)[row_of(own_row)]
                    : from_compute<T>(0.0f);
  }

  // Of the weight. Tiles of a group go to the blocks in turn.
  __device__ __forceinline__ int64_t row_of(int own_row) const {
    const int tile = (own_row / kLoraDecodeTileRows << c_.cluster_log2) + rank_;
    return int64_t{first_tile_ + group_first_ + tile} * kLoraDecodeTileRows +
           own_row % kLoraDecodeTileRows;
  }

  // --- Products

  // The warp's tiles: first those of `down`, then of the weight. All steps of all of them are one
  // sequence, whose weights are asked for kAhead steps before they are multiplied. Returns the bias
  // of the thread's row, asked for in between.
  __device__ __forceinline__ T multiply_rows(bool makes_t) {
    const int rank_tiles = makes_t ? c_.rank_tiles : 0;
    const int row_groups = kLoraDecodeWarps >> c_.k_groups_log2;
    const int first = warp_ >> c_.k_groups_log2;
    int own = 0;
    while (first + own * row_groups < group_tiles_) ++own;
    const int count = rank_tiles + own;
    auto tile_at = [&](int i) { return first + (i - rank_tiles) * row_groups; };
    auto rows_at = [&](int i) {
      if (i >= count) return Rows<T>();
      return i < rank_tiles ? rows_of_down(i) : rows_of_weight(tile_at(i));
    };
    Rows<T> rows = rows_at(0);
    uint4 upper[kAhead], lower[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(rows, j, &upper[j], &lower[j]);
    if (makes_t) load_x();
    load_up();
    const T bias = load_bias();
    copy_async_wait<0>();
    __syncthreads();
    cluster_wait();  // the blocks have started, or need nothing of the group before any more
    if (threadIdx.x == 0) mailbox_.expect(bytes_sent_here(makes_t));
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
          const T* const next_upper = next.upper + ahead * kLoraDecodeStepK;
          const T* const next_lower = next.lower + ahead * kLoraDecodeStepK;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            multiply(step + j, upper[j], lower[j], sums);
            upper[j] = load_once(next_upper + j * kLoraDecodeStepK);
            lower[j] = load_once(next_lower + j * kLoraDecodeStepK);
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
      if (i < rank_tiles) {
        keep_t(i, sums);
      } else {
        send_sums(tile_at(i), sums);
      }
    }
    return bias;
  }

  // All warps, a part of the steps each.
  __device__ __forceinline__ Rows<T> rows_of_down(int tile) const {
    return rows_of(p_.down, p_.rank, tile * 16, warp_ * c_.steps_of_warp_of_down,
                   c_.steps_of_warp_of_down);
  }

  __device__ __forceinline__ Rows<T> rows_of_weight(int tile) const {
    const int first = (first_tile_ + group_first_ + tile) * kLoraDecodeTileRows;
    return rows_of(p_.linear.b, p_.linear.n, first, k_group() * c_.steps_of_warp, c_.steps_of_warp);
  }

  // For rows that do not exist the last one is read.
  __device__ __forceinline__ Rows<T> rows_of(const GemmFactor& matrix, int64_t all, int64_t first,
                                             int first_step, int steps) const {
    const T* const data = static_cast<const T*>(matrix.data) + first_column_ +
                          first_step * kLoraDecodeStepK + lane_ % 4 * 8;
    const int64_t row = first + lane_ / 4, last = all - 1;
    return {data + min(row, last) * matrix.stride, data + min(row + 8, last) * matrix.stride,
            first_step, max(min(steps, c_.steps - first_step), 0)};
  }

  // Whether kAhead steps from step i on are all there, with all of their columns.
  __device__ __forceinline__ bool is_whole(const Rows<T>& rows, int i) const {
    return i + kAhead <= rows.count &&
           first_column_ + (rows.first_step + i + kAhead) * kLoraDecodeStepK <= k_;
  }

  // Weights pass by L1.
  static __device__ __forceinline__ uint4 load_once(const T* from) {
    return load_of_others(reinterpret_cast<const uint4*>(from));
  }

  __device__ __forceinline__ void load(const Rows<T>& rows, int i, uint4* upper,
                                       uint4* lower) const {
    const int column = first_column_ + (rows.first_step + i) * kLoraDecodeStepK + lane_ % 4 * 8;
    *upper = *lower = {0, 0, 0, 0};
    if (i >= rows.count || column >= k_) return;
    *upper = load_once(rows.upper + i * kLoraDecodeStepK);
    *lower = load_once(rows.lower + i * kLoraDecodeStepK);
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

  // The sums of `count` parts, which are `stride` vectors apart.
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
    float4* const to = sums_of(tile >> c_.cluster_log2) + part * kSumVectors + lane_;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i)
      mailbox_.send(to + i * kWarpSize, tile & (cluster() - 1), as_vector(sums[i / 2][i % 2]));
  }

  // All parts of a tile that this block adds up.
  __device__ __forceinline__ float4* sums_of(int own_tile) const {
    return at<float4>(c_.sums_offset) + own_tile * c_.parts * kSumVectors;
  }

  // Parts of the sums that this block adds up, and of t.
  __device__ __forceinline__ int bytes_sent_here(bool makes_t) const {
    const int own = (group_tiles_ - rank_ + cluster() - 1) >> c_.cluster_log2;
    const int parts = max(own, 0) * c_.parts + (makes_t ? cluster() * c_.rank_tiles : 0);
    return parts * kSumVectors * static_cast<int>(sizeof(float4));
  }

  __device__ __forceinline__ int vectors_of_t() const { return c_.rank_tiles * kSumVectors; }

  __device__ __forceinline__ void keep_t(int rank_tile, const Sums<kRowTiles>& sums) const {
    float4* const to =
        at<float4>(c_.t_of_warps_offset) + warp_ * vectors_of_t() + rank_tile * kSumVectors + lane_;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) to[i * kWarpSize] = as_vector(sums[i / 2][i % 2]);
  }

  // The block's part of t, to all blocks of the cluster.
  __device__ __forceinline__ void send_t() const {
    const float4* const from = at<float4>(c_.t_of_warps_offset);
    float4* const to = at<float4>(c_.t_of_blocks_offset) + rank_ * vectors_of_t();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < vectors_of_t(); i += kLoraDecodeThreads) {
      float sums[4] = {};
      add_parts(from + i, kLoraDecodeWarps, vectors_of_t(), sums);
#pragma unroll 1
      for (int block = 0; block < cluster(); ++block) mailbox_.send(to + i, block, as_vector(sums));
    }
  }

  // t of 16 rows of x and 16 ranks as a factor: two neighbours of row l / 4, of row l / 4 + 8; and
  // the same eight ranks further. Zeros where there are no ranks.
  __device__ __forceinline__ void t_of(int rank_tile, int tile, uint32_t (&t)[4]) const {
    const int place = rank_tile * kSumVectors + tile * 2 * kWarpSize + lane_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sums[4] = {};
      add_parts(at<float4>(c_.t_of_blocks_offset) + place + half * kWarpSize, cluster(),
                vectors_of_t(), sums);
      const int at_rank = rank_tile * 16 + half * 8 + lane_ % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = at_rank + j % 2 < p_.rank ? sums[j] * p_.scale : 0.0f;
      t[2 * half] = pack_pair<T>(sums[0], sums[1]);
      t[2 * half + 1] = pack_pair<T>(sums[2], sums[3]);
    }
  }

  // For the caller.
  __device__ __forceinline__ void store_t() const {
    const int pitch = static_cast<int>(p_.linear.extra_k);
    T* const output = static_cast<T*>(const_cast<void*>(p_.linear.extra_a.data));
#pragma unroll 1
    for (int i = warp_; i < c_.rank_tiles * kRowTiles; i += kLoraDecodeWarps) {
      const int rank_tile = i / kRowTiles, tile = i % kRowTiles;
      uint32_t t[4];
      t_of(rank_tile, tile, t);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = tile * 16 + lane_ / 4 + j % 2 * 8;
        const int column = rank_tile * 16 + lane_ % 4 * 2 + j / 2 * 8;
        if (row < p_.linear.m && column < pitch)
          *reinterpret_cast<uint32_t*>(output + row * pitch + column) = t[j];
      }
    }
  }

  // The sums of this block's rows of the weight, a warp 16 of them with 16 rows of x at a time.
  __device__ __forceinline__ void finish_rows() const {
#pragma unroll 1
    for (int i = warp_; i < c_.own_tiles * kRowTiles; i += kLoraDecodeWarps) {
      const int own_tile = i / kRowTiles, tile = i % kRowTiles;
      if ((own_tile << c_.cluster_log2) + rank_ >= group_tiles_) return;
      const float4* const parts = sums_of(own_tile) + tile * 2 * kWarpSize + lane_;
      float sums[2][4] = {};
      add_parts(parts, c_.parts, kSumVectors, sums[0]);
      add_parts(parts + kWarpSize, c_.parts, kSumVectors, sums[1]);
      add_branch(own_tile, tile, sums);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store(own_tile * kLoraDecodeTileRows + half * 8 + lane_ % 4 * 2, tile, sums[half]);
    }
  }

  __device__ __forceinline__ void add_branch(int own_tile, int tile, float (&sums)[2][4]) const {
    const int row = own_tile * kLoraDecodeTileRows + lane_ / 4;
    const T* const up = at<T>(c_.up_offset) + row * c_.rank_pitch + lane_ % 4 * 2;
#pragma unroll 1
    for (int rank_tile = 0; rank_tile < c_.rank_tiles; ++rank_tile) {
      uint32_t t[4];
      t_of(rank_tile, tile, t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* const factors = up + half * 8 * c_.rank_pitch + rank_tile * 16;
        multiply_tiles<T>(sums[half], t,
                          {*reinterpret_cast<const uint32_t*>(factors),
                           *reinterpret_cast<const uint32_t*>(factors + 8)});
      }
    }
  }

  // `own_row`, and the next one, with rows l / 4 and l / 4 + 8 of x.
  __device__ __forceinline__ void store(int own_row, int tile, const float (&sums)[4]) const {
    const float* const bias = at<float>(c_.bias_offset) + own_row;
    const float z[4] = {sums[0] + bias[0], sums[1] + bias[1], sums[2] + bias[0], sums[3] + bias[1]};
    float y[4];
    activate</*kFast=*/true>(p_.linear.activation, z, y);
    T* const output = static_cast<T*>(p_.linear.output.data);
    const int64_t column = row_of(own_row);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = tile * 16 + lane_ / 4 + j / 2 * 8;
      if (row < p_.linear.m && column + j % 2 < p_.linear.n)
        output[row * p_.linear.output.stride + column + j % 2] = from_compute<T>(y[j]);
    }
  }

  const LoraProductParams& p_;
  const LoraDecodeConfig& c_;
  const int warp_, lane_;
  const int rank_;  // of the block in its cluster
  const int first_tile_, first_column_, k_;
  const ClusterMailbox mailbox_;
  int tiles_ = 0;  // of the cluster
  int group_first_ = 0, group_tiles_ = 0;
};

}  // namespace lora_decode_detail

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kLoraDecodeThreads, lora_decode_blocks_of_sm(kRowTiles))
    lora_decode_kernel(const __grid_constant__ LoraProductParams p,
                       const __grid_constant__ LoraDecodeConfig c) {
  lora_decode_detail::Block<T, kRowTiles>(p, c).run();
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace lora_decode_detail {

template <typename T>
auto kernel_for(int row_tiles) {
  return row_tiles == 1   ? lora_decode_kernel<T, 1>
         : row_tiles == 2 ? lora_decode_kernel<T, 2>
                          : lora_decode_kernel<T, 4>;
}

template <typename T>
cudaError_t run(const LoraProductParams& p, const LoraDecodeConfig& c, cudaStream_t stream) {
  LaunchOptions options;
  options.dependent = c.dependent_launch;
  options.cluster = c.cluster();
  options.shared_bytes = c.shared_bytes;
  return launch(kernel_for<T>(c.row_tiles), dim3(c.blocks()), dim3(kLoraDecodeThreads), options,
                stream, p, c);
}

// With one block on an SM, and with two: the kernels fill its registers.
inline cudaError_t describe_clusters(DeviceTraits* traits) {
  cudaError_t status = cudaSuccess;
  for (int row_tiles : {1, 4}) {
    const int blocks = lora_decode_blocks_of_sm(row_tiles);
    for (int log2 = 1; log2 < 4 && traits->clusters && status == cudaSuccess; ++log2) {
      status = resident_clusters(kernel_for<__nv_bfloat16>(row_tiles), kLoraDecodeThreads,
                                 1 << log2, &traits->resident_clusters[blocks - 1][log2]);
    }
  }
  return status;
}

}  // namespace lora_decode_detail
}  // namespace fusedcuda
