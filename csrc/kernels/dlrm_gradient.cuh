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

#include "common/async_copy.cuh"
#include "common/launch.h"
#include "common/shared.cuh"
#include "common/vec.cuh"
#include "dlrm_gradient.h"
#include "dlrm_sort.cuh"

namespace fusedcuda {

struct RunSumParams {
  int64_t count;  // of items
  int64_t columns;
  // The first level: IndexedRow, whose position says which of the values is the item's. Further
  // levels: uint32_t, a row or kNoRow; values are in their order.
  const void* items;
  const void* values;  // [count, columns], of T at the first level, of Compute<T> behind it
  void* table_grad;
  // What the next level reads, two items a piece; null at the last level, where nothing is left.
  uint32_t* left_rows;
  void* left_values;
};

// threadIdx.y and blockIdx.x: the pieces; threadIdx.x and blockIdx.y: kVec columns. The block's
// items are in shared memory first, where it reads them in one go instead of each piece by itself,
// and no value has to wait for the place that it is at.
template <typename T, bool kIsFirst, int kVec>
__global__ void __launch_bounds__(kRunThreads, kRunBlocksOfSm)
    embedding_sum_kernel(const __grid_constant__ RunSumParams p) {
  using C = Compute<T>;
  using Value = std::conditional_t<kIsFirst, T, C>;
  using Item = std::conditional_t<kIsFirst, IndexedRow, uint32_t>;
  constexpr int kItemsOfCopy = kVectorBytes / sizeof(Item);
  constexpr int kPitch = kRunItems + kItemsOfCopy;  // so that pieces begin at other banks
  // Loads of a thread in flight: 128 bytes.
  constexpr int kUnroll = kIsFirst || sizeof(T) >= sizeof(C) ? 8 : 4;
  const Item* const given = static_cast<const Item*>(p.items);
  Item* const items = static_cast<Item*>(dynamic_shared());
  const int64_t block_first = int64_t{blockIdx.x} * blockDim.y * kRunItems;
  const int block_count =
      static_cast<int>(min(p.count - block_first, int64_t{blockDim.y} * kRunItems));
  const int64_t piece = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const int64_t column = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kVec;
  const int64_t first = piece * kRunItems;
  const int count = static_cast<int>(min(p.count - first, int64_t{kRunItems}));
  wait_for_previous_kernel();
  auto row_of = [](const Item& item) {
    if constexpr (kIsFirst) {
      return item.row;
    } else {
      return item;
    }
  };
  const uint32_t row_before = first > 0 && count > 0 ? row_of(given[first - 1]) : kNoRow;
  const uint32_t row_behind =
      count == kRunItems && first + count < p.count ? row_of(given[first + count]) : kNoRow;
  auto place_of = [&](int i) { return &items[i / kRunItems * kPitch + i % kRunItems]; };
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int rest = block_count % kItemsOfCopy;
  for (int i = thread * kItemsOfCopy; i < block_count - rest;
       i += blockDim.x * blockDim.y * kItemsOfCopy) {
    copy_async_16(place_of(i), &given[block_first + i]);
  }
  copy_async_commit();
  if (thread < rest) {
    const int i = block_count - rest + thread;
    *place_of(i) = given[block_first + i];
  }
  copy_async_wait<0>();
  __syncthreads();
  if (count <= 0 || column >= p.columns) return;

  const Item* const own = items + threadIdx.y * kPitch;
  const uint32_t first_row = row_of(own[0]);
  const bool comes_in = row_before == first_row && row_before != kNoRow;
  const bool goes_on = row_behind == row_of(own[count - 1]) && row_behind != kNoRow;
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
  for (int i = 0; i < count; i += kUnroll) {
    uint32_t rows[kUnroll];
    Vector<Value, kVec> values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      rows[u] = kNoRow;
      if (i + u >= count) continue;
      const Item item = own[i + u];
      rows[u] = row_of(item);
      if (rows[u] == kNoRow) continue;
      int64_t place = first + i + u;
      if constexpr (kIsFirst) place = item.position;
      const Value* const from = static_cast<const Value*>(p.values) + place * p.columns + column;
      values[u] = load_vector<Value, kVec>(from);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u >= count) continue;
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
  // Both sides are written. Of a run that is the whole piece the first side gets a zero: without a
  // row there it would be two runs.
  const C zeros[kVec] = {};
  const bool is_whole_piece = is_first_run && comes_in && goes_on;
  if (!comes_in || is_whole_piece) leave(0, comes_in ? row : kNoRow, zeros);
  leave(1, goes_on ? row : kNoRow, sums);
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
  s.from = pass == 0 ? p.indices : sorted((pass + 1) % 2);
  s.to = sorted(pass % 2);
  s.counts = reinterpret_cast<uint32_t*>(workspace + parts.counts);
  s.totals = reinterpret_cast<uint32_t*>(workspace + parts.totals);
  s.rows = p.rows;
  s.zeros = static_cast<uint4*>(p.table_grad);
  s.zero_bytes = p.rows * p.columns * size_of(p.dtype);
  return s;
}

template <typename Source>
cudaError_t sort_by_digit(const SortPass& s, int64_t count_blocks, bool dependent,
                          cudaStream_t stream) {
  const dim3 threads(kSortThreads);
  cudaError_t status = launch(radix_count_kernel<Source>, dim3(static_cast<unsigned>(count_blocks)),
                              threads, dependent, stream, s);
  if (status != cudaSuccess || s.items == 0) return status;
  status = launch(radix_scan_kernel, dim3(1u << s.bits), threads, dependent, stream, s.counts,
                  s.totals, s.tiles);
  if (status != cudaSuccess) return status;
  return launch(radix_scatter_kernel<Source>, dim3(static_cast<unsigned>(s.tiles)), threads,
                dependent, stream, s);
}

// Also fills the gradient with zeros: most rows are written again, which costs less than to find
// out which are not.
inline cudaError_t sort_indices(const TableGradientParams& p, const TableGradientConfig& config,
                                char* workspace, cudaStream_t stream) {
  const bool dependent = config.dependent_launch;
  const auto first = p.is_int32 ? sort_by_digit<int32_t> : sort_by_digit<int64_t>;
  cudaError_t status =
      first(describe_pass(p, config, workspace, 0), config.first_blocks, dependent, stream);
  for (int pass = 1; pass < config.passes && status == cudaSuccess; ++pass) {
    const SortPass s = describe_pass(p, config, workspace, pass);
    status = sort_by_digit<IndexedRow>(s, s.tiles, dependent, stream);
  }
  return status;
}

template <typename T, int kVec>
cudaError_t sum_by_row(const TableGradientParams& p, const TableGradientConfig& config,
                       char* workspace, cudaStream_t stream) {
  const TableGradientWorkspace& parts = config.workspace;
  const dim3 threads(config.threads_x, config.threads_y);
  LaunchOptions options;
  options.dependent = config.dependent_launch;
  for (int level = 0; level < config.levels; ++level) {
    const bool is_first = level == 0, is_last = level + 1 == config.levels;
    RunSumParams s = {};
    s.count = config.level_items[level];
    s.columns = p.columns;
    s.items = workspace + (is_first ? parts.sorted[(config.passes - 1) % 2] : parts.rows[level]);
    s.values = is_first ? p.grad : workspace + parts.values[level];
    s.table_grad = p.table_grad;
    if (!is_last) {
      s.left_rows = reinterpret_cast<uint32_t*>(workspace + parts.rows[level + 1]);
      s.left_values = workspace + parts.values[level + 1];
    }
    const int64_t pieces = ceil_div(s.count, kRunItems);
    const dim3 grid(static_cast<unsigned>(ceil_div(pieces, config.threads_y)),
                    static_cast<unsigned>(config.column_tiles));
    const size_t item_bytes = is_first ? sizeof(IndexedRow) : sizeof(uint32_t);
    options.shared_bytes = config.threads_y * (kRunItems * item_bytes + kVectorBytes);
    const cudaError_t status = launch(
        is_first ? embedding_sum_kernel<T, true, kVec> : embedding_sum_kernel<T, false, kVec>, grid,
        threads, options, stream, s);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <typename T>
cudaError_t table_gradient(const TableGradientParams& p, const TableGradientConfig& config,
                           void* workspace, cudaStream_t stream) {
  if (config.launches() == 0) return cudaSuccess;
  char* const parts = static_cast<char*>(workspace);
  const cudaError_t status = sort_indices(p, config, parts, stream);
  if (status != cudaSuccess) return status;
  return config.vec > 1 ? sum_by_row<T, kVectorWidth<T>>(p, config, parts, stream)
                        : sum_by_row<T, 1>(p, config, parts, stream);
}

}  // namespace dlrm

}  // namespace fusedcuda
