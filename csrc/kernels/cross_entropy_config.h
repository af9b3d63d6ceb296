// How the kernels of cross_entropy.cu are launched: pure host functions, no CUDA.
#pragma once

#include <algorithm>

#include "cross_entropy.h"

namespace fusedcuda {

// Of a block that takes a tile of a row in the backward, and the vectors of each thread.
constexpr int kCrossEntropyBwdThreads = 256;
constexpr int kCrossEntropyBwdItems = 4;

// A block of the kernel that adds up over the rows takes this many; more blocks form a cluster.
constexpr int64_t kTotalsRows = 4096;

// Neither a softcap nor label smoothing, which cost registers.
inline bool is_plain(const CrossEntropyParams& params) {
  return params.softcap == 0 && params.label_smoothing == 0;
}

inline CrossEntropyConfig choose_cross_entropy_config(const CrossEntropyParams& params,
                                                      const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.logits, params.gradient};
  const bool aligned = rows_are_aligned(matrices, 2, params.columns, size_of(params.dtype)) &&
                       is_aligned(params.weight);
  CrossEntropyConfig config;
  // Eight vectors leave few of a thread's 64 registers: not enough for the bounds of an unaligned
  // row, nor for float32 and its accurate functions. The kernel for what is not plain has one size.
  const bool is_small = size_of(params.dtype) == 2;
  const int most_items = aligned && is_small && is_plain(params) ? 8 : 4;
  config.row =
      choose_row_config(params.rows, params.columns, params.dtype, aligned, most_items, device);
  config.row.dependent_launch = device.dependent_launch;
  if (!params.adds_up()) return config;
  const int64_t blocks = ceil_div(std::max<int64_t>(params.rows, 1), kTotalsRows);
  const int most_blocks = device.clusters ? kMaxCluster : 1;
  config.totals_cluster =
      static_cast<int>(next_power_of_two(std::min<int64_t>(blocks, most_blocks)));
  config.totals_first = params.reduction == Reduction::kMean && params.gradient.data != nullptr;
  config.workspace_size = std::max<int64_t>(params.rows, 1);  // a pointer also of no rows
  return config;
}

// Nothing is reduced: each thread makes a few vectors of the gradient.
inline CrossEntropyBwdConfig choose_cross_entropy_bwd_config(const CrossEntropyBwdParams& params,
                                                             const DeviceTraits& device) {
  const RowMatrix matrices[] = {params.logits, params.gradient};
  CrossEntropyBwdConfig config;
  RowConfig& row = config.row;
  if (params.rows == 0 || params.columns == 0) return config;
  row.path = RowPath::kRegister;
  row.aligned = rows_are_aligned(matrices, 2, params.columns, size_of(params.dtype)) &&
                is_aligned(params.weight);
  row.vec = vector_width(params.dtype);
  row.items = kCrossEntropyBwdItems;
  row.dependent_launch = device.dependent_launch;
  const int64_t vectors = ceil_div(params.columns + (row.aligned ? 0 : row.vec - 1), row.vec);
  const int64_t threads = next_power_of_two(ceil_div(vectors, row.items));
  row.threads_per_row = static_cast<int>(std::min<int64_t>(threads, kCrossEntropyBwdThreads));
  row.rows_per_block = kCrossEntropyBwdThreads / row.threads_per_row;
  config.tiles = static_cast<int>(ceil_div(vectors, int64_t{row.items} * row.threads_per_row));
  row.blocks = ceil_div(params.rows, row.rows_per_block) * config.tiles;
  // Mostly there is nothing to do then, and a hundred thousand blocks would take 50 us to find out.
  if (params.unless_one) {
    constexpr int kBlocksOfSm = 4;
    row.blocks = std::min<int64_t>(row.blocks, int64_t{kBlocksOfSm} * device.num_sms);
  }
  row.blocks = std::min<int64_t>(row.blocks, (int64_t{1} << 31) - 1);
  const bool needs_weight_sum = params.weight != nullptr && params.label_smoothing != 0;
  config.workspace_size = needs_weight_sum ? 1 : 0;
  return config;
}

}  // namespace fusedcuda
