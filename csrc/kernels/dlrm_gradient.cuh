// The gradient of a table: gradient[r] is the sum of grad[i] over all i with indices[i] == r, in
// the order of i. The indices are sorted by row (dlrm_sort.cuh), so that what belongs to a row is a
// run of neighbours, which is added up from memory and rounded once. Of 65536 x 26 indices into
// [260000, 16] in bf16: 55 MB of grad, 8 of the gradient, 27 of indices, which are read twice, and
// 68 of sorted items, most of them in the L2.
//
// A run may be one item or all of them, so the work is divided by items instead: a piece of
// kRunItems. Runs inside a piece are finished there. The one that comes in from the piece before
// and the one that goes on into the next leave a partial sum each, and these, in the order of the
// pieces, are again rows and values that are sorted by row: the next level's. So the sums form a
// tree whose shape is given by the number of items and where the runs end, and the longest run
// takes as long as any other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/launch.h"
#include "common/vec.cuh"
#include "dlrm_gradient.h"
#include "dlrm_sort.cuh"

namespace fusedcuda {

struct RunSumParams {
  int64_t items;
  int64_t columns;
  const IndexedRow* sorted;  // the first level: an item's row, and which of the values is its own
  const uint32_t* rows;      // further levels: an item's row, or kNoRow; values are in their order
  const void* values;        // [items, columns], of T at the first level, of Compute<T> behind it
  void* table_grad;
  // What the next level reads, two items a piece; null at the last level, where nothing is left.
  uint32_t* left_rows;
  void* left_values;
};

// threadIdx.y and blockIdx.x: the pieces; threadIdx.x and blockIdx.y: kVec columns. Threads of a
// warp may have different pieces, so none waits for another.
template <typename T, bool kIsFirst, int kVec>
__global__ void __launch_bounds__(kRunThreads, kRunBlocksOfSm)
    embedding_sum_kernel(const __grid_constant__ RunSumParams p) {
  using C = Compute<T>;
  using Value = std::conditional_t<kIsFirst, T, C>;
  // Loads of a thread in flight: 128 bytes.
  constexpr int kUnroll = kIsFirst || sizeof(T) >= sizeof(C) ? 8 : 4;
  const int64_t piece = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kVec;
  const int64_t first = piece * kRunItems;
  const int64_t end = min(first + kRunItems, p.items);
  wait_for_previous_kernel();
  if (first >= p.items || column >= p.columns) return;

  auto row_at = [&](int64_t i) { return kIsFirst ? p.sorted[i].row : p.rows[i]; };
  const uint32_t first_row = row_at(first);
  const bool comes_in = first > 0 && row_at(first - 1) == first_row;
  const bool goes_on = end < p.items && row_at(end) == row_at(end - 1);
  uint32_t row = first_row;
  bool is_first_run = true;
  C sums[kVec] = {};
  // On one of the two sides of what the piece leaves.
  auto leave = [&](int side, uint32_t of_row, const C(&sum)[kVec]) {
    const int64_t item = 2 * piece + side;
    if (column == 0) p.left_rows[item] = of_row;
    if (of_row == kNoRow) return;
    Vector<C, kVec> left;
#pragma unroll
    for (int j = 0; j < kVec; ++j) left.values[j] = sum[j];
    store_vector<C, kVec>(static_cast<C*>(p.left_values) + item * p.columns + column, left);
  };
  auto end_run = [&] {
    if (is_first_run && comes_in) {
      leave(0, row, sums);
    } else if (row != kNoRow) {
      T* const to = static_cast<T*>(p.table_grad) + row * p.columns + column;
      store_vector<T, kVec>(to, pack<T, kVec>(sums));
    }
  };
  for (int64_t i = first; i < end; i += kUnroll) {
    uint32_t rows[kUnroll];
    int64_t places[kUnroll];
    Vector<Value, kVec> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      rows[u] = kNoRow;
      if (i + u >= end) continue;
      if constexpr (kIsFirst) {
        const IndexedRow item = p.sorted[i + u];
        rows[u] = item.row;
        places[u] = item.position;
      } else {
        rows[u] = p.rows[i + u];
        places[u] = i + u;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (rows[u] == kNoRow) continue;
      const Value* const from =
          static_cast<const Value*>(p.values) + places[u] * p.columns + column;
      values[u] = load_vector<Value, kVec>(from);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u >= end) continue;
      if (rows[u] != row) {
        end_run();
        is_first_run = false;
        row = rows[u];
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[j] = 0;
      }
      if (row == kNoRow) continue;
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += to_compute(values[u].values[j]);
    }
  }
  let_next_kernel_start();
  if (!goes_on) end_run();
  if (p.left_rows == nullptr) return;
  // Both sides are written. Where there is nothing to leave it is a zero of the other side's row,
  // so that the items of a row stay neighbours.
  const C zeros[kVec] = {};
  if (goes_on) {
    leave(1, row, sums);
    if (is_first_run || !comes_in) leave(0, row, zeros);
  } else {
    leave(1, comes_in ? first_row : kNoRow, zeros);
    if (!comes_in) leave(0, kNoRow, zeros);
  }
}

// --- Launches

namespace dlrm {

inline SortPass describe_pass(const TableGradientParams& p, const TableGradientConfig& config,
                              char* workspace, int pass) {
  const TableGradientWorkspace& parts = config.workspace;
  auto sorted = [&](int i) { return reinterpret_cast<IndexedRow*>(workspace + parts.sorted[i]); };
  SortPass s = {};
  s.items = p.items;
  s.tiles = config.tiles;
  s.shift = pass * config.digit_bits;
  s.bits = config.digit_bits;
  s.indices = p.indices;
  s.is_int32 = p.is_int32;
  s.rows = p.rows;
  s.zeros = static_cast<uint4*>(p.table_grad);
  s.zero_bytes = p.rows * p.columns * size_of(p.dtype);
  s.from = sorted((pass + 1) % 2);
  s.to = sorted(pass % 2);
  s.counts = reinterpret_cast<uint32_t*>(workspace + parts.counts);
  s.totals = reinterpret_cast<uint32_t*>(workspace + parts.totals);
  return s;
}

// Also fills the gradient with zeros: most rows are written again, which costs less than to find
// out which are not.
inline cudaError_t sort_indices(const TableGradientParams& p, const TableGradientConfig& config,
                                char* workspace, cudaStream_t stream) {
  const dim3 tiles(static_cast<unsigned>(config.tiles)), threads(kSortThreads);
  const dim3 first_blocks(static_cast<unsigned>(config.first_blocks));
  const dim3 digits(1u << config.digit_bits);
  const bool dependent = config.dependent_launch;
  cudaError_t status = cudaSuccess;
  auto run = [&](auto kernel, const dim3& grid, const auto&... args) {
    if (status == cudaSuccess) status = launch(kernel, grid, threads, dependent, stream, args...);
  };
  if (config.path == TableGradientPath::kZeros)
    run(radix_count_kernel<true>, first_blocks, describe_pass(p, config, workspace, 0));
  for (int pass = 0; pass < config.passes; ++pass) {
    const SortPass s = describe_pass(p, config, workspace, pass);
    const bool is_first = pass == 0;
    run(is_first ? radix_count_kernel<true> : radix_count_kernel<false>,
        is_first ? first_blocks : tiles, s);
    run(radix_scan_kernel, digits, s.counts, s.totals, s.tiles);
    run(is_first ? radix_scatter_kernel<true> : radix_scatter_kernel<false>, tiles, s);
  }
  return status;
}

template <typename T, int kVec>
cudaError_t sum_by_row(const TableGradientParams& p, const TableGradientConfig& config,
                       char* workspace, cudaStream_t stream) {
  const TableGradientWorkspace& parts = config.workspace;
  const dim3 threads(config.threads_x, config.threads_y);
  for (int level = 0; level < config.levels; ++level) {
    const bool is_first = level == 0, is_last = level + 1 == config.levels;
    RunSumParams s = {};
    s.items = config.level_items[level];
    s.columns = p.columns;
    s.sorted = reinterpret_cast<IndexedRow*>(workspace + parts.sorted[(config.passes - 1) % 2]);
    s.rows = reinterpret_cast<uint32_t*>(workspace + parts.rows[level]);
    s.values = is_first ? p.grad : workspace + parts.values[level];
    s.table_grad = p.table_grad;
    if (!is_last) {
      s.left_rows = reinterpret_cast<uint32_t*>(workspace + parts.rows[level + 1]);
      s.left_values = workspace + parts.values[level + 1];
    }
    const int64_t pieces = ceil_div(s.items, kRunItems);
    const dim3 grid(static_cast<unsigned>(ceil_div(pieces, config.threads_y)),
                    static_cast<unsigned>(config.column_tiles));
    const cudaError_t status = launch(
        is_first ? embedding_sum_kernel<T, true, kVec> : embedding_sum_kernel<T, false, kVec>, grid,
        threads, config.dependent_launch, stream, s);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <typename T>
cudaError_t table_gradient(const TableGradientParams& p, const TableGradientConfig& config,
                           void* workspace, cudaStream_t stream) {
  char* const parts = static_cast<char*>(workspace);
  const cudaError_t status = sort_indices(p, config, parts, stream);
  if (status != cudaSuccess) return status;
  return config.vec > 1 ? sum_by_row<T, kVectorWidth<T>>(p, config, parts, stream)
                        : sum_by_row<T, 1>(p, config, parts, stream);
}

}  // namespace dlrm

}  // namespace fusedcuda
