// t.T @ dropout(x): x is read once, its rows being what is added up along.
#pragma once

#include <cstdint>

#include "common/mma.cuh"
#include "common/shared.cuh"
#include "common/wgmma.cuh"
#include "lora_stages.cuh"

namespace fusedcuda {

// blockIdx: x, 128 columns, 16 of them for each warp; y, up to 64 ranks; z, a part of the rows.
// `partials`: [splits, rank, columns], or each part transposed.
template <typename T>
__global__ void __launch_bounds__(kLoraThreads, 2)
    lora_up_kernel(const __grid_constant__ LoraUpParams p, const __grid_constant__ LoraConfig c,
                   float* partials) {
  char* const shared = static_cast<char*>(dynamic_shared());
  const int lane = threadIdx.x % kWarpSize, own_column = threadIdx.x / kWarpSize * 16;
  const int64_t first_column = int64_t{blockIdx.x} * kLoraUpColumns;
  const int first_rank = static_cast<int>(blockIdx.y) * kLoraRanks;
  const int depth = c.rows_of_stage, ranks = 16 * c.rank_groups;
  const int t_pitch = (p.rank + 7) / 8 * 8;

  const PieceSource<T> x = {static_cast<const T*>(p.x.data), p.x.stride, p.rows, p.columns,
                            c.aligned_x};
  const PieceSource<T> t = {static_cast<const T*>(p.t), t_pitch, p.rows, t_pitch, c.aligned_factor};
  wait_for_previous_kernel();
  const DropoutMask mask(p.dropout.seed, p.dropout.threshold);

  const OwnPieces<T> x_pieces(kLoraUpColumns), t_pieces(ranks);
  auto fetch = [&](int64_t i, char* stage) {
    fetch_tile(x, x_pieces, i * depth, first_column, depth, reinterpret_cast<T*>(stage), c.x_pitch);
    fetch_tile(t, t_pieces, i * depth, first_rank, depth,
               reinterpret_cast<T*>(stage + c.factor_offset), c.factor_pitch);
  };
  auto drop = [&](int64_t i, char* stage) {
    if (!mask.drops()) return;
    drop_in_tile(mask, x_pieces, i * depth, first_column, depth, reinterpret_cast<T*>(stage),
                 c.x_pitch);
  };
  float sums[kLoraRanks / 16][2][4] = {};
  // Both factors lie with the rows below each other, which is what is added up along: they are
  // transposed on their way to the registers.
  auto multiply = [&](const char* stage) {
    const T* const columns =
        reinterpret_cast<const T*>(stage) + lane % 16 * c.x_pitch + own_column + lane / 16 * 8;
    const T* const of_ranks = reinterpret_cast<const T*>(stage + c.factor_offset) +
                              (lane % 8 + lane / 16 * 8) * c.factor_pitch + lane / 8 % 2 * 8;
    for (int row = 0; row < depth; row += 16) {
      uint32_t b[4];
      load_matrices<true>(columns + row * c.x_pitch, b);
#pragma unroll
      for (int group = 0; group < kLoraRanks / 16; ++group) {
        if (group >= c.rank_groups) break;
        uint32_t a[4];
        load_matrices<true>(of_ranks + row * c.factor_pitch + 16 * group, a);
        multiply_tiles<T>(sums[group][0], a, {b[0], b[1]});
        multiply_tiles<T>(sums[group][1], a, {b[2], b[3]});
      }
    }
  };
  const StageRange range((p.rows + depth - 1) / depth, blockIdx.z, gridDim.z);
  for_stages(range.first, range.last, shared, c.bytes_of_stage, fetch, drop, multiply);

  float* const part = partials + int64_t{blockIdx.z} * p.rank * p.columns;
#pragma unroll
  for (int group = 0; group < kLoraRanks / 16; ++group) {
    if (group >= c.rank_groups) break;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int rank = first_rank + 16 * group + lane / 4 + k % 4 / 2 * 8;
      const int64_t column = first_column + own_column + k / 4 * 8 + lane % 4 * 2 + k % 2;
      if (rank >= p.rank || column >= p.columns) continue;
      const int64_t at = p.transposed ? column * p.rank + rank : rank * int64_t{p.columns} + column;
      part[at] = sums[group][k / 4][k % 4] * p.scale;
    }
  }
}

}  // namespace fusedcuda
