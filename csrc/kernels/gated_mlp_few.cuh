// A gated MLP of few rows in two launches of products of few rows (common/few_rows.cuh):
//
//   h = act(x @ w_gate.T) * (x @ w_up.T),   y = h @ w_down.T
//
// A tile of the first one has eight rows of w_gate and the same of w_up, so that a thread has both
// sums of an element. Against one launch of everything (gated_mlp_decode.cuh) it takes the end of
// one kernel and the start of another, but up to 64 rows, and no block waits for all others.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.cuh"
#include "common/convert.cuh"
#include "common/few_rows.cuh"
#include "gated_mlp_few_config.h"
#include "linear_few.cuh"

namespace fusedcuda {

template <typename T>
class GatedFewResults {
 public:
  using Element = T;
  static constexpr bool kHasCommon = false;

  __device__ __forceinline__ explicit GatedFewResults(const GatedMlpDecodeParams& p) : p_(p) {}

  // For rows that do not exist the last one is read.
  __device__ __forceinline__ const T* row(int tile, int i) const {
    const GemmMatrix& weight = i < kPairs ? p_.w_gate : p_.w_up;
    const int row = min(tile * kPairs + i % kPairs, p_.f - 1);
    return static_cast<const T*>(weight.data) + row * weight.stride;
  }

  __device__ __forceinline__ void ask(const few_rows::OwnTiles&) const {}
  __device__ __forceinline__ void keep(const few_rows::OwnTiles&) const {}

  template <typename Block>
  __device__ __forceinline__ void finish(const Block& block, const few_rows::OwnTiles& own,
                                         int own_tile, int row_tile,
                                         const float (&sums)[2][4]) const {
    const int lane = block.lane(), column = own.tile(own_tile) * kPairs + lane % 4 * 2;
    float activated[4];
    activate</*kFast=*/true>(p_.activation, sums[0], activated);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = row_tile * 16 + lane / 4 + j / 2 * 8, at_column = column + j % 2;
      if (row < p_.m && at_column < p_.f)
        static_cast<T*>(p_.h)[int64_t{row} * p_.f + at_column] =
            from_compute<T>(activated[j] * sums[1][j]);
    }
  }

 private:
  static constexpr int kPairs = gated_mlp_few_detail::kPairs;

  const GatedMlpDecodeParams& p_;
};

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kFewRowsThreads, few_rows_blocks_of_sm(kRowTiles))
    gated_few_kernel(const __grid_constant__ GatedMlpDecodeParams p,
                     const __grid_constant__ few_rows::X x, const __grid_constant__ FewRowsConfig c,
                     int tiles) {
  GatedFewResults<T> results(p);
  few_rows::Block<GatedFewResults<T>, kRowTiles>(x, c, tiles, results).run();
}

// ------------------------------------------------------------------------------------------------
// Launcher
// ------------------------------------------------------------------------------------------------

namespace gated_mlp_few_detail {

template <typename T>
auto kernel_for(int row_tiles) {
  return row_tiles == 1   ? gated_few_kernel<T, 1>
         : row_tiles == 2 ? gated_few_kernel<T, 2>
                          : gated_few_kernel<T, 4>;
}

template <typename T>
cudaError_t run(const GatedMlpDecodeParams& p, const GatedMlpFewConfig& config,
                cudaStream_t stream) {
  const few_rows::X x = {p.x.data, p.x.stride, p.m, p.k};
  const cudaError_t status =
      few_rows::start(kernel_for<T>(config.hidden.row_tiles), config.hidden, stream, p, x,
                      config.hidden, static_cast<int>(hidden_problem(p).tiles));
  if (status != cudaSuccess) return status;
  LinearActParams down;
  down.dtype = p.dtype;
  down.m = p.m;
  down.n = p.n;
  down.k = p.f;
  down.a = {p.h, p.f, true};
  down.b = {p.w_down.data, p.w_down.stride, true};
  down.output = {p.y, p.n};
  return few_rows::run_linear<T>(down, config.output, stream);
}

}  // namespace gated_mlp_few_detail
}  // namespace fusedcuda
