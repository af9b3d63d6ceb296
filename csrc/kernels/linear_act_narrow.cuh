// A layer of few inputs and many rows, as the first one of a DLRM: act(x @ weight.T + bias), bound
// by the write of the output.
//
// - A warp has 32 columns of the output, whose weights and biases stay in its registers, and takes
//   16 rows of x at a time. No shared memory, and no copies to padded rows: rows of x may start
//   anywhere and have any length up to 16.
// - The weights are columns of the products (mma.sync) in an order in which a thread's results are
//   eight neighbours: one store of 16 bytes, and one byte of a ReLU's mask.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/convert.cuh"
#include "common/gemm_activation.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "common/vec.cuh"
#include "linear_act.h"
#include "linear_act_config.h"

namespace fusedcuda {

template <typename T>
class NarrowRows {
 public:
  __device__ __forceinline__ NarrowRows(const LinearActParams& p, int64_t mask_stride,
                                        int64_t first_column)
      : p_(p),
        mask_stride_(mask_stride),
        column_(first_column),
        lane_(static_cast<int>(threadIdx.x) % kWarpSize) {}

  // Weights: of product i, lane l has row l / 4, which is column 8 (l / 8) + 2 i + l / 4 % 2.
  __device__ __forceinline__ void load_weights() {
    const int row = lane_ / 4;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int64_t column = column_ + row / 2 * 8 + i * 2 + row % 2;
#pragma unroll
      for (int high = 0; high < 2; ++high)
        weights_[i][high] = pair_of(p_.b, min(column, p_.n - 1), first_k(high));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int64_t column = column_of_thread() + j;
      const bool has_bias = p_.bias != nullptr && column < p_.n;
      bias_[j] = has_bias ? to_compute(static_cast<const T*>(p_.bias)[column]) : 0.0f;
    }
  }

  // Rows of x, as a factor: of row l / 4 and of row l / 4 + 8. Rows that do not exist are the last.
  using Factor = uint32_t[4];
  __device__ __forceinline__ void load(int64_t first_row, Factor& x) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t row = min(first_row + lane_ / 4 + j % 2 * 8, p_.m - 1);
      x[j] = pair_of(p_.a, row, first_k(j / 2));
    }
  }

  __device__ __forceinline__ void finish(int64_t first_row, const Factor& x) const {
    float sums[kProducts][4] = {};
#pragma unroll
    for (int i = 0; i < kProducts; ++i) multiply_tiles<T>(sums[i], x, weights_[i]);
    with_activation(p_.activation, [&](auto act) {
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        float z[8], y[8], derivative[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) z[j] = sums[j / 2][lower * 2 + j % 2] + bias_[j];
        act(z, y, derivative);
        store(first_row + lane_ / 4 + lower * 8, column_of_thread(), z, y, derivative);
      }
    });
  }

 private:
  static constexpr int kProducts = kNarrowColumns / 8;

  __device__ __forceinline__ int first_k(int high) const { return lane_ % 4 * 2 + high * 8; }
  // The first of eight.
  __device__ __forceinline__ int64_t column_of_thread() const { return column_ + lane_ % 4 * 8; }

  // Two neighbours of a row; zeros behind its end.
  __device__ __forceinline__ uint32_t pair_of(const GemmFactor& factor, int64_t row, int k) const {
    const uint16_t* const from = static_cast<const uint16_t*>(factor.data) + row * factor.stride;
    if (k >= p_.k) return 0;
    if (factor.stride % 2 == 0 && reinterpret_cast<uintptr_t>(factor.data) % 4 == 0 && k + 1 < p_.k)
      return *reinterpret_cast<const uint32_t*>(from + k);
    return from[k] | (k + 1 < p_.k ? static_cast<uint32_t>(from[k + 1]) << 16 : 0u);
  }

  static __device__ __forceinline__ void store(T* to, const float (&x)[8]) {
    store_words(to, {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(x[4], x[5]),
                     pack_pair<T>(x[6], x[7])});
  }

  __device__ __forceinline__ void store(int64_t row, int64_t column, const float (&z)[8],
                                        const float (&y)[8], const float (&derivative)[8]) const {
    if (row >= p_.m || column >= p_.n) return;
    store(static_cast<T*>(p_.output.data) + row * p_.output.stride + column, y);
    if (p_.saves == SavedForBackward::kMask) {
      unsigned bits = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) bits |= (z[j] <= 0.0f ? 0u : 1u) << j;
      static_cast<uint8_t*>(p_.saved)[row * mask_stride_ + column / 8] = static_cast<uint8_t>(bits);
    } else if (p_.saves == SavedForBackward::kDerivative) {
      store(static_cast<T*>(p_.saved) + row * p_.n + column, derivative);
    }
  }

  const LinearActParams& p_;
  const int64_t mask_stride_, column_;
  const int lane_;
  uint32_t weights_[kProducts][2];
  float bias_[8];
};

// A warp for each group of 32 columns and `strides` sets of rows, groups first: the warps of a
// block write whole rows.
template <typename T>
__global__ void __launch_bounds__(kNarrowThreads, kNarrowBlocksOfSm)
    linear_narrow_kernel(const __grid_constant__ LinearActParams p, int64_t mask_stride, int groups,
                         int strides) {
  const int warp = static_cast<int>((blockIdx.x * kNarrowThreads + threadIdx.x) / kWarpSize);
  const int64_t step = int64_t{strides} * 16;
  int64_t row = int64_t{warp / groups} * 16;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (warp / groups >= strides || row >= p.m) return;
  NarrowRows<T> rows(p, mask_stride, int64_t{warp % groups} * kNarrowColumns);
  typename NarrowRows<T>::Factor x, next;
  rows.load(row, next);
  rows.load_weights();
  for (; row < p.m; row += step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = next[j];
    if (row + step < p.m) rows.load(row + step, next);  // while these are multiplied
    rows.finish(row, x);
  }
}

}  // namespace fusedcuda
