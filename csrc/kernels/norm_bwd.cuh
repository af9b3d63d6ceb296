// Kernels of the backward of RMSNorm and LayerNorm:
//
//   n = (h - mean) * rstd, g = dy * (weight + offset)
//   dx = rstd * (g - n * avg(g * n) - avg(g)) + dh      (RMSNorm: without avg(g))
//   dweight = sum over the rows of dy * n, dbias = sum over the rows of dy
//
// One pass: h and dy are read once, dx is written once, 6 bytes an element for 16-bit types.
// Blocks are persistent and keep dweight and dbias in registers over all of their rows, while the
// next rows are on their way to shared memory. They leave partial sums, which sum_partials_kernel
// adds up in a fixed order.
//
// - norm_bwd_kernel: rows that stream through shared memory (row_pipeline.cuh);
// - norm_bwd_stream_kernel and norm_bwd_weight_kernel: dx and the parameters' gradients in two
//   passes, for what the other does not take.
#pragma once

#include "common/launch.h"
#include "common/row.cuh"
#include "common/row_pipeline.cuh"
#include "common/shared.cuh"
#include "common/sum_partials.cuh"
#include "norm_config.h"
#include "norm_parameter.cuh"

namespace fusedcuda {

// Partial sums [partials, columns] of Compute<T>; null: not wanted.
struct NormPartials {
  void* dweight = nullptr;
  void* dbias = nullptr;
};

template <typename C>
struct NormStatistics {
  C mean, rstd;
};

// kCentered: of LayerNorm. RMSNorm's mean is a constant 0, which the compiler then leaves out.
template <typename C, bool kCentered>
__device__ __forceinline__ NormStatistics<C> load_statistics(const NormBwdParams& p, int64_t row) {
  const C mean = kCentered ? static_cast<const C*>(p.mean)[row] : C(0);
  return {mean, static_cast<const C*>(p.rstd)[row]};
}

// What the averages of g * n and of g make of an element: with n = (h - mean) * rstd,
// rstd * (g - n * a - b). The averages are subtracted before anything is multiplied, so that equal
// numbers cancel: dx of a row of one column is exactly 0.
template <typename C>
struct NormGradient {
  C mean, rstd, slope, average;

  __device__ NormGradient(const NormStatistics<C>& s, C a, C b)
      : mean(s.mean), rstd(s.rstd), slope(s.rstd * a), average(b) {}

  __device__ C operator()(C h, C g) const { return rstd * ((g - average) - (h - mean) * slope); }
};

// The sums of the block's rows of threads become the block's partial sums of its columns. `shared`
// has room for kItems * kVec values a thread. Called by every thread of the block. In a cluster a
// block has one row.
template <typename T, int kItems, bool kClusters, typename Pipeline>
__device__ __forceinline__ void store_partials(const Pipeline& rows, Compute<T>* partials,
                                               void* shared,
                                               Compute<T> (&sums)[kItems][kVectorWidth<T>]) {
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  const int threads = blockDim.x * blockDim.y;
  C* mine = static_cast<C*>(shared) + threadIdx.y * blockDim.x + rows.thread();
  const bool many_rows = !kClusters && blockDim.y > 1;
  if (many_rows) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) mine[(i * kVec + j) * threads] = sums[i][j];
    }
    __syncthreads();
  }
  if (threadIdx.y > 0) return;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
#pragma unroll 1  // 32 sums are unrolled already
      for (int y = 1; many_rows && y < blockDim.y; ++y) {
        sums[i][j] += mine[(i * kVec + j) * threads + y * blockDim.x];
      }
      if (rows.has(i, j)) partials[rows.first() + rows.column(i, j)] = sums[i][j];
    }
  }
}

// The threads of a block of norm_bwd_kernel. Of LayerNorm's rows in phases two of 4097 columns, 288
// threads each, share a block, or two blocks of a cluster that hold half of 8193 share an SM.
constexpr int bwd_threads(RowAccess access, bool centered) {
  const bool is_large = access == RowAccess::kPhased && centered;
  return is_large ? kPhasedLayerNormBwdThreads : kRowThreads;
}

// `values` from `begin` on, up to `end`, become 0; those below 0 are not there.
template <typename C>
__device__ __forceinline__ void fill_with_zeros(C* values, int begin, int end) {
  for (int i = begin + threadIdx.y * blockDim.x + threadIdx.x; i < end;
       i += blockDim.x * blockDim.y) {
    if (i >= 0) values[i] = 0;
  }
}

// 128 registers: h, g and the sums of four vectors of 16-bit elements take 80. With the second sum
// of LayerNorm, in rows that need so many vectors, dy is kept in place of g.
template <typename T, int kItems, RowAccess kAccess, bool kCentered, bool kClusters>
__global__ void __launch_bounds__(bwd_threads(kAccess, kCentered), 1)
    norm_bwd_kernel(const __grid_constant__ NormBwdParams p, NormPartials partials, int stages,
                    int phases) {
  using C = Compute<T>;
  constexpr int kVec = kVectorWidth<T>;
  constexpr bool kPhased = kAccess == RowAccess::kPhased;
  constexpr bool kShifted = kAccess == RowAccess::kShifted;
  constexpr bool kKeepsDy = kCentered && kItems > kLayerNormBwdItems;
  using Sums = std::conditional_t<kCentered, Pair<C>, C>;
  enum { kH, kDy, kDh };

  using Reduction = RowReduction<Sums, kClusters>;
  const unsigned cluster = kClusters ? cluster_size() : 1;
  const bool has_dh = p.dh.data != nullptr;

  SharedMemory shared;
  Reduction reduction(shared.take(Reduction::scratch_bytes()));
  const RowParameter<T, kItems> weight(shared.take(RowParameter<T, kItems>::bytes()));
  void* const streams = shared.rest();
  const unsigned rank = kClusters ? cluster_rank() : 0;
  RowPipeline<T, kItems, kAccess> rows(streams, stages, has_dh ? 3 : 2, p.columns, rank);
  using Index = std::conditional_t<kPhased || kKeepsDy, int, int64_t>;
  RowSets<kAccess, Index> all(p.rows, blockIdx.x / cluster, gridDim.x / cluster, phases);

  wait_for_previous_kernel();
  do {
    const RowSegment<Index> sets = all.segment();
    if constexpr (kPhased) {
      __syncthreads();  // everybody is done with the last one's
      rows.begin_segment(p.h, sets.phase, p.columns, rank);
    }
    auto row_of_set = [&](Index set) -> Index {
      if constexpr (kKeepsDy) return set;  // of a cluster
      return kPhased ? sets.row(set) : static_cast<Index>(set * blockDim.y + threadIdx.y);
    };
    auto fetch = [&](Index set) {
      rows.synchronize();  // everybody has read what the slots held
      const Index row = row_of_set(set);
      if (row < p.rows && (!kPhased || set < sets.end)) {
        rows.fetch(kH, p.h, row);
        rows.fetch(kDy, p.dy, row);
        if (has_dh) rows.fetch(kDh, p.dh, row);
      }
      rows.commit();  // also where there is nothing to copy: wait() counts
    };
    for (int s = 0; s < stages; ++s) {
      fetch(sets.begin + s * sets.step);
      rows.advance();
    }
    weight.fill(p.weight, rows, static_cast<C>(p.weight_offset), C(1));
    __syncthreads();

    C dweight[kItems][kVec] = {}, dbias[kCentered ? kItems : 1][kVec] = {};
    auto statistics_of = [&](Index set) {
      const Index row = row_of_set(set);
      if (row < p.rows) return load_statistics<C, kCentered>(p, row);
      return NormStatistics<C>{0, 0};
    };
    NormStatistics<C> next = statistics_of(sets.begin);
    for (Index set = sets.begin; set < sets.end; set += sets.step) {
      const Index row = row_of_set(set);
      const bool exists = row < p.rows;
      if constexpr (kKeepsDy) next = statistics_of(set);  // no registers for those of two rows
      const NormStatistics<C> statistics = {kCentered ? next.mean : C(0), next.rstd};
      if constexpr (!kKeepsDy) next = statistics_of(set + sets.step);
      rows.wait();
      Packed<T> h[kItems], dy[kKeepsDy ? kItems : 1];
      C g[kKeepsDy ? 1 : kItems][kVec];
      Pair<C> sums = {0, 0};
      if (exists) {
        const unsigned shift_h = rows.shift_of(p.h, row), shift_dy = rows.shift_of(p.dy, row);
        rows.clear_ends(kH, shift_h);
        rows.clear_ends(kDy, shift_dy);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          // In rows of few vectors whole warps have no last one.
          if (kPhased && i > 0 && i == kItems - 1 && !rows.has(i)) continue;
          h[i] = rows.read(kH, i, shift_h);
          Packed<T>& of_dy = dy[kKeepsDy ? i : 0];
          of_dy = rows.read(kDy, i, shift_dy);
          C x[kVec], d[kVec], w[kVec];
          unpack<T, kVec>(h[i], x);
          unpack<T, kVec>(of_dy, d);
          weight.load(i, w);
#pragma unroll
          for (int j = 0; j < kVec; ++j) {
            const C n = (x[j] - statistics.mean) * statistics.rstd;
            const C product = d[j] * w[j];
            sums.a += product * n;
            sums.b += product;
            dweight[i][j] += d[j] * n;
            if constexpr (kCentered) dbias[i][j] += d[j];
            if constexpr (!kKeepsDy) g[i][j] = product;
          }
          h[i].forget_unpacked();
          if constexpr (kKeepsDy) of_dy.forget_unpacked();
        }
      } else if (kShifted) {
        for (Packed<T>& v : h) v = {};
      }
      if (!has_dh) fetch(set + stages * sets.step);  // else dh waits in the slots

      const C count = static_cast<C>(p.columns);
      if constexpr (kCentered) {
        sums = reduction.sum(sums);
      } else {
        sums = {reduction.sum(sums.a), 0};
      }
      const NormGradient<C> gradient(statistics, sums.a / count, sums.b / count);
      if (exists && p.dx.data != nullptr) {
        const unsigned shift_dh = has_dh ? rows.shift_of(p.dh, row) : 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (kPhased && i > 0 && i == kItems - 1 && !rows.has(i)) continue;
          C x[kVec], d[kVec];
          unpack<T, kVec>(h[i], x);
          if constexpr (kKeepsDy) {
            C w[kVec];
            unpack<T, kVec>(dy[i], d);
            weight.load(i, w);
#pragma unroll
            for (int j = 0; j < kVec; ++j) x[j] = gradient(x[j], d[j] * w[j]);
          } else {
#pragma unroll
            for (int j = 0; j < kVec; ++j) x[j] = gradient(x[j], g[i][j]);
          }
          if (has_dh) {
            unpack<T, kVec>(rows.read(kDh, i, shift_dh), d);
#pragma unroll
            for (int j = 0; j < kVec; ++j) x[j] += d[j];
          }
          h[i] = pack<T, kVec>(x);
        }
        if constexpr (!kShifted) rows.write(p.dx, row, h);
      }
      if constexpr (kShifted) {
        // The threads of a warp exchange their ends, also with those whose row does not exist.
        if (p.dx.data != nullptr) rows.write(p.dx, row, h, exists);
      }
      if (has_dh) fetch(set + stages * sets.step);
      rows.advance();
    }
    if (!kPhased) let_next_kernel_start();
    copy_async_wait<0>();
    auto store = [&](void* partial, auto& sums) {
      if (partial == nullptr) return;
      // Counted again: the number of the group would be kept for this, and there is no register.
      const int64_t group = (blockIdx.x - rank) / cluster;
      C* place = static_cast<C*>(partial) + all.place(group) * p.columns;
      if (all.leaves_gap()) {
        fill_with_zeros(place - p.columns, rows.first(), rows.first() + rows.length());
      }
      store_partials<T, kItems, kClusters>(rows, place, streams, sums);
    };
    store(partials.dweight, dweight);
    if constexpr (kCentered) store(partials.dbias, dbias);
  } while (all.advance());
}

// dx alone, a block a row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    norm_bwd_stream_kernel(const __grid_constant__ NormBwdParams p) {
  using C = Compute<T>;
  RowReduction<Pair<C>> reduction(dynamic_shared());
  const int64_t row = blockIdx.x;
  const T* h = row_of<T>(p.h, row);
  const T* dy = row_of<T>(p.dy, row);
  const bool centered = p.kind == NormKind::kLayer;

  wait_for_previous_kernel();
  const NormStatistics<C> statistics =
      centered ? load_statistics<C, true>(p, row) : load_statistics<C, false>(p, row);
  auto g_of = [&](int column) {
    const C w = load_parameter<T>(p.weight, column, static_cast<C>(p.weight_offset), C(1));
    return to_compute(dy[column]) * w;
  };
  Pair<C> sums = {0, 0};
  for (int column = threadIdx.x; column < p.columns; column += blockDim.x) {
    const C g = g_of(column);
    sums.a += g * (to_compute(h[column]) - statistics.mean) * statistics.rstd;
    sums.b += g;
  }
  sums = reduction.sum(sums);
  const C count = static_cast<C>(p.columns);
  const NormGradient<C> gradient(statistics, sums.a / count, centered ? sums.b / count : C(0));
  for (int column = threadIdx.x; column < p.columns; column += blockDim.x) {
    C dx = gradient(to_compute(h[column]), g_of(column));
    if (p.dh.data != nullptr) dx += to_compute(row_of<T>(p.dh, row)[column]);
    row_of<T>(p.dx, row)[column] = from_compute<T>(dx);
  }
}

// Partial sums of the parameters' gradients: blockDim.x columns, blockDim.y rows at a time.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    norm_bwd_weight_kernel(const __grid_constant__ NormBwdParams p, NormPartials partials) {
  using C = Compute<T>;
  __shared__ C shared[kRowThreads];
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  Pair<C> sums = {0, 0};
  wait_for_previous_kernel();
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  if (column < p.columns) {
    for (int64_t row = blockIdx.y * blockDim.y + threadIdx.y; row < p.rows; row += step) {
      const C d = to_compute(row_of<T>(p.dy, row)[column]);
      const C h = to_compute(row_of<T>(p.h, row)[column]);
      const NormStatistics<C> statistics = p.kind == NormKind::kLayer
                                               ? load_statistics<C, true>(p, row)
                                               : load_statistics<C, false>(p, row);
      sums.a += d * (h - statistics.mean) * statistics.rstd;
      sums.b += d;
    }
  }
  auto store = [&](void* partial, C sum) {
    if (partial == nullptr) return;
    __syncthreads();
    shared[threadIdx.y * blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= p.columns) return;
    for (int y = 1; y < blockDim.y; ++y) sum += shared[y * blockDim.x + threadIdx.x];
    static_cast<C*>(partial)[static_cast<int64_t>(blockIdx.y) * p.columns + column] = sum;
  };
  store(partials.dweight, sums.a);
  store(partials.dbias, sums.b);
}

}  // namespace fusedcuda
