// Kernels of the forward of RMSNorm and LayerNorm. Formulas and sources: norm.cu.
#pragma once

#include "common/launch.h"
#include "common/row.cuh"
#include "common/row_pipeline.cuh"
#include "common/shared.cuh"
#include "norm_config.h"
#include "norm_parameter.cuh"

namespace fusedcuda {

template <typename T>
__device__ __forceinline__ Compute<T> rstd_of(const NormParams& p, Compute<T> sum_of_squares) {
  using C = Compute<T>;
  const C variance = sum_of_squares / static_cast<C>(p.columns) + static_cast<C>(p.eps);
  // The approximation is off by up to two units in the last place of float32.
  if constexpr (sizeof(T) == 2) return rsqrtf(variance);
  return C(1) / sqrt(variance);
}

template <typename C>
__device__ __forceinline__ void store_statistics(const NormParams& p, int64_t row, C mean, C rstd) {
  if (p.mean != nullptr) static_cast<C*>(p.mean)[row] = mean;
  if (p.rstd != nullptr) static_cast<C*>(p.rstd)[row] = rstd;
}

// h = x + residual, rounded.
template <typename T>
__device__ __forceinline__ Packed<T> add(const Packed<T>& x, const Packed<T>& residual) {
  constexpr int kVec = kVectorWidth<T>;
  Compute<T> a[kVec], b[kVec];
  unpack<T, kVec>(x, a);
  unpack<T, kVec>(residual, b);
#pragma unroll
  for (int j = 0; j < kVec; ++j) a[j] += b[j];
  return pack<T, kVec>(a);
}

// Sum of the elements, and of their squared distances from `mean`, over a thread's vectors. `rows`
// knows which elements belong to the row; the others are 0. What LayerNorm has unpacked of aligned
// rows it keeps: there is just room for it in 64 registers.
template <typename T, typename Rows, int kItems>
__device__ __forceinline__ Compute<T> sum_of(Packed<T> (&h)[kItems]) {
  constexpr int kVec = kVectorWidth<T>;
  Compute<T> sum = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    Compute<T> x[kVec];
    unpack<T, kVec>(h[i], x);
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += x[j];
    if (!Rows::kKeepsUnpacked) h[i].forget_unpacked();
  }
  return sum;
}

template <typename T, bool kCentered, int kItems, typename Rows>
__device__ __forceinline__ Compute<T> squares_of(Packed<T> (&h)[kItems], const Rows& rows,
                                                 Compute<T> mean) {
  constexpr int kVec = kVectorWidth<T>;
  Compute<T> squares = 0;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    Compute<T> x[kVec];
    unpack<T, kVec>(h[i], x);
    if (!kCentered || rows.has_all(i)) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) squares += (x[j] - mean) * (x[j] - mean);
    } else if (!Rows::kIsAligned) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        squares += rows.has(i, j) ? (x[j] - mean) * (x[j] - mean) : Compute<T>(0);
      }
    }
    if (!kCentered || !Rows::kKeepsUnpacked) h[i].forget_unpacked();
  }
  return squares;
}

// A row in the registers of its threads. Blocks come and go: at least two are on an SM, and while
// one reduces the others load or store. A single vector leaves registers to spare (kEarly), so its
// parameters arrive while the row is reduced.
template <typename T, int kItems, bool kAligned, bool kResidual, bool kCentered>
__global__ void __launch_bounds__(kRowThreads, 2)
    norm_kernel(const __grid_constant__ NormParams p) {
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  constexpr bool kEarly = kItems == 1;
  RowReduction<C, false> reduction(dynamic_shared());
  const int64_t wanted = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = wanted < p.rows;  // the last block's missing rows repeat the last one
  const int64_t row = exists ? wanted : p.rows - 1;
  const T* x = row_of<T>(p.x, row);
  using Slice = RowSlice<T, kItems, kAligned>;
  const Slice slice(x, p.columns, 0);

  wait_for_previous_kernel();
  Packed<T> h[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) h[i] = slice.load(p.x, x, i);
  C weight[kVec], bias[kVec];
  auto load_parameters = [&](int i) {
    slice.load_parameter(p.weight.data, p.weight.is_float32, i, C(1), weight);
    if constexpr (kCentered) slice.load_parameter(p.bias.data, p.bias.is_float32, i, C(0), bias);
  };
  if constexpr (kEarly) load_parameters(0);
  if (kResidual && p.residual.data != nullptr) {
    // Two vectors at a time: all of them would take twice the registers.
    constexpr int kBatch = kItems > 1 ? 2 : 1;
    const T* residual = row_of<T>(p.residual, row);
#pragma unroll
    for (int first = 0; first < kItems; first += kBatch) {
      Packed<T> r[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) r[i] = slice.load(p.residual, residual, first + i);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        h[first + i] = add<T>(h[first + i], r[i]);
        if (exists) slice.store(row_of<T>(p.sum, row), first + i, h[first + i]);
      }
    }
  }

  C mean = 0;
  if constexpr (kCentered) mean = reduction.sum(sum_of<T, Slice>(h)) / static_cast<C>(p.columns);
  const C rstd = rstd_of<T>(p, reduction.sum(squares_of<T, kCentered>(h, slice, mean)));
  let_next_kernel_start();
  if (!exists) return;
  if (threadIdx.x == 0) store_statistics<C>(p, row, mean, rstd);
  T* y = row_of<T>(p.y, row);
  const C offset = static_cast<C>(p.weight_offset);  // of RMSNorm only
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if constexpr (!kEarly) load_parameters(i);
    C a[kVec];
    unpack<T, kVec>(h[i], a);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if constexpr (kCentered) {
        a[j] = (a[j] - mean) * (rstd * weight[j]) + bias[j];
      } else {
        a[j] = a[j] * rstd * (weight[j] + offset);
      }
    }
    slice.store(y, i, pack<T, kVec>(a));
  }
}

// A row in the blocks of a cluster, which are persistent: the next rows are on their way to shared
// memory (row_pipeline.cuh) while the blocks wait for each other. Clusters that come and go, as
// the blocks of norm_kernel do, took 10 to 20 % longer: a cluster starts only when all of its
// blocks find room. Rows in phases come here also where a block holds them: the parameters then lie
// in shared memory as the rows do, and are not read element by element.
template <typename T, int kItems, RowAccess kAccess, bool kCentered>
__global__ void __launch_bounds__(kAccess == RowAccess::kShifted ? kUnalignedRowThreads
                                                                 : kWideRowThreads,
                                  kAccess == RowAccess::kShifted ? 2 : 1)
    norm_pipeline_kernel(const __grid_constant__ NormParams p, int stages, int phases) {
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  constexpr bool kPhased = kAccess == RowAccess::kPhased;
  enum { kX, kResidual };

  const int64_t group = blockIdx.x / cluster_size();
  const int64_t groups = gridDim.x / cluster_size();
  const bool has_residual = p.residual.data != nullptr;

  SharedMemory shared;
  RowReduction<C> reduction(shared.take(RowReduction<C>::scratch_bytes()));
  const RowParameter<T, kItems> weight(shared.take(RowParameter<T, kItems>::bytes()));
  const RowParameter<T, kItems> bias(kCentered ? shared.take(RowParameter<T, kItems>::bytes())
                                               : nullptr);
  using Pipeline = RowPipeline<T, kItems, kAccess>;
  Pipeline rows(shared.rest(), stages, has_residual ? 2 : 1, p.columns, cluster_rank());
  using Index = std::conditional_t<kPhased, int, int64_t>;
  RowSets<kAccess, Index> all(p.rows, group, groups, phases);

  wait_for_previous_kernel();
  do {
    const RowSegment<Index> sets = all.segment();
    if constexpr (kPhased) {
      __syncthreads();  // everybody has read the parameters of the last one
      rows.begin_segment(p.x, sets.phase, p.columns, cluster_rank());
    }
    // A cluster has one row at a time. Of several in a block the last set's may not exist.
    auto row_of_set = [&](Index set) { return kPhased ? sets.row(set) : set; };
    auto fetch = [&](Index set) {
      rows.synchronize();  // everybody has read what the slots held
      const Index row = row_of_set(set);
      if (set < sets.end && (!kPhased || row < p.rows)) {
        rows.fetch(kX, p.x, row);
        if (has_residual) rows.fetch(kResidual, p.residual, row);
      }
      rows.commit();  // also where there is nothing to copy: wait() counts
    };
    for (int s = 0; s < stages; ++s) {
      fetch(sets.begin + s * sets.step);
      rows.advance();
    }
    weight.fill(p.weight, rows, static_cast<C>(p.weight_offset), C(1));
    if constexpr (kCentered) bias.fill(p.bias, rows, C(0), C(0));
    __syncthreads();

    for (Index set = sets.begin; set < sets.end; set += sets.step) {
      const Index row = row_of_set(set);
      const bool exists = !kPhased || row < p.rows;
      rows.wait();
      Packed<T> h[kItems];
      if (exists) {
        const unsigned shift = rows.shift_of(p.x, row);
        rows.clear_ends(kX, shift);
#pragma unroll
        for (int i = 0; i < kItems; ++i) h[i] = rows.read(kX, i, shift);
        if (has_residual) {
          const unsigned shift_r = rows.shift_of(p.residual, row);
          rows.clear_ends(kResidual, shift_r);
#pragma unroll
          for (int i = 0; i < kItems; ++i) h[i] = add<T>(h[i], rows.read(kResidual, i, shift_r));
          rows.write(p.sum, row, h);
        }
      } else {
        for (Packed<T>& v : h) v = {};
      }
      fetch(set + stages * sets.step);

      C mean = 0;
      if constexpr (kCentered)
        mean = reduction.sum(sum_of<T, Pipeline>(h)) / static_cast<C>(p.columns);
      const C rstd = rstd_of<T>(p, reduction.sum(squares_of<T, kCentered>(h, rows, mean)));
      if (exists) {
        if (threadIdx.x == 0 && cluster_rank() == 0) store_statistics<C>(p, row, mean, rstd);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (kPhased && i > 0 && !rows.has(i)) continue;  // whole warps, in rows of few vectors
          C a[kVec], w[kVec], b[kVec] = {};
          unpack<T, kVec>(h[i], a);
          weight.load(i, w);
          if constexpr (kCentered) bias.load(i, b);
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            a[j] = (a[j] - mean) * rstd * w[j];
            if constexpr (kCentered) a[j] += b[j];
          }
          h[i] = pack<T, kVec>(a);
        }
        rows.write(p.y, row, h);
      }
      rows.advance();
    }
    copy_async_wait<0>();
  } while (all.advance());
  let_next_kernel_start();
}

// A thread reads back only what it has written itself, so no barrier is needed for the sum.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    norm_stream_kernel(const __grid_constant__ NormParams p) {
  using C = Compute<T>;
  RowReduction<C> reduction(dynamic_shared());
  const int64_t row = blockIdx.x;
  const bool has_residual = p.residual.data != nullptr;
  const T* x = row_of<T>(p.x, row);
  const T* h = has_residual ? row_of<T>(p.sum, row) : x;

  wait_for_previous_kernel();
  C sum = 0;
  for (int column = threadIdx.x; column < p.columns; column += blockDim.x) {
    if (has_residual) {
      const C r = to_compute(row_of<T>(p.residual, row)[column]);
      row_of<T>(p.sum, row)[column] = from_compute<T>(to_compute(x[column]) + r);
    }
    sum += to_compute(h[column]);
  }
  C mean = 0, squares = 0;
  if (p.kind == NormKind::kLayer) mean = reduction.sum(sum) / static_cast<C>(p.columns);
  for (int column = threadIdx.x; column < p.columns; column += blockDim.x) {
    const C d = to_compute(h[column]) - mean;
    squares += d * d;
  }
  const C rstd = rstd_of<T>(p, reduction.sum(squares));
  if (threadIdx.x == 0) store_statistics<C>(p, row, mean, rstd);
  for (int column = threadIdx.x; column < p.columns; column += blockDim.x) {
    const C w = load_parameter<T>(p.weight, column, static_cast<C>(p.weight_offset), C(1));
    const C b = load_parameter<T>(p.bias, column, C(0), C(0));
    const C y = (to_compute(h[column]) - mean) * rstd * w + b;
    row_of<T>(p.y, row)[column] = from_compute<T>(y);
  }
}

}  // namespace fusedcuda
