// Kernels of RMSNorm and LayerNorm for rows of a few columns: a thread takes a whole row, or
// several at a time, and no other has to be waited for. Formulas: norm.cu, norm_bwd.cuh.
#pragma once

#include "norm_bwd.cuh"
#include "norm_config.h"
#include "norm_fwd.cuh"
#include "norm_parameter.cuh"

namespace fusedcuda {

template <int kMost>
constexpr int kNarrowRowsOf = kMost == 1 ? kNarrowRows : 1;

// kMost: the most columns.
template <typename T, int kMost>
__global__ void __launch_bounds__(kRowThreads)
    norm_narrow_kernel(const __grid_constant__ NormParams p) {
  using C = Compute<T>;
  constexpr int kRows = kNarrowRowsOf<kMost>;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRows * kRowThreads + thread;
  const int columns = kMost == 1 ? 1 : p.columns;
  const bool has_residual = p.residual.data != nullptr;

  wait_for_previous_kernel();
  C h[kRows][kMost] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * kRowThreads;
    if (row >= p.rows) continue;
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c < columns) h[r][c] = to_compute(row_of<T>(p.x, row)[c]);
    }
  }
  C weight[kMost], bias[kMost];
#pragma unroll
  for (int c = 0; c < kMost; ++c) {
    if (c >= columns) continue;
    weight[c] = load_parameter<T>(p.weight, c, static_cast<C>(p.weight_offset), C(1));
    bias[c] = load_parameter<T>(p.bias, c, C(0), C(0));
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * kRowThreads;
    if (row >= p.rows) continue;
    C sum = 0, squares = 0;
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c >= columns) continue;
      if (has_residual) {
        const T rounded = from_compute<T>(h[r][c] + to_compute(row_of<T>(p.residual, row)[c]));
        row_of<T>(p.sum, row)[c] = rounded;
        h[r][c] = to_compute(rounded);
      }
      sum += h[r][c];
    }
    const C mean = p.kind == NormKind::kLayer ? sum / static_cast<C>(p.columns) : C(0);
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c < columns) squares += (h[r][c] - mean) * (h[r][c] - mean);
    }
    const C rstd = rstd_of<T>(p, squares);
    store_statistics<C>(p, row, mean, rstd);
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c >= columns) continue;
      row_of<T>(p.y, row)[c] = from_compute<T>((h[r][c] - mean) * rstd * weight[c] + bias[c]);
    }
  }
}

// Blocks are persistent, and leave partial sums as norm_bwd_kernel does.
template <typename T, int kMost>
__global__ void __launch_bounds__(kRowThreads)
    norm_bwd_narrow_kernel(const __grid_constant__ NormBwdParams p, NormPartials partials) {
  using C = Compute<T>;
  constexpr int kRows = kNarrowRowsOf<kMost>;
  __shared__ C scratch[kRowThreads / kWarpSize];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int columns = kMost == 1 ? 1 : p.columns;
  const bool centered = p.kind == NormKind::kLayer;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows * kRowThreads;

  wait_for_previous_kernel();
  C weight[kMost], dweight[kMost] = {}, dbias[kMost] = {};
#pragma unroll
  for (int c = 0; c < kMost; ++c) {
    if (c >= columns) continue;
    weight[c] = load_parameter<T>(p.weight, c, static_cast<C>(p.weight_offset), C(1));
  }
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows * kRowThreads + thread;
       first < p.rows; first += step) {
    C h[kRows][kMost], dy[kRows][kMost];
    NormStatistics<C> statistics[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * kRowThreads;
      if (row >= p.rows) continue;
      statistics[r] =
          centered ? load_statistics<C, true>(p, row) : load_statistics<C, false>(p, row);
#pragma unroll
      for (int c = 0; c < kMost; ++c) {
        if (c >= columns) continue;
        h[r][c] = to_compute(row_of<T>(p.h, row)[c]);
        dy[r][c] = to_compute(row_of<T>(p.dy, row)[c]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * kRowThreads;
      if (row >= p.rows) continue;
      C a = 0, b = 0;
#pragma unroll
      for (int c = 0; c < kMost; ++c) {
        if (c >= columns) continue;
        const C n = (h[r][c] - statistics[r].mean) * statistics[r].rstd;
        a += dy[r][c] * weight[c] * n;
        b += dy[r][c] * weight[c];
        dweight[c] += dy[r][c] * n;
        dbias[c] += dy[r][c];
      }
      if (p.dx.data == nullptr) continue;
      const C count = static_cast<C>(p.columns);
      const NormGradient<C> gradient(statistics[r], a / count, centered ? b / count : C(0));
#pragma unroll
      for (int c = 0; c < kMost; ++c) {
        if (c >= columns) continue;
        C dx = gradient(h[r][c], dy[r][c] * weight[c]);
        if (p.dh.data != nullptr) dx += to_compute(row_of<T>(p.dh, row)[c]);
        row_of<T>(p.dx, row)[c] = from_compute<T>(dx);
      }
    }
  }
  let_next_kernel_start();
  auto store = [&](void* partial, const C(&sums)[kMost]) {
    if (partial == nullptr) return;
    C* mine = static_cast<C*>(partial) + static_cast<int64_t>(blockIdx.x) * p.columns;
#pragma unroll
    for (int c = 0; c < kMost; ++c) {
      if (c >= columns) break;
      const C sum = block_sum(sums[c], scratch, thread, kRowThreads);
      if (thread == 0) mine[c] = sum;
    }
  };
  store(partials.dweight, dweight);
  store(partials.dbias, dbias);
}

}  // namespace fusedcuda
