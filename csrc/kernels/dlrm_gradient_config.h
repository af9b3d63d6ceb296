// How the kernels of dlrm_sort.cuh and dlrm_gradient.cuh are launched. Pure host functions without
// CUDA calls or global state. Nothing that decides the order of additions depends on the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/iteration.h"
#include "common/launch.h"
#include "dlrm_config.h"
#include "dlrm_gradient.h"

namespace fusedcuda {
namespace dlrm_detail {

inline int bits_of_rows(int64_t rows) {
  int bits = 1;
  while (int64_t{1} << bits < rows) ++bits;
  return bits;
}

// As few passes as the widest digits allow, of digits as narrow as these passes need.
inline void choose_passes(int64_t rows, TableGradientConfig* config) {
  const int bits = bits_of_rows(rows);
  config->passes = static_cast<int>(ceil_div(bits, kMostDigitBits));
  config->digit_bits = static_cast<int>(ceil_div(bits, config->passes));
}

// Until all items are in one piece, which leaves no partial sums.
inline void choose_levels(int64_t items, TableGradientConfig* config) {
  for (int64_t pieces = 0; pieces != 1; items = 2 * pieces) {
    config->level_items[config->levels++] = items;
    pieces = ceil_div(items, kRunItems);
  }
}

inline void choose_sum_threads(const TableGradientParams& p, TableGradientConfig* config) {
  config->aligned = is_aligned(p.grad) && p.columns % (kVectorBytes / size_of(p.dtype)) == 0;
  config->vec = config->aligned ? vector_width(p.dtype) : 1;
  const int64_t pieces_of_row = ceil_div(p.columns, config->vec);
  config->threads_x = static_cast<int>(std::min<int64_t>(pieces_of_row, kRunThreads));
  config->threads_y = kRunThreads / config->threads_x;
  config->column_tiles = ceil_div(pieces_of_row, config->threads_x);
}

inline TableGradientWorkspace divide_workspace(const TableGradientParams& p,
                                               const TableGradientConfig& config) {
  constexpr int64_t kAlignment = 256;
  TableGradientWorkspace parts;
  auto take = [&](int64_t bytes) {
    const int64_t start = parts.bytes;
    parts.bytes += ceil_div(bytes, kAlignment) * kAlignment;
    return start;
  };
  const int64_t word = sizeof(uint32_t), digits = int64_t{1} << config.digit_bits;
  for (int i = 0; i < std::min(config.passes, 2); ++i)
    parts.sorted[i] = take(p.items * static_cast<int64_t>(sizeof(IndexedRow)));
  parts.counts = take(digits * config.tiles * word);
  parts.totals = take(digits * word);
  const int64_t bytes_of_sum = compute_size_of(p.dtype);
  for (int level = 1; level < config.levels; ++level) {
    const int64_t items = config.level_items[level];
    parts.rows[level] = take(items * word);
    parts.values[level] = take(items * p.columns * bytes_of_sum);
  }
  return parts;
}

}  // namespace dlrm_detail

inline TableGradientConfig choose_table_gradient_config(const TableGradientParams& p,
                                                        const DeviceTraits& device) {
  TableGradientConfig config;
  if (p.rows * p.columns == 0) return config;
  dlrm_detail::choose_sum_threads(p, &config);
  if (p.items > kMostSortedItems || p.rows > kMostSortedRows ||
      config.column_tiles > kMostSumTiles) {
    config.path = TableGradientPath::kTorch;
    return config;
  }
  config.path = p.items == 0 ? TableGradientPath::kZeros : TableGradientPath::kSorted;
  config.tiles = ceil_div(p.items, kSortTile);
  // A few indices must not leave a large table to one block; each fills some tiles' worth.
  const int64_t zeros = p.rows * p.columns * size_of(p.dtype);
  const int64_t filling = std::min(ceil_div(zeros, kSortTile * int64_t{kVectorBytes}),
                                   int64_t{kSortBlocksOfSm} * device.num_sms);
  config.first_blocks = std::max(config.tiles, filling);
  config.dependent_launch = device.dependent_launch;
  if (p.items == 0) return config;
  dlrm_detail::choose_passes(p.rows, &config);
  dlrm_detail::choose_levels(p.items, &config);
  config.workspace = dlrm_detail::divide_workspace(p, config);
  return config;
}

}  // namespace fusedcuda
