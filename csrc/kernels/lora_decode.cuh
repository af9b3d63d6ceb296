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

#include "common/convert.cuh"
#include "common/few_rows.cuh"
#include "linear_few.cuh"
#include "lora.h"
#include "lora_decode_config.h"

namespace fusedcuda {

template <typename T>
class LoraDecodeResults : public LinearFewResults<T> {
  using Linear = LinearFewResults<T>;

 public:
  static constexpr bool kHasCommon = true;

  struct Params {
    LoraProductParams p;
    int pitch = 0;  // rank_pitch
    int rank_tiles = 0;
    int up_offset = 0;  // in the memory of the block's tiles, behind the bias
  };

  __device__ __forceinline__ explicit LoraDecodeResults(const Params& params)
      : Linear(params.p.linear), p_(params.p), params_(params) {}

  __device__ __forceinline__ const T* common_row(int tile, int i) const {
    return Linear::row_of(p_.down, p_.rank, tile * kFewRowsTile + i);
  }

  // The rows of `up`, too. Where there are no ranks, or rows, there are zeros.
  __device__ __forceinline__ void ask(const few_rows::OwnTiles& own) {
    constexpr int kMostPieces = kLoraDecodeMostRank / 8;
    const T* const up = static_cast<const T*>(p_.linear.extra_b.data);
    const int count = own.count * kFewRowsTile * kMostPieces;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kFewRowsThreads) {
      const int own_row = i / kMostPieces, first_rank = i % kMostPieces * 8;
      if (first_rank >= params_.rank_tiles * 16) continue;
      const int64_t row = Linear::column_of(own, own_row);
      T* const to = up_of(own, own_row) + first_rank;
      if (row < p_.linear.n && first_rank < p_.rank) {
        copy_async_16(to, up + row * p_.linear.extra_b.stride + first_rank);
      } else {
        *reinterpret_cast<uint4*>(to) = {};
      }
    }
    Linear::ask(own);
  }

  // t, for the caller.
  template <typename Block>
  __device__ __forceinline__ void finish_common(const Block& block) const {
    const int pitch = static_cast<int>(p_.linear.extra_k), lane = block.lane();
    const int row_tiles = (static_cast<int>(p_.linear.m) + 15) / 16;
    T* const output = static_cast<T*>(const_cast<void*>(p_.linear.extra_a.data));
#pragma unroll 1
    for (int i = block.warp(); i < params_.rank_tiles * row_tiles; i += kFewRowsWarps) {
      const int rank_tile = i / row_tiles, row_tile = i % row_tiles;
      uint32_t t[4];
      t_of(block, rank_tile, row_tile, t);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = row_tile * 16 + lane / 4 + j % 2 * 8;
        const int column = rank_tile * 16 + lane % 4 * 2 + j / 2 * 8;
        if (row < p_.linear.m && column < pitch)
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
    Linear::finish(block, own, own_tile, row_tile, sums);
  }

 private:
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
      float sums[4] = {};
      block.add_common(rank_tile, row_tile, half, sums);
      const int rank = rank_tile * 16 + half * 8 + block.lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] = rank + j % 2 < p_.rank ? sums[j] * p_.scale : 0.0f;
      t[2 * half] = pack_pair<T>(sums[0], sums[1]);
      t[2 * half + 1] = pack_pair<T>(sums[2], sums[3]);
    }
  }

  const LoraProductParams& p_;
  const Params& params_;
};

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kFewRowsThreads, few_rows_blocks_of_sm(kRowTiles))
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
  return row_tiles == 1   ? lora_decode_kernel<T, 1>
         : row_tiles == 2 ? lora_decode_kernel<T, 2>
                          : lora_decode_kernel<T, 4>;
}

template <typename T>
cudaError_t run(const LoraProductParams& p, const FewRowsConfig& c, cudaStream_t stream) {
  typename LoraDecodeResults<T>::Params params;
  params.p = p;
  params.pitch = rank_pitch(p.rank);
  params.rank_tiles = rank_tiles(p.rank);
  params.up_offset = c.own_tiles * kFewRowsTile * static_cast<int>(sizeof(float));
  return few_rows::start(kernel_for<T>(c.row_tiles), c, stream, params, few_rows::x_of(p.linear), c,
                         static_cast<int>(problem_of(p).tiles));
}

}  // namespace lora_decode_detail
}  // namespace fusedcuda
