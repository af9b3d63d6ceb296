// A linear layer of few rows with its adapter in one launch, as text is generated:
//
//   y = act(x @ weight.T + bias + t @ up.T),   t = scale * x @ down.T
//
// A launch for t, one for its parts, one for the branch, and their ends, are as long again as the
// 8 us of a weight of 4096 x 4096. Here `down` is the common rows of a product of few rows
// (common/few_rows.cuh): every cluster makes t for itself, once again for each hundred rows of the
// weight or so, and the block that adds up the sums adds the branch by a product more.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.cuh"
#include "common/convert.cuh"
#include "common/few_rows.cuh"
#include "lora.h"
#include "lora_decode_config.h"

namespace fusedcuda {

template <typename T>
class LoraDecodeResults {
 public:
  using Element = T;

  struct Params {
    LoraProductParams p;
    int pitch = 0;  // rank_pitch
    int rank_tiles = 0;
    int up_offset = 0;  // in the memory of the block's tiles, behind the bias
  };

  __device__ __forceinline__ explicit LoraDecodeResults(const Params& params)
      : params_(params), p_(params.p), linear_(params.p.linear) {}

  __device__ __forceinline__ const T* row(int tile, int i) const {
    return row_of(linear_.b, linear_.n, int64_t{tile} * kFewRowsTile + i);
  }

  __device__ __forceinline__ const T* common_row(int tile, int i) const {
    return row_of(p_.down, p_.rank, tile * kFewRowsTile + i);
  }

  // The rows of `up`, and the bias of the thread's row of the weight. Where there are no ranks, or
  // rows, there are zeros.
  __device__ __forceinline__ void ask(const few_rows::OwnTiles& own) {
    constexpr int kMostPieces = kLoraDecodeMostRank / 8;
    const GemmFactor& up = linear_.extra_b;
    const int thread = static_cast<int>(threadIdx.x);
    const int count = own.count * kFewRowsTile * kMostPieces;
#pragma unroll 1
    for (int i = thread; i < count; i += kFewRowsThreads) {
      const int own_row = i / kMostPieces, first_rank = i % kMostPieces * 8;
      if (first_rank >= params_.rank_tiles * 16) continue;
      const int64_t row = column_of(own, own_row);
      T* const to = up_of(own, own_row) + first_rank;
      if (row < linear_.n && first_rank < p_.rank) {
        copy_async_16(to, static_cast<const T*>(up.data) + row * up.stride + first_rank);
      } else {
        *reinterpret_cast<uint4*>(to) = {};
      }
    }
    bias_ = from_compute<T>(0.0f);
    if (linear_.bias == nullptr || thread >= own.count * kFewRowsTile) return;
    const int64_t column = column_of(own, thread);
    if (column < linear_.n) bias_ = static_cast<const T*>(linear_.bias)[column];
  }

  __device__ __forceinline__ void keep(const few_rows::OwnTiles& own) const {
    if (static_cast<int>(threadIdx.x) < own.count * kFewRowsTile)
      static_cast<float*>(own.memory)[threadIdx.x] = to_compute(bias_);
  }

  // t, for the caller.
  template <typename Block>
  __device__ __forceinline__ void finish_common(const Block& block) const {
    const int pitch = static_cast<int>(linear_.extra_k), lane = block.lane();
    const int row_tiles = (static_cast<int>(linear_.m) + 15) / 16;
    T* const output = static_cast<T*>(const_cast<void*>(linear_.extra_a.data));
#pragma unroll 1
    for (int i = block.warp(); i < params_.rank_tiles * row_tiles; i += kFewRowsWarps) {
      const int rank_tile = i / row_tiles, row_tile = i % row_tiles;
      uint32_t t[4];
      t_of(block, rank_tile, row_tile, t);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = row_tile * 16 + lane / 4 + j % 2 * 8;
        const int column = rank_tile * 16 + lane % 4 * 2 + j / 2 * 8;
        if (row < linear_.m && column < pitch)
          *reinterpret_cast<uint32_t*>(output + row * pitch + column) = t[j];
      }
    }
  }

  template <typename Block>
  __device__ __forceinline__ void finish(const Block& block, const few_rows::OwnTiles& own,
                                         int own_tile, int row_tile, float (&sums)[2][4]) const {
    const int lane = block.lane();
    const T* const up = up_of(own, own_tile * kFewRowsTile + lane / 4) + lane % 4 * 2;
#pragma unroll 1
    for (int rank_tile = 0; rank_tile < params_.rank_tiles; ++rank_tile) {
      uint32_t t[4];
      t_of(block, rank_tile, row_tile, t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* const factors = up + half * 8 * params_.pitch + rank_tile * 16;
        multiply_tiles<T>(sums[half], t,
                          {*reinterpret_cast<const uint32_t*>(factors),
                           *reinterpret_cast<const uint32_t*>(factors + 8)});
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store(own, own_tile * kFewRowsTile + half * 8 + lane % 4 * 2, row_tile * 16 + lane / 4,
            sums[half]);
  }

 private:
  // For rows that do not exist the last one is read.
  static __device__ __forceinline__ const T* row_of(const GemmFactor& matrix, int64_t rows,
                                                    int64_t row) {
    return static_cast<const T*>(matrix.data) + min(row, rows - 1) * matrix.stride;
  }

  // Of the output: a row of the weight.
  static __device__ __forceinline__ int64_t column_of(const few_rows::OwnTiles& own, int own_row) {
    return int64_t{own.tile(own_row / kFewRowsTile)} * kFewRowsTile + own_row % kFewRowsTile;
  }

  __device__ __forceinline__ T* up_of(const few_rows::OwnTiles& own, int own_row) const {
    return reinterpret_cast<T*>(static_cast<char*>(own.memory) + params_.up_offset) +
           own_row * params_.pitch;
  }

  // t of 16 rows of x and 16 ranks, rounded, as a factor: two neighbours of row l / 4, of row
  // l / 4 + 8; and the same eight ranks further. Zeros where there are no ranks.
  template <typename Block>
  __device__ __forceinline__ void t_of(const Block& block, int rank_tile, int row_tile,
                                       uint32_t (&t)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 common = block.common(rank_tile, row_tile, half);
      float sums[4] = {common.x, common.y, common.z, common.w};
      const int rank = rank_tile * 16 + half * 8 + block.lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = rank + j % 2 < p_.rank ? sums[j] * p_.scale : 0.0f;
      t[2 * half] = pack_pair<T>(sums[0], sums[1]);
      t[2 * half + 1] = pack_pair<T>(sums[2], sums[3]);
    }
  }

  // `own_row`, and the next one, with `row` of x and the one eight below.
  __device__ __forceinline__ void store(const few_rows::OwnTiles& own, int own_row, int row,
                                        const float (&sums)[4]) const {
    const float* const bias = static_cast<const float*>(own.memory) + own_row;
    const float z[4] = {sums[0] + bias[0], sums[1] + bias[1], sums[2] + bias[0], sums[3] + bias[1]};
    float y[4];
    activate</*kFast=*/true>(linear_.activation, z, y);
    T* const output = static_cast<T*>(linear_.output.data);
    const int64_t column = column_of(own, own_row);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at_row = row + j / 2 * 8;
      if (at_row < linear_.m && column + j % 2 < linear_.n)
        output[at_row * linear_.output.stride + column + j % 2] = from_compute<T>(y[j]);
    }
  }

  const Params& params_;
  const LoraProductParams& p_;
  const LinearActParams& linear_;
  T bias_;
};

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kFewRowsThreads)
    lora_decode_kernel(const __grid_constant__ typename LoraDecodeResults<T>::Params params,
                       const __grid_constant__ few_rows::X x,
                       const __grid_constant__ FewRowsConfig c, int tiles) {
  LoraDecodeResults<T> results(params);
  few_rows::Block<LoraDecodeResults<T>, kRowTiles>(x, c, tiles, results).run();
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace lora_decode_detail {

template <typename T>
auto kernel_for(int row_tiles) {
  return row_tiles == 1 ? lora_decode_kernel<T, 1> : lora_decode_kernel<T, 2>;
}

template <typename T>
cudaError_t run(const LoraProductParams& p, const FewRowsConfig& c, cudaStream_t stream) {
  typename LoraDecodeResults<T>::Params params;
  params.p = p;
  params.pitch = rank_pitch(p.rank);
  params.rank_tiles = rank_tiles(p.rank);
  params.up_offset = c.own_tiles * kFewRowsTile * static_cast<int>(sizeof(float));
  const LinearActParams& linear = p.linear;
  const few_rows::X x = {linear.a.data, linear.a.stride, static_cast<int>(linear.m),
                         static_cast<int>(linear.k)};
  return few_rows::start(kernel_for<T>(c.row_tiles), c, stream, params, x, c,
                         static_cast<int>(problem_of(p).tiles));
}

}  // namespace lora_decode_detail
}  // namespace fusedcuda
