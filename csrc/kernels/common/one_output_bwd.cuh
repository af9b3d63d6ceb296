// The gradient of a linear layer of one output, given that of its output:
//
//   dx[m, k] = g[m] weight[k]      dweight[k] = sum_m g[m] x[m, k]      dbias = sum_m g[m]
//
// x is read once and dx is written once, and nothing else is of their size. A thread has kVec
// columns and every so many rows of its block: it adds up in registers, the block in shared memory,
// and what several blocks leave sum_partials_kernel adds up. All in a fixed order.
#pragma once

#include <cstdint>

#include "launch.h"
#include "one_output_bwd.h"
#include "reduce.cuh"
#include "row.cuh"
#include "sum_partials.cuh"

namespace fusedcuda {

// Of a block. `partial`: dweight and dbias have a row for each block, in the compute type.
struct OneOutputRows {
  int rows_of_block;
  bool partial;
};

// blockIdx.x: the columns, blockIdx.y: the rows. `g` has what it takes to know the gradient of a
// row's output: `load()` fetches it for some rows, `value()` of that is the gradient.
template <typename T, int kVec, typename G>
__device__ __forceinline__ void one_output_bwd(const OneOutputGradient& p,
                                               const OneOutputRows& rows, const G& g) {
  using C = Compute<T>;
  constexpr int kAhead = kOneOutputRowsAhead;
  __shared__ C scratch[kOneOutputThreads / kWarpSize];
  const int step = static_cast<int>(blockDim.y), thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int first_column = static_cast<int>(blockIdx.x * blockDim.x) * kVec;
  const int column = first_column + static_cast<int>(threadIdx.x) * kVec;
  const int64_t start = int64_t{blockIdx.y} * rows.rows_of_block;
  const int64_t left = p.rows - start;
  int count = left < rows.rows_of_block ? static_cast<int>(left) : rows.rows_of_block;
  if (column >= p.columns) count = 0;
  const bool has_dx = p.dx.data != nullptr, has_dweight = p.dweight != nullptr;
  C dweight[kVec] = {}, dbias = 0;
  int row = static_cast<int>(threadIdx.y);
  if (row < count) {
    Part<T, kVec> x[kAhead] = {};
    typename G::Loaded given[kAhead] = {};
    // Behind the last row the last one again: loads without a condition can all be under way.
    auto load = [&] {
      int64_t at[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) at[i] = start + min(row + i * step, count - 1);
      g.load(at, given);
      if (!has_dweight) return;
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
        x[i] = load_part<T, kVec>(row_of<const T>(p.x, at[i]) + column);
    };
    load();
    // Behind the first rows, which need not wait for it.
    C weight[kVec] = {};
    if (has_dx) {
      const T* const from = static_cast<const T*>(p.weight) + column * p.weight_step;
#pragma unroll
      for (int k = 0; k < kVec; ++k) weight[k] = to_compute(from[k * p.weight_step]);
    }
    for (;;) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (row + i * step >= count) break;
        const C gradient = g.value(given[i]);
        dbias += gradient;
        C values[kVec];
        unpack(x[i], values);
#pragma unroll
        for (int k = 0; k < kVec; ++k) dweight[k] += gradient * values[k];
        if (!has_dx) continue;
#pragma unroll
        for (int k = 0; k < kVec; ++k) values[k] = gradient * weight[k];
        T* const to = row_of<T>(p.dx, start + row + i * step) + column;
        store_part<kVec, T>(to, pack<T, kVec>(values));
      }
      row += kAhead * step;
      if (row >= count) break;
      load();
    }
  }
  auto store = [&](void* sums, int64_t values, int64_t index, C sum) {
    if (rows.partial) {
      static_cast<C*>(sums)[blockIdx.y * values + index] = sum;
    } else {
      static_cast<T*>(sums)[index] = from_compute<T>(sum);
    }
  };
  if (has_dweight) {
    const C sum = sum_block_columns<kOneOutputThreads>(dweight);
    const int own = first_column + thread;
    if (thread < static_cast<int>(blockDim.x) * kVec && own < p.columns)
      store(p.dweight, p.columns, own, sum);
  }
  if (p.dbias != nullptr && blockIdx.x == 0) {
    const C sum = block_sum(threadIdx.x == 0 ? dbias : C(0), scratch, thread, kOneOutputThreads);
    if (thread == 0) store(p.dbias, 1, 0, sum);
  }
}

// `Params` is a OneOutputGradient and what its kernel knows of the output's gradient.
template <typename T, typename Params>
cudaError_t run_one_output_bwd(void (*kernel)(Params, OneOutputRows), Params p,
                               const OneOutputConfig& config, void* workspace,
                               cudaStream_t stream) {
  const OneOutputRows rows = {config.rows_of_block, config.workspace_size > 0};
  SumPartialsParams sums = {};
  unsigned count = 0;
  auto* next = static_cast<Compute<T>*>(workspace);
  auto sum_apart = [&](void** gradient, int64_t values) {
    if (*gradient == nullptr || !rows.partial) return;
    sums.partials[count] = next;
    sums.outputs[count] = *gradient;
    sums.values[count] = values;
    sums.partials_per_value[count] = config.blocks;
    ++count;
    *gradient = next;
    next += config.blocks * values;
  };
  sum_apart(&p.dweight, p.columns);
  sum_apart(&p.dbias, 1);
  const dim3 grid(static_cast<unsigned>(config.column_tiles), static_cast<unsigned>(config.blocks));
  const dim3 block(config.threads_x, config.threads_y);
  const cudaError_t status = launch(kernel, grid, block, config.dependent_launch, stream, p, rows);
  if (status != cudaSuccess || count == 0) return status;
  return launch_sum_partials<T>(sums, count, config.sum_threads_along, config.dependent_launch,
                                stream);
}

}  // namespace fusedcuda
