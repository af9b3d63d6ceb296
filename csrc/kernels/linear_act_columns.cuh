// The sums of columns, dbias: of dy, or of dz in the pass that makes it.
//
//   dz[m, n] = dy[m, n] * act'(z[m, n]), rounded      dbias[n] = sum over m of dz[m, n]
//
// Memory: dy and what was saved once, dz once. A sum apart would read dz again: 8192 x 3072 bf16
// took torch's 30 us beside 35 for dz.
//
// A block has some columns and every so many rows of them. A thread adds up its rows in registers,
// the block its threads through shared memory; what the slices leave, sum_partials_kernel adds up.
// All in the compute type and in a fixed order.
#pragma once

#include "common/reduce.cuh"
#include "common/row_launch.cuh"
#include "common/sum_partials.cuh"
#include "linear_act_columns_config.h"
#include "linear_act_rows.cuh"

namespace fusedcuda {

struct ColumnSumsKernelParams {
  const void* input;
  const void* saved;
  void* output;    // or null
  void* sums;      // [batch, n] of T; null: there are slices
  void* partials;  // [slices, batch, n] of the compute type
  int64_t m, n;    // of a matrix
  int64_t batch, column_blocks;
  int64_t input_stride, output_stride, saved_stride;  // saved: bytes of a mask, or elements
  Activation activation;
};

// The sums of the block's threads, kVec of each, added up and stored as those of the columns from
// `first` on.
template <typename T, int kVec>
__device__ __forceinline__ void store_column_sums(const ColumnSumsKernelParams& p,
                                                  const Compute<T> (&sums)[kVec], int64_t matrix,
                                                  int64_t first) {
  const Compute<T> sum = sum_block_columns<kColumnSumsThreads>(sums);
  const int along = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.y) * along + static_cast<int>(threadIdx.x);
  const int64_t column = first + thread;
  if (thread >= along * kVec || column >= p.n) return;
  const int64_t index = matrix * p.n + column;
  if (p.sums != nullptr) {
    static_cast<T*>(p.sums)[index] = from_compute<T>(sum);
  } else {
    static_cast<Compute<T>*>(p.partials)[blockIdx.y * p.batch * p.n + index] = sum;
  }
}

// blockIdx.x has the matrix and the columns, blockIdx.y the slice. kNone: the sums of the input.
template <typename T, int kVec, SavedForBackward kSaves>
__device__ __forceinline__ void sum_columns(const ColumnSumsKernelParams& p) {
  constexpr int kAhead = kRowsAhead<kSaves>;
  constexpr bool kIsInput = kSaves == SavedForBackward::kNone;
  const int64_t matrix = blockIdx.x / static_cast<unsigned>(p.column_blocks);
  const int64_t first = (blockIdx.x - matrix * p.column_blocks) * (blockDim.x * kVec);
  const int64_t column = first + threadIdx.x * kVec;
  const int64_t step = int64_t{gridDim.y} * blockDim.y;
  int64_t row = matrix * p.m + int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  const int64_t end = column < p.n ? (matrix + 1) * p.m : 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  Compute<T> sums[kVec] = {};
  for (; row < end; row += kAhead * step) {
    Part<T, kVec> dy[kAhead];
    decltype(load_saved<T, kVec, kSaves>(nullptr, 0, 0, 0)) saved[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t r = row + i * step;
      if (r >= end) continue;
      dy[i] = load_part<T, kVec>(static_cast<const T*>(p.input) + r * p.input_stride + column);
      if constexpr (!kIsInput)
        saved[i] = load_saved<T, kVec, kSaves>(p.saved, p.saved_stride, r, column);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t r = row + i * step;
      if (r >= end) continue;
      Compute<T> values[kVec], dz[kVec];
      unpack(dy[i], values);
      if constexpr (!kIsInput) {
        act_gradient<T, kSaves>(p.activation, values, saved[i], column, dz);
        const Part<T, kVec> rounded = pack<T, kVec>(dz);
        if (p.output != nullptr)
          store_part<kVec>(static_cast<T*>(p.output) + r * p.output_stride + column, rounded);
        unpack(rounded, values);  // what the products read
      }
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += values[j];
    }
  }
  store_column_sums<T>(p, sums, matrix, first);
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kColumnSumsThreads, kColumnSumsBlocksOfSm)
    column_sums_kernel(const __grid_constant__ ColumnSumsKernelParams params) {
  sum_columns<T, kVec, SavedForBackward::kNone>(params);
}

template <typename T, SavedForBackward kSaves, int kVec>
__global__ void __launch_bounds__(kColumnSumsThreads, kColumnSumsBlocksOfSm)
    act_rows_bwd_sum_kernel(const __grid_constant__ ColumnSumsKernelParams params) {
  sum_columns<T, kVec, kSaves>(params);
}

namespace linear_act {

using ColumnSumsKernel = void (*)(ColumnSumsKernelParams);

template <typename T, int kVec>
ColumnSumsKernel column_sums_kernel_for(SavedForBackward saves) {
  switch (saves) {
    case SavedForBackward::kNone:
      return column_sums_kernel<T, kVec>;
    case SavedForBackward::kMask:
      return act_rows_bwd_sum_kernel<T, SavedForBackward::kMask, kVec>;
    case SavedForBackward::kDerivative:
      return act_rows_bwd_sum_kernel<T, SavedForBackward::kDerivative, kVec>;
    default:
      return act_rows_bwd_sum_kernel<T, SavedForBackward::kPreActivation, kVec>;
  }
}

template <typename T>
cudaError_t run_column_sums(const ColumnSumsParams& p, const ColumnSumsConfig& config,
                            void* workspace, cudaStream_t stream) {
  const ActRowsParams& rows = p.rows;
  const bool is_mask = rows.saves == SavedForBackward::kMask;
  ColumnSumsKernelParams params = {};
  params.input = rows.input.data;
  params.saved = rows.saved;
  params.output = rows.output.data;
  if (config.slices > 1) {
    params.partials = workspace;
  } else {
    params.sums = p.sums;
  }
  params.m = rows.m / p.batch;
  params.n = rows.n;
  params.batch = p.batch;
  params.column_blocks = config.column_blocks;
  params.input_stride = rows.input.stride;
  params.output_stride = rows.output.stride;
  params.saved_stride = is_mask ? mask_row_bytes(rows.n) : rows.n;
  params.activation = rows.activation;
  const dim3 grid(static_cast<unsigned>(config.column_blocks * p.batch),
                  static_cast<unsigned>(config.slices));
  const dim3 block(config.threads_along, config.rows_of_block());
  const ColumnSumsKernel kernel = config.vectors
                                      ? column_sums_kernel_for<T, kVectorWidth<T>>(rows.saves)
                                      : column_sums_kernel_for<T, 1>(rows.saves);
  const cudaError_t status = launch(kernel, grid, block, rows.dependent, stream, params);
  if (status != cudaSuccess || config.slices == 1) return status;
  SumPartialsParams finish = {};
  finish.partials[0] = workspace;
  finish.outputs[0] = p.sums;
  finish.values[0] = p.batch * rows.n;
  finish.partials_per_value[0] = config.slices;
  return launch_sum_partials<T>(finish, 1, kWarpSize, rows.dependent, stream);
}

}  // namespace linear_act
}  // namespace fusedcuda
