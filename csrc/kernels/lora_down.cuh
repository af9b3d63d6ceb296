// t = scale * dropout(x) @ factor.T: x is read once, and each block has all of its ranks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/mma.cuh"
#include "common/shared.cuh"
#include "common/wgmma.cuh"
#include "lora_stages.cuh"

namespace fusedcuda {

// The right factor of 16 columns of x and 16 ranks, for two products of eight ranks. `tile` is
// where these columns and ranks begin in shared memory.
//   kRankInner: rows of the tile are columns of x, else ranks.
template <typename T, typename F, bool kRankInner>
__device__ __forceinline__ void load_factor(const F* tile, int pitch, int lane,
                                            uint32_t (&b)[2][2]) {
  if constexpr (std::is_same_v<T, F>) {
    uint32_t v[4];
    load_matrices<kRankInner>(tile + lane % 16 * pitch + lane / 16 * 8, v);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b[half][0] = kRankInner ? v[2 * half] : v[half];
      b[half][1] = kRankInner ? v[2 * half + 1] : v[half + 2];
    }
  } else {
    const int rank = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int column = pair + 8 * word;
        if constexpr (kRankInner) {
          const F* const first = tile + column * pitch + rank + 8 * half;
          b[half][word] = pack_pair<T>(first[0], first[pitch]);
        } else {
          const auto two = load_vector<F, 2>(tile + (rank + 8 * half) * pitch + column);
          b[half][word] = pack_pair<T>(two.values[0], two.values[1]);
        }
      }
    }
  }
}

// blockIdx: x, 16 to 64 rows; y, up to 64 ranks; z, a part of the columns. Of the warps, one for
// each 16 rows; several of these rows take every so many 16 columns of a stage, and their sums are
// added up at the end, in a fixed order. `partials`: [splits, rows, pitch], where there are several
// parts.
template <typename T, typename F, bool kRankInner>
__global__ void __launch_bounds__(kLoraThreads, 2)
    lora_down_kernel(const __grid_constant__ LoraDownParams p, const __grid_constant__ LoraConfig c,
                     float* partials) {
  char* const shared = static_cast<char*>(dynamic_shared());
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int row_warps = c.rows_of_stage / 16, column_warps = kLoraThreads / kWarpSize / row_warps;
  const int own_rows = warp % row_warps * 16, own_column = warp / row_warps;
  const int64_t first_row = int64_t{blockIdx.x} * c.rows_of_stage;
  const int first_rank = static_cast<int>(blockIdx.y) * kLoraRanks;
  const int depth = c.columns_of_stage, ranks = 16 * c.rank_groups;

  const PieceSource<T> x = {static_cast<const T*>(p.x.data), p.x.stride, p.rows, p.columns,
                            c.aligned_x};
  const PieceSource<F> factor = {static_cast<const F*>(p.factor), p.factor_stride,
                                 kRankInner ? p.columns : p.rank, kRankInner ? p.rank : p.columns,
                                 c.aligned_factor};
  wait_for_previous_kernel();
  const DropoutMask mask(p.dropout.seed, p.dropout.threshold);

  const OwnPieces<T> x_pieces(depth);
  const OwnPieces<F> factor_pieces(kRankInner ? ranks : depth);
  auto fetch = [&](int64_t i, char* stage) {
    const int64_t column = i * depth;
    fetch_tile(x, x_pieces, first_row, column, c.rows_of_stage, reinterpret_cast<T*>(stage),
               c.x_pitch);
    F* const to = reinterpret_cast<F*>(stage + c.factor_offset);
    if constexpr (kRankInner) {
      fetch_tile(factor, factor_pieces, column, first_rank, depth, to, c.factor_pitch);
    } else {
      fetch_tile(factor, factor_pieces, first_rank, column, ranks, to, c.factor_pitch);
    }
  };
  auto drop = [&](int64_t i, char* stage) {
    if (!mask.drops()) return;
    drop_in_tile(mask, x_pieces, first_row, i * depth, c.rows_of_stage, reinterpret_cast<T*>(stage),
                 c.x_pitch);
  };
  float sums[kLoraRanks / 16][2][4] = {};
  auto multiply = [&](const char* stage) {
    const T* const rows =
        reinterpret_cast<const T*>(stage) + (own_rows + lane % 16) * c.x_pitch + lane / 16 * 8;
    const F* const tile = reinterpret_cast<const F*>(stage + c.factor_offset);
    const int next_columns = kRankInner ? c.factor_pitch : 1;
    const int next_ranks = kRankInner ? 1 : c.factor_pitch;
#pragma unroll 2
    for (int column = 16 * own_column; column < depth; column += 16 * column_warps) {
      uint32_t a[4];
      load_matrices<false>(rows + column, a);
#pragma unroll
      for (int group = 0; group < kLoraRanks / 16; ++group) {
        if (group >= c.rank_groups) break;
        uint32_t b[2][2];
        load_factor<T, F, kRankInner>(tile + column * next_columns + 16 * group * next_ranks,
                                      c.factor_pitch, lane, b);
        multiply_tiles<T>(sums[group][0], a, b[0]);
        multiply_tiles<T>(sums[group][1], a, b[1]);
      }
    }
  };
  const StageRange range((p.columns + depth - 1) / depth, blockIdx.z, gridDim.z);
  for_stages(range.first, range.last, shared, c.bytes_of_stage, fetch, drop, multiply);

  // The warps' sums, [column_warps, rows_of_stage, ranks], take the place of the stages.
  float* const parts = reinterpret_cast<float*>(shared);
  const int pitch = ranks + 8;
  __syncthreads();
#pragma unroll
  for (int group = 0; group < kLoraRanks / 16; ++group) {
    if (group >= c.rank_groups) break;
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
      const int row = own_column * c.rows_of_stage + own_rows + lane / 4 + k % 4 / 2 * 8;
      const float* const two = &sums[group][k / 4][k % 4];
      store_vector<float, 2>(parts + row * pitch + 16 * group + k / 4 * 8 + lane % 4 * 2,
                             {two[0], two[1]});
    }
  }
  __syncthreads();
  const int t_pitch = (p.rank + 7) / 8 * 8;
  const int pairs = min(ranks, t_pitch - first_rank) / 2;
  for (int i = threadIdx.x; i < c.rows_of_stage * pairs; i += kLoraThreads) {
    const int row = i / pairs, column = i % pairs * 2;
    if (first_row + row >= p.rows) break;
    float two[2] = {};
    for (int part = 0; part < column_warps; ++part) {
      const auto more =
          load_vector<float, 2>(parts + (part * c.rows_of_stage + row) * pitch + column);
      two[0] += more.values[0];
      two[1] += more.values[1];
    }
#pragma unroll
    for (int k = 0; k < 2; ++k)  // Where there is no rank, infinity in x gives NaN.
      two[k] = first_rank + column + k < p.rank ? two[k] * p.scale : 0.0f;
    const int64_t at = (first_row + row) * t_pitch + first_rank + column;
    if (gridDim.z == 1) {
      *reinterpret_cast<uint32_t*>(static_cast<T*>(p.t) + at) = pack_pair<T>(two[0], two[1]);
    } else {
      store_vector<float, 2>(partials + blockIdx.z * p.rows * t_pitch + at, {two[0], two[1]});
    }
  }
}

}  // namespace fusedcuda
