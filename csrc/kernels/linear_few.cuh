// A linear layer of few rows (common/few_rows.cuh): act(x @ weight.T + bias).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/activation.cuh"
#include "common/convert.cuh"
#include "common/few_rows.cuh"
#include "linear_act.h"
#include "linear_few_config.h"

namespace fusedcuda {

// Of LinearActParams the weight, stored by rows, bias, activation and output.
template <typename T>
class LinearFewResults {
 public:
  using Element = T;
  static constexpr bool kHasCommon = false;

  __device__ __forceinline__ explicit LinearFewResults(const LinearActParams& p) : p_(p) {}

  __device__ __forceinline__ const T* row(int tile, int i) const {
    return row_of(p_.b, p_.n, int64_t{tile} * kFewRowsTile + i);
  }

  // The bias of the thread's row of the weight.
  __device__ __forceinline__ void ask(const few_rows::OwnTiles& own) {
    const int own_row = static_cast<int>(threadIdx.x);
    bias_ = from_compute<T>(0.0f);
    if (p_.bias == nullptr || own_row >= own.count * kFewRowsTile) return;
    const int64_t column = column_of(own, own_row);
    if (column < p_.n) bias_ = static_cast<const T*>(p_.bias)[column];
  }

  __device__ __forceinline__ void keep(const few_rows::OwnTiles& own) const {
    if (static_cast<int>(threadIdx.x) < own.count * kFewRowsTile)
      static_cast<float*>(own.memory)[threadIdx.x] = to_compute(bias_);
  }

  template <typename Block>
  __device__ __forceinline__ void finish(const Block& block, const few_rows::OwnTiles& own,
                                         int own_tile, int row_tile, float (&sums)[2][4]) const {
    const int lane = block.lane();
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store(own, own_tile * kFewRowsTile + half * 8 + lane % 4 * 2, row_tile * 16 + lane / 4,
            sums[half]);
  }

 protected:
  // For rows that do not exist the last one is read.
  static __device__ __forceinline__ const T* row_of(const GemmFactor& matrix, int64_t rows,
                                                    int64_t row) {
    return static_cast<const T*>(matrix.data) + min(row, rows - 1) * matrix.stride;
  }

  // Of the output: a row of the weight.
  static __device__ __forceinline__ int64_t column_of(const few_rows::OwnTiles& own, int own_row) {
    return int64_t{own.tile(own_row / kFewRowsTile)} * kFewRowsTile + own_row % kFewRowsTile;
  }

  const LinearActParams& p_;

 private:
  // `own_row`, and the next one, with `row` of x and the one eight below.
  __device__ __forceinline__ void store(const few_rows::OwnTiles& own, int own_row, int row,
                                        const float (&sums)[4]) const {
    const float* const bias = static_cast<const float*>(own.memory) + own_row;
    const float z[4] = {sums[0] + bias[0], sums[1] + bias[1], sums[2] + bias[0], sums[3] + bias[1]};
    float y[4];
    activate</*kFast=*/true>(p_.activation, z, y);
    T* const output = static_cast<T*>(p_.output.data);
    const int64_t column = column_of(own, own_row);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at_row = row + j / 2 * 8;
      if (at_row < p_.m && column + j % 2 < p_.n)
        output[at_row * p_.output.stride + column + j % 2] = from_compute<T>(y[j]);
    }
  }

  T bias_;
};

template <typename T, int kRowTiles>
__global__ void __launch_bounds__(kFewRowsThreads, few_rows_blocks_of_sm(kRowTiles))
    linear_few_kernel(const __grid_constant__ LinearActParams p,
                      const __grid_constant__ few_rows::X x,
                      const __grid_constant__ FewRowsConfig c, int tiles) {
  LinearFewResults<T> results(p);
  few_rows::Block<LinearFewResults<T>, kRowTiles>(x, c, tiles, results).run();
}

namespace few_rows {

inline X x_of(const LinearActParams& p) {
  return {p.a.data, p.a.stride, static_cast<int>(p.m), static_cast<int>(p.k)};
}

template <typename T>
auto linear_kernel(int row_tiles) {
  return row_tiles == 1   ? linear_few_kernel<T, 1>
         : row_tiles == 2 ? linear_few_kernel<T, 2>
                          : linear_few_kernel<T, 4>;
}

template <typename T>
cudaError_t run_linear(const LinearActParams& p, const FewRowsConfig& c, cudaStream_t stream) {
  return start(linear_kernel<T>(c.row_tiles), c, stream, p, x_of(p), c,
               static_cast<int>(linear_few_problem(p).tiles));
}

}  // namespace few_rows
}  // namespace fusedcuda
