// The gradient of a linear layer of one output: what it reads and writes, and how blocks divide it.
// Pure host functions. Kernels: one_output_bwd.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "dtype.h"
#include "iteration.h"
#include "launch.h"
#include "row.h"

namespace fusedcuda {

// Null: gradients that nobody asked for, and what only they need.
struct OneOutputGradient {
  int64_t rows = 0;
  int columns = 0;
  RowMatrix x;                   // for dweight
  const void* weight = nullptr;  // [columns]; for dx
  int64_t weight_step = 1;       // elements from one to the next
  RowMatrix dx;
  void* dweight = nullptr;  // [columns], contiguous
  void* dbias = nullptr;    // one element
};

constexpr int kOneOutputThreads = 256;
// Rows whose loads a thread has under way, of 16 bytes each, and blocks of an SM: 72 KB together,
// in 80 registers a thread. A copy at full bandwidth takes 32, but some warps are always at their
// products.
constexpr int kOneOutputRowsAhead = 6;
constexpr int kOneOutputBlocksOfSm = 3;

struct OneOutputConfig {
  bool aligned = false;  // rows of x and dx are whole vectors of 16 bytes
  int vec = 1;
  int threads_x = 1;           // of a block, along a row; the others have rows of their own
  int threads_y = 1;           // a power of two
  int64_t column_tiles = 1;    // times these along a row
  int64_t blocks = 1;          // that share the rows; each leaves its sums if there are several
  int rows_of_block = 0;       // one behind the other
  int sum_threads_along = 1;   // of launch_sum_partials
  int64_t workspace_size = 0;  // in elements of what is computed in
  bool dependent_launch = false;

  int64_t workspace_bytes(DType dtype) const { return workspace_size * compute_size_of(dtype); }
};

// As many blocks as run at the same time, with the same number of rows a thread, but for the last
// one. Of few rows a single block has all, and its sums are the result: a round of loads takes less
// time than the second kernel. In between, threads have few rows, so that all SMs have some.
inline OneOutputConfig choose_one_output_config(const OneOutputGradient& p, DType dtype,
                                                const DeviceTraits& device) {
  constexpr int64_t kFewRounds = 2, kFewestRows = 2;
  OneOutputConfig config;
  const RowMatrix matrices[] = {p.x, p.dx};
  config.aligned = rows_are_aligned(matrices, 2, p.columns, size_of(dtype));
  config.vec = config.aligned ? vector_width(dtype) : 1;
  config.dependent_launch = device.dependent_launch;
  const int64_t vectors_of_row = ceil_div(p.columns, config.vec);
  config.threads_x = threads_along_row(vectors_of_row);
  config.threads_y = kOneOutputThreads / config.threads_x;
  config.column_tiles = ceil_div(vectors_of_row, config.threads_x);

  const int64_t sums = (p.dweight != nullptr ? p.columns : 0) + (p.dbias != nullptr ? 1 : 0);
  const int64_t rows_of_thread = ceil_div(p.rows, config.threads_y);
  if (sums == 0 || rows_of_thread > kFewRounds * kOneOutputRowsAhead) {
    const int64_t resident = int64_t{device.num_sms} * kOneOutputBlocksOfSm;
    const int64_t most = std::max<int64_t>(resident / config.column_tiles, 1);
    config.blocks = std::clamp<int64_t>(ceil_div(rows_of_thread, kFewestRows), 1, most);
  }
  const int64_t rows_each = ceil_div(rows_of_thread, config.blocks);
  config.rows_of_block = static_cast<int>(rows_each * config.threads_y);
  if (p.rows > 0) config.blocks = ceil_div(rows_of_thread, rows_each);
  if (config.blocks == 1) return config;
  config.workspace_size = config.blocks * sums;
  // Four loads a thread, which are under way together, reach all sums of a value; of wide rows they
  // are few, and read in whole lines.
  config.sum_threads_along = config.blocks > 4 * kWarpSize ? 8 : kWarpSize;
  return config;
}

}  // namespace fusedcuda
